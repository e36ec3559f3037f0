"""Clients' optimisers: SGD, Adam and AdamW as `torch.optim` does them; the one place in which they are written.

    SGD     g ← g + wd·w;   b ← μ·b + g;   d ← g + μ·b (Nesterov) or b;   w ← w − η·d
    Adam    g ← g + wd·w;   m ← β₁·m + (1−β₁)·g;   v ← β₂·v + (1−β₂)·g²;   w ← w − η·m̂ / (√v̂ + ε)
    AdamW   w ← (1 − η·wd)·w, then Adam's step without decay                 m̂ = m/(1−β₁ᵗ),   v̂ = v/(1−β₂ᵗ)

Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", ICLR 2019.

An optimiser's state is a tree that starts at zero: "momentum" of SGD; "m", "v" and "t", the steps so far, of Adam. Every
operation is elementwise, so the same code serves one client and a stack of clients with a leading axis, where `t` and `lr` have
one number for each client; a traced step has both as tensors. `update` works in place, `stepped` returns new values and may run
inside `vmap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from . import tree
from .schedule import Schedule
from .tree import Params, Tree

OptimizerName: TypeAlias = Literal["sgd", "adam", "adamw"]
Rate: TypeAlias = "float | Tensor"


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent; its state are momentum buffers, none without momentum."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def slots(self, params: Params) -> Tree:
        """Return a tree of the state's names and shapes; its values are not the state's."""
        return {"momentum": params} if self.momentum else {}

    def init(self, params: Params) -> Tree:
        """Return the state before the first step. Zeros give torch's first step: μ·0 + g = g."""
        return tree.zeros(self.slots(params))

    at_rest = init

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
        params: Params,
        grads: Params,
        state: Tree,
        lr: Rate | None = None,
        live: Tensor | None = None,
        keeps: bool = False,
    ) -> None:
        """Make one step, in place on `params` and `state`.

        For a stack, `lr` holds one learning rate for each client, and clients that are not `live` keep their parameters and,
        where the state outlives the phase (`keeps`), their state.
        """
        momentum = state.get("momentum", {})
        with torch.no_grad():
            for name, w in params.items():
                b = momentum.get(name)
                d, new = self.direction(w, grads[name], b, in_place=not keeps)
                if keeps and b is not None and new is not None:
                    _put(b, new, live)
                if not isinstance(lr, Tensor) and live is None:
                    w.add_(d, alpha=-(self.lr if lr is None else lr))
                    continue
                step = d * (_column(lr, w) if isinstance(lr, Tensor) else self.lr if lr is None else lr)
                if live is None:
                    w.sub_(step)
                else:
                    w.copy_(torch.where(_column(live, w), w - step, w))

    def stepped(self, params: Params, grads: Params, state: Tree, lr: Rate | None = None) -> tuple[Params, Tree]:
        """Return the parameters and the state after one step of one client."""
        rate, momentum = self.lr if lr is None else lr, state.get("momentum", {})
        new: Params = {}
        moving: Params = {}
        for name, w in params.items():
            d, b = self.direction(w, grads[name], momentum.get(name))
            new[name] = w - rate * d
            if b is not None:
                moving[name] = b
        return new, {"momentum": moving} if moving else {}


