"""FedBN: everything but BatchNorm is shared; each client normalises its own features.

    w_k ← SGD(CE on client k's data) from (φ, n_k)        φ: all but BatchNorm        n_k: client k's own BatchNorm
    server: φ ← (1/|S|)·Σ φ_k

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021. Algorithm 1.

Choices: (1) BatchNorm is found by the type of the module, not by its name; its weight, bias, running statistics and count
of batches all stay. (2) The personal model is the current shared part with the client's own BatchNorm; a client that never
took part has the initial one. (3) Nobody trains a BatchNorm for everybody, so there is no generic score. (4) The mean is
uniform, as in Algorithm 1. (5) A model without BatchNorm is trained as FedAvg trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..core.settings import setting
from ..core.task import Task, pick
from ..core.tree import Params, Tree
from ..nn.split import by_type
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """All but BatchNorm is shared; BatchNorm, with its statistics, is each client's own."""

    id: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    scores: ClassVar[tuple[str, ...]] = ("personal",)

    mean: Literal["weighted", "uniform"] = setting("uniform", "weigh clients by their samples, or all alike")

    def init_client(self, task: Task, params: Params) -> Tree:
        """n_k."""
        return pick(params, self.private(task))

    def private(self, task: Task) -> frozenset[str]:
        """BatchNorm."""
        return by_type(task.net.module, (nn.modules.batchnorm._BatchNorm,))

    def shared(self, task: Task, params: Params) -> Params:
        """φ."""
        return pick(params, frozenset(params) - self.private(task))

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """φ."""
        return {"params": self.shared(task, server["params"])}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """φ with the client's BatchNorm."""
        return {"params": {**down["params"], **memory}}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """φ_k goes up, n_k stays."""
        return {"params": self.shared(task, local["params"])}, pick(local["params"], self.private(task))

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The current φ with the client's BatchNorm."""
        return {**down["params"], **memory}
