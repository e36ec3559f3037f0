"""FedAvg: local SGD from the global model, then the mean of the results.

    w ← Σ_k p_k·w_k,     p_k = n_k / Σ n_j  (mean="weighted")  or  1/|S|  (mean="uniform")

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Choices: (1) BatchNorm's running statistics are averaged with the same weights as the parameters; its whole-number count
of batches is averaged and rounded. (2) The generic model is also what each client is scored with: there is no personal
one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from ..core.batch import Batch
from ..core.method import Method, Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree

Mean: TypeAlias = Literal["weighted", "uniform"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """One shared model: the mean of what the clients trained.

    A subclass whose paper takes the other mean says so in its header: `class PFedSD(FedAvg, mean="uniform")`.
    """

    id: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    averages: ClassVar[bool] = True
    noisy_mean: ClassVar[bool] = True
    noisy_steps: ClassVar[bool] = True

    mean: Literal["weighted", "uniform"] = setting("weighted", "weigh clients by their samples, or all alike")

    def __init_subclass__(cls, mean: Mean | None = None, **kwargs: Any) -> None:
        """Give `mean` another default."""
        super().__init_subclass__(**kwargs)
        if mean is not None:
            cls.mean = setting(mean, "weigh clients by their samples, or all alike")
            cls.__annotations__ = {**inspect.get_annotations(cls), "mean": Mean}

    def init_server(self, task: Task, params: Params) -> Tree:
        """w = w⁰."""
        return {"params": params}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w."""
        return {"params": server["params"]}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_k ← w."""
        return {"params": down["params"]}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs of SGD, on everything."""
        return (Phase(),)

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """CE, or what the objective has in its place."""
        return task.fit(task.logits(params, batch), batch)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w)."""
        return self.fit(task, params, batch)

    closed_form = Method.closed_form  # CE

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; the memory stays as it is."""
        return {"params": local["params"]}, memory

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """w ← Σ p_k·w_k over the entries that were uploaded; what was not uploaded stays as it is."""
        mean = task.average([upload.params for upload in uploads], self.shares(uploads), server["params"])
        return {**server, "params": {**server["params"], **mean}}

    def shares(self, uploads: Sequence[Upload]) -> list[float]:
        """Return the clients' weights in the mean, before they are divided by their sum."""
        return [upload.weight if self.mean == "weighted" else 1.0 for upload in uploads]

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """w: there is no personal model."""
        return down["params"]  # type: ignore[no-any-return]

    def generic(self, task: Task, server: Tree) -> Params:
        """w."""
        return server["params"]  # type: ignore[no-any-return]
