"""FedFomo: each client weighs other clients' models by how much they would help on data of its own.

    w_m = max(0, L_k(θ_k) − L_k(θ_m)) / ‖θ_m − θ_k‖,   divided by their sum
    θ_k ← θ_k + Σ_m w_m·(θ_m − θ_k),   then local training
    server: keeps the clients' models, sends each client M others' by affinity, P_km ← P_km + w_m, with ε-greedy exploration

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

Choices: (1) θ_k is the client's model before its last local training; what it trained is one of the θ_m, and M counts
the others. So training that did not help is dropped, as in the authors' code. (2) L_k is the mean cross-entropy, in
evaluation mode, of every (1/val)-th of the client's training samples, which are not trained on (a batch of nothing else
is); val=0 measures on all of them. (3) M = 5, ε = 0.3, less by 0.05 a round, as in the authors' code and in pFedSD's
comparison. (4) Norms run over trainable parameters; where θ_m = θ_k to rounding (a combination of one model is that
model) the weight is 0, not noise over noise, and where all are 0 θ_k stays. (5) Buffers are combined by the same
weights. (6) All models that were ever uploaded can be sent; ties of affinity are broken at random. (7) The personal model
is the combination of what the client would download now, also for one that never took part; nobody is served with the
models' mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.errors import InputError, Shown
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg

EXPLORE, ANY, TIES = 1, 2, 3  # what a draw is for
SAME = 16  # times the rounding of its norm: no further than that, a model is the same


@dataclass(frozen=True, kw_only=True)
class FedFomo(FedAvg, mean="uniform"):
    """Each client weighs other clients' models by how much they would help it."""

    id: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    scores: ClassVar[tuple[str, ...]] = ("personal",)

    m: int = setting(5, "M, other clients' models that are sent down; 0: all", least=0)
    epsilon: float = setting(0.3, "ε, chance that a model is sent at random instead of by affinity", least=0, most=1)
    decay: float = setting(0.05, "by how much ε falls every round", least=0)
    val: float = setting(0.2, "share of a client's training samples that only measure; 0: all do", least=0, most=0.5)
    weighing: Literal["first-order", "equal"] = setting("first-order", "how a client weighs the models")

    def check(self, task: Task) -> None:
        """Refuse mixup of samples that only measure into those that are trained on."""
        super().check(task)
        if self.val and task.augment is not None and task.augment.mixup:
            right = "without mixup, or val 0: it would train on the samples that only measure"
            raise InputError("augment", Shown("mixup"), right)

    def init_server(self, task: Task, params: Params) -> Tree:
        """Return the clients' models and their affinities; `params` is the participants' mean."""
        return {"params": params, "models": {}, "affinity": {}}

    def init_client(self, task: Task, params: Params) -> Tree:
        """The model before and after the last training."""
        return {"before": params, "own": params}

    def chosen(self, task: Task, server: Tree, client: int) -> list[int]:
        """Choose whose models the client is sent: by affinity, or with probability ε any."""
        others = sorted(int(k) for k in server["models"] if int(k) != client)
        if not 0 < self.m < len(others):
            return others
        row: Tensor | None = server["affinity"].get(str(client))
        liked = {k: float(row[k]) if row is not None and k < len(row) else 0.0 for k in others}
        shuffled, ties = ([others[i] for i in task.permutation(len(others), why, client)] for why in (ANY, TIES))
        best, who = sorted(ties, key=lambda k: -liked[k]), list[int]()
        for slot in range(self.m):
            explores = task.uniform(EXPLORE, client, slot) < self.epsilon - self.decay * (task.round - 1)
            who.append(next(k for k in (shuffled if explores else best) if k not in who))
        return who

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """M models, and whose they are: −1 for a place that is empty."""
        most = max(0, task.clients - 1)
        places = min(self.m or most, most)
        who = self.chosen(task, server, client)[:places]
        empty = places - len(who)
        models = [*(server["models"][str(k)] for k in who), *[server["params"]] * empty]
        ids = torch.tensor([*who, *[-1] * empty], dtype=torch.int32, device=task.net.device)
        return {"models": {str(i): model for i, model in enumerate(models)}, "who": ids}

    def weigh(self, task: Task, down: Tree, memory: Tree) -> Tensor:
        """w_m, for the client's own trained model first."""
        worth = real = torch.cat([task.seen.reshape(1), down["who"] >= 0]).to(task.net.dtype)
        if self.weighing == "first-order":
            theta, others = memory["before"], [memory["own"], *down["models"].values()]
            gain = self.measured(task, theta) - torch.stack([self.measured(task, m) for m in others])
            squares = [tree.square_norm(tree.sub(task.trainable(m), task.trainable(theta))) for m in others]
            distance, size = torch.stack(squares).sqrt(), tree.square_norm(task.trainable(theta)).sqrt()
            differs = distance > SAME * torch.finfo(distance.dtype).eps * size
            worth = real * torch.where(differs, gain / torch.where(differs, distance, 1), 0).clamp(min=0)
        total = worth.sum()
        return torch.where(total > 0, worth / torch.where(total > 0, total, 1), 0)

    def combined(self, down: Tree, memory: Tree, weights: Tensor) -> Params:
        """θ_k + Σ_m w_m·(θ_m − θ_k)."""

        def combine(theta: Tensor, *others: Tensor) -> Tensor:
            new = theta + sum(weights[i] * (other - theta) for i, other in enumerate(others))
            return new if theta.is_floating_point() else new.round().to(theta.dtype)

        return tree.map(combine, memory["before"], memory["own"], *down["models"].values())

    def measured(self, task: Task, params: Params) -> Tensor:
        """L_k."""
        site, stride = task.here(), round(1 / self.val) if self.val else 1
        rows = site.index[::stride]
        real = (torch.arange(len(rows), device=rows.device) * stride < site.samples).to(task.net.dtype)
        losses = task.objective.plain_losses(task.predict(params, site.x[rows]), site.y[rows])
        return (losses * real).sum() / real.sum()

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """The combination, where training starts."""
        weights = self.weigh(task, down, memory)
        start = self.combined(down, memory, weights)
        return {"params": start, "start": start, "weights": weights}

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE on the samples that do not measure."""
        if not self.val:
            return self.fit(task, params, batch)
        real = torch.ones_like(batch.index, dtype=task.net.dtype) if batch.mask is None else batch.mask
        trained = real * (batch.index % round(1 / self.val) != 0)
        return self.fit(task, params, dataclasses.replace(batch, mask=torch.where(trained.sum() > 0, trained, real)))

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The trained model and the weights of the others' go up."""
        own = local["params"]
        return {"params": own, "weights": local["weights"][1:]}, {"before": local["start"], "own": own}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Keep every participant's model, and P_km ← P_km + w_m for the models that it was sent, be it rounds ago."""
        models, affinity = dict(server["models"]), dict(server["affinity"])
        for upload in uploads:
            client, weights, who = str(upload.client), upload.tree["weights"], upload.down["who"]
            who, weights = who[who >= 0], weights[who >= 0]
            row = affinity.get(client, weights.new_zeros(0))
            row = F.pad(row, (0, max([0, *(k + 1 - len(row) for k in who.tolist())])))
            affinity[client] = row.index_add(0, who, weights)
            models[client] = tree.clone(upload.tree["params"])
        return {**super().merge(task, server, uploads), "models": models, "affinity": affinity}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The combination of what comes down now."""
        return self.combined(down, memory, self.weigh(task, down, memory))
