"""From settings, data and a model to a run that is ready to start; every refusal comes from here, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import data as sources
from .. import models, scores
from ..core import own
from ..core.augment import Augment
from ..core.errors import InputError, Shown
from ..core.method import Method
from ..core.metric import Function, Measures, measure_of
from ..core.plan import JointPlan, Plan
from ..core.protection import POISONS
from ..core.task import Average, Task
from ..core.tree import Params, Tree
from ..data import Federation
from ..data.outline import Outline
from ..data.poison import poisoned
from ..data.samples import Rows, pieces
from ..edge.data_manager import DataManager, join, on_device
from ..engine import rehearsal
from ..engine.bench import Bench, EngineName, threads
from ..engine.trainer import Trainer
from ..models import weights
from ..nn import lora
from ..nn.net import Net
from ..nn.split import by_head
from ..scores.external import with_external
from ..server import privacy
from ..server.attack import Attack
from ..server.average import rule_of
from ..server.sampler import count
from ..server.trust import Trust, root_of
from ..timing import clock
from . import legal
from .experiment import Experiment, Training

PYTHON = "(python)"  # in experiment.toml: given as an object, so that only the same call of simulate() can continue


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """A run that is ready to start."""

    method: Method
    training: Training
    trainer: Trainer
    data: DataManager
    initial: Params
    device: torch.device
    samples: scores.Samples
    newcomers: tuple[int, ...] = ()
    external: tuple[Rows, torch.Tensor] | None = None
    devices: clock.Devices | None = None  # of simulated time
    attack: Attack | None = None
    trust: Trust | None = None
    outline: Outline | None = None
    experiment: Experiment | None = None  # where the run is a whole experiment, which another process can prepare

    @property
    def task(self) -> Task:
        """The setting of local work."""
        return self.trainer.bench.task

    @property
    def net(self) -> Net:
        """The model."""
        return self.trainer.bench.net

    def common_score(self, trainer: Trainer, generic: Tree) -> dict[str, Any]:
        """Return the generic model's score and metrics on the common test set."""
        assert self.data.common is not None
        x, y = self.data.common
        measures = self.trainer.bench.measures
        with threads(trainer.training_threads), torch.no_grad():
            outputs = self.task.predict(generic, x)
            record = {"generic_common": float(self.task.objective.score(outputs, y).double().mean())}
            if measures.metrics:
                found = measures.values(measures.reduce(outputs, y))
                record |= {f"generic_{name}_common": value for name, value in found.items()}
        return record


def federation_of(experiment: Experiment) -> Federation:
    """Read and divide the data of an experiment."""
    legal.check_statistics(experiment, experiment.preprocessing())
    dataset = sources.load(
        experiment.data,
        experiment.data_root or None,
        objective=experiment.objective,
        preprocessing=experiment.preprocessing(),
        memory_map=experiment.memory_map,
        input=experiment.input,
        owner=experiment.owner,
    )
    owned = "owner" if dataset.owner is not None else "domain" if dataset.domain is not None else None
    owned = owned or (None if dataset.objective == "classification" else "iid")  # a sample is of no one class
    experiment = experiment.dealt(owned)
    federation = Federation.from_dataset(
        dataset,
        partition=experiment.partition,
        clients=experiment.clients or None,
        seed=experiment.seed,
        split=experiment.split,
        pool=experiment.pool,
    )
    return _with_external(federation, experiment)


def _with_external(federation: Federation, experiment: Experiment) -> Federation:
    e = experiment
    return with_external(federation, e.external, e.data, e.data_root or None, e.memory_map)


