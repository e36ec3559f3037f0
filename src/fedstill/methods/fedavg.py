"""FedAvg: local SGD from the global model, then the mean of the results.

    w ← Σ_k p_k·w_k,     p_k = n_k / Σ n_j  (mean="weighted")  or  1/|S|  (mean="uniform")

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Choices: (1) BatchNorm's running statistics are averaged with the same weights as the parameters; its whole-number count
of batches is averaged and rounded. (2) The generic model is also what each client is scored with: there is no personal
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core import tree
from ..core.method import Method
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """One shared model: the mean of what the clients trained."""

    id: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    averages: ClassVar[bool] = True

    mean: Literal["weighted", "uniform"] = setting("weighted", "weigh clients by their samples, or all alike")

    def merge(
        self, task: Task, server: Tree, ups: Sequence[Tree], weights: Sequence[float], clients: Sequence[int]
    ) -> Tree:
        """w ← Σ p_k·w_k over the entries that were uploaded; what was not uploaded stays as it is."""
        mean = tree.mean([up["params"] for up in ups], self.shares(weights))
        return {**server, "params": {**server["params"], **mean}}

    def shares(self, weights: Sequence[float]) -> Sequence[float]:
        """The clients' weights in the mean, before they are divided by their sum."""
        return weights if self.mean == "weighted" else [1.0] * len(weights)
