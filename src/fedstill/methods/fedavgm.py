"""FedAvgM: FedAvg whose server keeps momentum over rounds.

    Δ = Σ p_k·(w_t − w_k),   p_k = n_k / Σ n_j            v ← β·v + Δ            w ← w − v

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.

Choices: (1) β = 0.9; the paper tries {0, 0.7, 0.9, 0.97, 0.99, 0.997}. (2) As in the paper, the server has no learning rate. (3)
Momentum covers trainable parameters; BatchNorm's buffers take the plain mean. (4) The setting server="momentum" gives other
methods the same server; this one supports no other server optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core import tree
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    id: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = "Hsu et al., 2019"
    noisy_mean: ClassVar[bool] = True

    beta: float = setting(0.9, "β, the server's momentum", least=0, most=1)

    def init_server(self, task: Task, params: Params) -> Tree:
        """w, and v = 0."""
        return {"params": params, "v": tree.zeros(task.trainable(params))}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """v ← β·v + Δ, w ← w − v."""
        merged, v = super().merge(task, server, uploads), server["v"]
        w, mean = (task.trainable(state["params"]) for state in (server, merged))
        moved = tree.add(
            mean, v, -self.beta
        )  # mean − β·v is w − (β·v + Δ); so written, β = 0 gives the mean to the bit
        return {"params": {**merged["params"], **moved}, "v": tree.add(tree.sub(w, mean), v, self.beta)}
