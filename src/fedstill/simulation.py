"""Run a federation in this process: `simulate` from Python, `run` for a whole experiment."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from . import data as sources
from . import models, scores, settings, tree
from .data import Dataset, Federation
from .edge.controller import Controller
from .edge.data_manager import DataManager
from .edge.model_store import ModelStore
from .edge.trainer import Bench, Trainer
from .errors import InputError, Shown
from .evaluate import Evaluation
from .experiment import Experiment, Training, to_toml
from .functional import Net
from .journal import Journal, write
from .method import Method
from .plan import Plan
from .server.coordinator import Coordinator, Record
from .server.sampler import count
from .split import by_head
from .task import Task
from .transport.local import LocalTransport
from .tree import Params, Tree

Progress = Callable[[Record], None]
PYTHON = "(python)"  # in experiment.toml: given as an object, so that only the same call of simulate() can go on


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a run gave."""

    method: Method
    training: Training
    engine: str
    history: list[Record]  # one record a round
    seconds: float
    _task: Task
    _server: Tree
    _store: ModelStore
    newcomers: tuple[int, ...] = ()  # clients that did not take part in training
    after: dict[str, Any] = dataclasses.field(default_factory=dict)  # scores after the federation that were asked for
    _trainer: Trainer | None = None
    _samples: scores.Samples | None = None

    @property
    def task(self) -> Task:
        """The setting of local work, at the last round."""
        return self._task

    @property
    def trainer(self) -> Trainer:
        """What trains and scores the clients, with their data."""
        if self._trainer is None:
            raise RuntimeError("this run was made without its data")
        return self._trainer

    @property
    def clients(self) -> list[int]:
        """The clients that took part in the federation: all but the newcomers."""
        return [k for k in range(self._task.clients + len(self.newcomers)) if k not in self.newcomers]

    @property
    def has_common(self) -> bool:
        """Whether there is a test set that belongs to no client."""
        return self._trainer is not None and self._trainer.bench.data.common is not None

    def served(self, client: int) -> Params:
        """The model that serves a client, as it is kept: its personal one, else the generic one."""
        if "personal" not in self.method.scores:
            return self.method.generic(self._task, self._server)
        down = self.method.send(self._task, self._server, client)
        return self.method.personal(self._task, down, self._store.get(client))

    def personal(self, client: int) -> Params:
        """A client's own model as a state dict (for a method without personal models, the generic one)."""
        last = self._task.clients + len(self.newcomers) - 1
        if not 0 <= client <= last:
            raise InputError("client", client, f"a number from 0 to {last}")
        return self._task.net.export(self.served(client))

    def generic(self) -> Params:
        """The model for everybody as a state dict (for `Local`, where nobody trains one: the initial weights)."""
        return self._task.net.export(self.method.generic(self._task, self._server))

    def score(self, **contract: Any) -> float:
        """One number by the evaluation contract: `model`, `clients`, `mean`, `round` (see `Evaluation`)."""
        return settings.build(Evaluation, contract).of(self.history)

    def new(self, on: Literal["clients", "common"] = "clients") -> float:
        """Accuracy where a sample's owner is unknown: all personal models vote, on all clients' tests or the common set."""
        return scores.new(self, on)

    def external(self, data: Dataset | Sequence[Any], model: Literal["ensemble", "generic"] = "ensemble") -> float:
        """Accuracy on a source that no client had, a `Dataset` or (x, y): of all personal models' vote, or the generic one."""
        if self._samples is None:
            raise RuntimeError("this run was made without its data")
        return scores.on_external(self, self._samples.read(data), model)

    def averaged(
        self, on: Literal["clients", "common"] = "clients", mean: Literal["weighted", "uniform"] = "weighted"
    ) -> float:
        """Accuracy of the mean of the personal models' weights: a generic score for methods without a generic model."""
        return scores.averaged(self, on, mean)

    def fine_tuned(
        self, epochs: int = 10, part: Literal["head", "all"] = "head", mean: Literal["client", "sample"] = "client"
    ) -> float:
        """Accuracy on their own tests after each client has trained its model for `epochs` more; the run does not change."""
        found = scores.fine_tuned(self, epochs, part)
        return float(found["fine_tuned" if mean == "client" else "fine_tuned_sample"])

    def joined(self, epochs: int = 5) -> tuple[float, float]:
        """Accuracy of the newcomers, mean per client: with what the method gives them, and after `epochs` of training."""
        found = scores.joined(self, epochs)
        return found["newcomers_before"], found["newcomers_after"]

    def table(self) -> str:
        """The result as text, with what it is a result of."""
        from .report.text import table

        return table([self])


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
    simulation = prepare(method, model, data, head, how)
    journal = None
    if out is not None:
        journal = Journal(out)
        about = {"data": PYTHON, "model": PYTHON, "head": simulation.trainer.bench.task.head_modules()}
        record = {**data.partition_record, "contents": data.checksum()}
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
    journal = Journal(out) if out is not None else None
    if journal:
        journal.check_free()
    simulation, federation = from_experiment(experiment, federation)
    if journal:
        kind = federation.partition_record.get("kind")
        said = experiment.dealt(kind if kind in ("owner", "domain") else None)
        data = PYTHON if kind == "arrays" else said.data
        said = dataclasses.replace(said, clients=len(federation), data=data)
        record = {**federation.partition_record, "contents": federation.checksum()}
        journal.begin(said.to_toml(), record, simulation.device)
    return simulation.run(journal=journal, checkpoint_every=experiment.checkpoint_every, progress=progress)


