"""pFedSD: a client's own past model teaches the freshly downloaded global one.

    min_w  CE(w) + λ·R(v_k, w),     R = τ²·KL( q_τ(v_k) ‖ q_τ(w) ),     q_τ(·) = softmax(logits / τ)
    start: w ← w_t        afterwards: v_k ← w_k, and w_k goes up        server: w_{t+1} = mean of the w_k, uniform

Jin et al., "Personalized Edge Intelligence via Federated Self-Knowledge Distillation", IEEE TPDS 2022. Eq. 3 and Algorithm 1.

Choices: (1) The paper's Eq. 3 has no τ², the authors' code has it: `scale_by_temperature`. (2) In its first round a
client has no past model: plain CE. (3) The teacher runs in evaluation mode without gradient, over all local data at once:
at the start of a round (teacher="model"), or after training, when its predictions are kept for the next round
(teacher="predictions": no pass at the start; v_k stays only as the client's result). Same numbers. (4) Table 9's other
regularisers: mse on logits (mean over classes), l2 = ½‖w − v_k‖², ewc = ½·Σ F·(w − v_k)² with the empirical Fisher
diagonal of v_k on the client's data. (5) `ramp`: λ rises linearly over this share of the rounds (§4.4 proposes a rise,
and no form). (6) `stateless`: the server keeps v_k and sends it down with w; it learns v_k from the upload anyway. (7)
BatchNorm's statistics are averaged with the weights; v_k keeps its own. (8) A client that never took part is scored with
the current global model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.errors import InputError
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedSD(FedAvg):
    """Self-distillation: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = "pfedsd"
    paper: ClassVar[str] = "Jin et al., TPDS 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    per_sample: ClassVar[frozenset[str]] = frozenset({"logits"})
    averages: ClassVar[bool] = True

    lam: float = setting(0.5, "λ, weight of the distillation", least=0)
    tau: float = setting(1.0, "τ, temperature of the softmax", above=0)
    scale_by_temperature: bool = setting(True, "multiply the KL by τ², as the authors' code does")
    teacher: Literal["model", "predictions"] = setting("model", "run the past model, or keep its predictions")
    regulariser: Literal["kl", "mse", "l2", "ewc"] = setting("kl", "how the past model holds the new one (Table 9)")
    ramp: float = setting(0.0, "share of the rounds over which λ rises linearly; 0: constant", least=0, most=1)
    stateless: bool = setting(False, "the server keeps the personal models and sends them down")
    mean: Literal["weighted", "uniform"] = setting("uniform", "weigh clients by their samples, or all alike")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stateless and self.teacher == "predictions":
            raise InputError(
                "teacher", "predictions", "'model' with stateless: predictions on a client's data stay there"
            )

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, and that no round has been seen yet."""
        return {} if self.stateless else self._blank(task, params)

    def init_server(self, task: Task, params: Params) -> Tree:
        """w; stateless also every v_k."""
        kept = {"blank": self._blank(task, params), "clients": {}} if self.stateless else {}
        return {"params": params, **kept}

    def _blank(self, task: Task, params: Params) -> Tree:
        kept: Tree = {"v": params, "seen": tree.scalar_zero(params)}
        if self.regulariser == "ewc":
            kept["fisher"] = tree.zeros(task.trainable(params))
        if self.teacher == "predictions":
            kept["logits"] = kept["seen"].new_zeros((0, task.net.outputs))
        return kept

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w; stateless also v_k."""
        kept = {"kept": server["clients"].get(str(client), server["blank"])} if self.stateless else {}
        return {"params": server["params"], **kept}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what holds it to v_k; λ is 0 where there is no past model."""
        kept = down["kept"] if self.stateless else memory
        rise = min(1.0, task.round / (self.ramp * task.rounds)) if self.ramp else 1.0
        local: Tree = {"params": down["params"], "lam": self.lam * rise * kept["seen"]}
        if self.regulariser in ("l2", "ewc"):
            local["v"] = task.trainable(kept["v"])
            local["fisher"] = kept.get("fisher", {})
        elif self.teacher == "predictions":
            local["teacher"] = kept["logits"]
        else:
            local["teacher"] = task.local_logits(kept["v"])
        return local

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + λ·R(v_k, w)."""
        logits, lam = task.logits(params, batch), local["lam"]
        held: Tensor = lam * self._held(task, params, local, batch, logits)
        return terms.cross_entropy(logits, batch) + held

    def _held(self, task: Task, params: Params, local: Tree, batch: Batch, logits: Tensor) -> Tensor:
        if self.regulariser == "l2":
            return terms.proximal(task.trainable(params), local["v"])
        if self.regulariser == "ewc":
            return terms.ewc(task.trainable(params), local["v"], local["fisher"])
        teacher = local["teacher"][batch.index]
        if self.regulariser == "mse":
            return terms.squared_error(teacher, logits, batch)
        scale = self.tau**2 if self.scale_by_temperature else 1.0
        return scale * terms.kl(teacher, logits, self.tau, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """v_k ← w_k; w_k goes up."""
        v = local["params"]
        kept: Tree = {"v": v, "seen": torch.ones_like(local["lam"])}
        if self.regulariser == "ewc":
            kept["fisher"] = task.local_gradient(
                lambda p, b: F.cross_entropy(task.net(p, b.x, train=False), b.y, reduction="none"), v, squared=True
            )
        if self.teacher == "predictions":
            kept["logits"] = task.local_logits(v)
        if not self.stateless:
            return {"params": v}, kept
        return {"params": v, "fisher": kept.get("fisher", {})}, {}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean of the w_k; stateless also v_k ← w_k."""
        server = super().merge(task, server, uploads)
        if not self.stateless:
            return server
        kept = dict(server["clients"])
        for client, up in ((u.client, u.tree) for u in uploads):
            fisher = {"fisher": up["fisher"]} if self.regulariser == "ewc" else {}
            mine = {"v": up["params"], "seen": torch.ones_like(server["blank"]["seen"]), **fisher}
            kept[str(client)] = tree.clone(mine)
        return {**server, "clients": kept}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model for a client that never took part."""
        kept = down["kept"] if self.stateless else memory
        return tree.where(kept["seen"] > 0, kept["v"], down["params"])
