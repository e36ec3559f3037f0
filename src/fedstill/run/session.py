"""Runs under way on one transport: what is put together when they start, and the results they end with."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from .. import scores
from ..core import settings, tree
from ..core.errors import CannotStack, InputError, TrainingError
from ..core.memory import available as available_memory
from ..core.plan import JointPlan, Plan
from ..edge.data_manager import join
from ..edge.edge import Edge, MemoryStore
from ..edge.model_store.plain import PlainStore
from ..edge.model_store.store import ModelStore
from ..edge.monitor import Monitor, Policy
from ..engine.bench import Bench
from ..engine.kept import initial_memory
from ..engine.step import explained
from ..engine.trainer import Trainer
from ..server import privacy
from ..server.coordinator import Aggregator, Callback, Coordinator, Record, Rounds, RunState
from ..server.gate import Gate
from ..server.optimizer import Rule
from ..server.sampler import BY_PLAN, SAMPLERS, count
from ..timing.asynchronous import Asynchronous, Asynchrony
from ..timing.clock import Clock
from ..timing.live import Ahead, AsTheyArrive
from ..timing.monitor import SimulatedMonitor
from ..timing.schedule import Schedule, Trigger
from ..timing.wait_free import Background, WaitFree
from ..transport.local import LocalTransport
from ..transport.messages import Dialogue, Transport
from .answers import Answers
from .callbacks import JournalCallback, Pace, Progress, ProgressCallback, restore, state_of
from .checkpoint import Checkpoint
from .driver import Driver
from .further import FurtherCallback, latest
from .journal import Journal, Survey
from .patience import Patience, PatienceCallback
from .prepare import Simulation
from .result import Run
from .signals import Stop, StopCallback


@runtime_checkable
class Elsewhere(Protocol):
    """Makes the transport of runs whose clients are divided among processes."""

    live: bool  # whether its clients are real sites, which take real seconds

    def share(self, clients: int) -> frozenset[int]:
        """Return the clients that this process holds, given how many there are."""

    def open(self, edge: Edge, simulations: Sequence[Simulation]) -> Transport:
        """Have the other processes set up their clients of these runs; `edge` has this process's."""

    def hidden(self) -> privacy.Hidden | None:
        """Return what the server's choices are drawn from where clients must not know them; None: the plan. Asked once open."""


Transports: TypeAlias = Callable[[Edge], Transport] | Elsewhere
"""Makes a transport, given the edge that this process can offer."""


@dataclass(frozen=True)
class Start:
    """A run to start, with its journal, callbacks and progress."""

    simulation: Simulation
    journal: Journal | None = None
    checkpoint_every: int = 0  # 0: as often as costs little
    progress: Progress | None = None
    resume: bool = False  # continue after the journal's newest checkpoint
    amended: str = ""  # the settings with which it goes on, where a flag has changed them
    callbacks: Sequence[Callback] = ()  # others that follow the run
    final: bool = (
        True  # whether the state after the last round is kept, from which models are loaded and more rounds made
    )


