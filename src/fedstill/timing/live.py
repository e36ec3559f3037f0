"""Asynchronous and wait-free training where time is real: what has arrived decides, not a clock.

The formulas are those of simulated time (`asynchronous`); a round is one step of the server. Orders that are under way
are part of a checkpoint, ids included: a server that is restarted gives them out again, and a site that had carried one out
answers with the reply that it kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..core.errors import TrainingError
from ..core.task import Task
from ..core.training import Timing
from ..core.tree import Tree
from ..server.coordinator import Coordinator, Exchange, Rounds
from ..transport.messages import Dialogue, Order, Reply, Request
from .asynchronous import Asynchrony

NUMBERS = ("round", "watch", "decided", "taken", "most", "id")  # of an order; an id has 53 bits, as a float64


@dataclass
class AsTheyArrive(Rounds):
    """Rounds that are the server's steps: it merges the first K replies that arrive, from whichever orders they answer.

    Clients at work across rounds are neither asked again nor scored. A refusal ends an order and is none of the K.
    """

    asynchrony: Asynchrony
    orders: dict[int, Order] = field(default_factory=dict)  # under way, by client
    arrived: list[Reply] = field(default_factory=list)  # replies to these that will be merged, oldest first
    again: bool = False  # whether the orders under way must be given out again, after a restart

    def available(self, round: int, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that are not at work."""
        return self.idle(clients)

    def idle(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that are not at work."""
        return [k for k in clients if k not in self.orders]

    def ask(self, goal: int) -> int:
        """Return the number of clients to ask so that `goal` are at work."""
        return max(0, goal - len(self.orders))

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Send orders, wait for the next K replies from any client, and rebase stale updates."""
        lost, self.again = list(self.orders.values()) if self.again else [], False
        self.orders |= {order.client: order for order in orders}
        coordinator.touched.update(self.orders)
        self.arrived += yield Request([*lost, *orders], until="now")
        answered: list[Order] = []
        replies: list[Reply] = []
        while self.orders and sum(_usable(reply) for reply in replies) < self.asynchrony.buffer:
            if not self.arrived:
                self.arrived += yield Request(until="any")
            if not self.arrived:
                raise TrainingError(f"round {task.round}: {len(self.orders)} clients are at work, and nobody answers")
            reply = self.arrived.pop(0)
            replies.append(reply)
            answered.append(self.orders.pop(reply.client))
        answers, merged, record = self.asynchrony.take(coordinator, task, answered, replies)
        record |= {
            "asked": [order.client for order in orders],
            "answered": [reply.client for reply in replies],  # in the order of arrival
            "at_work": sorted(self.orders),
        }
        decided, busy = {order.client: order.round for order in answered}, frozenset(self.orders)
        return Exchange(answers, merged, record, pending=busy, decided=decided, working=busy)

    def step(self, task: Task, before: Tree, merged: Tree) -> Tree:
        """Return the server's next state: FedBuff's step of length η."""
        return self.asynchrony.step(task, before, merged)

    def state_dict(self) -> Tree:
        """Return the orders under way; those whose replies have arrived, and are not merged yet, are given out again too."""
        number = functools.partial(torch.tensor, dtype=torch.float64)
        return {
            str(k): {"down": order.down, **{name: number(float(getattr(order, name))) for name in NUMBERS}}
            for k, order in self.orders.items()
        }

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Restore the orders under way from a checkpoint."""
        self.orders, self.arrived, self.again = orders_of(state), [], True


def orders_of(state: Tree) -> dict[int, Order]:
    """Return the orders under way, by client, that `AsTheyArrive.state_dict` returned."""
    orders = {}
    for name, entry in state.items():
        numbers: dict[str, Any] = {key: int(entry[key]) for key in NUMBERS}
        orders[int(name)] = Order(
            "train", client=int(name), down=entry["down"], **{**numbers, "watch": bool(numbers["watch"])}
        )
    return orders


def _usable(reply: Reply) -> bool:
    return not reply.refusal and not reply.fault


class Ahead(Rounds):
    """Rounds whose clients upload before their personal training, which goes on at them until their next order (wait-free).

    Clients know from the experiment how long they train; replies say how many personal steps were made since the last one.
    """

    work: Literal["all", "generic"] = "generic"

    def __init__(self, training: Timing) -> None:
        until = training.wait_free == "until-download"
        self.everyone = (
            until and training.unselected == "broadcast"
        )  # whether clients that are not asked get the model too

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Carry out the round; clients that are not asked go on from the model that they are sent, if they are."""
        asked = {order.client for order in orders}
        others = (
            [coordinator.order("begin", task, k) for k in coordinator.present() if k not in asked]
            if self.everyone
            else []
        )
        replies = yield Request([*orders, *others], self.deadline)
        begun = coordinator.sound([reply for reply in replies if reply.kind == "begin"])
        answers, record = coordinator.inspect(task, orders, [reply for reply in replies if reply.kind == "train"])
        uploads = coordinator.uploads(answers, orders)
        record["personal_steps"] = steps_of([*answers, *begun])
        return Exchange(answers, list(zip(answers, uploads, strict=True)), record, besides=others)

    def before_scores(self, coordinator: Coordinator, record: dict[str, Any]) -> Dialogue[None]:
        """After the last round, have personal training end, and count it."""
        if record["round"] < coordinator.task.rounds:
            return
        here, task = set(coordinator.present()), dataclasses.replace(coordinator.task, round=record["round"])
        orders = [coordinator.order("idle", task, k, {}) for k in sorted(coordinator.touched) if k in here]
        replies = coordinator.sound((yield Request(orders)))
        coordinator.gate.diverged(task, replies)
        record["personal_steps"] += steps_of(replies)


def steps_of(replies: Sequence[Reply]) -> int:
    """Return the personal steps that replies report."""
    return int(sum(reply.report.get("personal_steps", 0) for reply in replies))
