"""FedGen: the server learns to generate features from the clients' heads, and clients train their heads on them as well.

    server:  min_G  E_{y ~ p̂, ε ~ N(0,1)} [ Σ_k n_ky/n_y · CE( h_k(G(ε, y)), y ) ] + η·D(G),        p̂(y) = n_y / Σ n
    client:  min_w  CE(w) + α·E_{y ~ p̂, ε} [ CE( h(G(ε, y)), y ) ]                                      server: w ← Σ p_k·w_k
    D = exp( −mean_ij ‖ε_i − ε_j‖²·|G_i − G_j| ),   n_ky = client k's samples of class y,   n_y = Σ_k n_ky

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

Choices: (1) The paper ensembles the heads' logits; we weigh their losses by label counts, as the authors' code does,
which also has D. (2) α = 1, the paper's plain sum; the code has 10, decaying, and a second term that compares
predictions. (3) G is two linear layers with a ReLU between, without the code's BatchNorm; 256 hidden units and 32
numbers of noise, its values for MNIST. (4) 50 steps of Adam a round with lr 0.0003 on 32 drawn labels, the code's; Adam
starts anew each round, so that nothing but G is kept. (5) Labels come from p̂ of the last round's participants, at the
server and at clients; before the first merge clients train by CE alone. (6) A client draws as many features as its
batch has samples. (7) Heads are run in evaluation mode at the server. At a client only real samples move BatchNorm's
running statistics. (8) What leaves a client is its model and its label counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..core import terms, tree
from ..core.batch import Batch
from ..core.errors import InputError, Shown
from ..core.method import Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg

LABELS, RADIUS, ANGLE = 1, 2, 3  # which draw from a key
WEIGHTS = {"w1": 4, "b1": 5, "w2": 6, "b2": 7}  # the generator's, each with the number of its first draw


@dataclass(frozen=True, kw_only=True)
class FedGen(FedAvg):
    """A generator of features, learned from the clients' heads, teaches every client's head."""

    id: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al., ICML 2021"
    needs_head: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "generates features of classes"

    alpha: float = setting(1.0, "α, weight of the generated features in a client's loss", least=0)
    eta: float = setting(1.0, "η, weight of the features' diversity in the generator's loss", least=0)
    generator_steps: int = setting(50, "steps of the generator's training a round", least=0)
    generator_lr: float = setting(0.0003, "learning rate of the generator's training", above=0)
    generator_batch: int = setting(32, "labels in a step of the generator's training", least=2)
    generator_hidden: int = setting(256, "hidden units of the generator", least=1)
    generator_noise: int = setting(32, "numbers of noise that the generator takes", least=1)

    def check(self, task: Task) -> None:
        """Refuse a head that does not run on features alone; this also finds out how it does, before any step is traced."""
        super().check(task)
        if not task.need_split().head & frozenset(task.net.names):
            modules = ", ".join(task.need_split().modules)
            raise InputError("head", Shown(modules), "one that trains: the generator learns from the clients' heads")
        task.head_logits(
            task.net.initial(), torch.zeros(1, task.feature_size(), dtype=task.net.dtype, device=task.net.device)
        )

    def init_server(self, task: Task, params: Params) -> Tree:
        """w, G, and p̂ = 0: no label is known yet."""
        classes, key = task.net.outputs, task.key()
        size = task.feature_size()
        shapes: dict[str, tuple[int, ...]] = {
            "w1": (self.generator_hidden, self.generator_noise + classes),
            "b1": (self.generator_hidden,),
        }
        shapes |= {"w2": (size, self.generator_hidden), "b2": (size,)}
        reach = {"1": 1 / math.sqrt(self.generator_noise + classes), "2": 1 / math.sqrt(self.generator_hidden)}
        generator = {n: reach[n[1]] * (2 * task.uniforms(key, i, shapes[n]) - 1) for n, i in WEIGHTS.items()}
        return {"params": params, "generator": generator, "labels": tree.scalar_zero(params).new_zeros(classes)}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """w, G and p̂."""
        return {name: server[name] for name in ("params", "generator", "labels")}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w ← w_t, with G and p̂ at hand."""
        return dict(down)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """CE(w) + α·CE of the head on generated features."""
        loss = self.fit(task, params, batch)
        if not self.alpha:
            return loss
        features, y = self.generate(task, local["generator"], local["labels"], batch.key, len(batch.y))[:2]
        copies = {name: value.clone() for name, value in params.items() if name in task.net.buffers}
        drawn = dataclasses.replace(batch, y=y, other=None, share=None)
        taught = terms.cross_entropy(task.head_logits(task.head({**params, **copies}), features, drawn), drawn)
        known: Tensor = local["labels"].sum() > 0
        return loss + self.alpha * known * taught

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model and the label counts go up."""
        return {"params": local["params"], "labels": task.membership().sum(0)}, memory

    def generate(
        self, task: Task, generator: Params, labels: Tensor, key: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return G(ε, y) with y ~ p̂ and ε ~ N(0, 1) from a key: features, y and ε."""
        u = task.uniforms(key, LABELS, (rows, 1))
        y = (u >= labels.cumsum(0)).sum(1).clamp(max=len(labels) - 1)
        radius, angle = (task.uniforms(key, draw, (rows, self.generator_noise)) for draw in (RADIUS, ANGLE))
        epsilon = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        classes = (y.unsqueeze(1) == torch.arange(len(labels), device=y.device)).to(epsilon.dtype)
        hidden = F.linear(torch.cat([epsilon, classes], 1), generator["w1"], generator["b1"]).relu()
        return F.linear(hidden, generator["w2"], generator["b2"]), y, epsilon

    def generator_loss(self, task: Task, generator: Params, heads: Tree, counts: Tensor, key: Tensor) -> Tensor:
        """Return the heads' losses on generated features, by label counts, plus η·D; `heads`, `counts` have a row a client."""
        total = counts.sum(0)
        features, y, epsilon = self.generate(task, generator, total / total.sum(), key, self.generator_batch)
        logits = vmap(lambda head: task.head_logits(head, features))(heads)
        losses = F.cross_entropy(logits.transpose(1, 2), y.expand(len(counts), -1), reduction="none")
        taught = ((counts / total.clamp(min=1))[:, y] * losses).sum(0).mean()
        by_noise = (epsilon.unsqueeze(0) - epsilon.unsqueeze(1)).square().mean(-1)
        by_features = (features.unsqueeze(0) - features.unsqueeze(1)).abs().mean(-1)
        return taught + self.eta * (-(by_noise * by_features).mean()).exp()

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The mean model, p̂, and G after some steps of Adam."""
        heads = tree.stack([task.head(u.tree["params"]) for u in uploads])
        counts = torch.stack([u.tree["labels"] for u in uploads])
        generator = {name: value.detach().clone().requires_grad_() for name, value in server["generator"].items()}
        adam = torch.optim.Adam(list(generator.values()), lr=self.generator_lr)
        with torch.enable_grad():
            for step in range(self.generator_steps):
                adam.zero_grad()
                self.generator_loss(task, generator, heads, counts, task.key(step)).backward()  # type: ignore[no-untyped-call]
                adam.step()
        labels = counts.sum(0) / counts.sum()
        server = super().merge(task, server, uploads)
        return {**server, "generator": tree.map(torch.detach, generator), "labels": labels}
