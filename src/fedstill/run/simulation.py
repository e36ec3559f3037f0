"""Run a federation in this process: `simulate` from Python, `run` for a whole experiment."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import data as sources
from .. import models, scores
from ..core import settings, tree
from ..core.errors import InputError, Shown, check_callable, check_path
from ..core.method import Method
from ..core.plan import Plan
from ..core.task import Task
from ..core.tree import Params, Tree
from ..data import Federation
from ..edge.data_manager import DataManager
from ..edge.edge import Controller
from ..edge.model_store.store import ModelStore
from ..edge.monitor import Policy, SimulatedMonitor
from ..engine.bench import Bench
from ..engine.one import threads
from ..engine.trainer import Trainer
from ..nn.kernels.convolution import Choices
from ..nn.net import Net
from ..nn.split import by_head
from ..server.aggregator import Aggregator
from ..server.coordinator import Coordinator, Record
from ..server.optimizer import Rule
from ..server.sampler import SAMPLERS, Memory, count
from ..server.traffic import nbytes
from ..timing import clock
from ..timing import wait_free as background
from ..timing.asynchronous import Asynchrony
from ..timing.flight import Flight
from ..timing.schedule import Schedule, Trigger
from ..timing.wait_free import Background
from ..transport.local import LocalTransport
from ..transport.messages import Order
from . import legal
from .experiment import Experiment, Training, check_format, to_toml
from .journal import Journal, write
from .result import Run

Progress = Callable[[Record], None]
PYTHON = "(python)"  # in experiment.toml: given as an object, so that only the same call of simulate() can go on


def simulate(
    method: Method,
    *,
    model: nn.Module | Callable[[], nn.Module],
    data: Federation,
    head: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **training: Any,
) -> Run:
    """Train `data`'s clients by `method`, starting from the weights that `model` has.

    `model` is any `nn.Module` (it is not changed) or a function that makes one; `head` names its head where the module does
    not. The other keywords are the fields of `Training`. With `out` the run leaves a folder behind; the same call with
    `resume=True` goes on from that folder's newest checkpoint.
    """
    if isinstance(training.get("dtype"), torch.dtype):
        training["dtype"] = str(training["dtype"]).removeprefix("torch.")
    if isinstance(training.get("device"), torch.device):
        training["device"] = str(training["device"])
    how = settings.build(Training, training)
    legal.check_simulate(method, model, data, out, resume, progress)
    simulation = prepare(method, model, data, head, how)
    journal = None
    if out is not None:
        journal = Journal(out)
        about = {"data": PYTHON, "model": PYTHON, "head": simulation.trainer.bench.task.head_modules()}
        record = {**data.partition_record, "contents": data.checksum(), **clock.record(how.profile)}
        said, before = to_toml(how, method, **about), journal.folder / "experiment.toml"
        if not resume or not before.is_file():
            journal.begin(said, record, simulation.device)
        elif before.read_text(encoding="utf-8") != said:
            raise InputError("out", str(out), "the folder of the same call: its settings or method were others")
        else:
            journal.check_partition(record)
            return simulation.run(journal=journal, progress=progress, go_on=True)
    return simulation.run(journal=journal, progress=progress)


def run(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
) -> Run:
    """Run a whole experiment: read and divide the data, build the model, train. `federation` saves reading it again."""
    legal.check_run(experiment, out, progress, federation)
    return begin(experiment, out=out, progress=progress, federation=federation).run()


def begin(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
    abreast: int = 1,
) -> Course:
    """A whole experiment as it is before its first round, its folder made; `abreast` runs will share the memory."""
    journal = Journal(out) if out is not None else None
    if journal:
        journal.check_free()
    simulation, federation = from_experiment(experiment, federation)
    if journal:
        kind = federation.partition_record.get("kind")
        said = experiment.dealt(kind if kind in ("owner", "domain") else None)
        data = PYTHON if kind == "arrays" else said.data
        said = dataclasses.replace(said, clients=len(federation), data=data)
        record = {**federation.partition_record, "contents": federation.checksum(), **clock.record(experiment.profile)}
        journal.begin(said.to_toml(), record, simulation.device)
    return simulation.start(journal, experiment.checkpoint_every, progress, abreast=abreast)


def resume(folder: str | Path, *, progress: Progress | None = None) -> Run:
    """Go on with a run from its newest checkpoint, to the same bits as if it had never stopped."""
    check_path("folder", folder)
    check_callable("progress", progress)
    check_format(folder)
    journal = Journal(folder)
    experiment = Experiment.from_toml(journal.folder / "experiment.toml")
    simulation, federation = from_experiment(experiment)
    record = {**federation.partition_record, "contents": federation.checksum(), **clock.record(experiment.profile)}
    journal.check_partition(record)
    return simulation.run(journal=journal, checkpoint_every=experiment.checkpoint_every, progress=progress, go_on=True)


def federation_of(experiment: Experiment) -> Federation:
    """The data of an experiment, read and divided."""
    dataset = sources.load(experiment.data, experiment.data_root or None)
    owned = "owner" if dataset.owner is not None else "domain" if dataset.domain is not None else None
    experiment = experiment.dealt(owned)
    federation = Federation.from_dataset(
        dataset,
        partition=experiment.partition,
        clients=experiment.clients or None,
        seed=experiment.seed,
        split=experiment.split,
        pool=experiment.pool,
    )
    return scores.with_external(federation, experiment)


def from_experiment(experiment: Experiment, federation: Federation | None = None) -> tuple[Simulation, Federation]:
    """Everything ready to train; every refusal comes from here, before a folder is made."""
    pick_device(experiment.device)
    if PYTHON in (experiment.data, experiment.model) and federation is None:
        right = "a data set: this run was made in Python; the same call of simulate() with resume=True goes on with it"
        raise InputError("data", experiment.data, right)
    federation = scores.with_external(federation or federation_of(experiment), experiment)
    model = models.build(experiment.model, federation.shape, federation.classes, experiment.seed)
    return prepare(experiment.method, model, federation, experiment.head or None, experiment.training()), federation


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """A run that is ready to start."""

    method: Method
    training: Training
    trainer: Trainer
    initial: Params
    device: torch.device
    samples: scores.Samples
    newcomers: tuple[int, ...] = ()
    external: tuple[torch.Tensor, torch.Tensor] | None = None
    devices: clock.Devices | None = None  # of simulated time

    def run(self, **how: Any) -> Run:
        """Train to the end; `how` is what `start` takes."""
        return self.start(**how).run()

    def start(
        self,
        journal: Journal | None = None,
        checkpoint_every: int = 10,
        progress: Progress | None = None,
        go_on: bool = False,
        through_wire: bool = False,
        abreast: int = 1,
    ) -> Course:
        """Everything as it is before the first round, or after the journal's newest checkpoint.

        `abreast` is how many runs share what memory there is for clients' memories.
        """
        method, task = self.method, self.trainer.bench.task
        server, rule = tree.clone(method.init_server(task, self.initial)), Rule.of(method, self.training)
        if rule is not None:
            server = rule.begin(server, task.net.parameters)
        room = int(self.training.bank * 2**30) if self.device.type == "cuda" and self.training.bank else None
        folder = None if journal is None else journal.folder
        memory = method.init_client(task, self.initial)
        store = ModelStore(memory, device=self.device, device_bytes=room, folder=folder, sharing=abreast)
        history: list[Record] = []
        schedule = self._schedule()
        behind = self._background(schedule)
        first, begun = 1, {}
        if go_on and journal is not None and (found := journal.load(self.device)) is not None:
            state = found.state()
            server, first = state["server"], found.round + 1
            begun = state.get("begun", {})
            for client, memory in found.clients():
                store.put(client, memory)
            history = journal.rewind(found.round)
            if schedule is not None:
                schedule.go_on(history, state.get("late", {}))
            if behind is not None:
                behind.go_on(history)
        elif journal is not None:
            journal.rewind(0)
        controller = (scores.Watching if self.training.forgetting else Controller)(method, self.trainer, store)
        controller.go_on(begun)
        if schedule is not None:
            how = self.training
            policy = Policy(how.min_battery, how.max_load, how.min_memory)
            controller.monitor = None if policy == Policy() else SimulatedMonitor(schedule.clock, policy)
        coordinator = Coordinator(
            method,
            task,
            Plan(self.training.seed, self.training.batch_size),
            LocalTransport(controller, self.trainer.data.clients, through_wire),
            per_round=count(task.clients, self.training.participation),
            eval_every=self.training.eval_every,
            aggregator=Aggregator(minimum=self.training.minimum, rule=rule),
            parts=("test",) if self.trainer.data.val is None else ("test", "val"),
            common=self._common,
            away=frozenset(self.newcomers),
            watch=scores.Forgetting(history),
            sampler=SAMPLERS[self.training.sampler],
            samples=self.trainer.data.train.sizes,
            candidates=self.training.candidates,
            memory=Memory.of(history),
            schedule=schedule,
            background=behind,
            upload=functools.partial(self._upload, store),
        )
        choices = self.trainer.choices
        if go_on and journal is not None:
            choices.take(journal.choices())
        return Course(
            self, coordinator, controller, store, server, history, first, journal, checkpoint_every, progress, choices
        )

    def _schedule(self) -> Schedule | None:
        """Simulated time from its beginning, where it is asked for."""
        how = self.training
        if self.devices is None:
            return None
        time = clock.Clock(self.devices, how.seed, np.array(self.trainer.data.train.sizes))
        asynchrony = Asynchrony.of(self.method, how, count(self.trainer.bench.task.clients, how.participation))
        if asynchrony is not None:
            return Flight(time, asynchrony=asynchrony)
        return Schedule(time, Trigger(how.deadline, how.over_select), how.late, ahead=how.wait_free != "off")

    def _background(self, schedule: Schedule | None) -> Background | None:
        """Personal work until the next download, where it is asked for."""
        how = self.training
        if schedule is None or how.wait_free != "until-download":
            return None
        plan, everyone = Plan(how.seed, how.batch_size), how.unselected == "broadcast"
        return Background(schedule.clock, plan, how.personal_cap, everyone)

    def _upload(self, store: ModelStore, orders: Sequence[Order]) -> float:
        """The bytes of a reply, from what a client would send without having trained; a mean takes replies of one size."""
        if not orders:
            return 0.0
        order, method = orders[0], self.method
        task = self.trainer.bench.home(order.round, order.client)
        memory = tree.fit_rows(store.get(order.client), method.per_sample, len(task.here().y))
        with torch.no_grad():
            up, _ = method.finish(task, order.down, memory, method.begin(task, order.down, memory))
        return float(nbytes(up))

    def _common(self, generic: Tree) -> float | None:
        """The generic model's accuracy on the common test set, where the federation has one."""
        common = self.trainer.data.common
        if common is None:
            return None
        x, y = common
        with threads(self.trainer.threads):
            return float((self.trainer.bench.task.predict(generic, x).argmax(-1) == y).double().mean())