def from_experiment(experiment: Experiment, federation: Federation | None = None) -> tuple[Simulation, Federation]:
    """Everything ready to train; every refusal comes from here, before a folder is made."""
    pick_device(experiment.device)
    if PYTHON in (experiment.data, experiment.model) and federation is None:
        right = "a data set: this run was made in Python; the same call of simulate() with resume=True goes on with it"
        raise InputError("data", experiment.data, right)
    federation = _with_external(federation or federation_of(experiment), experiment)
    if experiment.objective not in ("auto", federation.objective):
        raise InputError(
            "objective", experiment.objective, f"{federation.objective!r}, as the federation's targets are"
        )
    model = models.build(experiment.model, federation.shape, federation.classes, experiment.seed, experiment.model_args)
    if experiment.weights:
        weights.load(model, experiment.weights, by_head(model, experiment.head or None))
    sim = prepare(experiment.method, model, federation, experiment.head or None, experiment.training())
    return dataclasses.replace(sim, experiment=experiment), federation


def prepare(
    method: Method,
    model: nn.Module | Callable[[], nn.Module],
    federation: Federation,
    head: str | Sequence[str] | None,
    training: Training,
    *,
    average: Average | None = None,
    functions: Mapping[str, Function] | None = None,
    rehearse: bool = True,
) -> Simulation:
    """Check everything and make it ready; raises `InputError` before any work. `functions` are metrics of one's own, by name.

    `average` stands for the server's mean in every method's `merge`; None: what the settings say. Without `rehearse` a method of
    one's own is not tried, because it has trained before.
    """
    device, dtype = pick_device(training.device), getattr(torch, training.dtype)
    if isinstance(federation, Federation) and federation.preparation is not None:
        legal.check_statistics(training, federation.preparation.rules)
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
    if training.lora:
        known = by_head(model, head)
        if known is None:
            right = "named, since LoRA trains it beside the adapters (or leaves it alone)"
            raise InputError("head", Shown("(none)"), right)
        model = lora.adapt(model, lora.Lora.parse(training.lora), known.modules, training.seed)
    net = Net(model, device, dtype, method.freezes([name for name, _ in model.named_parameters()]))
    if not net.parameters:
        raise InputError("model", Shown(type(model).__name__), "a module with parameters that require a gradient")
    split = by_head(model, head)
    joining = scores.newcomers(Plan(training.seed, training.batch_size), len(federation), training.newcomers)
    attack = Attack.of(training, training.seed, [k for k in range(len(federation)) if k not in joining])
    root, seed, outline = None, training.seed, Outline.of(federation)
    if training.average == "fltrust":
        root, federation = root_of(federation, training.root_samples, seed)
    objective = federation.learns(training.class_weights, training.label_smoothing)
    if attack is not None and training.attack in POISONS:
        if objective.name != "classification":
            right = f"another with {objective.name}: it changes the class of a sample"
            raise InputError("attack", training.attack, right)
        federation = poisoned(federation, attack.kind, attack.clients, attack.strength, seed, training.backdoor_target)
    ids, exact = not federation.clients[0].x_train.is_floating_point(), objective.name in ("regression", "multilabel")
    if ids:
        net.probe(_extremes(federation, device), objective.output, exact)
    manager = on_device(federation, device, net.example.dtype if ids else dtype)
    if not ids:
        net.probe(_example(manager, federation), objective.output, exact)
    measures = Measures.of(
        objective, training.metrics, _own_metrics(training.metrics, functions), federation.labels, net.outputs
    )
    check_metric(training, measures)
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
        local_steps=training.local_steps,
        seed=training.seed,
        private=privacy.sample_noise(training, training.batch_size),
        average=average or rule_of(training),
        recipe=training.recipe(),
        augment=Augment.parse(training.augment),
        objective=objective,
    )
    legal.check(method, task, training)
    check_scored(training, federation)
    trust = None if root is None else Trust.of(task, root, seed, training.batch_size)
    plan = Plan(training.seed, training.batch_size)
    bench = Bench(method, task, JointPlan((plan,), len(federation)), join([manager]), measures=measures)
    together = count(task.clients, training.participation)
    if training.privacy == "local":
        # a site knows of its own samples alone
        staying = [k for k in range(len(federation)) if k not in joining and manager.train.sizes[k]]
        always = together == task.clients and not training.profile  # in simulated time some may be away or at work
        privacy.check_samples(bench, training, staying, always)
    devices = None
    if training.simulates_time:
        devices = clock.Devices.of(
            training.profile, len(federation), training.seed, training.availability, training.drop
        )
    trainer = _trainer(bench, training, training.engine, together)
    if rehearse and rehearsal.is_own(method):
        with threads(trainer.training_threads):
            engine = rehearsal.rehearse(bench, trainer.name, together, asked=training.engine == "stacked")
        if engine != trainer.name:
            trainer = _trainer(bench, training, engine, together)
    samples = scores.Samples.of(federation)
    return Simulation(
        method, training, trainer, manager, net.initial(), device, samples, joining, federation.external, devices, attack, trust,
        outline,
    )  # fmt: skip


