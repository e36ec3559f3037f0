"""FedDyn: each client's loss is bent so that all of them stop at the same point, the optimum of their sum.

    client:  min_θ  CE(θ) − ⟨g_k, θ⟩ + α/2·‖θ − θ_t‖²,      afterwards  g_k ← g_k − α·(θ_k − θ_t)
    server:  h ← h − α·(1/m)·Σ_{k∈P} (θ_k − θ_t),            θ ← (1/|P|)·Σ_{k∈P} θ_k − h/α

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. Algorithm 1; m clients in all, P take part.

Where nothing moves any more, θ_k = θ and h = mean(g_k) = 0, and a client that stands still has ∇CE_k(θ) = g_k: so the
gradients sum to zero.

Choices: (1) Means are uniform; mean="weighted" weighs both sums by n_k, and then seeks the optimum of the weighted sum. (2)
α = 0.01, as in the authors' code for CIFAR-10; the paper chooses it from {0.1, 0.01, 0.001}. Their code divides α by the
client's share of the samples where sizes differ; ours does not. (3) g_k, h and the norm cover trainable parameters;
BatchNorm's buffers take the plain mean. (4) The local problem is solved by the experiment's epochs of SGD with its momentum
and weight decay, which is part of the loss. (5) The generic model is θ, as in Algorithm 1; the authors' code also scores the
mean of the θ_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedDyn(FedAvg, mean="uniform"):
    """A dynamic regulariser makes the clients' optima agree with the optimum of their sum."""

    id: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    noisy_steps: ClassVar[bool] = True
    coupled: ClassVar[frozenset[str]] = frozenset({"g"})  # h is the mean of all g_k

    alpha: float = setting(0.01, "α, weight of the regulariser", above=0)

    def init_server(self, task: Task, params: Params) -> Tree:
        """θ, and h = 0."""
        return {"params": params, "h": tree.zeros(task.trainable(params))}

    def init_client(self, task: Task, params: Params) -> Tree:
        """g_k = 0."""
        return {"g": tree.zeros(task.trainable(params))}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """θ ← θ_t, which is also the anchor; g_k."""
        return {"params": down["params"], "anchor": task.trainable(down["params"]), "g": memory["g"]}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(θ) − ⟨g_k, θ⟩ + α/2·‖θ − θ_t‖²."""
        theta = task.trainable(params)
        linear = tree.total({name: local["g"][name] * value for name, value in theta.items()})
        return self.fit(task, params, batch) - linear + self.alpha * terms.proximal(theta, local["anchor"])

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """θ_k goes up; g_k ← g_k − α·(θ_k − θ_t)."""
        moved = tree.sub(task.trainable(local["params"]), local["anchor"])
        return {"params": local["params"]}, {"g": tree.add(memory["g"], moved, -self.alpha)}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """h ← h − α·|P|/m·mean(θ_k − θ_t), θ ← mean − h/α. For a late upload θ_t is the model that its client began with."""
        shares = self.shares(uploads)
        params = task.average([u.params for u in uploads], shares, server["params"])
        moved = [tree.sub(task.trainable(u.tree["params"]), task.trainable(u.down["params"])) for u in uploads]
        h = tree.add(server["h"], task.average(moved, shares), -self.alpha * len(uploads) / task.clients)
        return {"params": {**params, **tree.add(task.trainable(params), h, -1 / self.alpha)}, "h": h}