@dataclasses.dataclass(eq=False)
class Course:
    """A run under way: what changes from round to round."""

    simulation: Simulation
    coordinator: Coordinator
    controller: Controller
    store: ModelStore
    server: Tree
    history: list[Record]
    first: int  # the round that comes first
    journal: Journal | None
    checkpoint_every: int
    progress: Progress | None
    choices: Choices  # what was measured on the way
    began: float = dataclasses.field(default_factory=time.perf_counter)
    abreast: int = 1  # runs that share the time, this one included

    def run(self) -> Run:
        """Run to the end."""
        try:
            with self.simulation.trainer.quiet():
                for _ in self.rounds():
                    pass
            return self.end()
        finally:
            self.simulation.trainer.close()

    def rounds(self) -> Iterator[Record]:
        """Run the rounds that are left; after each its record."""
        for server, record in self.coordinator.rounds(self.server, self.first):
            self.note(server, record)
            yield record

    def note(self, server: Tree, record: Record) -> None:
        """Keep what a round gave; runs abreast share its seconds."""
        self.server, record = server, {**record, "seconds": record["seconds"] / self.abreast}
        self.history.append(record)
        if self.journal is not None:
            self.journal.record(record)
            self.journal.keep_choices(self.choices)
            if record["round"] % self.checkpoint_every == 0 or record["round"] == self.coordinator.task.rounds:
                late = {} if self.coordinator.schedule is None else self.coordinator.schedule.kept()
                begun = self.controller.kept()
                more = {name: part for name, part in (("late", late), ("begun", begun)) if part}
                self.journal.save(record["round"], {"server": server, **more}, self.store.items())
        if self.progress is not None:
            self.progress(record)

    def end(self) -> Run:
        """The result, with the scores that were asked for after the federation."""
        sim, seconds = self.simulation, (time.perf_counter() - self.began) / self.abreast
        end = dataclasses.replace(self.coordinator.task, round=self.coordinator.task.rounds)
        ended = Run(
            sim.method, sim.training, sim.trainer.name, self.history, seconds, end, self.server, self.store,
            sim.newcomers, _trainer=sim.trainer, _samples=sim.samples,
        )  # fmt: skip
        ended = dataclasses.replace(ended, after=scores.after(ended, sim.external))
        if self.journal is not None and ended.after:
            write(self.journal.folder / "scores.json", (json.dumps(ended.after, indent=2) + "\n").encode())
        return ended


