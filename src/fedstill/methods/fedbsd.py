"""FedBSD: the global backbone's features teach the local backbone; the head stays private.

    head phase:      h_k ← SGD on h for E_h epochs over the received backbone w_g, CE
    backbone phase:  min_b  CE(b, h_k) + λ·KL( softmax(f_g/τ) ‖ softmax(f_b/τ) )       f = features, the head's input
    server:          w_g ← mean of the b_k, uniform (Eq. 3)

Wang et al., "Personalized Federated Learning via Backbone Self-Distillation", ACM Multimedia Asia 2023.

Choices: (1) Eq. 6 as printed, −Σ P_s log(P_s/P_t), is negative; we take KL(P_t ‖ P_s), teacher first. (2) Where the
student's backbone starts: §3.2 replaces it by the received one (start="global"), Algorithm 1 reads as the client's own
previous one (start="local"; first time: w_g). (3) The teacher's features are taken in evaluation mode without gradient,
once a round, or on each batch where that is augmented. (4) BatchNorm layers are private where the model has them,
statistics included (as FedBN); the teacher is the received backbone with the client's own BatchNorm. (5) The personal
model is the client's own trained backbone and head; a client that never took part has the current backbone under its
initial head. Nobody trains a head for everybody, so there is no generic score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from ..core import terms, tree
from ..core.batch import Batch
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task, pick
from ..core.tree import Params, Tree
from ..nn.split import by_type
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedBSD(FedAvg, mean="uniform"):
    """The global backbone's features teach the local backbone; head and BatchNorm stay private."""

    id: ClassVar[str] = "fedbsd"
    paper: ClassVar[str] = "Wang et al., MM Asia 2023"
    scores: ClassVar[tuple[str, ...]] = ("personal",)
    needs_head: ClassVar[bool] = True

    lam: float = setting(1.0, "λ, weight of the features' distillation", least=0)
    tau: float = setting(2.0, "τ, temperature of the softmax over features", above=0)
    head_epochs: int = setting(10, "E_h, epochs of the head phase", least=0)
    backbone_epochs: int = setting(1, "E_b, epochs of the backbone phase", least=0)
    start: Literal["global", "local"] = setting("global", "where the student's backbone starts: received, or its own")

    def init_client(self, task: Task, params: Params) -> Tree:
        """The client's own model."""
        return {"own": params}

    def private(self, task: Task) -> frozenset[str]:
        """The head, and BatchNorm."""
        return task.need_split().head | by_type(task.net.module, (nn.modules.batchnorm._BatchNorm,))

    def shared(self, task: Task, params: Params) -> Params:
        """Return the backbone without BatchNorm: all that travels."""
        return pick(params, frozenset(params) - self.private(task))

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w_g."""
        return {"params": self.shared(task, server["params"])}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """The received backbone under the client's head; its features on all local data; where the student starts."""
        received = {**memory["own"], **down["params"]}
        own = received if self.start == "global" else tree.where(task.seen, memory["own"], received)
        return {"params": received, "teacher": task.teach(received, features=True), "student": task.body(own)}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The head over the received backbone, then the backbone."""
        split = task.need_split()
        return (
            Phase(epochs=self.head_epochs, moves=split.head),
            Phase(epochs=self.backbone_epochs, moves=split.body, enter=_student, loss=self.distil),
        )

    def distil(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE + λ·KL(softmax(f_g/τ) ‖ softmax(f_b/τ))."""
        logits, features = task.features(params, batch)
        penalty = terms.kl(task.taught(local["teacher"], batch, features=True), features, self.tau, batch)
        return task.fit(logits, batch) + self.lam * penalty

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The backbone goes up; the client keeps all of its own."""
        own = local["params"]
        return {"params": self.shared(task, own)}, {"own": own}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The client's own model; for one that never took part the current backbone under its initial head."""
        return tree.where(task.seen, memory["own"], {**memory["own"], **down["params"]})


def _student(task: Task, local: Tree) -> Tree:
    """Return the student's model: its own backbone under the head that was just trained."""
    return {**local, "params": {**local["params"], **local["student"]}}
