"""Per-FedAvg: a shared model from which one gradient step on a client's own data makes a good personal one (MAML).

    w̃ = w − α·∇f_k(w; D)
    w ← w − β·(I − α·∇²f_k(w; D″))·∇f_k(w̃; D′)
    fo: the Hessian is left out          hf: ∇²f(w)·g ≈ [∇f(w + δ·g) − ∇f(w − δ·g)] / 2δ,   g = ∇f_k(w̃; D′)
    personal: w_k = w − α·∇f_k(w)        server: w ← mean of the w

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020. Algorithm 1.

Choices: (1) D′ is the plan's batch, so that α = 0 is FedAvg; D and D″ are drawn from the client's own samples by the
step's key, without replacement and as many as D′: disjoint from it only by chance. (2) β is the experiment's lr unless
told; momentum and weight decay act on the outer step alone. (3) δ is not given: 0.001. (4) Only the pass over D′ moves
BatchNorm's running statistics. (5) The personal model's step is taken on all local training data, in evaluation mode;
`adapt_steps` takes several. Every client has data, so one that never took part has its personal model too. (6) The generic
model is w as it is. (7) The server's mean is uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import tree
from ..core.batch import Batch
from ..core.closed import Ahead, ClosedForm
from ..core.method import Phase
from ..core.settings import setting
from ..core.task import Task
from ..core.tree import Params, Tree
from .fedavg import FedAvg

INNER, HESSIAN = 1, 2  # which draw from a step's key


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg, mean="uniform"):
    """A shared model from which one gradient step makes a good personal one."""

    id: ClassVar[str] = "per-fedavg"
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    scores: ClassVar[tuple[str, ...]] = ("personal", "generic")
    personal_gradients: ClassVar[bool] = True

    alpha: float = setting(0.01, "α, the inner step, and the personal model's", least=0)
    beta: float = setting(0.0, "β, the outer step; 0: as lr", least=0)
    variant: Literal["fo", "hf"] = setting("fo", "first-order, or Hessian-free (by a finite difference)")
    delta: float = setting(0.001, "δ, how far the finite difference reaches", above=0)
    adapt_steps: int = setting(1, "gradient steps from the shared to the personal model", least=0)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The experiment's epochs with β."""
        return (Phase(lr=self.beta or None),)

    def loss(self, task: Task, params: Params, local: Tree, batch: Batch) -> Tensor:
        """f_k(w̃; D′), whose gradient by w is the update's: w̃ − w is a constant, and the Hessian's part is added to it."""
        w = {name: value.detach() for name, value in params.items()}
        shift = tree.map(lambda g: -self.alpha * g, self.slope(task, w, task.redraw(batch, INNER)))
        adapted = {name: params[name] + shift[name] for name in shift}
        loss = self.fit(task, {**params, **adapted}, batch)
        if self.variant == "fo":
            return loss
        g = self.slope(task, {**w, **tree.map(torch.detach, adapted)}, batch)
        curved = self.hessian_times(task, w, g, task.redraw(batch, HESSIAN))
        products = tree.map(lambda h, p, at: h * (p - at), curved, task.trainable(params), task.trainable(w))
        return loss - self.alpha * tree.total(products)  # its value is 0, its gradient −α·∇²f·g

    def closed_form(self, task: Task, local: Tree) -> ClosedForm | None:
        """CE at w̃; the Hessian-free variant is left to autograd."""
        return ClosedForm(nested=Ahead(self.alpha, INNER)) if self.variant == "fo" else None

    def slope(self, task: Task, params: Params, batch: Batch) -> Params:
        """∇f_k on a batch; nothing of `params` moves."""
        return task.gradient(lambda p, b: self.fit(task, p, b), params, batch)[0]

    def hessian_times(self, task: Task, params: Params, g: Params, batch: Batch) -> Params:
        """∇²f_k·g by a central difference."""
        ahead, behind = (self.slope(task, {**params, **_added(params, g, d)}, batch) for d in (self.delta, -self.delta))
        return tree.map(lambda a, b: (a - b) / (2 * self.delta), ahead, behind)

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """w − α·∇f_k(w) on the client's own training data."""
        params: Params = down["params"]
        for _ in range(self.adapt_steps):
            g = task.local_gradient(lambda p, b: task.each(task.net(p, b.x, train=False), b), params)
            params = {**params, **_added(params, g, -self.alpha)}
        return params


def _added(params: Params, g: Params, scale: float) -> Params:
    return {name: params[name] + scale * g[name] for name in g}
