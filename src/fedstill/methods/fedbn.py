"""FedBN: everything but BatchNorm is shared; each client normalises its own features.

    w_k ← SGD(CE on client k's data) from (φ, n_k)        φ: all but BatchNorm        n_k: client k's own BatchNorm
    server: φ ← (1/|S|)·Σ φ_k

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021. Algorithm 1.

Choices: (1) BatchNorm is found by the type of the module, not by its name; its weight, bias, running statistics and count
of batches all stay. (2) The personal model is the current shared part with the client's own BatchNorm; a client that never
took part has the initial one. (3) Nobody trains a BatchNorm for everybody, so there is no generic score. (4) The mean is
uniform, as in Algorithm 1. (5) A model without BatchNorm is trained as FedAvg trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..core.task import Task
from ..nn.split import by_type
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class FedBN(PartialFedAvg, mean="uniform"):
    """All but BatchNorm is shared; BatchNorm, with its statistics, is each client's own."""

    id: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al., ICLR 2021"

    def private(self, task: Task) -> frozenset[str]:
        """BatchNorm, with its statistics."""
        return by_type(task.net.module, (nn.modules.batchnorm._BatchNorm,))
