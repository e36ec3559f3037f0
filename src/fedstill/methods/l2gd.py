"""L2GD: local models that are drawn towards their mean whenever a coin says so.

    min_{x_1 … x_n}  1/n·Σ_k f_k(x_k) + λ/(2n)·Σ_k ‖x_k − x̄‖²,     x̄ = 1/n·Σ_k x_k
    an iteration, by one coin for all clients:
        with probability 1−p   x_k ← x_k − η·∇f_k(x_k)
        with probability p     x_k ← x_k − θ·(x_k − x̄),     θ = η·λ·(1−p)/p

Hanzely and Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020. Algorithm 1, with its step α written by
our learning rate: η = α/(n(1−p)), so that α·λ/(n·p) = θ.

Choices: (1) A round is a run of J local iterations that follows a run of A aggregations; both are drawn by coins common
to all clients, P(J=j) = (1−p)^(j−1)·p and P(A=a) = p^(a−1)·(1−p). x̄ does not change while aggregations follow one
another, so a round is one communication, and it has 1/p + 1/(1−p) iterations on average: p(1−p) communications an
iteration, the paper's Lemma 4.2. (2) A local iteration is one epoch: with full batches the paper's gradient step. The
experiment's epochs count only where p = 0, which is Local: nobody ever aggregates. (3) x̄ is the mean over all clients,
also those that sit a round out: participants upload how far their x_k moved. (4) θ above 1 would overshoot the mean and
is refused. (5) λ and p are tuned by data set in the paper; ours are 1 and 0.2, five epochs a round on average. (6)
BatchNorm's running statistics are drawn together like weights; its count of batches is the client's own. (7) The
generic model is x̄; a client that never took part is scored with it. (8) The local iterations take any optimiser; θ is
always of the learning rate η, that of the round where a schedule changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import tree
from ..core.errors import InputError
from ..core.method import Method, Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree

LOCAL, TOGETHER = 1, 2  # what a coin is for


@dataclass(frozen=True, kw_only=True)
class L2GD(Method):
    """Local models, drawn towards their mean whenever a common coin says so."""

    id: ClassVar[str] = "l2gd"
    paper: ClassVar[str] = "Hanzely & Richtárik, 2020"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    coupled: ClassVar[frozenset[str]] = frozenset({"params"})  # x̄ is the mean of all x_k

    lam: float = setting(1.0, "λ, how strongly the local models are held together", least=0)
    p: float = setting(0.2, "p, the probability that an iteration aggregates; 0: never", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p == 1:
            raise InputError("p", self.p, "below 1: some iterations must be local")

    def check(self, task: Task) -> None:
        """Refuse a θ that overshoots the mean."""
        super().check(task)
        if self.pull(task, task.lr) > 1:
            most = self.p / (task.lr * (1 - self.p))
            raise InputError("lam", self.lam, f"at most {most:g} with p {self.p:g} and lr {task.lr:g}")

    def pull(self, task: Task, rate: float) -> float:
        """Return θ at a learning rate η; 0 where nobody ever aggregates."""
        return rate * self.lam * (1 - self.p) / self.p if self.p else 0.0

    def iterations(self, task: Task) -> tuple[int, int]:
        """Return J and A of this round, the same for every client."""
        return _tosses(task.uniform(LOCAL), self.p), _tosses(task.uniform(TOGETHER), 1 - self.p)

    def init_server(self, task: Task, params: Params) -> Tree:
        """x̄ = w⁰."""
        return {"params": params}

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """x̄."""
        return {"params": server["params"]}

    def generic(self, task: Task, server: Tree) -> Params:
        """x̄."""
        return server["params"]  # type: ignore[no-any-return]

    def init_client(self, task: Task, params: Params) -> Tree:
        """x_k = w⁰."""
        return {"params": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """A aggregations: x_k ← x̄ + (1−θ)^A·(x_k − x̄)."""
        if not self.p:
            return {"params": memory["params"]}
        share = (1 - self.pull(task, task.rate)) ** self.iterations(task)[1]

        def draw(x: Tensor, mean: Tensor) -> Tensor:
            return mean + share * (x - mean) if x.is_floating_point() else x

        return {"params": tree.map(draw, memory["params"], down["params"])}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """J local iterations."""
        return (Phase(epochs=self.iterations(task)[0] if self.p else None),)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """How far x_k moved goes up; x_k stays."""
        x = local["params"]
        return {"params": tree.sub(x, memory["params"])}, {"params": x}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """x̄ ← x̄ + 1/n·Σ of the moves."""
        mean = task.average([u.params for u in uploads], [1.0] * len(uploads))
        return {"params": tree.add(server["params"], mean, len(uploads) / task.clients)}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """x_k, or x̄ for a client that never took part."""
        return tree.where(task.seen, memory["params"], down["params"])


def _tosses(u: float, stop: float) -> int:
    """Return the number of tosses until one stops, from one uniform number: P(n) = (1−stop)^(n−1)·stop."""
    return 1 if stop >= 1 else 1 + math.floor(math.log1p(-u) / math.log1p(-stop))
