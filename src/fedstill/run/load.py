"""Give back finished runs from their folders, without training and, as far as possible, without the data.

Records and settings are read at once. Models are made when they are first asked for, from the newest checkpoint: what the
server keeps, and what each client keeps, in a simulation of the same form whose clients have no samples. Where something needs
samples after all (a personal model that Per-FedAvg or FedFomo makes from the client's training data, or a new score), the data
are read, checked against the run's partition.json, and used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from .. import models
from ..core import own
from ..core.errors import InputError, Shown, check_path
from ..core.method import Method
from ..core.metric import METRICS
from ..core.reading import Unreadable, field, items, read_json, read_toml
from ..data import Federation
from ..data.outline import Outline
from ..engine.flops import Flops, RoundFlops
from ..engine.stage import say
from ..server.attack import Attack
from .accounting import Cost
from .callbacks import restore, state_of
from .experiment import Experiment, Training, check_format, method_from
from .journal import ENVIRONMENT, EXPERIMENT, PARTITION, Journal
from .legal import check_federation, check_model
from .patience import Patience
from .prepare import PYTHON, Simulation, federation_of, pick_device, prepare
from .result import Parts, Run
from .session import Start, start

LARGEST = 1 << 30  # bytes of a partition.json
SUMMARY = "summary.json"
AS_TRAINED = (  # settings that the hooks behind a personal or generic model may see
    "rounds", "epochs", "local_steps", "batch_size", "lr", "momentum", "nesterov", "weight_decay", "seed", "dtype", "newcomers",
    "participation", "precision", "lora", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "keep_optimizer", "clip_gradient",
    "lr_schedule", "lr_schedule_over", "warmup", "lr_step", "lr_decay", "augment", "class_weights", "label_smoothing",
)  # fmt: skip
Model: TypeAlias = nn.Module | Callable[[], nn.Module]


def load(
    folder: str | Path,
    *,
    model: Model | None = None,
    method: Method | None = None,
    data: Federation | bool | None = None,
    device: str = "cpu",
) -> Any:
    """Return the finished run that a folder holds; of a comparison, a sweep or several seeds, the runs by label.

    `model` and `method` are needed where the run was made in Python with ones of its own; `data`, its federation, where
    something needs the clients' samples. Data that fedstill can read itself are read when they are needed, or with
    `data=True` at once.
    """
    check_path("folder", folder)
    root = Path(folder)
    if model is not None:
        check_model(model)
    if not isinstance(data, bool | None):
        check_federation("data", data)
    found = run_folders(root)
    if not found:
        raise InputError(
            "folder", str(folder), f"one that --out (or out=) made, which holds {EXPERIMENT} or runs that do"
        )
    loaded = {place: _load(place, model, method, data, device) for place in found}
    if found == [root]:
        return loaded[root]
    return _by_label(root, loaded)


def run_folders(root: Path) -> list[Path]:
    """Return the folders of runs: this one, or those inside it; none where it holds no run."""
    if (root / EXPERIMENT).is_file():
        return [root]
    return sorted(file.parent for pattern in (f"*/{EXPERIMENT}", f"*/*/{EXPERIMENT}") for file in root.glob(pattern))


def _by_label(root: Path, loaded: Mapping[Path, Run]) -> dict[str, list[Run]]:
    """Return runs by label, those that differ only in their seed together; the labels are the names of their folders."""
    data = {place: _read(place)[0] for place in loaded}
    varied = {
        name: {place: values.get(name) for place, values in data.items()}
        for name in ("data", "model", "partition", "clients")
    }
    varied = {name: column for name, column in varied.items() if len(set(map(str, column.values()))) > 1}
    groups: dict[str, list[Run]] = {}
    for place, run in sorted(loaded.items(), key=lambda pair: (pair[1].training.seed, pair[0])):
        parts = [part for part in place.relative_to(root).parts if not part.startswith("seed-")]
        beside = {name: column[place] for name, column in varied.items()}
        groups.setdefault("/".join(parts) or run.method.id, []).append(dataclasses.replace(run, beside=beside))
    order = _labels(root)
    return dict(sorted(groups.items(), key=lambda pair: order.get(pair[0], len(order))))


def _labels(root: Path) -> dict[str, int]:
    """Return the labels of a folder of runs in the order in which the command had them."""
    try:
        return {label: i for i, label in enumerate(field(read_json(root / SUMMARY), "methods", dict))}
    except Unreadable:
        return {}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run, and those that its Experiment takes."""
    try:
        values = read_toml(folder / EXPERIMENT)
    except Unreadable as error:
        raise InputError("folder", str(folder), f"one whose {EXPERIMENT} is {error}") from None
    return values, {name: value for name, value in values.items() if name != "method"}


