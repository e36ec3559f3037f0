"""Server optimizers: the server's step towards the clients' mean, for any method whose merge is a mean.

    Δ = mean − w                                             the pseudo-gradient, with its sign turned
    momentum:    m ← β₁·m + Δ                                w ← w + η·m
    adam, yogi:  m ← β₁·m + (1−β₁)·Δ                         w ← w + η·m / (√v + τ)
                 v ← β₂·v + (1−β₂)·Δ²  (adam)    v ← v − (1−β₂)·Δ²·sign(v − Δ²)  (yogi)

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019 (momentum, as
FedAvgM); Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (adam and yogi, Algorithm 2).

As in Algorithm 2, m and v have no bias correction; v starts at τ², m at 0. The optimizer updates trainable parameters;
BatchNorm's statistics and integer tensors take the plain mean. Its state is an entry of the server's state, so checkpoints
contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core import tree
from ..core.errors import InputError
from ..core.method import Method
from ..core.training import ServerOptimizer
from ..core.tree import Params, Tree

STATE = "rule"  # the entry of the server's state that holds the optimizer's
STEP = {"momentum": 1.0, "adam": 0.01, "yogi": 0.01}  # default η


@dataclass(frozen=True)
class Rule:
    """A server optimizer with its hyper-parameters; `start` makes its state, `step` returns the next."""

    kind: Literal["momentum", "adam", "yogi"]
    lr: float
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def words(self) -> str:
        """Describe the optimizer and its hyper-parameters in one line."""
        second_moment = "" if self.kind == "momentum" else f", β₂ {self.beta2:g}, τ {self.tau:g}"
        return f"{self.kind}, η {self.lr:g}, β₁ {self.momentum:g}{second_moment}"

    def start(self, params: Params) -> Tree:
        """Return the state before round 1, for these (trainable) parameters."""
        m: Tree = {"m": tree.zeros(params)}
        return m if self.kind == "momentum" else {**m, "v": tree.map(lambda p: torch.full_like(p, self.tau**2), params)}

    def step(self, w: Params, mean: Params, state: Tree) -> tuple[Params, Tree]:
        """Return the server's next parameters and the optimizer's next state, for the names in the state."""
        w, mean = ({name: params[name] for name in state["m"]} for params in (w, mean))
        delta = tree.sub(mean, w)
        if self.kind == "momentum":
            # mean + (η−1)·Δ + η·β₁·m is w + η·(β₁·m + Δ); so written, β₁ = 0 and η = 1 give the mean to the bit
            moved = tree.add(tree.add(mean, delta, self.lr - 1), state["m"], self.lr * self.momentum)
            return moved, {"m": tree.add(delta, state["m"], self.momentum)}
        b1, b2 = self.momentum, self.beta2
        m = tree.map(lambda m, d: b1 * m + (1 - b1) * d, state["m"], delta)
        if self.kind == "adam":
            v = tree.map(lambda v, d: b2 * v + (1 - b2) * d.square(), state["v"], delta)
        else:
            v = tree.map(lambda v, d: v - (1 - b2) * d.square() * torch.sign(v - d.square()), state["v"], delta)
        moved = tree.map(lambda w, m, v: w + self.lr * m / (v.sqrt() + self.tau), w, m, v)
        return moved, {"m": m, "v": v}

    @classmethod
    def of(cls, method: Method, training: ServerOptimizer) -> Rule | None:
        """Return the optimizer that a run asks for, None for the plain mean; refuse it if the method's merge is no mean."""
        if training.server == "mean":
            return None
        if not method.averages:
            right = f"'mean' for {method.id}: its server takes no plain mean for an optimizer to follow"
            raise InputError("server", training.server, right)
        lr = training.server_lr or STEP[training.server]
        return cls(training.server, lr, training.server_momentum, training.server_beta2, training.server_tau)

    def begin(self, server: Tree, trainable: tuple[str, ...]) -> Tree:
        """Return the server's state with the optimizer's initial state added."""
        return {**server, STATE: self.start({name: server["params"][name] for name in trainable})}

    def follow(self, before: Tree, merged: Tree) -> Tree:
        """Return the server's state after the optimizer's step; `params` of `merged` are the clients' mean."""
        moved, state = self.step(before["params"], merged["params"], before[STATE])
        return {**merged, "params": {**merged["params"], **moved}, STATE: state}
