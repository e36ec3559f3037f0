"""What a run gave: its history, its models, and scores that can be asked for afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from .. import scores
from ..core import settings
from ..core.errors import InputError
from ..core.method import Method
from ..core.task import Task
from ..core.tree import Params, Tree
from ..data import Dataset
from ..edge.model_store.store import ModelStore
from ..engine.trainer import Trainer
from ..server.coordinator import Record
from . import accounting
from .evaluate import Evaluation
from .experiment import Training


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
    _last: dict[int, int] = dataclasses.field(default_factory=dict)  # the round in which each client last trained
    _cost: list[accounting.Cost] = dataclasses.field(default_factory=list)  # once it was asked for

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
        return self._trainer is not None and self._trainer.data.common is not None

    @property
    def cost(self) -> accounting.Cost:
        """What a round costs a participant: steps, FLOPs (counted when first asked for), bytes; and a round's seconds."""
        if not self._cost:
            self._cost.append(accounting.cost(self))
        return self._cost[0]

    def without_data(self) -> Run:
        """The same result, its cost counted, without what holds the clients' data."""
        _ = self.cost
        return dataclasses.replace(self, _trainer=None)

    def served(self, client: int) -> Params:
        """The model that serves a client, as it is kept: its personal one, else the generic one."""
        if "personal" not in self.method.scores:
            return self.method.generic(self._task, self._server)
        down = self.method.send(self._task, self._server, client)
        last = self._last.get(client, 0)
        task = self._task if self._trainer is None else self._trainer.bench.home(self._task.round, client, last)
        return self.method.personal(task, down, self._store.get(client))

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
        from ..report.text import table

        return table([self])
