"""Which data a reproduction needs, and which of their files are where they should be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..core.errors import InputError
from ..data import download
from ..data.download import REMOTES
from ..data.source import SOURCES, root_of
from ..run.experiment import Experiment


@dataclass(frozen=True)
class Need:
    """A named data set that some cells need, and its files that are missing."""

    name: str
    missing: tuple[str, ...]
    contents: str = ""

    @property
    def present(self) -> bool:
        """Whether nothing is missing, or what is missing is downloaded when it is first used."""
        return not self.missing or self.name in REMOTES

    @property
    def words(self) -> str:
        """The name, and whether its files are there."""
        if self.missing:
            return f"{self.name} [downloaded when first used]" if self.present else f"{self.name} [missing]"
        return f"{self.name} [here]" if SOURCES[self.name].files else self.name

    @property
    def mark(self) -> str:
        """The name with a mark: ↓ where its files are downloaded when first used, ✗ where they are missing."""
        return self.name + ("↓" if self.missing and self.present else "✗" if self.missing else "")


def names(experiment: Experiment) -> tuple[str, ...]:
    """Return the named data sets of an experiment, those that are generated left out."""
    written = [source for source in (experiment.data, experiment.external) if source]
    parts = [re.split("[:@#]", part)[0] for source in written for part in source.split("+")]
    return tuple(dict.fromkeys(part for part in parts if part in SOURCES))


def needs(experiments: Iterable[Experiment], root: str) -> list[Need]:
    """Return the data that experiments need."""
    folder = root_of(root or None)
    wanted = dict.fromkeys(name for experiment in experiments for name in names(experiment))
    return [Need(name, tuple(SOURCES[name].missing(folder)), SOURCES[name].contents) for name in wanted]


def check(experiments: Iterable[Experiment], root: str) -> None:
    """Refuse where data are missing: say which files to put where, and which cells can be run without them.

    What can be downloaded is downloaded now, so that this fails once and before anything is run.
    """
    found = needs(experiments, root)
    absent = [need for need in found if not need.present]
    if not absent:
        for need in found:
            if need.missing:
                download.fetch(need.name, root_of(root or None))
        return
    files = "; ".join(f"{need.name}: {', '.join(need.missing)}{need.contents}" for need in absent)
    here = [need.name for need in found if need.present]
    without = f"; --only {','.join(here)} runs what is here" if here else ""
    right = f"present: put into {root_of(root or None)} {files} ('fedstill data' lists all){without}"
    raise InputError("data", ", ".join(need.name for need in absent), right)
