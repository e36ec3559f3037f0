"""FedBABU: the head keeps its initial values while the body is federated; a client's own model is then fine-tuned.

    federated:  φ_k ← SGD(CE) on the body for the experiment's epochs, under the head h⁰ that nobody trains
    server:     φ ← Σ p_k·φ_k,   p_k = n_k / Σ n_j
    personal:   from (φ, h⁰), τ_f epochs of SGD(CE) on the client's data

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

Choices: (1) The paper fine-tunes once, after the federation. Here a participant does it each round, from the model that it
received and beside its work for the federation, so that personal scores are there in every round. With personal_epochs=0
the generic model serves everybody, and the score `fine_tune` is the paper's procedure. (2) The abstract fine-tunes the
head, the paper's tables also the whole network. `personal_part`="head" keeps the client's head: the personal model is the
current body under it. "all" keeps the whole fine-tuned model. (3) τ_f = 5. (4) Each fine-tuning starts from h⁰, not from the
last one's head. (5) The head never travels: everybody has h⁰. Buffers go with their module. (6) A client that never took
part has the current body under h⁰. (7) `train_head` trains and shares the head as well: FedAvg, the paper's ablation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core import tree
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task, pick
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedAvg):
    """The body is federated under a head that nobody trains; the client's own model is fine-tuned."""

    id: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    noisy_steps: ClassVar[bool] = True
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    needs_head: ClassVar[bool] = True
    trains_generic: ClassVar[bool] = False  # nobody trains its head

    personal_epochs: int = setting(5, "τ_f, epochs of fine-tuning; 0: none", least=0)
    personal_part: Literal["head", "all"] = setting("head", "what is fine-tuned")
    train_head: bool = setting(False, "train and share the head too, as FedAvg does")

    def init_client(self, task: Task, params: Params) -> Tree:
        """h⁰, and the entries that are fine-tuned."""
        return {"head": task.head(params), "own": self._tuned(task, params)}

    def private(self, task: Task) -> frozenset[str]:
        """The head."""
        return frozenset() if self.train_head else task.need_split().head

    def _shared(self, task: Task) -> frozenset[str]:
        """Return the names that travel."""
        return frozenset(task.net.names) - self.private(task)

    def _tuned(self, task: Task, params: Params) -> Params:
        """Return the entries of its own model that a client keeps."""
        return task.head(params) if self.personal_part == "head" else params

    def _received(self, task: Task, down: Tree, memory: Tree) -> Params:
        """Return the received body under the received head, or under h⁰."""
        both = {**memory["head"], **down["params"]}
        return {name: both[name] for name in task.net.names}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """φ."""
        return {"params": pick(server["params"], self._shared(task))}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """(φ, h⁰), twice: for the federation, and to be fine-tuned."""
        received = self._received(task, down, memory)
        return {"params": received, "personal": received}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The body; then the client's own model."""
        tuned = task.need_split().head if self.personal_part == "head" else None
        return (
            Phase(moves=self._shared(task)),
            Phase(epochs=self.personal_epochs, model="personal", moves=tuned),
        )

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """φ_k goes up; the client keeps what was fine-tuned."""
        up = {"params": pick(local["params"], self._shared(task))}
        return up, {"head": memory["head"], "own": self._tuned(task, local["personal"])}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The current body under the client's head, or all of its own; without fine-tuning the generic model."""
        received = self._received(task, down, memory)
        if self.personal_epochs == 0:
            return received
        return tree.where(task.seen, {**received, **memory["own"]}, received)