@dataclass(frozen=True)
class Adam:
    """Adam or, with `decoupled` weight decay, AdamW."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def slots(self, params: Params) -> Tree:
        """Return a tree of the state's names and shapes for a stack of clients; its values are not the state's."""
        first = next(iter(params.values()))
        return {"m": params, "v": params, "t": torch.zeros(len(first), dtype=torch.int64, device=first.device)}

    def init(self, params: Params) -> Tree:
        """Return one client's state before the first step, for `update`, which reads the number of steps: it lies on the host."""
        return {"m": tree.zeros(params), "v": tree.zeros(params), "t": torch.zeros((), dtype=torch.int64)}

    def at_rest(self, params: Params) -> Tree:
        """Return one client's state before the first step, for `stepped`."""
        first = next(iter(params.values()))
        return {**self.init(params), "t": torch.zeros((), dtype=torch.int64, device=first.device)}

    def update(
        self,
        params: Params,
        grads: Params,
        state: Tree,
        lr: Rate | None = None,
        live: Tensor | None = None,
        keeps: bool = False,
    ) -> None:
        """Make one step, in place on `params` and `state`: see `SGD.update`."""
        with torch.no_grad():
            t: Tensor = state["t"]
            if t.ndim:
                after, states = self.stepped(params, grads, state, lr)
                for name, w in params.items():
                    _put(w, after[name], live)
                    for slot in ("m", "v"):
                        _put(state[slot][name], states[slot][name], live if keeps else None)
                _put(t, states["t"], live if keeps else None)
                return
            rate, steps = float(self.lr if lr is None else lr), int(t.add_(1))
            size, root = rate / (1 - self.beta1**steps), (1 - self.beta2**steps) ** 0.5
            for name, w in params.items():
                g, m, v = grads[name], state["m"][name], state["v"][name]
                if self.weight_decay and self.decoupled:
                    w.mul_(1 - rate * self.weight_decay)
                elif self.weight_decay:
                    g = torch.add(g, w, alpha=self.weight_decay)
                m.lerp_(g, 1 - self.beta1)
                v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
                w.addcdiv_(m, (v.sqrt() / root).add_(self.eps), value=-size)

    def stepped(self, params: Params, grads: Params, state: Tree, lr: Rate | None = None) -> tuple[Params, Tree]:
        """Return the parameters and the state after one step of one client, or of all clients of a stack."""
        t = state["t"] + 1
        steps, rate = t.to(torch.float64), self.lr if lr is None else lr
        size, root = rate / (1 - self.beta1**steps), (1 - self.beta2**steps).sqrt()
        new: Params = {}
        m: Params = {}
        v: Params = {}
        for name, w in params.items():
            g = grads[name]
            if self.weight_decay and self.decoupled:
                w = w * (1 - (_column(rate, w) if isinstance(rate, Tensor) else rate) * self.weight_decay)
            elif self.weight_decay:
                g = torch.add(g, w, alpha=self.weight_decay)
            m[name] = torch.lerp(state["m"][name], g, 1 - self.beta1)
            v[name] = self.beta2 * state["v"][name] + (1 - self.beta2) * g * g
            denominator = v[name].sqrt() / _column(root, w).to(w.dtype) + self.eps
            new[name] = w - _column(size, w).to(w.dtype) * m[name] / denominator
        return new, {"m": m, "v": v, "t": t}


Optimizer: TypeAlias = SGD | Adam


@dataclass(frozen=True)
class Recipe:
    """How local training makes its steps, besides learning rate, momentum and weight decay."""

    optimizer: OptimizerName = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0  # the longest gradient that the optimiser is given; 0: any
    keep: bool = False  # whether clients keep the optimiser's state between rounds
    schedule: Schedule | None = None  # None: the rate is constant

    @property
    def plain(self) -> bool:
        """Whether steps are those of SGD on the gradient as it is, at a rate that no step changes."""
        return self.optimizer == "sgd" and not self.clip and not self.by_step

    @property
    def by_step(self) -> bool:
        """Whether a schedule changes the rate within a phase."""
        return self.schedule is not None and self.schedule.over == "steps"

    def factors(self, steps: int) -> list[float]:
        """Return the factors of a phase's steps; none where the rate does not change within a phase."""
        return self.schedule.factors(steps) if self.schedule is not None and self.by_step else []


PLAIN = Recipe()


def clipped(grads: Params, most: float) -> Params:
    """Return one client's gradient, no longer than `most` (0: any) over all its entries, as `clip_grad_norm_` clips it."""
    if not most or not grads:
        return grads
    norms = torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])
    factor = (most / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def _put(old: Tensor, new: Tensor, live: Tensor | None) -> None:
    """Copy new values into old memory, for a stack in the rows that are live."""
    old.copy_(new if live is None else torch.where(_column(live, new), new, old))


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each client so that it broadcasts over the client's entries; a single value as it is."""
    return values.reshape(-1, *[1] * (like.ndim - 1)) if values.ndim else values
