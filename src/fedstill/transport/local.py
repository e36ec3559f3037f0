"""The transport `local`: every client in this process, cohorts through the trainer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from ..core import tree
from ..edge.edge import Controller
from . import wire
from .messages import Order, Reply


class LocalTransport:
    """Carries orders to one controller that stands for all clients.

    With `through_wire` every message is turned into bytes and back, as it would be between machines; only that takes `seconds`.
    """

    def __init__(self, controller: Controller, clients: int, through_wire: bool = False) -> None:
        self.controller, self.clients, self.through_wire = controller, clients, through_wire
        self.seconds = 0.0
        self._waiting: list[Order] = []

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Send orders out."""
        self._waiting.extend(self._travel_down(order) for order in orders)

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Replies in the order of the orders; after `timeout` seconds the rest is given up."""
        orders, self._waiting = self._waiting, []
        end = None if timeout is None else time.monotonic() + timeout
        for reply in self.controller.handle(orders):
            if end is not None and time.monotonic() > end:
                return
            yield self._travel_up(reply)

    def alive(self) -> Sequence[int]:
        """Every client."""
        return range(self.clients)

    def _travel_down(self, order: Order) -> Order:
        if not self.through_wire:
            return order
        began = time.perf_counter()
        arrived = wire.decode(wire.encode(order), Order)
        device = self.controller.trainer.bench.data.train.x.device
        generic = None if arrived.generic is None else tree.to(arrived.generic, device)
        down = tree.to(arrived.down, device)
        self.seconds += time.perf_counter() - began
        return dataclasses.replace(arrived, down=down, generic=generic)

    def _travel_up(self, reply: Reply) -> Reply:
        if not self.through_wire:
            return reply
        began = time.perf_counter()
        arrived = wire.decode(wire.encode(reply), Reply)
        device = self.controller.trainer.bench.data.train.x.device
        up = tree.to(arrived.up, device)
        self.seconds += time.perf_counter() - began
        return Reply(arrived.kind, arrived.round, arrived.client, up, arrived.report)
