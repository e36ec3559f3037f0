"""APFL: a personal model that is mixed with the shared one, by a share that each client learns.

    v̄_k = α_k·v_k + (1−α_k)·w_k
    w_k ← w_k − η·∇f_k(w_k),     v_k ← v_k − η·α_k·∇f_k(v̄_k),     α_k ← α_k − η·⟨v_k − w_k, ∇f_k(v̄_k)⟩
    server: w ← mean of the w_k

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020. Algorithm 1.

Choices: (1) All three right-hand sides are taken at the values before the step, as printed, and on one batch; the
authors' code moves w_k first. (2) α_k takes its step once a round, with the first batch, and is cut to [0, 1], as in
the authors' code; that code also adds 0.02·α_k to its gradient, which we do not. (3) α_k = 0.5 at first, as in the
authors' code; adaptive=False keeps it. (4) w_k and v_k have momentum of their own, as the experiment says, α_k has
none. (5) The mixture's BatchNorm statistics belong to v_k; they are measured, not mixed. (6) v_k starts at w⁰. The
personal model mixes v_k with the current global model; a client that never took part is scored with the global model
alone. (7) The server's mean is uniform, as in Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """A personal model mixed with the shared one, by a share that each client learns."""

    id: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al., 2020"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    personal_passes: ClassVar[float] = 1.0  # w_k's steps do not depend on v_k's

    alpha: float = setting(0.5, "α, the personal model's share in the mixture, at first", least=0, most=1)
    adaptive: bool = setting(True, "let each client learn its α")
    mean: Literal["weighted", "uniform"] = setting("uniform", "weigh clients by their samples, or all alike")

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, α_k, and that no round has been seen yet."""
        zero = tree.scalar_zero(params)
        return {"v": params, "alpha": zero + self.alpha, "seen": zero}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_k ← w; v_k and α_k as they were."""
        still = tree.zeros(task.trainable(down["params"])) if task.momentum else {}
        return {
            "params": down["params"],
            "v": memory["v"],
            "alpha": memory["alpha"],
            "first": torch.ones_like(memory["alpha"]),
            "momentum": {"params": still, "v": still},
        }

    def step(self, task: Task, local: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        """One step of w_k, v_k and, in the round's first, α_k."""
        w, v, alpha, moving = local["params"], local["v"], local["alpha"], local["momentum"]
        at_w, loss, seen_w = task.gradient(lambda p, b: self.fit(task, p, b), w, batch)
        at_mixed, _, seen_v = task.gradient(lambda p, b: self.fit(task, p, b), self.mixed(task, alpha, v, w), batch)
        new_w, moving_w = task.descend(task.trainable(w), at_w, moving["params"])
        new_v, moving_v = task.descend(task.trainable(v), tree.map(lambda g: alpha * g, at_mixed), moving["v"])
        return {
            "params": {**w, **new_w, **seen_w},
            "v": {**v, **new_v, **seen_v},
            "alpha": self.next_alpha(task, local, at_mixed),
            "first": torch.zeros_like(alpha),
            "momentum": {"params": moving_w, "v": moving_v},
        }, loss

    def next_alpha(self, task: Task, local: Tree, at_mixed: Params) -> Tensor:
        """α_k − η·⟨v_k − w_k, ∇f_k(v̄_k)⟩ in the round's first step, then α_k."""
        alpha: Tensor = local["alpha"]
        if not self.adaptive:
            return alpha
        apart = tree.sub(task.trainable(local["v"]), task.trainable(local["params"]))
        slope = tree.total(tree.map(torch.mul, apart, at_mixed))
        return torch.where(local["first"] > 0, (alpha - task.lr * slope).clamp(0, 1), alpha)

    def mixed(self, task: Task, alpha: Tensor, v: Params, w: Params) -> Params:
        """v̄_k, with the statistics of v_k."""
        both = tree.map(lambda a, b: alpha * a + (1 - alpha) * b, task.trainable(v), task.trainable(w))
        return {**v, **both}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k and α_k stay."""
        kept = {"v": local["v"], "alpha": local["alpha"], "seen": torch.ones_like(memory["seen"])}
        return {"params": local["params"]}, kept

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v̄_k with the current global model, or that alone for a client that never took part."""
        mixed = self.mixed(task, memory["alpha"], memory["v"], down["params"])
        return tree.where(memory["seen"] > 0, mixed, down["params"])
