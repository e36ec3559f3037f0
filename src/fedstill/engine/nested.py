"""Loops for steps that take several gradients, in which the first and largest layer's inner weights are never written down.

A gradient of a layer's weights is δᵀ·a: of a batch of b samples it has rank b. So weights that lie some gradients away from W
are s·W + Dᵀ·a with a D of b rows, and what they make of a batch a′ follows from W's own product and the samples' products:

    a′·(s·W + Dᵀ·a)ᵀ = s·(a′·Wᵀ) + (a′·aᵀ)·D

which takes b products for each sample in place of one for each input and unit. The layers above, which are small, have copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.closed import Ahead, Envelope
from ..core.optim import SGD
from ..core.task import drawn
from ..core.tree import Params
from ..data.samples import Rows, gather
from .fused import Layer, Loop, Objective, Room, Weights


class NestedLoop(Loop):
    """A loop with a second set of weights, on the way from the first."""

    widest = 2

    def __init__(self, layers: tuple[Layer, ...], like: Params, moving: frozenset[str], sgd: SGD) -> None:
        super().__init__(layers, like, moving, sgd)
        self.inner = Weights(layers, like)


class AheadLoop(NestedLoop):
    """Per-FedAvg's first-order step: w ← w − η·∇f(w − α·∇f(w; D))."""

    def epoch(self, x: Rows, y: Tensor, order: Tensor, size: int, keys: Tensor | None) -> Tensor:
        """Pass once over the samples; each batch comes with another one that its step's key draws."""
        nested, samples = self.form.nested, len(order)
        assert isinstance(nested, Ahead)
        assert keys is not None
        full, rest = divmod(samples, size)
        ranks = drawn(keys, nested.stream, len(y))[:, :size]
        others = torch.cat([ranks[:full].reshape(-1), ranks[full, :rest]]) if rest else ranks.reshape(-1)
        data = self.like.new_ones(samples, self.inputs[0] + 1)
        gather(x, others, data[:, :-1])
        self.other = Objective(self.form, y, others, self.outputs, x.dtype)
        self.others = torch.split(data[:, : self.weights[0].shape[1]], size)
        self.other_targets = torch.split(self.other.targets, size)
        return super().epoch(x, y, order, size, keys)

    def step(
        self, objective: Objective, room: Room, a: Tensor, z: Tensor, targets: Tensor, number: int, last: bool
    ) -> None:
        """Make a step by the gradient at the weights ahead; write the logits there to `z`."""
        nested, top = self.form.nested, len(self.layers) - 1
        assert isinstance(nested, Ahead)
        first, rate, other = room.units[0] if top else z, -nested.alpha / room.rows, self.others[number]
        torch.mm(other, self.own.transposed[0], out=first)
        self.forward(room, self.own, z)
        self.other.slope(z, self.other_targets[number], room.slopes[top])
        self.backward(room, self.own, 0)
        for i in range(1, top + 1):
            torch.addmm(self.weights[i], room.risen[i], room.before[i - 1], alpha=rate, out=self.inner.all[i])
        base, products = torch.mm(a, self.own.transposed[0]), torch.mm(a, other.t())
        torch.addmm(base, products, room.slopes[0], alpha=rate, out=first)
        self.forward(room, self.inner, z)
        objective.slope(z, targets, room.slopes[top])
        self.backward(room, self.inner, 0)
        for i in range(top + 1):
            self.update(i, room.risen[i], room.before[i - 1] if i else a, room.rows)


class EnvelopeLoop(NestedLoop):
    """pFedMe's step: θ by inner steps on one batch, then w towards θ. The first layer's θ is s·W + Dᵀ·a."""

    def step(
        self, objective: Objective, room: Room, a: Tensor, z: Tensor, targets: Tensor, number: int, last: bool
    ) -> None:
        """Make a step; write the logits at w to `z`."""
        nested, top, weights, thetas = self.form.nested, len(self.layers) - 1, self.weights, self.inner.all
        assert isinstance(nested, Envelope)
        keeps, back = 1 - nested.lr * (self.sgd.weight_decay + nested.lam), nested.lr * nested.lam
        towards, rate = nested.rate * nested.lam, -nested.lr / room.rows
        base, products, out = torch.mm(a, self.own.transposed[0]), torch.mm(a, a.t()), torch.empty_like(z)
        share, offset = 1.0, torch.zeros_like(base)
        for i in range(1, top + 1):
            thetas[i].copy_(weights[i])
        for inner in range(nested.steps):
            into = out if inner else z
            torch.addmm(base, products, offset, beta=share, out=room.units[0] if top else into)
            self.forward(room, self.inner, into)
            objective.slope(into, targets, room.slopes[top])
            self.backward(room, self.inner, 0)
            for i in range(1, top + 1):
                thetas[i].addmm_(room.risen[i], room.before[i - 1], beta=keeps, alpha=rate)
                thetas[i].add_(weights[i], alpha=back)
            offset.mul_(keeps).add_(room.slopes[0], alpha=rate)
            share = keeps * share + back
        if last:  # only the θ of the last batch is kept
            torch.addmm(weights[0], offset.t(), a, beta=share, out=thetas[0])
        weights[0].addmm_(offset.t(), a, beta=1 - towards * (1 - share), alpha=towards)
        for i in range(1, top + 1):
            weights[i].lerp_(thetas[i], towards)

    def inner_state(self) -> Params:
        """Return θ."""
        return self.inner.state(self.moves)


LOOPS: dict[type, type[Loop]] = {Ahead: AheadLoop, Envelope: EnvelopeLoop}
