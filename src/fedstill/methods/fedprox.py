"""FedProx: FedAvg whose local work is held near the global model.

    min_w  CE(w) + μ/2·‖w − w_t‖²

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Choices: (1) the norm runs over trainable parameters, not over BatchNorm's buffers. (2) The paper tunes μ over {0.001,
0.01, 0.1, 1} per data set and gives no default; ours is 0.01. (3) Inexactness (γ) is the experiment's number of epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import terms
from ..core.batch import Batch
from ..core.closed import ClosedForm
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps local work near the global model."""

    id: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    noisy_steps: ClassVar[bool] = True

    mu: float = setting(0.01, "weight of the proximal term", least=0)

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t, with w_t as the anchor."""
        return {"params": down["params"], "anchor": task.trainable(down["params"])}

    def closed_form(self, task: Task, local: Tree) -> ClosedForm:
        """CE, and a pull of μ towards w_t."""
        return ClosedForm(pull=self.mu, anchor=local["anchor"])

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE + μ/2·‖w − w_t‖²."""
        return self.fit(task, params, batch) + self.mu * terms.proximal(task.trainable(params), local["anchor"])
