"""The record of a job in its folder: what `fedstill resume FOLDER` needs to go on with a comparison, a sweep or several seeds.

job.json      the command and all settings of every experiment, with a checksum
groups.json   which runs were trained together (`run.groups`)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import methods
from ..core import files, settings
from ..core.errors import InputError, can_be_shown
from ..core.files import Damaged, write
from ..core.reading import Unreadable, field, items
from ..core.version import __version__
from ..run.experiment import FORMAT, Experiment
from ..run.groups import Groups, damaged
from .job import Job

JOB = "job.json"


def write_job(job: Job) -> None:
    """Write what the job runs into its folder."""
    assert job.out is not None
    record = {
        "format": FORMAT,
        "fedstill": __version__,
        "command": job.command,
        "line": job.line,
        "seeds": job.seeds,
        "explicit": list(job.explicit),
        "track": list(job.track),
        "experiments": {label: _values(experiment) for label, experiment in job.experiments.items()},
    }
    write(job.out / JOB, files.seal(record, indent=2))


def read_job(folder: Path) -> Job:
    """Return the job that a folder holds; refuse a record that has been changed or was written in another format."""
    try:
        record = files.unseal(folder / JOB)
    except Damaged as error:
        raise damaged(folder, JOB, str(error)) from None
    if record.get("format") != FORMAT:
        right = f"in format {FORMAT}: fedstill {record.get('fedstill')} wrote it in format {record.get('format')}"
        raise InputError("folder", str(folder), right)
    try:
        tables, command = field(record, "experiments", dict), field(record, "command", str)
        line = field(record, "line", str, "")
        track = tuple(items(record, "track", str)) if "track" in record else ()
        seeds, explicit = field(record, "seeds", int, least=1), items(record, "explicit", str)
    except Unreadable as error:
        raise damaged(folder, JOB, f"it should be {error}") from None
    for label in tables or [""]:  # each names a folder within this one
        if not label or ".." in Path(label).parts or Path(label).is_absolute() or not can_be_shown(label):
            raise damaged(folder, JOB, f"{label!r} names no folder within it")
    experiments = {label: Experiment.from_values(values) for label, values in tables.items()}
    return Job(experiments, seeds, folder, command, tuple(explicit), line, track)


def is_job(folder: Path) -> bool:
    """Return whether a folder holds several runs that one command made."""
    return (folder / JOB).is_file()


def beside(folder: Path) -> Path | None:
    """Return the folder of the job in which a run was trained together with others; None where it was alone."""
    job = next((parent for parent in list(folder.absolute().parents)[:2] if is_job(parent)), None)
    if job is None:
        return None
    name = folder.absolute().relative_to(job).as_posix()
    try:
        last = next((group for group in reversed(Groups.read(job).log) if name in group), [])
    except InputError:
        return job  # not known
    return job if len(last) > 1 else None


def _values(experiment: Experiment) -> dict[str, Any]:
    method = {"id": methods.name_of(experiment.method), **settings.values_of(experiment.method)}
    return {**settings.values_of(experiment), "method": method}
