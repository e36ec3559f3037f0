"""FedPAC: features are drawn to class centroids that all share, and each client's head is a combination of all heads.

    head phase:  h_k ← SGD on h, CE            body phase:  min_φ  CE(φ, h_k) + λ·1/(n·d)·Σ ‖f_φ(x) − c_y‖²
    c_y ← mean of all participants' features of class y           φ ← Σ p_k·φ_k,   p_k = n_k / Σ n_j
    h_k ← Σ_j α_kj·h_j,   α_k = argmin_{α ≥ 0, Σα = 1}  Σ_j α_j²·V_j + Σ_y ‖Σ_j α_j·(μ_ky − μ_jy)‖²
    μ_ky = P_k(y)·E_k[f | y],   V_k = 1/n_k·( E_k‖f‖² − Σ_y ‖μ_ky‖² )

Xu, Tong and Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.

Choices: (1) λ = 1, one epoch for the head and five for the body, as in the authors' code, which trains heads with lr
0.1 and bodies with 0.01: `head_lr`. (2) μ and V are taken under the received body, which all participants have in
common, centroids under the trained one; both in evaluation mode. (3) A class that no participant had keeps its
centroid; one that nobody had yet pulls nothing (the authors' code takes the client's own). (4) The quadratic programme
is solved exactly, by an active set; the authors' code cuts weights below 0.001. (5) Participants combine the heads of
the round's participants; the others keep theirs. (6) combine=False leaves every client its own head, which then never
leaves it. (7) The personal model is the current body under the client's head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import terms, tree
from ..core.batch import Batch
from ..core.errors import InputError, Shown
from ..core.method import Phase, Upload
from ..core.settings import setting
from ..core.simplex import simplex_minimum
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedPAC(FedAvg):
    """Features drawn to shared class centroids; each client's head combines all heads."""

    id: ClassVar[str] = "fedpac"
    paper: ClassVar[str] = "Xu et al., ICLR 2023"
    scores: ClassVar[tuple[str, ...]] = ("personal",)
    needs_head: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    robust: ClassVar[bool] = False
    needs_classes: ClassVar[str] = "draws features to the centroids of classes"

    lam: float = setting(1.0, "λ, how strongly features are drawn to the centroids", least=0)
    combine: bool = setting(True, "combine the clients' heads; off: each keeps its own")
    head_epochs: int = setting(1, "E_h, epochs of the head phase", least=0)
    body_epochs: int = setting(5, "E_b, epochs of the body phase", least=0)
    head_lr: float = setting(0.0, "learning rate of the head phase; 0: as lr", least=0)

    def check(self, task: Task) -> None:
        """Refuse mixup: a mixed sample has no class whose centroid could draw its features."""
        super().check(task)
        if self.lam and task.augment is not None and task.augment.mixup:
            right = "without mixup, or lam 0: a mixed sample belongs to no one class centroid"
            raise InputError("augment", Shown("mixup"), right)

    def init_server(self, task: Task, params: Params) -> Tree:
        """φ, the centroids and which of them are known, and the combined heads."""
        blank = tree.scalar_zero(params)
        known, d = blank.new_zeros(task.net.outputs), task.feature_size()
        return {"params": params, "centroids": blank.new_zeros(len(known), d), "known": known, "heads": {}}

    def init_client(self, task: Task, params: Params) -> Tree:
        """The client's head, where it is its own."""
        return {} if self.combine else {"head": task.head(params)}

    def private(self, task: Task) -> frozenset[str]:
        """The head, where it is the client's own."""
        return frozenset() if self.combine else task.need_split().head

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """φ, the centroids, and the client's head."""
        down = {"params": task.body(server["params"]), "centroids": server["centroids"], "known": server["known"]}
        if self.combine:
            down["head"] = server["heads"].get(str(client), task.head(server["params"]))
        return down

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The current body under the client's head."""
        return {**down["params"], **(down if self.combine else memory)["head"]}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """The received body under the client's head, and the centroids."""
        return {"params": self.personal(task, down, memory), "centroids": down["centroids"], "known": down["known"]}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The head, then the body."""
        split = task.need_split()
        return (
            Phase(epochs=self.head_epochs, moves=split.head, lr=self.head_lr or None),
            Phase(epochs=self.body_epochs, moves=split.body, loss=self.aligned),
        )

    def aligned(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE + λ·1/d·‖f(x) − c_y‖², averaged over the batch."""
        if not self.lam:
            return self.fit(task, params, batch)
        logits, features = task.features(params, batch)
        distance = (features - local["centroids"][batch.y]).square().mean(-1) * local["known"][batch.y]
        return task.fit(logits, batch) + self.lam * terms.mean(distance, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Up go the body and class statistics of the features, and the head where heads are combined."""
        own, of = local["params"], task.membership()
        head, counts, n = task.head(own), of.sum(0), task.here().samples
        up: Tree = {"params": task.body(own)}
        if self.lam:
            up |= {"counts": counts, "centroids": _means(of, task.local_features(own))}
        if not self.combine:
            return up, {"head": head}
        features = task.local_features({**own, **down["params"]})
        mu = (counts / n).unsqueeze(1) * _means(of, features)
        spread = (of.sum(1) * features.square().sum(1)).sum() / n - mu.square().sum()
        return up | {"head": head, "mu": mu, "v": spread / n}, {}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean body, the new centroids, and for every participant its own combination of the heads."""
        server = super().merge(task, server, uploads)
        if self.lam:
            counts = torch.stack([u.tree["counts"] for u in uploads])
            means = torch.stack([u.tree["centroids"] for u in uploads])
            total = counts.sum(0)
            mean = (counts.unsqueeze(-1) * means).sum(0) / total.clamp(min=1).unsqueeze(1)
            server["centroids"] = torch.where((total > 0).unsqueeze(1), mean, server["centroids"])
            server["known"] = torch.where(total > 0, 1.0, server["known"])
        if not self.combine:
            return server
        heads = [u.tree["head"] for u in uploads]
        mu = torch.stack([u.tree["mu"].double().flatten().cpu() for u in uploads])
        v = torch.stack([u.tree["v"].double().cpu() for u in uploads]).clamp(min=0)
        combined = {}
        for upload, mu_k in zip(uploads, mu, strict=True):
            gap = mu_k - mu
            alpha = simplex_minimum(torch.diag(v) + gap @ gap.T).tolist()
            combined[str(upload.client)] = task.average(heads, alpha)
        return {**server, "heads": {**server["heads"], **combined}}


def _means(of: Tensor, features: Tensor) -> Tensor:
    """Return the mean features of each class; zeros for a class without samples."""
    return of.T @ features / of.sum(0).clamp(min=1).unsqueeze(1)
