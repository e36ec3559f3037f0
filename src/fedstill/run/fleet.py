"""Several runs side by side as one stack: other seeds, or other values of one hyper-parameter, are one more axis.

Every run keeps its own server, clients' memories, history and folder, and each coordinator runs as if it were alone. What is
done together is the clients' work: in every round the orders of all runs go through one trainer, whose client r·K + k is client k
of run r. The results are those of separate runs, to rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from ..core import settings
from ..core.errors import TrainingError, first_line
from ..core.tree import Tree
from ..data import Federation
from ..engine.bench import Bench, Done, Work
from ..engine.stage import say
from ..server.coordinator import Record
from ..server.sampler import BY_PLAN
from ..transport.messages import Order, Reply
from . import legal
from .experiment import Experiment
from .joined import Apart, Joined, Plans, Stores
from .result import Run
from .simulation import Course, Progress, Simulation, begin

T = TypeVar("T")
# What a coordinator's conversation says: orders, the end of a round, or nothing more.
Said: TypeAlias = list[Order] | tuple[Tree, Record] | None


def run_together(
    experiments: Sequence[Experiment],
    *,
    outs: Sequence[str | Path | None] | None = None,
    progress: Progress | None = None,
    federations: Sequence[Federation | None] | None = None,
) -> list[Run]:
    """Experiments that differ in their seeds, in floating fields of their methods or in lr only, as one stack.

    Where they cannot go together (the engine is not stacked, a method branches on the value) they are run one after another,
    with one line that says why. `progress` is told the last one's records. Where one cannot go on, the others are run to their
    ends before `TrainingError` says so.
    """
    legal.check_runs(experiments, outs, federations, progress)
    told = [None] * (len(experiments) - 1) + [progress]
    return _whole(try_together(experiments, outs=outs, progress=told, federations=federations))


def try_together(
    experiments: Sequence[Experiment],
    *,
    outs: Sequence[str | Path | None] | None = None,
    progress: Sequence[Progress | None] | None = None,
    federations: Sequence[Federation | None] | None = None,
    begins: Callable[[Sequence[int]], None] | None = None,
) -> list[Run | TrainingError]:
    """As `run_together`, with someone to tell each run's records; in the place of a run that could not go on stands why.

    `begins` is told the numbers of the runs that begin, each time some do.
    """
    none = [None] * len(experiments)
    courses = [
        begin(experiment, out=folder, federation=federation, progress=tell, abreast=len(experiments))
        for experiment, folder, federation, tell in zip(
            experiments, outs or none, federations or none, progress or none, strict=True
        )
    ]
    return _play(dict(enumerate(courses)), begins or (lambda numbers: None))


def _play(courses: Mapping[int, Course], begins: Callable[[Sequence[int]], None]) -> list[Run | TrainingError]:
    """All together; where that cannot be, those that differ in their seeds only; where that cannot be, each by itself."""
    begins(list(courses))
    try:
        return go(list(courses.values()))
    except Apart as why:
        if any(course.history for course in courses.values()):
            raise
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, course in courses.items():
            training = dataclasses.replace(course.simulation.training, seed=0)
            groups.setdefault((course.simulation.method, training), []).append(number)
        some = 1 < len(groups) < len(courses)
        if len(courses) > 1:
            say(f"the runs go one after another{', seeds together' if some else ''}: {why}")
        found: dict[int, Run | TrainingError] = {}
        for part in groups.values() if some else [[number] for number in courses]:
            # Memories may have been changed already: from the beginning.
            again = {number: _anew(courses[number], len(part)) for number in part}
            if some:
                found |= zip(part, _play(again, begins), strict=True)
                continue
            begins(part)
            found |= {number: _try(course.run) for number, course in again.items()}
        return [found[number] for number in courses]


def _anew(course: Course, abreast: int) -> Course:
    return course.simulation.start(course.journal, course.checkpoint_every, course.progress, abreast=abreast)


def _try(run: Callable[[], Run]) -> Run | TrainingError:
    try:
        return run()
    except TrainingError as error:
        return error


def _whole(found: Sequence[Run | TrainingError]) -> list[Run]:
    """The runs, where none has failed."""
    for run in found:
        if isinstance(run, TrainingError):
            raise run
    return [run for run in found if not isinstance(run, TrainingError)]


def run(courses: Sequence[Course]) -> list[Run]:
    """Run all to their ends. Raises `Apart` before the first round where they cannot go together."""
    return _whole(go(courses))


def go(courses: Sequence[Course]) -> list[Run | TrainingError]:
    """As `run`; a run that cannot go on leaves the others alone, and in its place stands why."""
    fleet = Fleet(courses)
    talks = [course.coordinator.course(course.server, course.first) for course in courses]
    said = [next(talk, None) for talk in talks]
    failed: dict[int, TrainingError] = {}

    def each(going: Sequence[int], step: Callable[[int], Said]) -> None:
        for i in going:
            try:
                said[i] = step(i)
            except TrainingError as error:
                failed[i], said[i] = error, None

    def noted(i: int) -> Said:
        part = said[i]
        assert isinstance(part, tuple)
        courses[i].note(*part)
        return next(talks[i], None)

    first = True
    while going := [i for i, part in enumerate(said) if part is not None]:
        if not isinstance(said[going[0]], list):
            each(going, noted)
            first = False
            continue
        try:
            replies = fleet.handle([part if isinstance(part, list) else [] for part in said])
        except Exception as error:
            if first and len(courses) > 1:
                raise Apart(fleet.reason(error)) from error
            if not isinstance(error, TrainingError):
                raise
            failed |= dict.fromkeys(going, error)  # whose work it was cannot be told
            break
        each(going, lambda i, replies=replies: talks[i].send(replies[i]))  # type: ignore[misc]
    return [failed[i] if i in failed else _try(course.end) for i, course in enumerate(courses)]


class Fleet:
    """The clients of several runs behind one trainer."""

    def __init__(self, courses: Sequence[Course]) -> None:
        self.courses = courses
        sims = [course.simulation for course in courses]
        lead = sims[0].trainer
        self.clients = len(lead.bench.data.train.sizes)
        for sim in sims:
            _check_alike(sims[0], sim)
        if len({course.first for course in courses}) > 1:
            raise Apart("the runs are not at the same round")
        if any(sim.training.mode != "sync" for sim in sims):
            raise Apart("replies are merged as they arrive, in each run at other times")
        if any(sim.training.wait_free == "until-download" for sim in sims):
            raise Apart("personal training ends with the next download, in each run at other times")
        plans = Plans(tuple(course.coordinator.plan for course in courses), self.clients)
        self.varied = varying(sims)
        varied = {
            name: [value for value in values for _ in range(self.clients)] for name, values in self.varied.items()
        }
        data = Joined([sim.trainer.data for sim in sims])
        task = dataclasses.replace(lead.bench.task, seed=_NoSeed())  # type: ignore[arg-type]
        bench = Bench(sims[0].method, task, plans, data, varied)
        self.trainer = lead.over(bench, together=lead.together * len(sims))
        for course in courses:
            course.choices, course.abreast = self.trainer.choices, len(courses)
        self.stores = Stores([course.store for course in courses], self.clients)

    def reason(self, error: Exception) -> str:
        """Why these runs cannot go together, in a line."""
        if self.varied and "data-dependent control flow" in str(error):
            return f"{self.courses[0].simulation.method.id} branches on {' or '.join(self.varied)}"
        return first_line(error)

    def handle(self, orders: Sequence[Sequence[Order]]) -> list[list[Reply]]:
        """Every run's replies to its orders, all of one kind and round."""
        controllers = [course.controller for course in self.courses]
        first = next((order for part in orders for order in part), None)
        if first is None:  # all that were asked have dropped out
            return [[] for _ in orders]
        if first.kind == "train":
            answers = [controller.refusals(part) for controller, part in zip(controllers, orders, strict=True)]
            orders = [part for _, part in answers]
            works = [Work(r * self.clients + o.client, o.down) for r, part in enumerate(orders) for o in part]
            done = self._apart(orders, list(self.trainer.train(first.round, works, self.stores)) if works else [])
            return [
                refusals
                + [controller.trained(order, _own(one, order.client)) for order, one in zip(part, found, strict=True)]
                for controller, (refusals, part), found in zip(controllers, answers, done, strict=True)
            ]
        wanted = [controller.models(part) for controller, part in zip(controllers, orders, strict=True)]
        hits: list[dict[str, list[int]]] = [{} for _ in orders]
        for model in next(found for found, part in zip(wanted, orders, strict=True) if part):
            every = [
                (r * self.clients + k, params) for r, part in enumerate(wanted) for k, params in part.get(model, ())
            ]
            right = self._apart(orders, self.trainer.score(first.part, every))
            for mine, found in zip(hits, right, strict=True):
                mine[model] = found
        return [
            list(controller.scored(part, mine)) if part else []  # a run that could not go on has no orders
            for controller, part, mine in zip(controllers, orders, hits, strict=True)
        ]

    def _apart(self, orders: Sequence[Sequence[Order]], found: list[T]) -> list[list[T]]:
        """A list over all runs' orders, run by run."""
        places = np.cumsum([0, *map(len, orders)])
        return [found[a:b] for a, b in itertools.pairwise(places)]


