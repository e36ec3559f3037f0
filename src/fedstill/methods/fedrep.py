"""FedRep: a shared body (the representation), a private head, trained one after the other.

    head phase:  h_k ← SGD on h for E_h epochs, body fixed          body phase:  φ_k ← SGD on φ for E_b epochs, head fixed
    server:      φ ← Σ p_k·φ_k,   p_k = n_k / Σ n_j

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

Choices: (1) E_h = 10 and E_b = 1, as in the paper's main experiments; a method's own epochs override the experiment's.
(2) Buffers go with their module: a BatchNorm in the body is shared, and its statistics stand still in the head phase. (3)
The personal model is the current shared body under the client's head; the generic one the body under the initial head,
which nobody trains, so only personal scores mean something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class FedRep(PartialFedAvg):
    """A shared body and a private head, trained in turn."""

    id: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al., ICML 2021"
    noisy_steps: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    head_epochs: int = setting(10, "E_h, epochs of the head phase", least=0)
    body_epochs: int = setting(1, "E_b, epochs of the body phase", least=0)

    def private(self, task: Task) -> frozenset[str]:
        """The head."""
        return task.need_split().head

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The head, then the body."""
        split = task.need_split()
        return Phase(epochs=self.head_epochs, moves=split.head), Phase(epochs=self.body_epochs, moves=split.body)
