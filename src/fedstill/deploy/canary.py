"""The canary: look at all sites before the real run, and make one round with every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import TrainingError
from ..core.secret import Secret
from ..run.experiment import Experiment
from .data import problems
from .hub import run
from .hub_server import HubServer

CLOCK = 60.0  # seconds by which clocks may differ: certificates and logs depend on them
ROOM = 64 << 20  # bytes of memory and disk that a site needs beside the model's


def canary(
    hub_server: HubServer, experiment: Experiment, names: Sequence[str], folder: Path, secret: Secret | None = None
) -> dict[str, Any]:
    """Look at all sites before the real run, then make one round of it: return a row for each site, and what is wrong."""
    here = [name for name in names if name in hub_server.sites]
    wrong = [f"site {name!r} is not here" for name in names if name not in hub_server.sites]
    wrong += [
        f"site {r['site']!r}: {r['reason']}"
        for r in hub_server.refusals
        if r["site"] in names and r["site"] not in here
    ]
    if here:
        wrong += [str(problem) for problem in problems(here, [hub_server.sites[name].about for name in here])]
    rows: list[dict[str, Any]] = []
    for name in here:
        site, machine = hub_server.sites[name], hub_server.sites[name].about["machine"]
        if abs(site.skew) > CLOCK:
            wrong.append(f"the clock of site {name!r} is {site.skew:+.0f} s off the hub's")
        for kind in ("memory", "disk"):
            if machine[kind] < ROOM:
                wrong.append(f"site {name!r} has {machine[kind] / 1e6:.0f} MB of {kind} free")
        data = {"samples": site.about["sizes"]["train"], "classes": site.about["classes"], "shape": site.about["shape"]}
        room = {kind: machine[kind] for kind in ("memory", "disk")}
        rows.append({"site": name, **data, **room, "clock": round(site.skew, 1)})
    if not wrong:
        try:
            # the run's own sampling would leave sites out, and asynchronous rounds end before all have answered
            everyone: dict[str, Any] = {"participation": 1.0, "sampler": "uniform", "mode": "sync", "wait_free": "off"}
            one_round = dataclasses.replace(experiment, rounds=1, **everyone)
            history = run(hub_server, one_round, names, folder, secret=secret).history
            away = set(range(len(names))) - set(history[0]["participants"])
            wrong += [f"site {names[k]!r} did not count: {_why(hub_server, names[k])}" for k in sorted(away)]
            rows = [{**row, "seconds": round(hub_server.train_seconds[row["site"]], 2)} for row in rows]
        except TrainingError as error:
            wrong.append(str(error))
    return {"rows": rows, "wrong": wrong}


def _why(hub_server: HubServer, site: str) -> str:
    """Return what was noted last of a site."""
    return next((str(r["reason"]) for r in reversed(hub_server.refusals) if r["site"] == site), "no reply")
