"""The server's asynchronous modes: replies are merged as they arrive, while others are still at work.

    fedasync:  w ← (1 − α_t)·w + α_t·w_k,                          α_t = α·s(t − τ_k)            with every reply
    fedbuff:   w ← w + η·(1/K)·Σ s(t − τ_k)·(w_k − w_τk)                                         with every K replies
    s(x):  constant 1     hinge 1 for x ≤ b, else 1 / (a·(x − b) + 1)     polynomial (x + 1)^−a

t counts the server's steps, τ_k is the step whose model client k began with, w_τk that model; t − τ_k is its staleness.

Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019. Nguyen et al., "Federated Learning with Buffered
Asynchronous Aggregation", AISTATS 2022.

Choices: (1) As many clients are kept at work as a synchronous round would ask. New ones are asked when the server has made its
step, so they begin with the new model; FedBuff's paper replaces each client as soon as it answers, by one that begins with the
old model. With K as large as the cohort this is the synchronous round. (2) A client's update is turned into the model that it
stands for now, w + s·(w_k − w_τk), and the method merges those with equal weights: so any method whose merge is a mean is
carried, and a server rule (momentum, adam, yogi) takes its step towards that mean. (3) BatchNorm's statistics are mixed,
(1 − s)·w + s·w_k: a sum of differences could leave a variance below 0. Whole numbers are the client's. (4) FedAsync's paper
adds a proximal term to clients' losses; here the method's own loss stands (FedProx and Ditto have one). (5) a = 0: 10 for the
hinge, 0.5 for the polynomial, which is FedBuff's 1/√(1 + x). (6) What else a method uploads (FedPAC's heads and centroids,
FedGen's labels) is merged as it came, whatever its staleness.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.errors import InputError
from ..core.method import Method, Upload
from ..core.task import Task
from ..core.training import ServerOptimizer, Timing
from ..core.tree import Params, Tree
from ..server.coordinator import Coordinator, Exchange
from ..server.records import each, nbytes
from ..transport.messages import Dialogue, Order, Reply, Request
from .clock import Spans
from .schedule import MERGE, Floats, Outcome, Schedule, as_numbers, epochs

BUFFER = 10  # K where none is given and so many are at work
SLOPE = {"constant": 0.0, "hinge": 10.0, "polynomial": 0.5}  # a where none is given


@dataclass(frozen=True)
class Asynchrony:
    """A mode with its numbers."""

    kind: Literal["fedasync", "fedbuff"]
    buffer: int = 1
    mixing: float = 1.0
    lr: float = 1.0
    staleness: Literal["constant", "hinge", "polynomial"] = "constant"
    a: float = 0.5
    b: int = 4

    @classmethod
    def of(cls, method: Method, timing: Timing, server: ServerOptimizer, together: int) -> Asynchrony | None:
        """The mode that a run asks for, refused where the method or another setting does not go with it."""
        kind = timing.mode
        if kind == "sync":
            return None
        if not method.averages:
            right = f"'sync' for {method.id}: what its server does is no plain mean of models, so a stale reply cannot join it"
            raise InputError("mode", kind, right)
        if kind == "fedbuff" and timing.buffer > together:
            right = f"at most {together}, the clients at work at a time, or fewer replies would never come"
            raise InputError("buffer", timing.buffer, right)
        buffer = 1 if kind == "fedasync" else timing.buffer or min(BUFFER, together)
        lr = server.server_lr or 1.0 if server.server == "mean" else 1.0
        slope = timing.staleness_a or SLOPE[timing.staleness]
        return cls(kind, buffer, timing.mixing, lr, timing.staleness, slope, timing.staleness_b)

    def words(self) -> str:
        """The mode and its numbers in words."""
        s = {"hinge": f"hinge a {self.a:g} b {self.b}", "polynomial": f"polynomial a {self.a:g}"}
        how = f"α {self.mixing:g}" if self.kind == "fedasync" else f"K {self.buffer}, η {self.lr:g}"
        return f"{self.kind}, {how}, staleness {s.get(self.staleness, self.staleness)}"

    def scale(self, behind: int) -> float:
        """s(x) for a reply that is so many steps behind."""
        if self.staleness == "polynomial":
            return float((behind + 1) ** -self.a)
        if self.staleness == "hinge" and behind > self.b:
            return 1.0 / (self.a * (behind - self.b) + 1)
        return 1.0

    def rebase(self, task: Task, server: Tree, down: Tree, up: Tree, behind: int) -> Params:
        """Return the parameters that stand for a client's update now; fresh ones at full weight pass unchanged."""
        w, base, moved = server["params"], down["params"], up["params"]
        if self.kind == "fedasync":
            share = self.mixing * self.scale(behind)
            return {name: _mixed(w[name], value, share) for name, value in moved.items()}
        s, trainable = self.scale(behind), set(task.net.parameters)
        if behind == 0 and s == 1:
            return moved  # type: ignore[no-any-return]
        return {
            name: w[name] + s * (value - base[name]) if name in trainable else _mixed(w[name], value, s)
            for name, value in moved.items()
        }

    def step(self, task: Task, before: Tree, merged: Tree) -> Tree:
        """The server's state after FedBuff's step of length η; η = 1 is what was merged."""
        if self.lr == 1 or self.kind == "fedasync":
            return merged
        w, mean = (task.trainable(state["params"]) for state in (before, merged))
        moved: Params = tree.add(mean, tree.sub(mean, w), self.lr - 1)
        return {**merged, "params": {**merged["params"], **moved}}