def _load(folder: Path, model: Model | None, method: Method | None, data: Federation | bool | None, device: str) -> Run:
    """Return the run that one folder holds."""
    check_format(folder)
    journal = Journal(folder)
    journal.check_settings()
    values, others = _read(folder)
    method = method or _method(values.get("method"))
    experiment = dataclasses.replace(Experiment.from_values(others), method=method)
    history = _history(journal)
    if not history:
        raise InputError("folder", str(folder), "one of a run of which a round is over")
    federation = data if isinstance(data, Federation) else None
    outline = journal.outline()
    if outline is None:  # a folder of an earlier version
        federation = federation or _read_data(folder, experiment)
        outline = Outline.of(federation)
    held = Held(folder, journal, experiment, outline, history, model, device, federation)
    numbers = _numbers(folder)
    simulation, joining = held.hollow(), held.hollow().newcomers
    attack = Attack.of(experiment, experiment.seed, [k for k in range(len(outline.sizes)) if k not in joining])
    run = Run(
        None,
        None,
        None,
        method,
        experiment.training(),
        str(numbers.get("engine") or _environment(folder).get("engine") or experiment.engine),
        history,
        float(sum(record.get("seconds", 0.0) for record in history)),
        dataclasses.replace(simulation.task, round=held.round),
        joining,
        () if attack is None else tuple(sorted(attack.clients)),
        journal.scores() or {},
        outline=outline,
        model=experiment.model,
        folder=folder,
        _cost=_cost(numbers.get("round_cost")),
        _source=held,
    )
    if data is True:
        held.federation = held.federation or _read_data(folder, experiment)
        held.read_data()
    return run


def _method(table: Any) -> Method:
    """Return the method that a run's settings name; code of somebody's own is not imported to read results."""
    name = table.get("id") if isinstance(table, dict) else table
    if isinstance(name, str) and own.is_reference(name):
        right = f"given, since this run's is code of its own ({name}): fs.load(FOLDER, method=METHOD)"
        raise InputError("method", Shown("nothing"), right)
    return method_from(table)


def _history(journal: Journal) -> list[dict[str, Any]]:
    """Return a run's records, with their timelines."""
    timelines = {line["round"]: {"timeline": line} for line in journal.timelines()}
    return [{**record, **timelines.get(record["round"], {})} for record in journal.history()]


@dataclasses.dataclass(eq=False)
class Held:
    """What a run's folder holds of its models, opened when it is first asked for."""

    folder: Path
    journal: Journal
    experiment: Experiment
    outline: Outline
    history: list[dict[str, Any]]
    model: Model | None
    device: str
    federation: Federation | None
    _hollow: Simulation | None = None
    _parts: Parts | None = None
    has_data: bool = False

    @property
    def round(self) -> int:
        """The round whose models the run keeps: its newest, or with patience the best so far."""
        patience = Patience.of(self.experiment, self.history)
        return (0 if patience is None else patience.best) or len(self.history)

    def hollow(self) -> Simulation:
        """Return a simulation of the run's form whose clients have no samples."""
        if self._hollow is None:
            experiment = self.experiment
            same = {name: getattr(experiment, name) for name in AS_TRAINED}
            training = Training(**same, device=self.device, engine="one", workers=1)
            federation = self.outline.federation(_partition(self.folder))
            self._hollow = prepare(experiment.method, self._module(), federation, experiment.head or None, training)
            self._take_constants(self._hollow)
        return self._hollow

    def _take_constants(self, simulation: Simulation) -> None:
        """Give a simulation's model the frozen weights that the run had, whatever the module came with."""
        net, constants = simulation.net, self.journal.constants()
        if constants or net.constants:
            net.fixed.load(constants)
            self.journal.check_constants(net.fixed)

    def open(self) -> Parts:
        """Return the run as it was after its last checkpoint."""
        if self._parts is None:
            self._parts = self._restored(self.federation is not None)
        return self._parts

    def read_data(self) -> Parts:
        """Return the same with the data, which are read now."""
        if not self.has_data:
            if self.federation is None:
                self.federation = _read_data(self.folder, self.experiment, note=True)
            self._parts = self._restored(True)
        assert self._parts is not None
        return self._parts

    def _restored(self, with_data: bool) -> Parts:
        simulation = self.hollow()
        if with_data:
            assert self.federation is not None
            _check_same(self.folder, self.federation)
            training = dataclasses.replace(self.experiment.training(), device=self.device, workers=0)
            known = tuple(name for name in training.metrics if name in METRICS)  # not code of somebody's own
            training = dataclasses.replace(training, metrics=known, score_metric="")
            simulation = prepare(
                self.experiment.method, self._module(), self.federation, self.experiment.head or None, training,
                rehearse=False,
            )  # fmt: skip
            self._take_constants(simulation)
        survey = self.journal.survey(pick_device(self.device))
        if not survey.whole:
            problems = "; ".join(survey.problems()) or "it has none"
            raise InputError(
                "folder", str(self.folder), f"one with a whole checkpoint, which has the models ({problems})"
            )
        checkpoint = survey.whole.get(self.round) or survey.whole[max(survey.whole)]
        if checkpoint.round != self.round:
            say(f"{self.folder}: the newest whole checkpoint is that of round {checkpoint.round}: its models are given")
        session = start([Start(simulation)])
        coordinator, driver = session.coordinators[0], session.driver
        state, timing = state_of(checkpoint, self.history[: checkpoint.round])
        coordinator.load_state(state, timing if with_data else {})
        for error in driver.run({coordinator.run: restore(checkpoint, coordinator)}).values():
            raise error
        self.has_data = with_data
        return simulation, coordinator, driver

    def _module(self) -> Model:
        """Return the model, as it was before training."""
        if self.model is not None:
            return self.model
        if self.experiment.model == PYTHON or own.is_reference(self.experiment.model):
            right = (
                f"given, since this run's is code of its own ({self.experiment.model}): fs.load(FOLDER, model=MODULE)"
            )
            raise InputError("model", Shown("nothing"), right)
        e = self.experiment
        return models.build(e.model, self.outline.shape, self.outline.classes, e.seed, e.model_args)


