"""Asynchronous modes of the server: replies are merged as they arrive, while other clients are still at work.

    fedasync:  w ← (1 − α_t)·w + α_t·w_k,                          α_t = α·s(t − τ_k)            with every reply
    fedbuff:   w ← w + η·(1/K)·Σ s(t − τ_k)·(w_k − w_τk)                                         with every K replies
    s(x):  constant 1     hinge 1 for x ≤ b, else 1 / (a·(x − b) + 1)     polynomial (x + 1)^−a

t counts the server's steps, τ_k is the step whose model client k started from, w_τk that model; t − τ_k is the staleness.

Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019. Nguyen et al., "Federated Learning with Buffered
Asynchronous Aggregation", AISTATS 2022.

Choices: (1) As many clients are at work as a synchronous round would ask. New ones are asked after the server's step, so they
start from the new model; FedBuff's paper replaces each client as soon as it answers, by one that starts from the old model.
With K as large as the cohort this is the synchronous round. (2) A client's update is rebased onto the current model, w + s·(w_k
− w_τk), and the method merges the rebased models with equal weights. So this works for any method whose merge is a mean, and a
server optimizer (momentum, adam, yogi) takes its step towards that mean. (3) BatchNorm's statistics are mixed, (1 − s)·w +
s·w_k: a sum of differences could leave a variance below 0. Integer tensors are the client's. (4) FedAsync's paper adds a
proximal term to the clients' losses; here the method's own loss is used (FedProx and Ditto have one). (5) a = 0 means 10 for
the hinge and 0.5 for the polynomial, which is FedBuff's 1/√(1 + x). (6) Other uploads of a method (FedPAC's heads and
centroids, FedGen's labels) are merged unchanged, whatever their staleness.
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
from .clock import Epochs, Spans
from .schedule import MERGE, Floats, Outcome, Schedule, as_numbers

BUFFER = 10  # default K, or fewer if fewer clients are at work
SLOPE = {"constant": 0.0, "hinge": 10.0, "polynomial": 0.5}  # default a


@dataclass(frozen=True)
class Asynchrony:
    """An asynchronous mode with its hyper-parameters."""

    kind: Literal["fedasync", "fedbuff"]
    buffer: int = 1
    mixing: float = 1.0
    lr: float = 1.0
    staleness: Literal["constant", "hinge", "polynomial"] = "constant"
    a: float = 0.5
    b: int = 4

    @classmethod
    def of(cls, method: Method, timing: Timing, server: ServerOptimizer, together: int) -> Asynchrony | None:
        """Return the mode that a run asks for, None for "sync"; refuse it if the method or a setting does not support it."""
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
        """Describe the mode and its hyper-parameters in one line."""
        staleness = {"hinge": f"hinge a {self.a:g} b {self.b}", "polynomial": f"polynomial a {self.a:g}"}
        step = f"α {self.mixing:g}" if self.kind == "fedasync" else f"K {self.buffer}, η {self.lr:g}"
        return f"{self.kind}, {step}, staleness {staleness.get(self.staleness, self.staleness)}"

    def scale(self, behind: int) -> float:
        """Return s(x) for a reply that is x = `behind` steps behind."""
        if self.staleness == "polynomial":
            return float((behind + 1) ** -self.a)
        if self.staleness == "hinge" and behind > self.b:
            return 1.0 / (self.a * (behind - self.b) + 1)
        return 1.0

    def rebase(self, task: Task, server: Tree, down: Tree, up: Tree, behind: int) -> Params:
        """Rebase a stale update onto the current model; fresh ones at full weight pass unchanged."""
        w, base, trained = server["params"], down["params"], up["params"]
        if self.kind == "fedasync":
            share = self.mixing * self.scale(behind)
            return {name: _mixed(w[name], value, share) for name, value in trained.items()}
        s, trainable = self.scale(behind), set(task.net.parameters)
        if behind == 0 and s == 1:
            return trained  # type: ignore[no-any-return]
        return {
            name: w[name] + s * (value - base[name]) if name in trainable else _mixed(w[name], value, s)
            for name, value in trained.items()
        }

    def step(self, task: Task, before: Tree, merged: Tree) -> Tree:
        """Return the server's state after FedBuff's step of length η; η = 1 gives `merged` unchanged."""
        if self.lr == 1 or self.kind == "fedasync":
            return merged
        w, mean = (task.trainable(state["params"]) for state in (before, merged))
        params: Params = tree.add(mean, tree.sub(mean, w), self.lr - 1)
        return {**merged, "params": {**merged["params"], **params}}


def _mixed(old: Tensor, new: Tensor, share: float) -> Tensor:
    """Return (1 − share)·old + share·new; share 1 gives `new` to the bit."""
    return torch.lerp(old, new, share) if new.is_floating_point() else new


@dataclass(kw_only=True)
class Asynchronous(Schedule):
    """Rounds that are the server's steps: clients work across rounds, and the server merges replies as they arrive.

    In a round the server asks new clients until enough are at work, waits for the next K replies from any clients, and merges
    them. A client trains only when its reply is due. Its order holds the model that it was sent with, so the result is the same
    to the bit whenever and together with whomever it trains, and its memory changes at the simulated time at which it finishes.

    `busy` holds the arrival of each reply under way, `orders` the order that it answers.
    """

    asynchrony: Asynchrony
    orders: dict[int, Order] = field(default_factory=dict)

    def ask(self, goal: int) -> int:
        """Return the number of clients to ask so that `goal` are at work."""
        return max(0, goal - len(self.busy))

    def land(
        self,
        round: int,
        orders: Sequence[Order],
        epochs: Epochs,
        down: Floats,
        up: float,
        gone: Sequence[int],
    ) -> tuple[Outcome, list[Order]]:
        """Send these orders and wait for the next K replies; return (outcome, orders that are answered).

        `down` are the bytes of each order, `up` those of every reply; the clients in `gone` never answer.
        """
        ids = np.array([order.client for order in orders], dtype=np.int64)
        drops = np.isin(ids, list(gone))
        undisturbed = self.clock.spans(ids, down, np.where(drops, 0.0, up), epochs)
        spans = Spans(
            undisturbed.download,
            undisturbed.generic * ~drops,
            undisturbed.personal * ~drops,
            np.where(drops, 0.0, undisturbed.upload),
            undisturbed.hold,
        )
        leaving = {int(ids[i]): self.now + float(spans.arrival[i]) for i in np.flatnonzero(~drops)}
        self.orders |= {order.client: order for order in orders if order.client in leaving}
        pending = {**self.busy, **leaving}
        due = sorted(pending, key=lambda k: (pending[k], k))[: self.asynchrony.buffer]
        start, closed = self.now, max([self.now, *(pending[k] for k in due)])
        answered = [self.orders.pop(k) for k in sorted(due)]
        end = closed + len(due) * up / MERGE
        self.now, self.busy = end, {k: arrival for k, arrival in sorted(pending.items()) if k not in due}
        state = [
            "dropped" if dropped else "merged" if int(k) in due else "under way"
            for k, dropped in zip(ids, drops, strict=True)
        ]
        folded = sorted(set(due) - set(ids.tolist()))
        return Outcome(round, start, closed, end, as_numbers(ids), state, spans, folded, self.busy), answered

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Send orders; train the clients whose replies are due, by the round of their orders; rebase stale updates."""
        workers = set(self.workers(task.round, [order.client for order in orders]))
        at_work = [order for order in orders if order.client in workers]
        gone = sorted({order.client for order in orders} - workers)
        down = np.array(each(order.down for order in orders), float)
        waiting = at_work or list(self.orders.values())
        up = (
            float(nbytes(coordinator.example(task, waiting[0].down))) if waiting else 0.0
        )  # a mean needs uploads of equal size
        asked = [order.client for order in orders]
        work = self.epochs(coordinator.method, task, asked, coordinator.plan.batch_size)
        outcome, due = self.land(task.round, orders, work, down, up, gone)
        replies: list[Reply] = []
        for t in sorted({order.round for order in due}):
            replies += yield Request([order for order in due if order.round == t])
        answers, record = coordinator.inspect(task, due, sorted(replies, key=lambda reply: reply.client))
        behind = {reply.client: task.round - reply.round for reply in answers}
        sent = {order.client: order.down for order in due}
        merged = []
        for reply in answers:
            k = reply.client
            rebased = self.asynchrony.rebase(task, coordinator.state.server, sent[k], reply.up, behind[k])
            merged.append((reply, Upload(reply.up, 1.0, k, sent[k], rebased)))
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
        """Restore the time from the run's records, and the orders under way from a checkpoint."""
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