@dataclass(eq=False)
class Session:
    """Runs side by side. Each has its own server, history and folder; their clients are trained together."""

    starts: Sequence[Start]
    coordinators: Sequence[Coordinator]
    driver: Driver
    trainer: Trainer
    first: Sequence[int]  # by run the rounds that were over when it started
    stop: Stop = field(default_factory=Stop)
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> list[Run | TrainingError]:
        """Run to the end; in the place of a run that could not go on stands why."""
        try:
            with self.trainer.quiet():
                failed = self.driver.run({c.run: c.talk() for c in self.coordinators}, self._note)
                if self.stop.after:
                    self.stop.check()
                failed |= self.driver.run({c.run: self._kept(c) for c in self.coordinators if c.run not in failed})
                return [failed[c.run] if c.run in failed else self._end(c) for c in self.coordinators]
        finally:
            self.trainer.close()

    def rounds(self) -> Iterator[list[Record]]:
        """Run round by round: yield the records of all runs after each. Close the generator to stop early."""
        failed: dict[int, TrainingError] = {}
        done = self.coordinators[0].state.round
        with self.trainer.quiet():
            for _ in self.driver.turns({c.run: c.talk() for c in self.coordinators}, failed):
                for error in failed.values():
                    raise error
                while all(c.state.round > done for c in self.coordinators):
                    yield [c.state.history[done] for c in self.coordinators]
                    done += 1

    def close(self) -> None:
        """End worker processes and free what programs set aside."""
        self.trainer.close()

    def _note(self, run: int, error: TrainingError) -> None:
        """Note in a run's folder why it could not go on, so that a resumed comparison does not try again."""
        journal = self.starts[run].journal
        if journal is not None:
            journal.fail(str(error))

    def _kept(self, coordinator: Coordinator) -> Dialogue[None]:
        """Return server and clients to the round whose models the run keeps, where that is not the last."""
        for callback in coordinator.callbacks:
            if isinstance(callback, PatienceCallback):
                yield from callback.go_back(coordinator)

    def _end(self, coordinator: Coordinator) -> Run | TrainingError:
        """Return a run's result, with the scores that were asked for after the federation."""
        start = self.starts[coordinator.run]
        sim, seconds = start.simulation, (time.perf_counter() - self.began) / len(self.starts)
        run = Run.of(sim, coordinator, self.driver, self.trainer.name, seconds)
        finished = start.journal is not None and self.first[coordinator.run] == coordinator.state.round  # earlier
        kept = start.journal.scores() if start.journal is not None and finished else None
        try:
            kept_now = latest(coordinator) if kept is None and not coordinator.best_round else kept
            run = dataclasses.replace(run, after=scores.after(run) if kept_now is None else kept_now)
        except TrainingError as error:
            return error
        if start.journal is not None and kept is None:
            start.journal.write_scores(run.after)
        if start.journal is not None and Answers.read(start.journal.folder, run.task.round) is None:
            Answers.of(run).write(start.journal.folder)
        return run


def start(starts: Sequence[Start], transport: Transports | None = None, stop: Stop | None = None) -> Session:
    """Put everything together as it is before the first round, or after the newest checkpoints.

    `stop` is how runs with a journal are asked to stop after a round.
    Raises `CannotStack` where several runs cannot be trained side by side.
    """
    sims = [start.simulation for start in starts]
    parts = edge_of(sims, next((start.journal.folder for start in starts if start.journal is not None), None))
    if isinstance(transport, Elsewhere):
        carrier, hidden = transport.open(parts.edge, sims), transport.hidden()
    else:
        hidden, carrier = None, (transport or LocalTransport)(parts.edge)
    driver, pace, live = Driver(carrier), Pace(), isinstance(transport, Elsewhere) and transport.live
    coordinators = [
        _coordinator(start, number, len(starts), strategy, driver, parts.trainer, stop, pace, hidden, live)
        for number, (start, strategy) in enumerate(zip(starts, parts.rounds, strict=True))
    ]
    surveys = [None if one.journal is None else one.journal.survey(one.simulation.device) for one in starts]
    at = _common_round(starts, surveys)
    # every refusal comes before the first change
    chosen = [_choose(one, survey, at) for one, survey in zip(starts, surveys, strict=True)]
    for one, survey, checkpoint, coordinator in zip(starts, surveys, chosen, coordinators, strict=True):
        _resume(one, survey, checkpoint, coordinator, driver)
    going = [c for c, one, survey in zip(coordinators, starts, surveys, strict=True) if not _over(one, survey)]
    if len({coordinator.state.round for coordinator in going}) > 1:
        raise CannotStack("the runs are not at the same round")
    first = [coordinator.state.round for coordinator in coordinators]
    return Session(starts, coordinators, driver, parts.trainer, first, stop or Stop())


@dataclass(frozen=True)
class Parts:
    """What runs side by side share in a process: the edge with its clients, what trains them, and by run the timing."""

    edge: Edge
    trainer: Trainer
    rounds: Sequence[Rounds]


