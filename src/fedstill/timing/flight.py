"""Simulated time without rounds that end: clients under way, and the server's steps as their replies arrive.

A step of the server is called a round all the same: it asks new clients until as many are at work as are wanted, waits for the
next K replies, whoever they come from, and merges them. Nobody trains before its reply is due: an order keeps the model it was
sent with, so that training it together with others or by itself, sooner or later, gives the same bits; and a client's memory
changes at the moment at which it has really finished.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.tree import Tree
from ..transport.messages import Order
from .asynchronous import Asynchrony
from .clock import Spans
from .schedule import MERGE, Floats, Outcome, Schedule, _numbers


@dataclass(kw_only=True)
class Flight(Schedule):
    """The clock of an asynchronous run; `busy` says when each reply under way arrives, `orders` what it answers."""

    asynchrony: Asynchrony
    orders: dict[int, Order] = field(default_factory=dict)

    def ask(self, goal: int) -> int:
        """As many as have fallen out of the `goal` at work."""
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
        """Send these orders off and wait for the next K replies: what happened, and the orders that are answered.

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
        return Outcome(round, start, closed, end, _numbers(who), state, spans, folded, self.busy), answered

    def go_on(self, history: Sequence[Mapping[str, Any]], held: Tree) -> None:
        """As it was after these records, with the orders that a checkpoint kept."""
        super().go_on(history, {})
        self.orders = {int(k): Order("train", int(kept["round"]), int(k), kept["down"]) for k, kept in held.items()}

    def kept(self) -> Tree:
        """What a checkpoint must hold: the orders under way."""
        number = functools.partial(torch.tensor, dtype=torch.float64)
        return {str(k): {"round": number(order.round), "down": order.down} for k, order in self.orders.items()}
