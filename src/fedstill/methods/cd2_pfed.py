"""CD²-pFed: a growing share of every layer's channels is private; private and shared sub-network teach each other.

    p_t = p·t/T   (LI)      of a layer's C output channels the last ⌊p_t·C⌋ are private, the rest is shared
    min  CE(g_full) + λ·½[ KL(y_L ‖ y_G) + KL(y_G ‖ y_L) ]   (CD)     y_L, y_G: outputs with shared, or private, channels silenced
    w ← β_t·w' + (1−β_t)·w_prev  for private w after every epoch (TA),  β_t = β·exp(−5(1−t/t0)²) for t ≤ t0, then β
    server: shared channels ← Σ p_k·w_k,  p_k = n_k / Σ n_j

Shen et al., "CD²-pFed: Cyclic Distillation-guided Channel Decoupling for Model Personalization in Federated Learning", CVPR 2022.

Choices: (1) The classifier is divided by its input channels; its bias is shared while p_t < 1, and is in both
sub-networks. Rounds count from 1, so p_T = p. (2) A channel is silenced where the next layer reads it, so after BatchNorm
and activation; only g_full moves BatchNorm's statistics. (3) Gradients flow through both sides of the distillation; the
term is zero until every layer has both a private and a shared channel. (4) A parameter that turns private starts from its
shared value; for that the server sends all channels (a client may have missed rounds), and clients upload the shared ones
only. (5) `progressive`, `smoothing` and `distill` switch LI, TA and CD off (Table 5). (6) BatchNorm's statistics are
divided by channel like its weights; smoothing leaves the momentum alone. (7) The generic model has, in private channels,
the values that were last shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.method import Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class CD2PFed(FedAvg):
    """A growing share of channels is private; the private and the shared sub-network teach each other."""

    id: ClassVar[str] = "cd2-pfed"
    paper: ClassVar[str] = "Shen et al., CVPR 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    upload_varies: ClassVar[bool] = True  # the shared channels become fewer

    p: float = setting(0.5, "share of the channels that is private in the end", least=0, most=1)
    lam: float = setting(1.0, "λ, weight of the cyclic distillation", least=0)
    beta: float = setting(0.5, "β, how much of a private weight's update is kept", above=0, most=1)
    ramp_fraction: float = setting(0.1, "t0 as a share of the rounds: β_t rises until then", least=0, most=1)
    progressive: bool = setting(True, "LI: the private share grows from round to round")
    smoothing: bool = setting(True, "TA: private weights are averaged over epochs")
    distill: bool = setting(True, "CD: the sub-networks teach each other")

    def check(self, task: Task) -> None:
        """Refuse a model whose graph cannot be followed."""
        _ = task.channels

    def share(self, task: Task) -> float:
        """p_t."""
        return self.p * task.round / task.rounds if self.progressive else self.p

    def init_client(self, task: Task, params: Params) -> Tree:
        """The client's own model."""
        return {"own": params}

    def private(self, task: Task) -> frozenset[str]:
        """What is private as a whole; the laws of this method check the channels."""
        return frozenset(task.net.names) if self.p == 1 and not self.progressive else frozenset()

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """Shared channels from the download, private ones from the client's own model; and p_t, by which the loss divides."""
        return {"params": self.combined(task, down["params"], memory), "share": self.share_tensor(task)}

    def share_tensor(self, task: Task) -> Tensor:
        """Return p_t as a tensor, so that a loss that divides by it is the same function in every round."""
        return torch.full_like(task.here().last, self.share(task))

    def combined(self, task: Task, received: Params, memory: Tree) -> Params:
        """Return the received model with the client's channels that are private now and were when it last trained."""
        last = task.here().last
        ratio = last / task.rounds if self.progressive else task.seen.to(last.dtype)
        before, now = self.p * ratio, self.share_tensor(task)
        private = task.channels.is_private
        own = {n: private(n, v, now) & private(n, v, before) for n, v in received.items()}
        return {n: torch.where(own[n], memory["own"][n], v) for n, v in received.items()}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs, without a teacher until every layer has both kinds of channel; smoothing after each."""
        taught = self.distill and self.lam != 0 and task.channels.both(self.share(task))
        return (Phase(loss=None if taught else self.alone, after_epoch=self.smooth if self.smoothing else None),)

    def alone(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(g_full)."""
        return self.fit(task, params, batch)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(g_full) + λ·½[KL(y_L ‖ y_G) + KL(y_G ‖ y_L)]."""
        loss, p = self.fit(task, params, batch), local["share"]
        y_l, y_g = (task.gated_logits(params, batch, task.channels.gates(p, own, batch.x)) for own in (True, False))
        return loss + self.lam * 0.5 * (task.distill(y_l, y_g, 1.0, batch) + task.distill(y_g, y_l, 1.0, batch))

    def smooth(self, task: Task, before: Params, after: Params) -> Params:
        """Private weights: β_t·w' + (1−β_t)·w_prev."""
        t0, beta = self.ramp_fraction * task.rounds, self.beta
        if task.round <= t0:
            beta *= math.exp(-5 * (1 - task.round / t0) ** 2)
        p = next(iter(after.values())).new_tensor(self.share(task), dtype=torch.float64)
        return {
            n: torch.where(task.channels.is_private(n, after[n], p), beta * after[n] + (1 - beta) * before[n], after[n])
            for n in task.net.parameters
        }

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Shared channels go up; the client keeps its own model."""
        own, p = local["params"], self.share(task)
        shared = {name: task.channels.shared(name, value, p) for name, value in own.items()}
        return {"params": {n: v for n, v in shared.items() if v.numel()}}, {"own": own}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Shared channels ← their mean; the others keep the values that were last shared. A late upload has more channels."""
        params, p = tree.clone(server["params"]), self.share(task)
        shared = {name: task.channels.shared(name, value, p) for name, value in params.items()}
        places = {name: tuple(map(slice, value.shape)) for name, value in shared.items() if value.numel()}
        narrowed = [{name: u.params[name][place] for name, place in places.items()} for u in uploads]
        for name, value in task.average(narrowed, self.shares(uploads), shared).items():
            shared[name].copy_(value)
        return {"params": params}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The current shared channels with the client's private ones."""
        return self.combined(task, down["params"], memory)
