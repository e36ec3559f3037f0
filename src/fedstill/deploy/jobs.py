"""The runs of a hub, as files: a command hands one in and follows it, the hub's process carries it out.

    runs/NAME/experiment.toml, job.json    what to run, with which sites
    runs/NAME/run/                         the run folder, as every run has one
    runs/NAME/outcome.json                 how it ended; without it the hub goes on with the run whenever it is started

No command needs a port, and a kill loses nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core import files, reading
from ..core.errors import InputError, TrainingError
from ..run.experiment import Experiment
from . import hub as hubs
from .folders import Hub

EXPERIMENT, JOB, OUTCOME, STATUS, RUN = "experiment.toml", "job.json", "outcome.json", "status.json", "run"


def submit(
    hub: Hub,
    experiment: Experiment,
    sites: Sequence[str],
    *,
    name: str = "",
    deadline: float | Literal["auto"] = 0.0,
    canary: bool = False,
    audit: bool = False,
    wait: float = 120.0,
) -> Path:
    """Hand a run in to a hub; return its folder."""
    hubs.check(experiment)
    hubs.check_deadline(experiment, deadline)
    known = hub.sites()
    for site in sites:
        if site not in known:
            raise InputError("sites", site, f"of {', '.join(known) or 'the approved sites (there are none)'}")
    if len(sites) < 1:
        raise InputError("sites", hub.name, "a hub with approved sites: fedstill hub approve REQUEST")
    runs = hub.folder / "runs"
    name = name or f"run-{1 + len(list(runs.glob('*'))):04d}"
    folder = runs / name
    if folder.exists() or not name.replace("-", "").replace("_", "").isalnum():
        raise InputError("name", name, "letters, digits and -, new among the hub's runs")
    files.write(folder / EXPERIMENT, experiment.to_toml().encode())
    job = {"sites": sorted(sites), "deadline": deadline, "wait": wait, "canary": canary, "audit": audit}
    files.write(folder / JOB, (json.dumps(job, indent=2) + "\n").encode())  # last: from now on it is run
    return folder


def follow(folder: Path, alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the records of a run as they are written, until it is over; raises `TrainingError` where it failed."""
    done, metrics, outcome = 0, folder / RUN / "metrics.jsonl", folder / OUTCOME
    while True:
        over = outcome.exists()
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        for line in lines[done:]:
            try:
                record = json.loads(line)
            except ValueError:
                break
            done += 1
            yield record
        if over:
            result = reading.read_json(outcome)
            if not result["ok"]:
                raise TrainingError(str(result["why"]))
            return
        if not alive():
            raise TrainingError(f"the hub is not at work any more; 'fedstill hub start' goes on with {folder.name}")
        time.sleep(0.1)
