"""The record of a job in its folder: what `fedstill resume FOLDER` needs to go on with a comparison, a sweep or several seeds.

job.json      the command and all settings of every experiment, with a checksum
groups.json   which runs were trained together, in the order in which they began
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import files, settings
from ..core.errors import InputError, can_be_shown
from ..core.files import Damaged, write
from ..core.reading import Unreadable, field, items
from ..core.version import __version__
from ..run.experiment import FORMAT, Experiment
from .job import Job

JOB, GROUPS = "job.json", "groups.json"


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
        seeds, explicit = field(record, "seeds", int, least=1), items(record, "explicit", str)
    except Unreadable as error:
        raise damaged(folder, JOB, f"it should be {error}") from None
    for label in tables or [""]:  # each names a folder within this one
        if not label or ".." in Path(label).parts or Path(label).is_absolute() or not can_be_shown(label):
            raise damaged(folder, JOB, f"{label!r} names no folder within it")
    experiments = {label: Experiment.from_values(values) for label, values in tables.items()}
    return Job(experiments, seeds, folder, command, tuple(explicit), line)


def damaged(folder: Path, name: str, problem: str) -> InputError:
    """Return the refusal of a folder one of whose files is not as it was written."""
    each = "'fedstill resume' of a run's own folder in it still works"
    return InputError("folder", str(folder), f"a folder whose {name} is as fedstill wrote it ({problem}); {each}")


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


@dataclasses.dataclass
class Groups:
    """Which runs of a job are trained together; each is named by its folder within the job's."""

    folder: Path | None  # None: nothing is kept
    log: list[list[str]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path | None) -> Groups:
        """Return the groups that began before; none where none did. Refuse a file that is damaged."""
        if folder is None or not (folder / GROUPS).exists():
            return cls(folder)
        try:
            log = files.unseal(folder / GROUPS)["groups"]
        except Damaged as error:
            raise damaged(folder, GROUPS, str(error)) from None
        return cls(folder, log)

    def check(self, begun: Sequence[str]) -> None:
        """Refuse to divide runs that have begun, and of which nobody knows with which others."""
        lost = set(begun) - {name for group in self.log for name in group}
        if lost and self.folder is not None:
            raise damaged(self.folder, GROUPS, f"it does not name {min(lost)}")

    def begin(self, names: Sequence[str]) -> None:
        """Note that these runs now begin together."""
        if self.folder is not None:
            self.log.append(list(names))
            write(self.folder / GROUPS, files.seal({"groups": self.log}))

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