def _mixed(old: Tensor, new: Tensor, share: float) -> Tensor:
    """(1 − share)·old + share·new; share 1 gives `new` to the bit."""
    return torch.lerp(old, new, share) if new.is_floating_point() else new


@dataclass(kw_only=True)
class Asynchronous(Schedule):
    """Rounds without an end that all wait for: clients under way, and the server's steps as their replies arrive.

    A step of the server is called a round all the same: it asks new clients until as many are at work as are wanted, waits for
    the next K replies, whoever they come from, and merges them. Nobody trains before its reply is due: an order keeps the model
    it was sent with, so that training it together with others or by itself, sooner or later, gives the same bits; and a client's
    memory changes at the moment at which it has really finished.

    `busy` says when each reply under way arrives, `orders` what it answers.
    """

    asynchrony: Asynchrony
    orders: dict[int, Order] = field(default_factory=dict)

    def ask(self, goal: int) -> int:
        """Return how many are missing of the `goal` that should be at work."""
        return max(0, goal - len(self.busy))

    def land(
        self,
        round: int,
        orders: Sequence[Order],
        epochs: tuple[float, float],
        down: Floats,
        up: float,
        gone: Sequence[int],
    ) -> tuple[Outcome, list[Order]]:
        """Send these orders off and wait for the next K replies: return what happened, and the orders that are answered.

        `down` are bytes in the order of the orders, `up` those of every reply; `gone` are those who never answer.
        """
        who = np.array([order.client for order in orders], dtype=np.int64)
        drops = np.isin(who, list(gone))
        whole = self.clock.spans(who, down, np.where(drops, 0.0, up), epochs)
        spans = Spans(
            whole.download,
            whole.generic * ~drops,
            whole.personal * ~drops,
            np.where(drops, 0.0, whole.upload),
            whole.hold,
        )
        leaving = {int(who[i]): self.now + float(spans.arrival[i]) for i in np.flatnonzero(~drops)}
        self.orders |= {order.client: order for order in orders if order.client in leaving}
        pending = {**self.busy, **leaving}
        due = sorted(pending, key=lambda k: (pending[k], k))[: self.asynchrony.buffer]
        start, closed = self.now, max([self.now, *(pending[k] for k in due)])
        answered = [self.orders.pop(k) for k in sorted(due)]
        end = closed + len(due) * up / MERGE
        self.now, self.busy = end, {k: arrival for k, arrival in sorted(pending.items()) if k not in due}
        state = [
            "dropped" if gone_ else "merged" if int(k) in due else "under way"
            for k, gone_ in zip(who, drops, strict=True)
        ]
        folded = sorted(set(due) - set(who.tolist()))
        return Outcome(round, start, closed, end, as_numbers(who), state, spans, folded, self.busy), answered

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Send orders off; have those trained whose replies are due, by the round of their orders; rebase stale updates."""
        workers = set(self.workers(task.round, [order.client for order in orders]))
        at_work = [order for order in orders if order.client in workers]
        gone = sorted({order.client for order in orders} - workers)
        down = np.array(each(order.down for order in orders), float)
        waiting = at_work or list(self.orders.values())
        up = float(nbytes(coordinator.example(task, waiting[0].down))) if waiting else 0.0  # a mean takes equal uploads
        outcome, due = self.land(task.round, orders, epochs(coordinator.method, task), down, up, gone)
        replies: list[Reply] = []
        for t in sorted({order.round for order in due}):
            replies += yield Request([order for order in due if order.round == t])
        answers, record = coordinator.inspect(task, due, sorted(replies, key=lambda reply: reply.client))
        behind = {reply.client: task.round - reply.round for reply in answers}
        began = {order.client: order.down for order in due}
        merged = []
        for reply in answers:
            k = reply.client
            rebased = self.asynchrony.rebase(task, coordinator.state.server, began[k], reply.up, behind[k])
            merged.append((reply, Upload(reply.up, 1.0, k, began[k], rebased)))
        staleness = {"staleness": {str(k): value for k, value in behind.items()}}
        outcome = outcome.rejecting({int(k) for k in record.get("rejected", ())})
        timed = {**outcome.record(), **staleness, "timeline": outcome.timeline()}
        busy = frozenset(self.busy)
        decided = {order.client: order.round for order in due}
        return Exchange(answers, merged, {**record, **timed}, pending=busy, decided=decided, working=busy)

    def step(self, task: Task, before: Tree, merged: Tree) -> Tree:
        """Return the server's next state: FedBuff's step of length η."""
        return self.asynchrony.step(task, before, merged)

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Continue after these records, with the orders that a checkpoint held."""
        super().load_state(history, {})
        self.orders = {
            int(k): Order("train", int(v["round"]), int(k), v["down"], watch=bool(v["watch"])) for k, v in state.items()
        }

    def state_dict(self) -> Tree:
        """Return the orders under way."""
        number = functools.partial(torch.tensor, dtype=torch.float64)
        return {
            str(k): {"round": number(order.round), "watch": number(float(order.watch)), "down": order.down}
            for k, order in self.orders.items()
        }