class _NoSeed:
    """Stands for the seed where several runs are one: each has its own, so none can be asked for."""

    def __and__(self, other: object) -> int:
        raise Apart("the method draws from the run's seed at its clients")

    __index__ = __int__ = __add__ = __xor__ = __mul__ = __and__


def _own(done: Done, client: int) -> Done:
    return dataclasses.replace(done, client=client)


def varying(sims: Sequence[Simulation]) -> dict[str, list[float]]:
    """The fields in which the runs' methods, or their learning rates, differ: for each the values run by run."""
    found: dict[str, list[float]] = {}
    for name in settings.values_of(sims[0].method):
        values = [getattr(sim.method, name) for sim in sims]
        if any(value != values[0] for value in values):
            if not all(type(value) is float for value in values):
                raise Apart(f"{name} is no floating number")
            found[name] = values
    if len({_work(sim) for sim in sims}) > 1:
        raise Apart("the optimiser of a phase differs")
    rates = [sim.training.lr for sim in sims]
    return {**found, "lr": rates} if len(set(rates)) > 1 else found


def _work(sim: Simulation) -> tuple[object, ...]:
    """What the engine reads of a method's phases itself, the same for the whole stack."""
    task = dataclasses.replace(sim.trainer.bench.task, round=1)
    return tuple((phase.lr, phase.momentum) for phase in sim.method.phases(task))


def _check_alike(a: Simulation, b: Simulation) -> None:
    """Refuse runs that differ in more than seeds, fields of the method and the learning rate."""
    if type(a.method) is not type(b.method):
        raise Apart("their methods differ")
    for name, value in settings.values_of(a.training).items():
        if name not in ("seed", "lr") and getattr(b.training, name) != value:
            raise Apart(f"{name} differs")
    if a.training.forgetting:
        raise Apart("forgetting is watched run by run")
    if a.training.sampler not in BY_PLAN:
        raise Apart(f"the sampler {a.training.sampler} goes by losses, which a stack may round otherwise")
    if b.trainer.name != "stacked" or (a.newcomers and a.training.seed != b.training.seed):
        raise Apart("clients are not stacked" if b.trainer.name != "stacked" else "their newcomers differ")
    shapes = [{n: (tuple(v.shape), v.dtype) for n, v in sim.initial.items()} for sim in (a, b)]
    if shapes[0] != shapes[1] or len(a.trainer.bench.data.train.sizes) != len(b.trainer.bench.data.train.sizes):
        raise Apart("their models or their numbers of clients differ")
