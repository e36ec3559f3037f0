"""FedSA-LoRA: of every adapter's two matrices A is shared, and B is each client's own.

    W_k = W₀ + s·B_k·A
    (A_k, B_k) ← SGD(CE on client k's data) from (A, B_k), both at once
    server:      A ← Σ p_k·A_k,   p_k = n_k / Σ n_j

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.

Which mean it takes: of A alone. A client's model has the product of its own B_k and the mean of the A_k; no mean of products is
formed, nor of B.

Choices: (1) The head is the client's own, as in the authors' settings for GLUE (`local_param: lora_B, classifier`);
`classifier`="shared" averages it. (2) The mean is weighted by samples, as in the authors' FedAvg. (3) All else that moves, such
as BatchNorm's statistics, is shared. (4) The personal model is the current A with the client's B_k and head; a client that never
took part has B = 0, which is the model without adapters, and the first head. Nobody trains a B for everybody, so there is no
generic score. (5) FedSA-rsLoRA is the same with `--lora …,scaling=rs`; FedSA-VeRA is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.settings import setting
from ..core.task import Task
from ..nn import lora
from .partial import PartialFedAvg


@dataclass(frozen=True, kw_only=True)
class FedSALoRA(PartialFedAvg):
    """LoRA with a shared A and a private B and head."""

    id: ClassVar[str] = "fedsa-lora"
    paper: ClassVar[str] = "Guo et al., ICLR 2025"
    needs_lora: ClassVar[bool] = True

    classifier: Literal["private", "shared"] = setting("private", "whether the head is each client's own")

    def check(self, task: Task) -> None:
        """Refuse a model without adapters."""
        lora.require(task.net.module, self.id)
        self.private(task)

    def private(self, task: Task) -> frozenset[str]:
        """Every B, and the head but for an A in it."""
        a, b = lora.matrices(task.net.module)
        return b | (task.need_split().head - a) if self.classifier == "private" else b
