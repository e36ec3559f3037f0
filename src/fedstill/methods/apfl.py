"""APFL: a personal model that is mixed with the shared one, by a share that each client learns.

    v̄_k = α_k·v_k + (1−α_k)·w_k
    w_k ← w_k − η·∇f_k(w_k),     v_k ← v_k − η·α_k·∇f_k(v̄_k),     α_k ← α_k − η·⟨v_k − w_k, ∇f_k(v̄_k)⟩
    server: w ← mean of the w_k

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020. Algorithm 1.

Choices: (1) All three right-hand sides are taken at the values before the step, as printed, and on one batch; the
authors' code moves w_k first. (2) α_k takes its step once a round, with the first batch, and is cut to [0, 1], as in
the authors' code; that code also adds 0.02·α_k to its gradient, which we do not. (3) α_k = 0.5 at first, as in the
authors' code; adaptive=False keeps it. (4) w_k and v_k have optimisers of their own, as the experiment says (each with
its own clipping); α_k always takes a plain step of the learning rate. (5) The mixture's BatchNorm statistics belong to
v_k; they are measured, not mixed. (6) v_k starts at w⁰. The personal model mixes v_k with the current global model; a
client that never took part is scored with the global model alone. (7) The server's mean is uniform, as in Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg, mean="uniform"):
    """A personal model mixed with the shared one, by a share that each client learns."""

    id: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al., 2020"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    personal_passes: ClassVar[float] = 1.0  # w_k's steps do not depend on v_k's

    alpha: float = setting(0.5, "α, the personal model's share in the mixture, at first", least=0, most=1)
    adaptive: bool = setting(True, "let each client learn its α")

    def init_client(self, task: Task, params: Params) -> Tree:
        """v_k = w⁰, and α_k."""
        return {"v": params, "alpha": tree.scalar_zero(params) + self.alpha}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_k ← w; v_k and α_k as they were."""
        at_rest = task.at_rest(task.trainable(down["params"]))
        return {
            "params": down["params"],
            "v": memory["v"],
            "alpha": memory["alpha"],
            "first": torch.ones_like(memory["alpha"]),
            "optimizer": {"params": at_rest, "v": at_rest},
        }

    def step(self, task: Task, local: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        """Make one step of w_k, v_k and, in the round's first, α_k."""
        w, v, alpha, past = local["params"], local["v"], local["alpha"], local["optimizer"]
        at_w, loss, buffers_w = task.gradient(lambda p, b: self.fit(task, p, b), w, batch)
        at_mixed, _, buffers_v = task.gradient(lambda p, b: self.fit(task, p, b), self.mixed(task, alpha, v, w), batch)
        new_w, past_w = task.descend(task.trainable(w), at_w, past["params"])
        new_v, past_v = task.descend(task.trainable(v), tree.map(lambda g: alpha * g, at_mixed), past["v"])
        return {
            "params": {**w, **new_w, **buffers_w},
            "v": {**v, **new_v, **buffers_v},
            "alpha": self.next_alpha(task, local, at_mixed),
            "first": torch.zeros_like(alpha),
            "optimizer": {"params": past_w, "v": past_v},
        }, loss

    def next_alpha(self, task: Task, local: Tree, at_mixed: Params) -> Tensor:
        """α_k − η·⟨v_k − w_k, ∇f_k(v̄_k)⟩ in the round's first step, then α_k."""
        alpha: Tensor = local["alpha"]
        if not self.adaptive:
            return alpha
        difference = tree.sub(task.trainable(local["v"]), task.trainable(local["params"]))
        slope = tree.total(tree.map(torch.mul, difference, at_mixed))
        return torch.where(local["first"] > 0, (alpha - task.rate * slope).clamp(0, 1), alpha)

    def mixed(self, task: Task, alpha: Tensor, v: Params, w: Params) -> Params:
        """v̄_k, with the statistics of v_k."""
        mixture = tree.map(lambda a, b: alpha * a + (1 - alpha) * b, task.trainable(v), task.trainable(w))
        return {**v, **mixture}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; v_k and α_k stay."""
        return {"params": local["params"]}, {"v": local["v"], "alpha": local["alpha"]}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """v̄_k with the current global model, or that alone for a client that never took part."""
        mixed = self.mixed(task, memory["alpha"], memory["v"], down["params"])
        return tree.where(task.seen, mixed, down["params"])
