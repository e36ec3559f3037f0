"""FedPer: a shared body and a private head, trained together.

    (φ_k, h_k) ← SGD(CE on client k's data) from (φ, h_k), all at once
    server:      φ ← Σ p_k·φ_k,   p_k = n_k / Σ n_j

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. Algorithms 1 and 2.

Choices: (1) Buffers go with their module: a BatchNorm in the body is shared, one in the head is private. (2) The paper tries
one to four personal layers; here the head is what the model names, its last layer unless told (`head`). (3) The personal
model is the current shared body under the client's head; a client that never took part has its initial head. Nobody trains
a head for everybody, so there is no generic score. (4) The paper starts heads at random; all start from w⁰'s here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.task import Task
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class FedPer(PartialFedAvg):
    """A shared body and a private head, trained together."""

    id: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    needs_head: ClassVar[bool] = True

    def private(self, task: Task) -> frozenset[str]:
        """The head."""
        return task.need_split().head