def edge_of(sims: Sequence[Simulation], folder: Path | None = None) -> Parts:
    """Put together what trains and keeps the clients of some runs; large memories may lie in files of `folder`."""
    trainer = sims[0].trainer if len(sims) == 1 else _joint_trainer(sims)
    rounds = [rounds_of(sim) for sim in sims]
    monitors = [monitor_of(sim, strategy) for sim, strategy in zip(sims, rounds, strict=True)]
    stores = _store(sims, folder), _store(sims, folder, True)
    return Parts(Edge([sim.method for sim in sims], trainer, stores[0], monitors, stores[1]), trainer, rounds)


def _coordinator(
    start: Start,
    number: int,
    runs: int,
    rounds: Rounds,
    driver: Driver,
    trainer: Trainer,
    stop: Stop | None,
    pace: Pace,
    hidden: privacy.Hidden | None,
    live: bool,
) -> Coordinator:
    sim, training = start.simulation, start.simulation.training
    with explained(sim.method, sim.task, stacked=False):
        server = tree.clone(sim.method.init_server(sim.task, sim.initial))
    rule = Rule.of(sim.method, training)
    if rule is not None:
        server = rule.begin(server, sim.task.net.parameters)
    callbacks: list[Callback] = []
    if training.further_every:
        callbacks.append(FurtherCallback(sim, driver, trainer.name))
    if training.patience:
        callbacks.append(PatienceCallback(training, start.journal))
    if start.journal is not None:
        callbacks.append(
            JournalCallback(start.journal, start.checkpoint_every, trainer.choices, stop, pace, start.final)
        )
    if start.progress is not None:
        callbacks.append(ProgressCallback(start.progress))
    callbacks += start.callbacks
    if start.journal is not None and stop is not None:
        callbacks.append(StopCallback(stop))
    per_round = count(sim.task.clients, training.participation)
    lower = sim.task.objective.lower
    return Coordinator(
        sim.method,
        sim.task,
        Plan(training.seed, training.batch_size, None if hidden is None else hidden.secret),
        RunState(server),
        driver.transport,
        per_round=per_round,
        rounds=rounds,
        callbacks=callbacks,
        eval_every=training.eval_every,
        splits=("test", *(["val"] if sim.data.val is not None else []), *(["train"] if training.train_scores else [])),
        sampler=SAMPLERS[training.sampler],
        gate=Gate.of(
            training,
            sim.method,
            sim.data.train.sizes,
            sim.task.net.buffers,
            sim.task.objective.counted,
            () if sim.outline is None else sim.outline.names,
        ),
        aggregator=Aggregator(0 if training.privacy == "central" else training.minimum, rule),
        average=sim.trust or privacy.noisy_mean(sim.method, sim.task, training, per_round, hidden),
        spend=privacy.ledger(training, sim.trainer.bench),
        common=None if sim.data.common is None else functools.partial(sim.common_score, trainer),
        measures=dataclasses.replace(sim.trainer.bench.measures, rows=not live),
        away=frozenset(sim.newcomers),
        watch=functools.partial(scores.forgetting, lower=lower) if training.forgetting else None,
        tests={
            "test": sim.data.test.sizes,
            "train": sim.data.train.sizes,
            **({} if sim.data.val is None else {"val": sim.data.val.sizes}),
        },
        samples=sim.data.train.sizes,
        candidates=training.candidates,
        attack=sim.attack,
        run=number,
        runs=runs,
    )


def _common_round(starts: Sequence[Start], surveys: Sequence[Survey | None]) -> int | None:
    """Return the newest round of which every run that goes on with others has a checkpoint; None for a single run.

    A kill between two runs' checkpoints leaves them at different rounds. Each keeps the one before as well. A run that has
    stopped early has its own newest.
    """
    both = [(one, survey) for one, survey in zip(starts, surveys, strict=True) if not _over(one, survey)]
    held = [survey.whole.keys() for start, survey in both if start.resume and survey]
    if len(starts) == 1 or not held or len(held) < len(both):
        return None
    common = set.intersection(*map(set, held))
    if not common and any(held):
        raise CannotStack("they have no checkpoints of the same round")
    return max(common, default=0)


