"""The transport `local`: every client in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from . import wire
from .messages import Answering, Order, Reply


class LocalTransport:
    """Hands orders to one edge that holds all clients.

    With `through_wire` every message is turned into bytes and back, as it would be between machines; only that takes `seconds`.
    """

    def __init__(self, edge: Answering, through_wire: bool = False) -> None:
        self.edge, self.through_wire = edge, through_wire
        self.seconds = 0.0
        self._waiting: list[Order] = []

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Keep the orders until somebody asks for the replies."""
        self._waiting += [self._carry(order, Order) for order in orders] if self.through_wire else orders

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield the replies; after `timeout` seconds the rest is given up."""
        orders, self._waiting = self._waiting, []
        most = {order.id: order.most for order in orders} if self.through_wire else {}
        end = None if timeout is None else time.monotonic() + timeout
        for reply in self.edge.handle(orders):
            if end is not None and time.monotonic() > end:
                return
            yield self._returned(reply, most.get(reply.order, 0)) if self.through_wire else reply

    def alive(self) -> Sequence[int]:
        """Return every client."""
        return range(self.edge.clients)

    def _returned(self, reply: Reply, most: int) -> Reply:
        """Carry a reply of at most so many bytes; what cannot be read is counted against its sender."""
        try:
            return self._carry(reply, Reply, most)
        except wire.MessageError as error:
            fault = f"it sent bytes that are no message: {error}"
            return Reply(reply.kind, reply.round, reply.client, run=reply.run, order=reply.order, fault=fault)

    def _carry(self, message: wire.Message, kind: type[wire.Message], most: int = 0) -> wire.Message:
        began = time.perf_counter()
        arrived = wire.decode(wire.encode(message), kind, wire.device_of(message), most)
        self.seconds += time.perf_counter() - began
        return arrived
