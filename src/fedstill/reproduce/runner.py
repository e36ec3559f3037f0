"""Run the trials of a plan: each once, seeds and equal steps side by side, failures alone, on from where they were stopped."""

from __future__ import annotations

import dataclasses
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core import settings
from ..core.errors import InputError, Stopped, TrainingError
from ..data import Federation
from ..run import prepare, simulation, together
from ..run.experiment import Experiment
from ..run.groups import Groups
from ..run.journal import Journal
from ..run.lock import FolderLock
from ..run.prepare import pick_device
from ..run.result import Run
from .ahead import Ahead
from .plan import Plan, Trial
from .shelf import Shelf
from .store import Result, Store

TOGETHER = 12  # runs side by side at most: so many are in the middle when the machine stops
GOES_ON = "the same command goes on"


@dataclass(frozen=True)
class Member:
    """A trial with one seed."""

    trial: Trial
    number: int  # of the seed

    @property
    def experiment(self) -> Experiment:
        """The experiment with its seed."""
        return self.trial.seeded(self.number)


class Watch(Protocol):
    """Follows a reproduction."""

    def begin(self, members: Sequence[Member]) -> None:
        """Note that some runs begin, or go on, side by side."""

    def step(self, member: Member, record: dict[str, Any]) -> None:
        """Note that a run has finished a round."""

    def end(self, member: Member, result: Result | None, reason: str) -> None:
        """Note that a run is over, or why it cannot be."""