def resume(folder: str | Path, *, progress: Progress | None = None) -> Run:
    """Go on with a run from its newest checkpoint, to the same bits as if it had never stopped."""
    journal = Journal(folder)
    experiment = Experiment.from_toml(journal.folder / "experiment.toml")
    simulation, federation = from_experiment(experiment)
    journal.check_partition({**federation.partition_record, "contents": federation.checksum()})
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

    def run(
        self,
        *,
        journal: Journal | None = None,
        checkpoint_every: int = 10,
        progress: Progress | None = None,
        go_on: bool = False,
        through_wire: bool = False,
    ) -> Run:
        """Train to the end; with `go_on` from the journal's newest checkpoint."""
        method, task, bench = self.method, self.trainer.bench.task, self.trainer.bench
        server = tree.clone(method.init_server(task, self.initial))
        store = ModelStore(method.init_client(task, self.initial))
        history: list[Record] = []
        first = 1
        if go_on and journal is not None and (found := journal.load(self.device)) is not None:
            done, state = found
            server, first = state["server"], done + 1
            for client, memory in state["clients"].items():
                store.put(int(client), memory)
            history = journal.rewind(done)
        elif journal is not None:
            journal.rewind(0)
        controller = (scores.Watching if self.training.forgetting else Controller)(method, self.trainer, store)
        coordinator = Coordinator(
            method,
            task,
            bench.plan,
            LocalTransport(controller, bench.data.clients, through_wire),
            per_round=count(task.clients, self.training.participation),
            eval_every=self.training.eval_every,
            parts=("test",) if bench.data.val is None else ("test", "val"),
            common=self._common,
            away=frozenset(self.newcomers),
            watch=scores.Forgetting(history),
        )
        began = time.perf_counter()
        for server, record in coordinator.rounds(server, first):  # noqa: B020
            history.append(record)
            if journal is not None:
                journal.record(record)
                if record["round"] % checkpoint_every == 0 or record["round"] == task.rounds:
                    clients = {str(k): memory for k, memory in store.items()}
                    journal.save(record["round"], {"server": server, "clients": clients})
            if progress is not None:
                progress(record)
        seconds = time.perf_counter() - began
        end = dataclasses.replace(task, round=task.rounds)
        ended = Run(
            method, self.training, self.trainer.name, history, seconds, end, server, store, self.newcomers,
            _trainer=self.trainer, _samples=self.samples,
        )  # fmt: skip
        ended = dataclasses.replace(ended, after=scores.after(ended, self.external))
        if journal is not None and ended.after:
            write(journal.folder / "scores.json", (json.dumps(ended.after, indent=2) + "\n").encode())
        return ended

    def _common(self, generic: Tree) -> float | None:
        """The generic model's accuracy on the common test set, where the federation has one."""
        common = self.trainer.bench.data.common
        if common is None:
            return None
        x, y = common
        return float((self.trainer.bench.task.predict(generic, x).argmax(-1) == y).double().mean())


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
    net.probe(manager.train.x, federation.classes)
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
    )
    method.check(task)
    plan = Plan(training.seed, training.batch_size)
    joining = scores.newcomers(plan, len(federation), training.newcomers)
    if training.fine_tune and training.fine_tune_part == "head":
        task.need_split()
    bench = Bench(method, task, plan, manager)
    together = count(task.clients, training.participation)
    trainer = Trainer(bench, training.engine, training.cohort, together)
    samples = scores.Samples.of(federation)
    return Simulation(method, training, trainer, net.initial(), device, samples, joining, federation.external)


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
