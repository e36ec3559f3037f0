"""Stochastic gradient descent on lists of tensors, as `torch.optim.SGD` does it, for one client or a stack of them.

    g ← g + wd·w;   b ← μ·b + g;   g ← g + μ·b (Nesterov) or b;   w ← w − η·g

Every operation is elementwise, so the same code serves parameters with a leading client axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SGD:
    """The optimiser's numbers; its state is the list that `init` makes and `update` changes."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def init(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Fresh momentum buffers (none where there is no momentum). Zeros give torch's first step: μ·0 + g = g."""
        return [torch.zeros_like(p) for p in params] if self.momentum else []

    def update(self, params: list[Tensor], grads: list[Tensor], state: list[Tensor], lr: Tensor | None = None) -> None:
        """One step, in place on `params` and `state`; `grads` may be overwritten. `lr`: one for each client of a stack."""
        with torch.no_grad():
            if self.weight_decay:
                grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
            if self.momentum:
                torch._foreach_mul_(state, self.momentum)
                torch._foreach_add_(state, grads)
                grads = list(torch._foreach_add(grads, state, alpha=self.momentum)) if self.nesterov else state
            if lr is None:
                torch._foreach_add_(params, grads, alpha=-self.lr)
            else:
                for p, g in zip(params, grads, strict=True):
                    p.sub_(lr.reshape(-1, *[1] * (p.ndim - 1)) * g)
