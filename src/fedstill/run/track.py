"""Callbacks that send a run's records to TensorBoard, Weights & Biases or MLflow.

    from fedstill.run.track import TensorBoard
    fs.simulate(..., callbacks=[TensorBoard("runs/first/tensorboard")])
    fedstill run pfedsd --out runs/first --track tensorboard,mlflow

Each gets the plain numbers of every round, by the names of metrics.jsonl, at the round as step. Where a run is resumed, the
rounds before are not sent again. The packages are imported when tracking begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core import settings
from ..core.errors import InputError, first_line, nearest
from ..engine.stage import say
from ..server.coordinator import Coordinator, Record
from .frame import plain


class Tracker(Protocol):
    """Follows a run, as any callback of the coordinator."""

    def on_start(self, coordinator: Coordinator) -> None:
        """Begin to track."""

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Send a round's numbers."""

    def on_end(self, coordinator: Coordinator) -> None:
        """End the tracking."""


def about(coordinator: Coordinator) -> dict[str, Any]:
    """Return what a tracker says of a run: the method with its settings, and those of local training."""
    method, task = coordinator.method, coordinator.task
    own = {f"method.{name}": value for name, value in settings.values_of(method).items()}
    names = ("clients", "rounds", "epochs", "local_steps", "lr", "momentum", "weight_decay", "seed")
    local = {"batch_size": coordinator.plan.batch_size, "optimizer": task.recipe.optimizer}
    return {"method": method.id, **own, **{name: getattr(task, name) for name in names}, **local}


class TensorBoard:
    """Writes scalars into a folder that `tensorboard --logdir` reads."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(self, coordinator: Coordinator) -> None:
        """Open the folder; of rounds that are run again the later numbers count."""
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter
        self._writer = make(str(self.folder), purge_step=coordinator.state.round + 1)
        lines = [f"| {name} | {value} |" for name, value in about(coordinator).items()]
        self._writer.add_text(
            "settings", "\n".join(["| setting | value |", "|---|---|", *lines]), coordinator.state.round
        )

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Write a round's numbers, and the clients' accuracies as a distribution."""
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["round"])
        if "personal_clients" in record:
            rates = np.array([*record["personal_clients"].values()])
            self._writer.add_histogram("personal_clients", rates, record["round"])
        self._writer.flush()

    def on_end(self, coordinator: Coordinator) -> None:
        """Close the files."""
        self._writer.close()


class WandB:
    """Logs to Weights & Biases, in a folder of the run; WANDB_MODE=offline needs no account and no network."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self.folder, self.name = Path(folder), name
        self._run: Any = None

    def on_start(self, coordinator: Coordinator) -> None:
        """Begin a run."""
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "fedstill")
        self._run = wandb.init(
            project=project, name=self.name or coordinator.method.id, dir=str(self.folder), config=about(coordinator)
        )

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Log a round's numbers."""
        self._run.log(_numbers(record), step=record["round"])

    def on_end(self, coordinator: Coordinator) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """Logs to MLflow: to where MLFLOW_TRACKING_URI says, else to a file store in a folder of the run."""

    def __init__(self, folder: str | Path, name: str = "") -> None:
        self.folder, self.name = Path(folder), name
        self._client: Any = None
        self._run = ""

    def on_start(self, coordinator: Coordinator) -> None:
        """Begin a run with its settings as parameters."""
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask whether a file store is meant
            self.folder.mkdir(parents=True, exist_ok=True)
            uri = self.folder.absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedstill")
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=self.name or coordinator.method.id).info.run_id
        for key, value in about(coordinator).items():
            self._client.log_param(self._run, key, value)

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Log a round's numbers."""
        for name, value in _numbers(record).items():
            self._client.log_metric(self._run, name, value, step=record["round"])

    def on_end(self, coordinator: Coordinator) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class Careful:
    """Follows a run with a tracker; where that fails, says so in one line, and the run goes on without it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker, self.failed = name, tracker, False

    def on_start(self, coordinator: Coordinator) -> None:
        """Begin to track."""
        self._try(lambda: self.tracker.on_start(coordinator))

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Send a round's numbers."""
        self._try(lambda: self.tracker.on_round(coordinator, record))

    def on_end(self, coordinator: Coordinator) -> None:
        """End the tracking."""
        self._try(lambda: self.tracker.on_end(coordinator))

    def _try(self, send: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            send()
        except Exception as error:  # a network, a full disk, a server's refusal: whatever the package raises
            self.failed = True
            say(f"{self.name} fails, and the run goes on without it ({first_line(error)})")


TRACKERS: dict[str, tuple[Callable[[Path, str], Tracker], tuple[str, ...]]] = {  # with the modules that each needs
    "tensorboard": (TensorBoard, ("torch.utils.tensorboard",)),
    "wandb": (WandB, ("wandb",)),
    "mlflow": (MLflow, ("mlflow.tracking",)),
}


def check(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse a tracker that there is not, or whose package is not installed."""
    import importlib

    for name in names:
        if name not in TRACKERS:
            raise InputError("track", name, nearest(name, TRACKERS))
        for module in TRACKERS[name][1]:
            try:
                importlib.import_module(module)
            except ImportError as error:
                right = f"one that is installed: pip install 'fedstill[{name}]' ({error})"
                raise InputError("track", name, right) from None
    return tuple(dict.fromkeys(names))


def trackers(names: Sequence[str], folder: Path | None, name: str = "") -> list[Tracker]:
    """Return the callbacks by these names; what they write lies in a folder each, within the run's where it has one."""
    root = Path() if folder is None else folder
    return [Careful(each, TRACKERS[each][0](root / each, name)) for each in names]


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in plain(record).items() if name != "round"}
