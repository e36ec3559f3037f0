"""FedRoD: a generic model trained as if classes were balanced, and a personal head that takes the imbalance back in.

    generic:   min  −log( n_y·exp(z_y) / Σ_c n_c·exp(z_c) )      z: logits        n_c: the client's samples of class c
    personal:  min over P_k alone  CE( z + P_k(features) )       features and z without gradient; P_k stays at the client
    server:    w ← Σ p_k·w_k,   p_k = n_k / Σ n_j                (body and generic head; the logits of both heads are added)

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

Choices: (1) The paper trains both heads in the same steps; here the personal head has its turn after the generic model, on
the features of the body that the client has just trained, for as many epochs (`personal_epochs`, 0: as the experiment's).
So its gradient cannot reach the body, and it can train while the model travels (spectral co-distillation's wait-free
protocol does so). (2) P_k is linear: the added logits are those of one classifier with the weights of both, and the personal
phase trains that sum. The classifier is the last linear layer of the model's head. (3) P_k starts at zero, so that a client
that never took part has the generic model. (4) The personal model is the current generic model with P_k added. (5) A class
that the client does not have is left out of the sum (n_c = 0). (6) The paper's hypernetwork for new clients is not here.
(7) Momentum starts fresh in the personal phase, weight decay acts on the sum; BatchNorm's statistics stand still in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core import tree
from ..core.batch import Batch
from ..core.errors import InputError, Shown
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task, pick
from ..core.tree import Params, Tree
from ..nn.lora import A
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedRoD(FedAvg):
    """A generic model by a balanced loss, and a personal head whose logits are added."""

    id: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    wait_free: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "balances its loss by the numbers of each class"

    generic_loss: Literal["balanced", "ce"] = setting("balanced", "balanced softmax, or plain cross-entropy")
    personal_head: bool = setting(True, "whether there are personal heads")
    personal_epochs: int = setting(0, "epochs of the personal head; 0: as the experiment's", least=0)

    def check(self, task: Task) -> None:
        """Refuse a head without a linear layer, which is its classifier, and targets of classes that a client does not have."""
        self.classifier(task)
        if self.generic_loss == "balanced" and task.objective.smoothing:
            right = "0 for fedrod, or its generic_loss 'ce': the balanced loss leaves out classes that a client does not have"
            raise InputError("label_smoothing", task.objective.smoothing, right)

    def classifier(self, task: Task) -> frozenset[str]:
        """Return the names of the last linear layer's entries, which P_k shares; none without personal heads."""
        if not self.personal_head:
            return frozenset()
        heads = task.need_split().modules
        layers = [(n, layer) for n, layer in task.net.module.named_modules() if isinstance(layer, nn.Linear)]
        linear = [(n, layer) for n, layer in layers if any(n == head or n.startswith(head + ".") for head in heads)]
        if not linear or linear[-1][1].out_features != task.net.outputs:
            raise InputError("head", Shown(", ".join(heads)), "one that ends in a linear layer, to which P_k is added")
        names = frozenset(n for n in task.net.names if n.rpartition(".")[0] == linear[-1][0])
        if any(n.rpartition(".")[2] == A for n in names) or not names:
            raise InputError(
                "head", Shown(", ".join(heads)), "one whose last layer trains, without adapters: P_k is added to it"
            )
        return names

    def init_client(self, task: Task, params: Params) -> Tree:
        """P_k = 0."""
        return tree.zeros(pick(params, self.classifier(task)))

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t; log n_c, and P_k."""
        site = task.here()
        real = torch.arange(len(site.index), device=site.x.device) < site.samples
        classes = torch.arange(task.net.outputs, device=site.x.device)
        counts = ((site.y[site.index].unsqueeze(1) == classes) & real.unsqueeze(1)).sum(0)
        return {
            "params": down["params"],
            "log_n": counts.to(task.net.dtype).log(),
            "p": memory,
            "joint": down["params"],
        }

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The generic model; then the classifier that is the sum of both heads."""
        generic = Phase()
        if not self.personal_head:
            return (generic,)
        epochs, moves = self.personal_epochs or None, self.classifier(task)
        return generic, Phase(epochs=epochs, model="joint", moves=moves, enter=_joined, loss=self.personal_loss)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """The balanced softmax: CE of z + log n."""
        if self.generic_loss == "ce":
            return self.fit(task, params, batch)
        return task.fit(task.logits(params, batch) + local["log_n"], batch)

    def personal_loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(z + P_k(features)): that of the joint classifier."""
        return self.fit(task, params, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up; P_k is the joint classifier less the generic one."""
        p = {name: local["joint"][name] - local["params"][name] for name in memory}
        return {"params": local["params"]}, p

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The current generic model with P_k added."""
        return _plus(down["params"], memory)


def _plus(params: Params, p: Params) -> Params:
    """Return the model with P_k added to its classifier."""
    return {**params, **{name: params[name] + value for name, value in p.items()}}


def _joined(task: Task, local: Tree) -> Tree:
    return {**local, "joint": _plus(local["params"], local["p"])}
