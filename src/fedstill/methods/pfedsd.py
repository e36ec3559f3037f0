"""pFedSD: a client's own past model teaches the freshly downloaded global one.

    min_w  CE(w) + λ·τ²·KL( q_τ(v_k) ‖ q_τ(w) ),     q_τ(·) = softmax(logits / τ)
    start: w ← w_t        afterwards: v_k ← w_k, and w_k goes up        server: w_{t+1} = mean of the w_k, uniform

Jin et al., "Personalized Edge Intelligence via Federated Self-Knowledge Distillation", IEEE TPDS 2022.

Choices: (1) The paper's Eq. 3 has no τ², the authors' code has it; so do we. (2) In its first round a client has no past model:
plain CE. (3) The teacher runs in evaluation mode without gradient, once over the client's data at the start of a round; every
epoch looks its predictions up. (4) BatchNorm's statistics are averaged with the weights; v_k keeps its own. (5) A client that
never took part is scored with the current global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import terms, tree
from ..batch import Batch
from ..settings import setting
from ..task import Task
from ..tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedSD(FedAvg):
    """Self-distillation: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = "pfedsd"
    paper: ClassVar[str] = "Jin et al., TPDS 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")

    lam: float = setting(0.5, "λ, weight of the distillation", least=0)
    tau: float = setting(1.0, "τ, temperature of the softmax", above=0)
    mean: Literal["weighted", "uniform"] = setting("uniform", "weigh clients by their samples, or all alike")

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, and that no round has been seen yet."""
        return {"v": params, "seen": torch.zeros_like(next(iter(params.values())).sum())}

    def start(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; the teacher's predictions on all local data; λ is 0 where there is no past model."""
        return {
            "params": down["params"],
            "teacher": task.local_logits(memory["v"]),
            "lam": self.lam * memory["seen"],
        }

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + λ·τ²·KL(q_τ(v_k) ‖ q_τ(w))."""
        logits = task.logits(params, batch)
        distillation = terms.kl(local["teacher"][batch.index], logits, self.tau, batch)
        weight: Tensor = local["lam"] * self.tau**2
        return terms.cross_entropy(logits, batch) + weight * distillation

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """v_k ← w_k; w_k goes up."""
        return {"params": local["params"]}, {"v": local["params"], "seen": torch.ones_like(memory["seen"])}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model for a client that never took part."""
        return tree.where(memory["seen"] > 0, memory["v"], down["params"])
