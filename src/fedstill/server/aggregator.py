"""The Aggregator: collects a round's replies until all are in or the time limit passes, then has the method merge them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import TrainingError
from ..core.method import Method, Upload
from ..core.task import Task
from ..core.tree import Tree
from ..transport.messages import Order, Reply, Transport
from .optimizer import Rule


@dataclass(frozen=True)
class Aggregator:
    """Fires when all replies are in, or `deadline` seconds after the orders went out. Fewer than `minimum`: no merge."""

    deadline: float | None = None
    minimum: int = 1
    rule: Rule | None = None  # what the server makes of the mean; None: the mean itself

    def collect(self, transport: Transport, orders: Sequence[Order]) -> list[Reply]:
        """The replies to these orders that came in time, by ascending client. Strays from earlier rounds are dropped."""
        expected = {(order.kind, order.round, order.client) for order in orders}
        received: dict[int, Reply] = {}
        end = None if self.deadline is None else time.monotonic() + self.deadline
        for reply in transport.replies(self.deadline):
            if end is not None and time.monotonic() > end:
                break
            if (reply.kind, reply.round, reply.client) in expected:
                received.setdefault(reply.client, reply)
            if len(received) == len(expected):
                break
        return [received[client] for client in sorted(received)]

    def merge(self, method: Method, task: Task, server: Tree, replies: Sequence[Reply]) -> Tree:
        """The server's next state; unchanged where too few replied."""
        self.check(task, replies)
        if len(replies) < self.minimum:
            return server
        uploads = [  # what a client was sent: right as long as replies are merged in their own round
            Upload(r.up, r.report["samples"], r.client, method.send(task, server, r.client)) for r in replies
        ]
        merged = method.merge(task, server, uploads)
        return merged if self.rule is None else self.rule.follow(server, merged)

    def check(self, task: Task, replies: Sequence[Reply]) -> None:
        """Stop where training has diverged."""
        for reply in replies:
            loss = reply.report["loss"]
            if not math.isfinite(loss) or not reply.report.get("finite", 1.0):
                what = f"the training loss is {loss}" if not math.isfinite(loss) else "weights are no longer finite"
                raise TrainingError(
                    f"round {reply.round}, client {reply.client}: {what}; a smaller lr (now {task.lr:g}) usually helps"
                )