def _over(start: Start, survey: Survey | None) -> bool:
    """Return whether a run that is resumed has stopped early."""
    if survey is None or not start.resume:
        return False
    patience = Patience.of(start.simulation.training, survey.metrics.records)
    return patience is not None and patience.over and len(survey.metrics.records) in survey.whole


def _choose(start: Start, survey: Survey | None, at: int | None) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from; None where it begins. Refuse where the best round's is lost."""
    if start.journal is None or survey is None or not start.resume:
        return None
    at = None if _over(start, survey) else at
    checkpoint = start.journal.choose(survey, start.checkpoint_every or 1, at)
    records = survey.metrics.records[: checkpoint.round if checkpoint else 0]
    patience = Patience.of(start.simulation.training, records)
    if patience is not None and patience.best and patience.best not in survey.whole:
        why = survey.damaged.get(patience.best, "there is none")
        right = (
            f"one with the checkpoint of round {patience.best}, the best so far, whose models patience keeps ({why})"
        )
        raise InputError("folder", str(start.journal.folder), f"{right}; with patience 0 it goes on without")
    return checkpoint


def _resume(
    start: Start, survey: Survey | None, checkpoint: Checkpoint | None, coordinator: Coordinator, driver: Driver
) -> None:
    """Continue after a checkpoint; without one from the beginning."""
    journal, sim = start.journal, start.simulation
    if journal is None or survey is None:
        return
    if start.resume:
        sim.trainer.recall({**(checkpoint.choices if checkpoint else {}), **journal.choices()})
        if start.amended:
            journal.amend(start.amended, len(survey.metrics.records))
    if checkpoint is None:
        journal.rewind(survey, 0)
        return
    state, timing = state_of(checkpoint, journal.rewind(survey, checkpoint.round))
    coordinator.load_state(state, timing)
    for error in driver.run({coordinator.run: restore(checkpoint, coordinator)}).values():
        raise error


def rounds_of(sim: Simulation) -> Rounds:
    """Return how the run's rounds pass in time."""
    training = sim.training
    asynchrony = Asynchrony.of(sim.method, training, training, count(sim.task.clients, training.participation))
    if sim.devices is None:
        if asynchrony is not None:
            return AsTheyArrive(asynchrony)
        return Ahead(training) if training.wait_free != "off" else Rounds()
    clock = Clock(sim.devices, training.seed, np.array(sim.data.train.sizes))
    if asynchrony is not None:
        return Asynchronous(clock, asynchrony=asynchrony)
    trigger = Trigger(training.deadline, training.over_select)
    if training.wait_free == "until-download":
        plan, everyone = Plan(training.seed, training.batch_size), training.unselected == "broadcast"
        background = Background(clock, plan, training.personal_cap, everyone)
        return WaitFree(clock, trigger, training.late, ahead=True, background=background)
    return Schedule(clock, trigger, training.late, ahead=training.wait_free != "off")


def monitor_of(sim: Simulation, rounds: Rounds) -> Monitor | None:
    """Return the monitor of a run's simulated devices, where any may refuse."""
    training = sim.training
    policy = Policy(training.min_battery, training.max_load, training.min_memory)
    return SimulatedMonitor(rounds.clock, policy) if isinstance(rounds, Schedule) and policy != Policy() else None


def _store(sims: Sequence[Simulation], folder: Path | None, coupled: bool = False) -> MemoryStore:
    """Return the clients' memories of all runs: in tiers on a GPU, and where they might not fit into the host's memory.

    With `coupled`, only the entries that must agree with the server.
    """
    lead = sims[0]
    bank = lead.training.bank
    room = int(bank * 2**30) if lead.device.type == "cuda" and bank else None
    initials, grows = [], False
    for sim in sims:
        with explained(sim.method, sim.task, stacked=False):
            initial = initial_memory(sim.method, sim.task, sim.initial)
        initials.append({n: v for n, v in initial.items() if n in sim.method.coupled} if coupled else initial)
        grows = grows or bool(sim.method.per_sample & initial.keys())  # with the clients' numbers of samples
    clients = len(lead.data.train.sizes)
    size = clients * sum(leaf.nbytes for initial in initials for _, leaf in tree.leaves(initial))
    if not size or (lead.device.type == "cpu" and not grows and 2 * size < available_memory()):
        return PlainStore(initials[0], clients=clients, others=initials[1:])
    return ModelStore(
        initials[0], clients=clients, others=initials[1:], device=lead.device, device_bytes=room, folder=folder
    )


