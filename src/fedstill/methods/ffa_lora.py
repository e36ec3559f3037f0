"""FFA-LoRA: A keeps its first, random values, which everybody has; B is trained and shared.

    W = W₀ + s·B·A⁰
    B_k ← SGD(CE on client k's data) from B
    server:  B ← Σ p_k·B_k,   p_k = n_k / Σ n_j

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.

Which mean it takes: of B, under an A that is the same everywhere, so (Σ p_k·B_k)·A⁰ = Σ p_k·(B_k·A⁰): the product of the means is
the mean of the products. That is what the method is for. FedAvg of both matrices takes (Σ p_k·B_k)·(Σ p_k·A_k), which differs.

Choices: (1) A⁰ is drawn from the seed, so it never travels and no client keeps one of its own; half of an adapter's numbers or
fewer are sent. (2) The head is trained and shared beside B, as FedAvg's; `--lora …,head=freeze` leaves it at its first values.
(3) The mean is weighted by samples. (4) The paper adds differential privacy: `--privacy local` (DP-SGD) or `central`, as for
FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.task import Task
from ..nn import lora
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FFALoRA(FedAvg):
    """LoRA with a fixed random A; B is trained and averaged."""

    id: ClassVar[str] = "ffa-lora"
    paper: ClassVar[str] = "Sun et al., ICLR 2024"
    needs_lora: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        """Refuse a model without adapters."""
        lora.require(task.net.module, self.id)

    def freezes(self, parameters: Sequence[str]) -> frozenset[str]:
        """Every A."""
        return frozenset(name for name in parameters if name.rpartition(".")[2] == lora.A)