class Runner:
    """Runs what a plan needs and the store does not have."""

    def __init__(self, plan: Plan, store: Store, shelf: Shelf, root: str, command: str, watch: Watch) -> None:
        self.plan, self.store, self.shelf = plan, store, shelf
        self.root, self.command, self.watch = root, command, watch
        self.reasons: dict[str, str] = {}  # by name of a run, why there is no result and none is kept
        self.ahead = Ahead(plan.scale, root)
        self._left: Sequence[list[Member]] = ()
        self._compiling = False  # whether the steps of later runs are being compiled
        self._engines: dict[Any, str] = {}

    def missing(self) -> list[Member]:
        """Return the runs of which the store has no result."""
        members = [Member(trial, n) for trial in self.plan.wanted if trial.trains for n in range(trial.seeds)]
        return [member for member in members if self._result(member) is None]

    def run(self) -> None:
        """Run all that is missing."""
        with FolderLock(self.store.out):
            try:
                self._left = list(self._groups(self.missing()))
                for number in range(len(self._left)):
                    self.ahead.reach(number)
                    self._run(self._left[number])
            except KeyboardInterrupt as stopped:
                number = getattr(stopped, "signal", signal.SIGINT)
                raise Stopped(f"{str(stopped).partition(';')[0] or 'stopped'}; {GOES_ON}", number) from None
            except OSError as error:
                if error.filename is None or not str(error.filename).startswith(str(self.store.out)):
                    raise
                raise TrainingError(f"{error.filename}: {error.strerror}; when it can be written, {GOES_ON}") from None
            finally:
                self.ahead.close()

    # ---- who goes with whom ------------------------------------------------------------------------------------------
    def _groups(self, members: Sequence[Member]) -> Iterator[list[Member]]:
        """Yield the runs that are tried side by side, those with the same data next to one another."""
        groups: OrderedDict[Any, list[Member]] = OrderedDict()
        for member in sorted(members, key=lambda member: (*_data_of(member.trial.experiment), member.number)):
            alone = (id(member.trial), member.number)
            try:
                key = _step_of(member.experiment) if self._stacks(member) else alone
            except InputError as error:
                self._end(member, None, str(error))
                continue
            groups.setdefault(key, []).append(member)
        known = Groups.read(self.store.out)
        for group in groups.values():
            by_name = {self._name(member): member for member in group}
            for names in known.divide(list(by_name)) if len(by_name) > 1 else [list(by_name)]:
                for first in range(0, len(names), TOGETHER):
                    yield [by_name[name] for name in names[first : first + TOGETHER]]

    def _stacks(self, member: Member) -> bool:
        """Return whether a run's clients are stacked, so that several runs can be one stack."""
        e = member.experiment
        key: tuple[Any, ...] = (e.data, e.model, e.head, e.engine, e.device, e.dtype, e.fast)
        if pick_device(e.device).type == "cpu":  # where it also depends on how much work there is
            key += (e.clients, e.participation, type(e.method))
        if key not in self._engines:
            ready, _ = prepare.from_experiment(_located(e), self._federation(e))
            self._engines[key] = ready.trainer.name
        return self._engines[key] == "stacked"

    def _compiles(self, member: Member) -> bool:
        """Return whether a run's steps are compiled, so that those of others can be compiled meanwhile."""
        several = len(self._left) > 1
        return several and pick_device(member.experiment.device).type == "cuda" and self._stacks(member)

    # ---- running -----------------------------------------------------------------------------------------------------
    def _run(self, members: Sequence[Member]) -> None:
        """Run some side by side where that is possible; what cannot be run leaves the others alone."""
        members = [member for member in members if not self._failed_before(member)]
        if not members:
            return
        self.watch.begin(members)
        try:
            outcomes = self._attempt(members)
        except InputError as error:
            if len(members) > 1:
                for member in members:
                    self._run([member])
                return
            outcomes = [error]
        except (torch.cuda.OutOfMemoryError, MemoryError):
            outcomes = [TrainingError("the memory is full")] * len(members)
            for member in members:
                self._end(member, None, "the memory is full")
            return
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Run):
                federation = self._federation(member.experiment)
                self.store.write(member.experiment, self.plan.scale, outcome, federation.hash, self.command)
                self.store.forget_state(self._name(member))
                self._end(member, self._result(member), "")
            elif isinstance(outcome, TrainingError):
                self.store.fail(member.experiment, self.plan.scale, str(outcome), self.command)
                self._end(member, self._result(member), str(outcome))
            else:
                self._end(member, None, str(outcome))

    def _attempt(self, members: Sequence[Member]) -> Sequence[Run | TrainingError | InputError]:
        """Return what each run gave, or why it could not be run to its end."""
        experiments = [_located(member.experiment) for member in members]
        federations = [self._federation(experiment) for experiment in experiments]
        outs = [self.store.folder(self._name(member)) for member in members]
        if len(members) == 1:
            try:
                start = simulation.begin(
                    experiments[0], out=outs[0], federation=federations[0], resume=True, progress=self._step(members[0])
                )
                return [simulation.finish(dataclasses.replace(start, final=False))]
            except TrainingError as error:
                return [error]
        groups = Groups.read(self.store.out)
        return together.try_together(
            experiments,
            outs=outs,
            federations=federations,
            progress=[self._step(member) for member in members],
            begins=lambda numbers: groups.begin([self._name(members[n]) for n in numbers]),
            resume=True,
            final=False,
        )

    def _step(self, member: Member) -> Callable[[dict[str, Any]], None]:
        def step(record: dict[str, Any]) -> None:
            self.watch.step(member, record)
            if not self._compiling and self._compiles(member):  # now that the kernels of a group are measured
                self._compiling = True
                at = next(n for n, group in enumerate(self._left) if member in group)
                self.ahead.begin([[other.experiment for other in group] for group in self._left], at)

        return step

    def _failed_before(self, member: Member) -> bool:
        """Return whether a run had failed when it was stopped before that was written as its result."""
        reason = Journal(self.store.folder(self._name(member))).failure()
        if reason:
            self.store.fail(member.experiment, self.plan.scale, reason, self.command)
            self._end(member, self._result(member), reason)
        return bool(reason)

    def _end(self, member: Member, result: Result | None, reason: str) -> None:
        if result is None:
            self.reasons[self._name(member)] = reason
        self.watch.end(member, result, reason)

    def _federation(self, experiment: Experiment) -> Federation:
        return self.shelf.federation(experiment, self.plan.scale, self.root)

    def _name(self, member: Member) -> str:
        return self.store.name(member.experiment, self.plan.scale)

    def _result(self, member: Member) -> Result | None:
        return self.store.read(member.experiment, self.plan.scale)


def _located(experiment: Experiment) -> Experiment:
    """Return an experiment without the place of its data, which are handed over, so that they may be moved."""
    return dataclasses.replace(experiment, data_root="")


def _data_of(experiment: Experiment) -> tuple[Any, ...]:
    """Return what determines the data of a run, apart from its seed."""
    e = experiment
    return (e.data, e.partition, e.clients, e.split, e.pool, e.external)


def _step_of(experiment: Experiment) -> tuple[Any, ...]:
    """Return what runs that go as one stack have in common: all but seeds, learning rate and the method's floating fields."""
    method = {name: value for name, value in settings.values_of(experiment.method).items() if type(value) is not float}
    own = {name: value for name, value in settings.values_of(experiment).items() if name not in ("seed", "lr")}
    return (type(experiment.method), repr(method), repr(own))
