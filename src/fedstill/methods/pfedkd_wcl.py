"""pFedKD-WCL: the personal models learn from labels and from the global model; the global model learns from them.

    client:  min_θ  (1−α)·CE(θ_i) + α·T²·KL( p_w ‖ p_θ )            θ_i goes on from where it was, it is never reset to w
    server:  w ← w − η·(1/|S|)·Σ_i ∇_w KL( p_θ̂_i ‖ p_w )

Hu et al., "A Novel Algorithm for Personalized Federated Learning: Knowledge Distillation with Weighted Combination Loss", 2025.
Eq. 2, Eq. 3 and Algorithm 1.

Choices: (1) The server's gradient needs data that it must not see: each client computes ∇_w KL on its own data after
training and uploads that gradient, which has the size of a model (server="distill"). server="average" takes the mean of
the θ̂_i instead. (2) T² stands in Eq. 2 and not in Eq. 3, and so here; the server's KL is softened by T too, without
T². T = 1 by default. (3) Algorithm 1 counts local steps, §3.2 says 20 local epochs: epochs. (4) Teachers run in
evaluation mode without gradient, once over the client's data; w teaches each batch where that is augmented. (5) In
"distill" the global model's BatchNorm statistics are the mean of the clients'; its parameters move by the gradient
alone. (6) A client that never took part is scored with the current global model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.closed import ClosedForm, Taught
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedKDWCL(FedAvg, mean="uniform"):
    """Personal and global model teach each other, in a weighted combination of losses."""

    id: ClassVar[str] = "pfedkd-wcl"
    paper: ClassVar[str] = "Hu et al., 2025"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")

    alpha: float = setting(0.1, "α, weight of the global model against the labels", least=0, most=1)
    tau: float = setting(1.0, "T, temperature of the softmax", above=0)
    server: Literal["distill", "average"] = setting("distill", "how the global model learns")
    server_lr: float = setting(0.0, "η of the server's step; 0: as lr", least=0)

    def init_client(self, task: Task, params: Params) -> Tree:
        """θ_i = w⁰."""
        return {"theta": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """θ_i as it was; the global model's predictions on all local data."""
        return {"params": memory["theta"], "teacher": task.teach(down["params"])}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """(1−α)·CE + α·T²·KL(p_w ‖ p_θ)."""
        logits = task.logits(params, batch)
        taught = self.tau**2 * task.distill(task.taught(local["teacher"], batch), logits, self.tau, batch)
        return (1 - self.alpha) * task.fit(logits, batch) + self.alpha * taught

    def closed_form(self, task: Task, local: Tree) -> ClosedForm:
        """CE with 1−α, and the global model's predictions with α·T²."""
        return ClosedForm(1 - self.alpha, (Taught(local["teacher"]["rows"], self.alpha * self.tau**2, self.tau),))

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """θ̂_i stays; up goes ∇_w KL(p_θ̂ ‖ p_w) on the client's own data, or θ̂_i itself."""
        theta = local["params"]
        if self.server == "average":
            return {"params": theta}, {"theta": theta}
        student = task.local_logits(theta)

        def divergence(w: Params, batch: Batch) -> Tensor:
            return task.distill_each(student[batch.index], task.net(w, batch.x, train=False), self.tau, batch)

        gradient = task.local_gradient(divergence, down["params"])
        return {"gradient": gradient, "params": {name: theta[name] for name in task.net.buffers}}, {"theta": theta}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """w ← w − η·mean of the gradients, or the mean of the θ̂_i."""
        server = super().merge(task, server, uploads)
        if self.server == "average":
            return server
        gradient = task.average([u.tree["gradient"] for u in uploads], self.shares(uploads))
        moved = tree.add(task.trainable(server["params"]), gradient, -(self.server_lr or task.rate))
        return {"params": {**server["params"], **moved}}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """θ_i, or the global model for a client that never took part."""
        return tree.where(task.seen, memory["theta"], down["params"])
