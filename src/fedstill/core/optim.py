"""Stochastic gradient descent, as `torch.optim.SGD` does it; the one place in which it is written.

    g ← g + wd·w;   b ← μ·b + g;   d ← g + μ·b (Nesterov) or b;   w ← w − η·d

Every operation is elementwise, so the same code serves one client, a stack of clients with a leading axis, and a traced step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SGD:
    """The optimiser's hyper-parameters; its state is what `init` makes: momentum buffers that start at zero."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def init(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return fresh momentum buffers (none without momentum). Zeros give torch's first step: μ·0 + g = g."""
        return [torch.zeros_like(p) for p in params] if self.momentum else []

    def direction(self, w: Tensor, g: Tensor, b: Tensor | None, in_place: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return (d, the new momentum buffer) for one parameter; the buffer is `b` itself if updated in place."""
        if self.weight_decay:
            g = torch.add(g, w, alpha=self.weight_decay)
        if not self.momentum or b is None:
            return g, b
        b = b.mul_(self.momentum).add_(g) if in_place else self.momentum * b + g
        return (torch.add(g, b, alpha=self.momentum) if self.nesterov else b), b

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Sequence[Tensor],
        lr: Tensor | None = None,
        live: Tensor | None = None,
    ) -> None:
        """Make one step, in place on `params` and `state`.

        For a stack, `lr` holds one learning rate for each client, and clients that are not `live` keep their parameters.
        """
        with torch.no_grad():
            for i, (w, g) in enumerate(zip(params, grads, strict=True)):
                d, _ = self.direction(w, g, state[i] if state else None, in_place=True)
                if lr is None and live is None:
                    w.add_(d, alpha=-self.lr)
                    continue
                step = d * (self.lr if lr is None else _column(lr, w))
                if live is None:
                    w.sub_(step)
                else:
                    w.copy_(torch.where(_column(live, w), w - step, w))


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each client so that it broadcasts over the client's entries."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