def _read_data(folder: Path, experiment: Experiment, note: bool = False) -> Federation:
    """Read the data of a run."""
    if experiment.data == PYTHON:
        right = (
            "given: this run was made in Python, and this needs its clients' samples: fs.load(FOLDER, data=FEDERATION)"
        )
        raise InputError("data", Shown("nothing"), right)
    if note:
        say(f"{folder}: this needs the clients' samples: reading {experiment.data}")
    return federation_of(experiment)


def _check_same(folder: Path, federation: Federation) -> None:
    """Refuse data that are not those with which the run was made."""
    before = _partition(folder)
    for name, now in (("contents", federation.checksum()), ("hash", federation.partition_record.get("hash"))):
        if name in before and before[name] != now:
            raise InputError(f"partition {name}", now, f"{before[name]}, as when the run began: the data are others")


def _partition(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / PARTITION, LARGEST)
    except Unreadable as error:
        raise InputError("folder", str(folder), f"one whose {PARTITION} is {error}") from None


def _environment(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / ENVIRONMENT)
    except Unreadable:
        return {}


def _numbers(folder: Path) -> dict[str, Any]:
    """Return what a summary, in the run's folder or above it, says of the run."""
    for root in (folder, folder.parent, folder.parent.parent):
        try:
            methods = field(read_json(root / SUMMARY), "methods", dict)
            name = folder.relative_to(root).as_posix()
            for method in methods.values():
                for one in items(method, "runs", dict):
                    if one.get("folder") == name:
                        return one
        except Unreadable:
            continue
    return {}


def _cost(record: Any) -> list[Cost]:
    """Return the cost of a round as a summary has it; none where it has not."""
    try:
        sizes = {name: field(record, name, float, None) for name in ("steps", "bytes_down", "bytes_up")}
        samples = field(record, "samples", int, None)
        seconds = {n.removesuffix("_seconds"): float(v) for n, v in record.items() if n.endswith("_seconds")}
        work = None
        if "flops" in record:
            work = RoundFlops(
                _flops(field(record, "flops_begin", dict)),
                tuple(map(_flops, items(record, "flops_phases", dict))),
                _flops(field(record, "flops_finish", dict)),
            )
        steps, down, up = sizes["steps"], sizes["bytes_down"], sizes["bytes_up"]
        return [Cost(steps, down, up, samples=samples, work=work, seconds=seconds)]
    except (Unreadable, TypeError, ValueError):
        return []


def _flops(record: dict[str, Any]) -> Flops:
    return Flops(field(record, "forward", float), field(record, "backward", float))
