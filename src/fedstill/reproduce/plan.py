"""From exhibits to experiments: the cells that are chosen, and each distinct experiment once, however many cells read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import papers
from ..core import settings
from ..core.errors import InputError, nearest
from ..papers import Cell, Exhibit
from ..run.experiment import Experiment
from . import filters
from .scale import WHOLE, Scale
from .store import BESIDE

ASKED = {"new": "new", "averaged": "averaged"}  # by model, the score that a contract needs
EACH = ("new", "averaged", "external")  # models that are scored by round where a contract needs more than the last one
NO_TRAINING = ("partition",)  # metrics of the data alone
Key = tuple[str, str]  # an exhibit's name and a cell's id


@dataclass(frozen=True)
class Trial:
    """A distinct experiment with its first seed, scaled, and with how many seeds it is run."""

    experiment: Experiment
    seeds: int
    label: str
    trains: bool = True  # False: only its data are looked at

    def seeded(self, number: int) -> Experiment:
        """Return the experiment with the `number`-th seed."""
        return dataclasses.replace(self.experiment, seed=self.experiment.seed + number)


@dataclass(frozen=True)
class Chosen:
    """The cells of an exhibit that were chosen, and with how many seeds they are run."""

    exhibit: Exhibit
    cells: tuple[Cell, ...]
    seeds: int


@dataclass(frozen=True)
class Plan:
    """What a reproduction runs; `cells` and `references` give the number of the trial that a cell reads."""

    chosen: tuple[Chosen, ...]
    scale: Scale
    trials: tuple[Trial, ...]  # those without seeds are of cells that were not chosen
    cells: Mapping[Key, int]
    references: Mapping[Key, int]
    refused: Mapping[Key, str]  # cells whose experiment cannot be made, and why

    @property
    def wanted(self) -> tuple[Trial, ...]:
        """The trials of the chosen cells."""
        return tuple(trial for trial in self.trials if trial.seeds)

    def trial(self, cell: Cell) -> Trial | None:
        """Return the trial of a cell."""
        number = self.cells.get(key_of(cell))
        return None if number is None else self.trials[number]

    def reference(self, cell: Cell) -> Trial | None:
        """Return the trial that a cell compares with."""
        number = self.references.get(key_of(cell))
        return None if number is None else self.trials[number]


def key_of(cell: Cell) -> Key:
    """Return what identifies a cell among all papers' cells."""
    return f"{cell.paper}/{cell.exhibit}", cell.id


def find(words: Sequence[str]) -> list[Exhibit]:
    """Return the exhibits that words such as pfedsd/table2, or pfedsd for all of a paper's, name."""
    found: dict[str, Exhibit] = {}
    everything = [exhibit.name for name in papers.names() for exhibit in papers.exhibits(name).values()]
    for word in words:
        paper, slash, id = word.partition("/")
        if paper not in papers.names():
            near = [f"{other.partition('/')[0]}/{word}" for other in words if other.partition("/")[0] in papers.names()]
            whole = [repr(name) for name in near if name in everything]
            raise InputError(
                "paper", paper, f"{whole[0]}? (with its paper)" if whole else nearest(paper, papers.names())
            )
        of_paper = papers.exhibits(paper)
        if slash and id not in of_paper:
            plain = id.replace("-", "").replace(".", "")
            right = f"{plain!r}? (one of: {', '.join(of_paper)})" if plain in of_paper else nearest(id, of_paper)
            raise InputError("exhibit", word, right)
        for exhibit in [of_paper[id]] if slash else of_paper.values():
            found[exhibit.name] = exhibit
    if not found:
        raise InputError("exhibit", "", nearest("", everything))
    return list(found.values())


def plan(
    exhibits: Sequence[Exhibit],
    only: str = "",
    seeds: int = 0,
    scale: Scale = WHOLE,
    machine: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what to run for some exhibits; `seeds` 0 takes the papers' numbers, `machine` has fields of every experiment."""
    cells = [cell for exhibit in exhibits for cell in exhibit.cells]
    kept = filters.choose(cells, only, [cell.experiment() for cell in cells])
    chosen = []
    for exhibit in exhibits:
        own = tuple(cell for cell in kept if (cell.paper, cell.exhibit) == (exhibit.paper, exhibit.id))
        if own:
            chosen.append(Chosen(exhibit, own, seeds or exhibit.seeds or 1))
    book = _Book(scale, dict(machine or {}))
    of_cells: dict[Key, int] = {}
    references: dict[Key, int] = {}
    refused: dict[Key, str] = {}
    wanted = {key_of(cell): part.seeds for part in chosen for cell in part.cells}
    for cell in cells:  # those that were not chosen, too: a run has the scores that any of them reads
        number = wanted.get(key_of(cell), 0)
        try:
            of_cells[key_of(cell)] = book.add(cell, cell.experiment(), number)
            other = cell.reference()
            if other is not None:
                references[key_of(cell)] = book.add(cell, other, number)
        except InputError as error:
            refused[key_of(cell)] = str(error)
    return Plan(tuple(chosen), scale, tuple(book.trials), of_cells, references, refused)


class _Book:
    """The trials so far."""

    def __init__(self, scale: Scale, machine: dict[str, Any]) -> None:
        self.scale, self.machine = scale, machine
        self.trials: list[Trial] = []

    def add(self, cell: Cell, values: Mapping[str, Any], seeds: int) -> int:
        """Return the number of the trial for some values, with the scores that the cell's contract needs."""
        contract = cell.contract
        asked: dict[str, Any] = {ASKED[contract.model]: True} if contract.model in ASKED else {}
        if contract.model in EACH and (contract.round != "last" or contract.curve):
            asked["further_every"] = values.get("eval_every", 1)
        if contract.metric == "forgetting":
            asked["forgetting"] = True
        if contract.metric in ("loss", "loss-curve"):
            asked["train_scores"] = True
        whole = Experiment.from_values({**values, **asked, **self.machine})
        scaled = self.scale.experiment(whole)
        trains = contract.metric not in NO_TRAINING
        for number, trial in enumerate(self.trials):
            both = joined(trial.experiment, scaled) if trial.trains == trains else None
            if both is not None:
                self.trials[number] = dataclasses.replace(trial, experiment=both, seeds=max(trial.seeds, seeds))
                return number
        self.trials.append(Trial(scaled, seeds, label_of(cell, scaled), trains))
        return len(self.trials) - 1


def joined(a: Experiment, b: Experiment) -> Experiment | None:
    """Return one experiment whose run has the scores of both; None where they are not trained alike."""
    if a.method != b.method:
        return None
    both = {}
    for field in settings.fields_of(Experiment):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one == other:
            continue
        if field.name not in BESIDE or (one != field.default and other != field.default):
            return None
        both[field.name] = other if one == field.default else one
    return dataclasses.replace(a, **both)


def label_of(cell: Cell, experiment: Experiment) -> str:
    """Return what a trial is called while it runs: its setting, and its method with the fields that the variant sets."""
    fields = {**cell.variant, **cell.variant.get("method", {})}
    given = [f"{name} {value}" for name, value in fields.items() if name not in ("method", *BESIDE)]
    return " · ".join([cell.setting, experiment.method.id, *given])