# ---- several runs as one stack ---------------------------------------------------------------------------------------
class _NoSeed:
    """Stands for the seed where several runs are trained together: each has its own, so a client can ask for none."""

    def __and__(self, other: object) -> int:
        raise CannotStack("the method draws from the run's seed at its clients")

    __index__ = __int__ = __add__ = __xor__ = __mul__ = __and__


def _joint_trainer(sims: Sequence[Simulation]) -> Trainer:
    """Return a trainer for the clients of all runs."""
    lead = sims[0]
    for sim in sims:
        _check_alike(lead, sim)
    if any(sim.training.mode != "sync" for sim in sims):
        raise CannotStack("replies are merged as they arrive, in each run at other times")
    if any(sim.training.wait_free == "until-download" for sim in sims):
        raise CannotStack("personal training ends with the next download, in each run at other times")
    clients = len(lead.data.train.sizes)
    plan = JointPlan(tuple(Plan(sim.training.seed, sim.training.batch_size) for sim in sims), clients)
    varied = {name: [value for value in values for _ in range(clients)] for name, values in varying(sims).items()}
    task = dataclasses.replace(lead.trainer.bench.task, seed=_NoSeed())  # type: ignore[arg-type]
    measures = lead.trainer.bench.measures
    bench = Bench(lead.method, task, plan, join([sim.data for sim in sims]), varied, measures=measures)
    return lead.trainer.over(bench, together=lead.trainer.together * len(sims))


def varying(sims: Sequence[Simulation]) -> dict[str, list[float]]:
    """Return the fields in which the runs' methods, or their learning rates, differ: for each the values run by run."""
    fields: dict[str, list[float]] = {}
    for name in settings.values_of(sims[0].method):
        values = [getattr(sim.method, name) for sim in sims]
        if any(value != values[0] for value in values):
            if not all(type(value) is float for value in values):
                raise CannotStack(f"{name} is no floating number")
            fields[name] = values
    if len({_optimizers(sim) for sim in sims}) > 1:
        raise CannotStack("the optimiser of a phase differs")
    rates = [sim.training.lr for sim in sims]
    return {**fields, "lr": rates} if len(set(rates)) > 1 else fields


def _optimizers(sim: Simulation) -> tuple[object, ...]:
    """Return what the engine reads of a method's phases itself, the same for the whole stack."""
    task = dataclasses.replace(sim.task, round=1)
    return tuple((phase.lr, phase.momentum, phase.optimizer) for phase in sim.method.phases(task))


def _check_alike(a: Simulation, b: Simulation) -> None:
    """Refuse runs that differ in more than seeds, fields of the method and the learning rate."""
    if type(a.method) is not type(b.method):
        raise CannotStack("their methods differ")
    for name, value in settings.values_of(a.training).items():
        if name not in ("seed", "lr") and getattr(b.training, name) != value:
            raise CannotStack(f"{name} differs")
    if a.training.forgetting:
        raise CannotStack("forgetting is watched run by run")
    if a.training.sampler not in BY_PLAN:
        raise CannotStack(f"the sampler {a.training.sampler} uses losses, which a stack may round otherwise")
    if b.trainer.name != "stacked" or (a.newcomers and a.training.seed != b.training.seed):
        raise CannotStack("clients are not stacked" if b.trainer.name != "stacked" else "their newcomers differ")
    shapes = [{n: (tuple(v.shape), v.dtype) for n, v in sim.initial.items()} for sim in (a, b)]
    if a.net.fixed.digest() != b.net.fixed.digest():
        raise CannotStack("their frozen weights differ")
    if shapes[0] != shapes[1] or a.data.clients != b.data.clients:
        raise CannotStack("their models or their numbers of clients differ")
