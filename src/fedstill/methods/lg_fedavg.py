"""LG-FedAvg: a private body (local representations) under a shared head, trained together.

    (l_k, g_k) ← SGD(CE on client k's data) from (l_k, g), all at once
    server:      g ← Σ p_k·g_k,   p_k = n_k / Σ n_j

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020. Algorithm 1.

Choices: (1) The authors' code first runs FedAvg and goes on from there; here every body starts from w⁰. (2) Buffers go with
their module: a BatchNorm in the body is private. (3) The personal model is the client's body under the current head; a
client that never took part has its initial body. Nobody trains a body for everybody, so there is no generic score. (4) The
paper allows other losses for the local representations (unsupervised, self-supervised, adversarial); here it is CE alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.task import Task
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(PartialFedAvg):
    """A private body under a shared head, trained together."""

    id: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al., 2020"
    needs_head: ClassVar[bool] = True

    def private(self, task: Task) -> frozenset[str]:
        """The body."""
        return task.need_split().body
