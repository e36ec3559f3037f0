"""FedGKD: the mean of the last M global models teaches every client.

    min_w  CE(w) + γ/2·KL( q(w̄_t) ‖ q(w) ),     w̄_t = mean of the last M global models,     q(·) = softmax(logits)
    server: w ← Σ p_k·w_k,   p_k = n_k / Σ n_j

Yao et al., "FedGKD: Toward Heterogeneous Federated Learning via Global Knowledge Distillation", 2021 (IEEE TC 2024).

Choices: (1) The teacher runs in evaluation mode without gradient, once over the client's data (augmented: on each
batch); temperature 1. (2) The last M global models are those that rounds have made, the current one included: fewer
than M in the beginning, w⁰ never. In round 1 there is no teacher, as in the authors' code. (3) γ = 0.2 and M = 5, as
for the paper's images; γ/2 is their code's coefficient 0.1. (4) The server keeps the past models and sends w and w̄_t;
with M = 1 they are the same, and w is all that goes down. (5) BatchNorm's statistics are averaged like the weights, in
w̄_t too. (6) The paper's FedGKD-VOTE, M teachers weighted by their loss on validation data at the server, is not here:
our server has no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.closed import ClosedForm, Taught
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedGKD(FedAvg):
    """The mean of the last global models teaches every client."""

    id: ClassVar[str] = "fedgkd"
    paper: ClassVar[str] = "Yao et al., 2021"
    averages: ClassVar[bool] = True
    noisy_mean: ClassVar[bool] = True
    noisy_steps: ClassVar[bool] = True

    gamma: float = setting(0.2, "γ; γ/2 is the weight of the distillation", least=0)
    m: int = setting(5, "M, how many global models make the teacher", least=1)

    def init_server(self, task: Task, params: Params) -> Tree:
        """w, and no past models."""
        return {"params": params, "past": {}}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w; where there are past models also w̄_t."""
        models = [*server["past"].values(), server["params"]]
        teacher = {"teacher": tree.mean(models, [1.0] * len(models))} if len(models) > 1 else {}
        return {"params": server["params"], **teacher}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; what w̄_t predicts on all local data."""
        if task.round == 1:
            return {"params": down["params"]}
        teacher: Params = down["teacher"] if "teacher" in down else down["params"]
        return {"params": down["params"], "teacher": task.teach(teacher)}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + γ/2·KL(q(w̄_t) ‖ q(w))."""
        if "teacher" not in local:
            return self.fit(task, params, batch)
        logits = task.logits(params, batch)
        penalty = task.distill(task.taught(local["teacher"], batch), logits, 1.0, batch)
        return task.fit(logits, batch) + self.gamma / 2 * penalty

    def closed_form(self, task: Task, local: Tree) -> ClosedForm:
        """CE, and w̄_t's predictions with γ/2."""
        return ClosedForm(taught=(Taught(local["teacher"]["rows"], self.gamma / 2),) if "teacher" in local else ())

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean of the w_k; the model that they started from is now a past one."""
        past = dict(server["past"])
        if task.round > 1:
            past[str(task.round - 1)] = server["params"]
        newest = list(past)[len(past) - min(len(past), self.m - 1) :]
        return {**super().merge(task, server, uploads), "past": {name: past[name] for name in newest}}
