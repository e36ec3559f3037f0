"""What a command runs: experiments that differ in their method or in one field, each with several seeds.

`plan` makes a job from flags, `execute.execute` runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import settings
from ..core.errors import InputError, Shown
from ..core.method import Method
from ..methods import METHODS
from ..run.experiment import Experiment
from ..run.track import check as checked
from . import flags
from .dated import NOWHERE

SWEEP = "sweep"  # the command whose experiments differ in one field or two


@dataclasses.dataclass(frozen=True)
class Job:
    """The experiments of a command, and the folder for their results."""

    experiments: dict[str, Experiment]  # by method, or by the values of the fields that are swept
    seeds: int
    out: Path | None
    command: str = "run"
    explicit: tuple[str, ...] = ()  # the fields that flags set
    line: str = ""  # the command as it was typed
    track: tuple[str, ...] = ()  # where records are sent besides
    dated: bool = False  # whether `out` is a new folder named by the date, since none was named
    wide: bool = False  # whether the table has all its columns, however narrow the terminal is

    @property
    def first(self) -> Experiment:
        """The first experiment; data and model are the same in all."""
        return next(iter(self.experiments.values()))

    @property
    def varied(self) -> dict[str, dict[str, Any]]:
        """The fields in which the experiments differ, each with its value by label."""
        values = {
            label: {**settings.values_of(one), **settings.values_of(one.method)}
            for label, one in self.experiments.items()
        }
        names = [name for name in values[next(iter(values))] if all(name in each for each in values.values())]
        columns = {name: {label: each[name] for label, each in values.items()} for name in names}
        return {name: column for name, column in columns.items() if len(set(column.values())) > 1}

    @property
    def compares(self) -> bool:
        """Whether each experiment has a folder of its own in `out`."""
        return self.command != "run"

    def name(self, label: str, number: int) -> str:
        """Return a run's folder within `out`: one for each method, and in it one for each seed, where there are several."""
        seed = f"seed-{self.first.seed + number}" if self.seeds > 1 else ""
        return "/".join(word for word in (label if self.compares else "", seed) if word)

    def folder(self, label: str, number: int) -> Path | None:
        """Return a run's folder; None where nothing is written."""
        return None if self.out is None else self.out / self.name(label, number)

    @property
    def several(self) -> bool:
        """Whether `out` holds the folders of several runs."""
        return self.compares or self.seeds > 1


def every_method(flag_values: Mapping[str, Any]) -> dict[str, type[Method]]:
    """Return what `all` stands for: every method, those about LoRA's adapters where `--lora` is given."""
    return {name: cls for name, cls in METHODS.items() if "lora" in flag_values or not cls.needs_lora}


def plan(methods: Sequence[Method], base: Experiment, flag_values: Mapping[str, Any], command: str) -> Job:
    """Return the job that flags make of a base experiment; refuse a flag that none of the methods has."""
    owners: dict[str, list[str]] = {}
    for cls in METHODS.values():
        for field in settings.fields_of(cls):
            owners.setdefault(field.name, []).append(cls.id)
    chosen = [method.id for method in methods]
    common = {field.name for field in settings.fields_of(Experiment)}
    for name in flag_values:
        if name in owners and name not in common and not set(owners[name]) & set(chosen):
            right = f"left out for {', '.join(chosen)}: it is a flag of {', '.join(owners[name])}"
            raise InputError("flag", Shown(flags.flag(name)), right)
    out = flag_values.get("out", "")
    if out == "" and "out" in flag_values:
        raise InputError("--out", "", "a folder")
    seeds = flags.whole_number(flag_values, "seeds", 1)
    experiments = {}
    for method in methods:  # a flag that a method has as its own is the method's, elsewhere the experiment's
        own = flags.take(type(method), flag_values)
        values = flags.take(Experiment, {name: value for name, value in flag_values.items() if name not in own})
        experiments[method.id] = dataclasses.replace(base, **values, method=dataclasses.replace(method, **own))
    folder = None if out in ("", NOWHERE) else Path(out)
    track = checked(tuple(filter(None, flag_values.get("track", "").split(","))))
    wide = "wide" in flag_values
    return Job(experiments, seeds, folder, command, tuple(flag_values), dated=not out, wide=wide, track=track)
