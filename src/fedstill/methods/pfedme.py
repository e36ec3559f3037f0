"""pFedMe: the personal model solves a client's loss near w; w follows the gradient of the Moreau envelope.

    θ̃(w) ≈ argmin_θ  f_B(θ) + λ/2·‖θ − w‖²              K steps of SGD on a batch B, from θ = w, step η_p
    w_k ← w_k − η·λ·(w_k − θ̃(w_k))                      one step for each batch, from w_k = w_t
    server:  w ← (1−β)·w + β·(1/|S|)·Σ w_k

T. Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020. Algorithm 1.

A batch costs K gradients: K times the work of FedAvg.

Choices: (1) The paper makes R steps a round, on a fresh batch each; here as many as the experiment's epochs have batches. (2) θ
starts from w_k for each batch; the authors' code goes on from the last batch's θ, which λ soon forgets. (3) λ = 15, K = 5, η_p
= 0.09 and β = 1, as in the authors' code for MNIST; η is the experiment's lr, and η·λ should stay below 1; η_p·λ above 2 would
diverge and is refused. (4) Neither loop has momentum, whatever the experiment says; its weight decay acts on θ. (5) The
server's mean is uniform, as printed; the authors' code weighs by samples. (6) The client keeps the θ of its last batch: that is
the personal model. One that never took part is scored with w. (7) BatchNorm's statistics move with θ's K passes; w_k has the
same ones, and the server takes their plain mean. (8) In the paper all clients train and S of them are averaged; here only the
participants train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.closed import ClosedForm, Envelope
from ..core.errors import InputError
from ..core.method import Phase, Upload
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PFedMe(FedAvg, mean="uniform"):
    """Personal models near the global one, by Moreau envelopes."""

    id: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "T. Dinh et al., NeurIPS 2020"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    noisy_mean: ClassVar[bool] = True

    lam: float = setting(15.0, "λ, how near the personal model stays to w", above=0)
    k: int = setting(5, "K, steps that solve the personal problem on a batch", least=1)
    personal_lr: float = setting(0.09, "η_p, learning rate of these steps", above=0)
    beta: float = setting(1.0, "β, the server's step towards the mean", above=0)

    def check(self, task: Task) -> None:
        """Refuse inner steps that diverge."""
        super().check(task)
        if self.personal_lr * self.lam > 2:  # |1 − η_p·λ| > 1
            right = f"at most {2 / self.lam:g} (2/λ) with lam {self.lam:g}, or the inner steps diverge"
            raise InputError("personal_lr", self.personal_lr, right)

    def init_client(self, task: Task, params: Params) -> Tree:
        """θ_k = w⁰."""
        return {"theta": params}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """w_k ← w_t, and θ with it."""
        return {"params": down["params"], "theta": down["params"]}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs, without momentum."""
        return (Phase(momentum=0.0),)

    def step(self, task: Task, local: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        """θ ← θ̃(w_k), then w_k ← w_k − η·λ·(w_k − θ)."""
        w = task.trainable(local["params"])
        theta, first = local["params"], None
        for _ in range(self.k):
            grads, loss, buffers = task.gradient(lambda p, b: self.fit(task, p, b), theta, batch)
            first = loss if first is None else first
            moved = {n: theta[n] - self.personal_lr * self._pull(task, grads[n], theta[n], w[n]) for n in w}
            theta = {**theta, **buffers, **moved}
        assert first is not None
        nearer = {name: w[name] - task.lr * self.lam * (w[name] - theta[name]) for name in w}
        return {"params": {**theta, **nearer}, "theta": theta}, first

    def closed_form(self, task: Task, local: Tree) -> ClosedForm:
        """CE, in an envelope."""
        return ClosedForm(nested=Envelope(self.lam, self.k, self.personal_lr, task.lr, "theta"))

    def _pull(self, task: Task, grad: Tensor, theta: Tensor, w: Tensor) -> Tensor:
        """∇f_B(θ) + λ·(θ − w), with weight decay."""
        return grad + task.weight_decay * theta + self.lam * (theta - w)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """w_k goes up, θ_k stays."""
        return {"params": local["params"]}, {"theta": local["theta"]}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """w ← mean + (β−1)·(mean − w), which is (1−β)·w + β·mean."""
        params = task.average([u.params for u in uploads], self.shares(uploads), server["params"])
        mean, w = task.trainable(params), task.trainable(server["params"])
        return {**server, "params": {**params, **tree.add(mean, tree.sub(mean, w), self.beta - 1)}}

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """θ_k, or w for a client that never took part."""
        return tree.where(task.seen, memory["theta"], down["params"])
