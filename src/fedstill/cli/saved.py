"""The record of a job in its folder: what `fedstill resume FOLDER` needs to go on with a comparison, a sweep or several seeds.

job.json      the command and all settings of every experiment, with a checksum
groups.json   which runs were trained together, in the order in which they began
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import settings
from ..core.errors import InputError
from ..core.files import write
from ..core.version import __version__
from ..run.experiment import FORMAT, Experiment
from .job import Job

JOB, GROUPS = "job.json", "groups.json"
DIGEST = "sha256"


def write_job(job: Job) -> None:
    """Write what the job runs into its folder."""
    assert job.out is not None
    record = {
        "format": FORMAT,
        "fedstill": __version__,
        "command": job.command,
        "seeds": job.seeds,
        "explicit": list(job.explicit),
        "experiments": {label: _values(experiment) for label, experiment in job.experiments.items()},
    }
    write(job.out / JOB, (json.dumps({**record, DIGEST: _digest(record)}, indent=2) + "\n").encode())


def read_job(folder: Path) -> Job:
    """Return the job that a folder holds; refuse a record that has been changed or was written in another format."""
    try:
        record = json.loads((folder / JOB).read_text(encoding="utf-8"))
        digest = record.pop(DIGEST)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        record, digest = {}, ""
    if not record or digest != _digest(record):
        right = (
            f"a folder whose {JOB} is as fedstill wrote it; 'fedstill resume' of a run's own folder in it still works"
        )
        raise InputError("folder", str(folder), right)
    if record["format"] != FORMAT:
        right = f"in format {FORMAT}: fedstill {record['fedstill']} wrote it in format {record['format']}"
        raise InputError("folder", str(folder), right)
    experiments = {label: Experiment.from_values(values) for label, values in record["experiments"].items()}
    return Job(experiments, record["seeds"], folder, record["command"], tuple(record["explicit"]))


def is_job(folder: Path) -> bool:
    """Return whether a folder holds several runs that one command made."""
    return (folder / JOB).is_file()


def beside(folder: Path) -> Path | None:
    """Return the folder of the job in which a run was trained together with others; None where it was alone."""
    job = next((parent for parent in list(folder.absolute().parents)[:2] if is_job(parent)), None)
    if job is None:
        return None
    name = folder.absolute().relative_to(job).as_posix()
    last = next((group for group in reversed(Groups.read(job).log) if name in group), [])
    return job if len(last) > 1 else None


@dataclasses.dataclass
class Groups:
    """Which runs of a job are trained together; each is named by its folder within the job's."""

    folder: Path | None  # None: nothing is kept
    log: list[list[str]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path | None) -> Groups:
        """Return the groups that began before; none where the file is missing or damaged."""
        groups = cls(folder)
        if folder is not None and (folder / GROUPS).is_file():
            try:
                log = json.loads((folder / GROUPS).read_text(encoding="utf-8"))
                groups.log = [[str(name) for name in names] for names in log]
            except (OSError, ValueError, TypeError, RecursionError):
                groups.log = []
        return groups

    def begin(self, names: Sequence[str]) -> None:
        """Note that these runs now begin together."""
        if self.folder is not None:
            self.log.append(list(names))
            write(self.folder / GROUPS, json.dumps(self.log).encode())

    def divide(self, names: Sequence[str]) -> list[list[str]]:
        """Divide runs that go on into those that were trained together, and at the end those that had not begun.

        The last group in which a run began counts, if all that began with it are still in it; a group that was given up for
        smaller ones had trained nothing.
        """
        last = {name: number for number, group in enumerate(self.log) for name in group}
        groups = []
        for number, group in enumerate(self.log):
            if all(last[name] == number for name in group):
                groups.append([name for name in group if name in names])
        begun = {name for group in groups for name in group}
        rest = [name for name in names if name not in begun]
        return [group for group in [*groups, rest] if group]


def _values(experiment: Experiment) -> dict[str, Any]:
    method = {"id": experiment.method.id, **settings.values_of(experiment.method)}
    return {**settings.values_of(experiment), "method": method}


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