def _trainer(bench: Bench, training: Training, engine: EngineName, together: int) -> Trainer:
    return Trainer(
        bench, engine, training.cohort, together, fast=training.fast, compile=training.compile,
        precision=training.precision, workers=training.workers,
    )  # fmt: skip


def _own_metrics(names: Sequence[str], functions: Mapping[str, Function] | None) -> dict[str, Function]:
    """Return the metrics of somebody's own: given as functions, or named by where their code is."""
    found = dict(functions or {})
    for name in names:
        if name not in found and own.is_reference(name):
            found[name] = own.load("metrics", name)
            if not callable(found[name]):
                raise InputError("metrics", name, "a function (targets, predictions) → number")
    return found


def check_metric(training: Training, measures: Measures) -> None:
    """Refuse an evaluation contract by a metric that the run does not compute."""
    known = [metric.name for metric in measures.metrics]
    if training.score_metric and training.score_metric not in (*known, measure_of(measures.objective.metric).name):
        right = f"one that the run computes ({', '.join([measures.objective.metric, *known])}), or named in metrics too"
        raise InputError("score_metric", training.score_metric, right)


def _example(manager: DataManager, federation: Federation) -> torch.Tensor:
    """Return two samples; zeros where this process holds none, as a hub whose sites keep their data."""
    x = manager.train.x[:2]
    return x if len(x) else x.new_zeros((2, *federation.shape))


def _extremes(federation: Federation, device: torch.device) -> torch.Tensor:
    """Return the samples with the lowest and the highest id, so that too small a vocabulary is found before any work."""
    lowest, highest = [], []  # of each piece of the samples
    for x in (x for c in federation.clients for x in (c.x_train, c.x_test, c.x_val) if x is not None):
        for piece in pieces(x):
            low, high = torch.aminmax(piece.flatten(1), dim=1)
            lowest.append(piece[int(low.argmin())].clone())
            highest.append(piece[int(high.argmax())].clone())
    if not lowest:
        return federation.clients[0].x_train[:0].new_zeros((2, *federation.shape)).to(device)
    low, high = torch.stack(lowest), torch.stack(highest)
    return torch.stack([low[int(low.flatten(1).amin(1).argmin())], high[int(high.flatten(1).amax(1).argmax())]]).to(
        device
    )


def check_scored(training: Training, federation: Federation) -> None:
    """Refuse an evaluation contract on data that the federation does not have."""
    if training.score_round == "best-val" and federation.clients[0].y_val is None:
        raise InputError("score_round", "best-val", "another without validation data (split 70/10/20 makes some)")
    if training.score_clients == "common" and federation.test is None:
        right = "'all' or 'participants': there is no common test set (pool train, or split official)"
        raise InputError("score_clients", "common", right)
    if training.score_model == "external" and federation.external is None:
        raise InputError("score_model", "external", "another without data that no client has (external)")


def named_device(name: str) -> torch.device:
    """Return the device by name, be it on this machine or not; "auto" is a GPU if there is one here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", name, "auto, cpu, cuda or cuda:N")
    return device


def pick_device(name: str) -> torch.device:
    """Return the device by name, which must be on this machine."""
    device = named_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError("device", name, f"one of this machine's ({torch.cuda.device_count()} GPUs), for example cpu")
    return device