def prepare(
    method: Method,
    model: nn.Module | Callable[[], nn.Module],
    federation: Federation,
    head: str | Sequence[str] | None,
    training: Training,
) -> Simulation:
    """Check everything and make it ready; raises `InputError` before any work."""
    device, dtype = pick_device(training.device), getattr(torch, training.dtype)
    if isinstance(method, type) or not isinstance(method, Method):
        raise InputError("method", Shown(repr(method)), "a method such as fedstill.PFedSD(), not its class or name")
    if not isinstance(federation, Federation):
        raise InputError(
            "data", Shown(type(federation).__name__), "a fedstill.Federation, for example Federation.from_arrays"
        )
    if not isinstance(model, nn.Module) and callable(model):
        model = models.seeded(model, training.seed)
    if not isinstance(model, nn.Module):
        raise InputError("model", Shown(type(model).__name__), "an nn.Module, or a function that makes one")
    net = Net(model, device, dtype)
    if not net.parameters:
        raise InputError("model", Shown(type(model).__name__), "a module with parameters that require a gradient")
    split = by_head(model, head)
    manager = DataManager(federation, device, dtype)
    net.probe(manager.train.x[:2], federation.classes)
    task = Task(
        net=net,
        split=split,
        clients=len(federation) - training.newcomers,
        rounds=training.rounds,
        epochs=training.epochs,
        lr=training.lr,
        momentum=training.momentum,
        nesterov=training.nesterov,
        weight_decay=training.weight_decay,
        seed=training.seed,
    )
    legal.check(method, task, training)
    Rule.of(method, training)
    plan = Plan(training.seed, training.batch_size)
    joining = scores.newcomers(plan, len(federation), training.newcomers)
    if training.fine_tune and training.fine_tune_part == "head":
        task.need_split()
    bench = Bench(method, task, plan, manager)
    together = count(task.clients, training.participation)
    if training.minimum > together:
        raise InputError("minimum", training.minimum, f"at most {together}, the clients that are wanted in a round")
    Asynchrony.of(method, training, together)
    background.check(method, task, training)
    how = (len(federation), training.seed, training.availability, training.drop)
    devices = clock.Devices.of(training.profile, *how) if training.profile else None
    trainer = Trainer(
        bench, training.engine, training.cohort, together, fast=training.fast, compile=training.compile,
        precision=training.precision, workers=training.workers,
    )  # fmt: skip
    samples = scores.Samples.of(federation)
    return Simulation(method, training, trainer, net.initial(), device, samples, joining, federation.external, devices)


def pick_device(name: str) -> torch.device:
    """The device by name; auto takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", name, "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError("device", name, f"one of this machine's ({torch.cuda.device_count()} GPUs), for example cpu")
    return device
