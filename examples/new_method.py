"""FedHold: FedAvg whose local predictions stay near the global model's.

    min_w  CE(w) + λ·KL( q(w_t) ‖ q(w) ),     q(·) = softmax(logits)

FedProx keeps the *weights* near the downloaded model w_t; this keeps the *predictions* on the client's own data near its.

Choices: (1) the teacher w_t runs in evaluation mode without gradient, once over the client's data at the start of a round;
every epoch looks its predictions up. (2) Temperature 1. (3) As in FedAvg, the generic model serves every client.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import fedstill as fs


@dataclass(frozen=True, kw_only=True)
class FedHold(fs.FedAvg):
    """FedAvg with a proximal term in function space: the global model teaches."""

    id: ClassVar[str] = "fedhold"

    lam: float = fs.setting(0.5, "λ, weight of the distillation", least=0)

    def begin(self, task: fs.Task, down: fs.Tree, memory: fs.Tree) -> fs.Tree:
        """w ← w_t, and what w_t predicts on all local data."""
        return {"params": down["params"], "teacher": task.teach(down["params"])}

    def loss(self, task: fs.Task, params: fs.Params, local: fs.Tree, batch: fs.Batch) -> Tensor:
        """CE(w) + λ·KL(q(w_t) ‖ q(w))."""
        logits = task.logits(params, batch)
        penalty = task.distill(task.taught(local["teacher"], batch), logits, 1.0, batch)
        return task.fit(logits, batch) + self.lam * penalty


if __name__ == "__main__":
    run = fs.run(fs.Experiment(method=FedHold(lam=0.5), rounds=5))
    print(run.table())
