"""LG-FedAvg: a private body (local representations) under a shared head, trained together.

    (l_k, g_k) ← SGD(CE on client k's data) from (l_k, g), all at once
    server:      g ← Σ p_k·g_k,   p_k = n_k / Σ n_j

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020. Algorithm 1.

Choices: (1) The authors' code first runs FedAvg and goes on from its model: `warm_rounds` of FedAvg, 0 by default, where every
body starts from w⁰. The server cannot know whose body has begun, so after warm rounds it sends the warm body with the head;
a client takes it the first time. Up goes the head alone. (2) Buffers go with
their module: a BatchNorm in the body is private. (3) The personal model is the client's body under the current head; a
client that never took part has its initial body. Nobody trains a body for everybody, so there is no generic score. (4) The
paper allows other losses for the local representations (unsupervised, self-supervised, adversarial); here it is CE alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core import tree
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task, pick
from ..core.tree import Params, Tree
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(PartialFedAvg):
    """A private body under a shared head, trained together."""

    id: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al., 2020"
    needs_head: ClassVar[bool] = True

    noisy_steps: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    noisy_mean: ClassVar[bool] = True

    warm_rounds: int = setting(0, "rounds of FedAvg before the bodies become the clients' own", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm_rounds:  # another part of the model travels from then on
            object.__setattr__(self, "upload_varies", True)

    def private(self, task: Task) -> frozenset[str]:
        """The body; nothing where it was shared in warm rounds."""
        return frozenset() if self.warm_rounds else task.need_split().body

    def init_client(self, task: Task, params: Params) -> Tree:
        """l_k = w⁰'s body."""
        return pick(params, task.need_split().body)

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """(l_k, g); in a warm round w."""
        return {"params": self.personal(task, down, memory)}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """g_k goes up, l_k stays; in a warm round all of it goes up."""
        body = pick(local["params"], task.need_split().body)
        names = task.net.names if task.round <= self.warm_rounds else task.need_split().head
        return {"params": pick(local["params"], frozenset(names))}, body

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean of the g_k, in a warm round of all: a late reply to a warm round gives its head alone."""
        names = frozenset(task.net.names) if task.round <= self.warm_rounds else task.need_split().head
        trees = [pick(upload.params, names) for upload in uploads]
        mean = task.average(trees, self.shares(uploads), server["params"])
        return {**server, "params": {**server["params"], **mean}}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """(l_k, g): l_k is the warm body until the client has trained its own."""
        if not self.warm_rounds:
            return {**down["params"], **memory}
        own = task.here().last > self.warm_rounds
        return {**down["params"], **tree.where(own, memory, pick(down["params"], task.need_split().body))}
