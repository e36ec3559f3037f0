"""Ditto: beside its work for FedAvg, each client trains a model of its own that is held near the global one.

    generic:   w_k ← SGD(CE) from w_t, and w_k goes up            server: w ← Σ p_k·w_k,   p_k = n_k / Σ n_j
    personal:  min_v  CE(v_k) + λ/2·‖v_k − w_t‖²                  v_k goes on from where it was, and stays

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021. Algorithm 1.

Choices: (1) v_k is held to the model that was received, w_t, as in Algorithm 1, not to the w_k that the client has just
trained. (2) Both models see the same batches; the paper lets their numbers of local steps differ, its code makes one step
of each in turn: `personal_epochs`, 0 for as many as the generic model's. (3) λ = 1; the paper chooses it from {0.1, 1, 2},
its code also client by client on validation data, which is not here. (4) v_k starts at w⁰. (5) The norm runs over trainable
parameters; v_k keeps its own BatchNorm statistics. (6) A client that never took part is scored with the generic model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a personal model held near the global one."""

    id: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    noisy_steps: ClassVar[bool] = True
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    wait_free: ClassVar[bool] = True

    lam: float = setting(1.0, "λ, weight of the proximal term", least=0)
    personal_epochs: int = setting(0, "epochs of the personal model; 0: as the experiment's", least=0)

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰."""
        return {"v": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_k ← w_t, which is also the anchor; v_k as it was."""
        return {"params": down["params"], "v": memory["v"], "anchor": task.trainable(down["params"])}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The generic model, then the personal one."""
        return Phase(), Phase(epochs=self.personal_epochs or None, model="v", loss=self.personal_loss)

    def personal_loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(v) + λ/2·‖v − w_t‖²."""
        return self.fit(task, params, batch) + self.lam * terms.proximal(task.trainable(params), local["anchor"])

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up, v_k stays."""
        return {"params": local["params"]}, {"v": local["v"]}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the generic model for a client that never took part."""
        return tree.where(task.seen, memory["v"], down["params"])
