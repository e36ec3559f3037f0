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
the current global model; stateless, one of which the server has no v_k.

`SelfDistillation` is Algorithm 1; `PFedSD`, the method, adds what choices 3 to 6 name. Its defaults are Algorithm 1.
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
class SelfDistillation(FedAvg, mean="uniform"):
    """Algorithm 1: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = ""  # the base of `PFedSD`
    paper: ClassVar[str] = "Jin et al., TPDS 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")

    lam: float = setting(0.5, "λ, weight of the distillation", least=0)
    tau: float = setting(1.0, "τ, temperature of the softmax", above=0)
    scale_by_temperature: bool = setting(True, "multiply the KL by τ², as the authors' code does")

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰."""
        return {"v": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what v_k predicts on all local data; λ, which is 0 while there is no v_k."""
        lam = self.lam * task.seen.to(task.net.dtype)
        return {"params": down["params"], "lam": lam, "teacher": task.local_logits(memory["v"])}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + λ·R(v_k, w)."""
        logits = task.logits(params, batch)
        penalty: Tensor = local["lam"] * self.penalty(task, params, logits, local, batch)
        return terms.cross_entropy(logits, batch) + penalty

    def penalty(self, task: Task, params: Params, logits: Tensor, local: Tree, batch: Batch) -> Tensor:
        """R = τ²·KL(q_τ(v_k) ‖ q_τ(w))."""
        scale = self.tau**2 if self.scale_by_temperature else 1.0
        return scale * terms.kl(local["teacher"][batch.index], logits, self.tau, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k ← w_k."""
        return {"params": local["params"]}, {"v": local["params"]}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model for a client that never took part."""
        return tree.where(task.seen, memory["v"], down["params"])


@dataclass(frozen=True, kw_only=True)
class PFedSD(SelfDistillation):
    """Self-distillation: the client's last personal model teaches the downloaded one."""

    id: ClassVar[str] = "pfedsd"
    per_sample: ClassVar[frozenset[str]] = frozenset({"logits"})
    averages: ClassVar[bool] = True
    noisy_mean: ClassVar[bool] = True
    noisy_steps: ClassVar[bool] = True

    teacher: Literal["model", "predictions"] = setting("model", "run the past model, or keep its predictions")
    regulariser: Literal["kl", "mse", "l2", "ewc"] = setting("kl", "how the past model holds the new one (Table 9)")
    ramp: float = setting(0.0, "share of the rounds over which λ rises linearly; 0: constant", least=0, most=1)
    stateless: bool = setting(False, "the server keeps the personal models and sends them down")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stateless and self.teacher == "predictions":
            raise InputError(
                "teacher", "predictions", "'model' with stateless: predictions on a client's data stay there"
            )

    def check(self, task: Task) -> None:
        """Refuse a Fisher diagonal of samples that DP-SGD should protect: it shapes what goes up later."""
        super().check(task)
        if task.private is not None and self.regulariser == "ewc":
            right = "'kl', 'mse' or 'l2' with privacy 'local', which does not cover the Fisher diagonal"
            raise InputError("regulariser", self.regulariser, right)

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, and what goes with it; nothing where the server keeps v_k."""
        return {} if self.stateless else self._no_past(task, params)

    def _no_past(self, task: Task, params: Params) -> Tree:
        """Return what stands for v_k, and what goes with it, before there is one."""
        past: Tree = {"v": params}
        if self.regulariser == "ewc":
            past["fisher"] = tree.zeros(task.trainable(params))
        if self.teacher == "predictions":
            past["logits"] = tree.scalar_zero(params).new_zeros((0, task.net.outputs))
        return past

    def init_server(self, task: Task, params: Params) -> Tree:
        """w; stateless also every v_k that has come up."""
        if not self.stateless:
            return {"params": params}
        return {
            "params": params,
            "none": {**self._no_past(task, params), "known": tree.scalar_zero(params)},
            "past": {},
        }

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w; stateless also v_k, and whether the server has one."""
        past = {"past": server["past"].get(str(client), server["none"])} if self.stateless else {}
        return {"params": server["params"], **past}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what the regulariser takes of v_k; λ, which is 0 while there is no v_k."""
        past = down["past"] if self.stateless else memory
        known = past["known"] if self.stateless else task.seen.to(task.net.dtype)
        rise = min(1.0, task.round / (self.ramp * task.rounds)) if self.ramp else 1.0
        local: Tree = {"params": down["params"], "lam": self.lam * rise * known}
        if self.regulariser in ("l2", "ewc"):
            return {**local, "v": task.trainable(past["v"]), "fisher": past.get("fisher", {})}
        return {**local, "teacher": past["logits"] if self.teacher == "predictions" else task.local_logits(past["v"])}

    def penalty(self, task: Task, params: Params, logits: Tensor, local: Tree, batch: Batch) -> Tensor:
        """R, by the regulariser."""
        if self.regulariser == "l2":
            return terms.proximal(task.trainable(params), local["v"])
        if self.regulariser == "ewc":
            return terms.ewc(task.trainable(params), local["v"], local["fisher"])
        if self.regulariser == "mse":
            return terms.squared_error(local["teacher"][batch.index], logits, batch)
        return super().penalty(task, params, logits, local, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k ← w_k, with its Fisher diagonal or its predictions. Stateless all of it goes up."""
        past: Tree = {"v": local["params"]}
        if self.regulariser == "ewc":
            past["fisher"] = task.local_gradient(
                lambda p, b: F.cross_entropy(task.net(p, b.x, train=False), b.y, reduction="none"),
                past["v"],
                squared=True,
            )
        if self.teacher == "predictions":
            past["logits"] = task.local_logits(past["v"])
        if self.stateless:
            return {"params": past["v"], "fisher": past.get("fisher", {})}, {}
        return {"params": past["v"]}, past

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean of the w_k; stateless also v_k ← w_k, as the client trained it."""
        server = super().merge(task, server, uploads)
        if not self.stateless:
            return server
        past = dict(server["past"])
        for upload in uploads:
            fisher = {"fisher": upload.tree["fisher"]} if self.regulariser == "ewc" else {}
            known = torch.ones_like(server["none"]["known"])
            past[str(upload.client)] = tree.clone({"v": upload.tree["params"], **fisher, "known": known})
        return {**server, "past": past}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v_k, or the global model where there is none."""
        if not self.stateless:
            return super().personal(task, down, memory)
        return tree.where(down["past"]["known"] > 0, down["past"]["v"], down["params"])
