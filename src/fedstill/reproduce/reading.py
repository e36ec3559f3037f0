"""What every chosen cell has: our numbers by seed and the verdict on them, or why there are none; and the rankings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.errors import InputError
from ..data.dataset import Ints
from ..papers import Cell, Exhibit
from . import score
from .plan import NO_TRAINING, Chosen, Plan, Trial, key_of
from .score import LOWER, NEUTRAL, Series, Unscored
from .shelf import Shelf
from .store import Result, Store
from .verdict import Entry, Ranking, Sample, Verdict, rank, verdict

State = Literal["done", "partial", "failed", "missing"]


@dataclass(frozen=True)
class Reading:
    """A cell with what was measured: values, or curves, of the seeds that are over."""

    cell: Cell
    seeds: int  # that were asked for
    values: tuple[float, ...] = ()
    curves: tuple[Series, ...] = ()
    counts: Ints | None = None  # samples by client and class, where the cell is a partition
    distribution: tuple[float, ...] = ()  # the clients' accuracies of all seeds, where it is one
    results: tuple[Result, ...] = ()
    problem: str = ""
    verdict: Verdict | None = None

    @property
    def state(self) -> State:
        """Whether all seeds have their number, some, or none, and whether something has failed."""
        if self.problem:
            return "failed"
        if self.counts is not None or len(self.values) == self.seeds:
            return "done"
        return "partial" if self.values else "missing"

    @property
    def ours(self) -> Sample | None:
        """Our mean and standard deviation over the seeds that are over."""
        return Sample.of(self.values) if self.values else None


def read(plan: Plan, store: Store, shelf: Shelf, root: str, reasons: Mapping[str, str]) -> dict[str, list[Reading]]:
    """Return the readings of every exhibit's chosen cells, and of the others of which there are results.

    A cell has all its seeds that are over, the asked ones at least; `reasons` has, by name of a run, why it could not be run.
    """
    found = {}
    for part in plan.chosen:
        chosen = {cell.id for cell in part.cells}
        own = [_read(plan, part, cell, store, shelf, root, reasons) for cell in part.exhibit.cells]
        found[part.exhibit.name] = [r for r in own if r.cell.id in chosen or r.values]
    return found


def published(cell: Cell, exhibit: Exhibit) -> Sample | None:
    """Return the published number with its spread, and over how many seeds that is, if the paper says so."""
    if cell.published is None:
        return None
    stated = "seeds" not in exhibit.unstated and (cell.spread is None or exhibit.spread == "seeds")
    return Sample(cell.published, cell.spread, exhibit.seeds if stated else None)


def _read(
    plan: Plan, part: Chosen, cell: Cell, store: Store, shelf: Shelf, root: str, reasons: Mapping[str, str]
) -> Reading:
    """Return one cell's reading."""
    trial, other = plan.trial(cell), plan.reference(cell)
    if trial is None:
        return Reading(cell, part.seeds, problem=plan.refused[key_of(cell)])
    chosen = any(other.id == cell.id for other in part.cells)
    if cell.contract.metric in NO_TRAINING:
        if not chosen:
            return Reading(cell, part.seeds)
        return _partition(plan, part, cell, trial, shelf, root)
    values: list[float] = []
    curves: list[Series] = []
    distribution: list[float] = []
    results: list[Result] = []
    problems: list[str] = []
    seeds = 0
    for number in itertools.count():
        experiment = trial.seeded(number)
        result = store.read(experiment, plan.scale)
        if result is None and number >= (part.seeds if chosen else 1):
            break
        seeds = number + 1
        reference = None if other is None else store.read(other.seeded(number), plan.scale)
        reason = reasons.get(store.name(experiment, plan.scale), "") or (result.failed if result else "")
        if other is not None and reference is None:
            reason = reason or reasons.get(store.name(other.seeded(number), plan.scale), "")
        if reference is not None and reference.failed:
            reason = reason or f"what it compares with failed: {reference.failed}"
        if reason:
            problems.append(f"seed {experiment.seed}: {reason}")
        elif result is not None and (other is None or reference is not None):
            try:
                if cell.contract.metric == "client-accuracies":
                    rates = [100 * rate for rate in score.clients(cell.contract, result)]
                    distribution += rates
                    values.append(sum(rates) / len(rates))
                elif cell.contract.curve:
                    curves.append(score.curve(cell.contract, result))
                    values.append(_last(curves[-1], cell))
                else:
                    values.append(score.number(cell.contract, result, plan.scale, reference))
                results.append(result)
            except Unscored as error:
                problems.append(f"seed {experiment.seed}: {error}")
    if len(problems) > 1 and len({problem.partition(": ")[2] for problem in problems}) == 1:
        problems = [f"{len(problems)} seeds: {problems[0].partition(': ')[2]}"]
    against = published(cell, part.exhibit)
    judged = None
    if against is not None and values and len(values) == seeds:  # those that did not fail are no fair sample
        lower = None if cell.contract.metric in NEUTRAL else cell.contract.metric in LOWER
        judged = verdict(against, Sample.of(values), lower=lower, relation=cell.relation, scaled=not plan.scale.whole)
    return Reading(
        cell, seeds, tuple(values), tuple(curves), None, tuple(distribution), tuple(results), "; ".join(problems),
        judged,
    )  # fmt: skip


def _partition(plan: Plan, part: Chosen, cell: Cell, trial: Trial, shelf: Shelf, root: str) -> Reading:
    """Return the reading of a cell that shows who has which samples."""
    try:
        counts = shelf.federation(trial.experiment, plan.scale, root).counts()
    except InputError as error:
        return Reading(cell, part.seeds, problem=str(error))
    return Reading(cell, part.seeds, counts=counts)


def _last(series: Series, cell: Cell) -> float:
    """Return the last value of a curve."""
    if not series:
        raise Unscored(f"no {cell.contract.metric} was recorded")
    return series[-1][1]


def rankings(exhibit: Exhibit, readings: list[Reading]) -> list[Ranking]:
    """Return, for each row or column of the paper in which methods or variants compete, how far our order is the published one.

    The competitors stand in the rows where labels differ from row to row within a column, else in the columns.
    """
    found = []
    for panel in dict.fromkeys(reading.cell.panel for reading in readings):
        own = [reading for reading in readings if reading.cell.panel == panel]
        in_rows = _labels(own, "column") >= _labels(own, "row")
        places = dict.fromkeys(r.cell.column if in_rows else r.cell.row for r in own)
        for place in places:
            group = [r for r in own if (r.cell.column if in_rows else r.cell.row) == place]
            entries = []
            for reading in group:
                against = published(reading.cell, exhibit)
                if against is not None and reading.ours is not None and reading.cell.relation == "=":
                    name = reading.cell.row if in_rows else reading.cell.column
                    entries.append(Entry(name or reading.cell.label, against, reading.ours))
            title = next((p.title for p in exhibit.panels if p.id == panel), "")
            where = ", ".join(word for word in (title, place) if word)
            lower = {reading.cell.contract.metric for reading in group} <= LOWER
            ranking = rank(entries, where=where, lower=lower)
            if ranking is not None:
                found.append(ranking)
    return found


def _labels(readings: list[Reading], within: str) -> int:
    """Return the most different labels that any row, or column, has."""
    places = {getattr(reading.cell, within) for reading in readings}
    return max(
        (len({r.cell.label for r in readings if getattr(r.cell, within) == place}) for place in places), default=0
    )
