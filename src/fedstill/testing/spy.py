"""A transport that notes what it carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.tree import Tree
from ..edge.edge import Edge
from ..transport.local import LocalTransport
from ..transport.messages import Order, Reply


class Spy(list[tuple[Reply, Tree]]):
    """Every reply that passes, each with what its client keeps after it. `transport` is the transport to give to a run."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[Order] = []

    def transport(self, edge: Edge) -> LocalTransport:
        """Return a transport that notes what it carries."""
        spy = self

        class Watched(LocalTransport):
            def dispatch(self, orders: Sequence[Order]) -> None:
                """Note the orders and pass them on."""
                spy.orders += orders
                super().dispatch(orders)

            def replies(self, timeout: float | None = None) -> Iterator[Reply]:
                """Note each reply with its client's memory and pass it on."""
                for reply in super().replies(timeout):
                    spy.append((reply, edge.store.get(reply.run * edge.clients + reply.client)))
                    yield reply

        return Watched(edge)

    def trained(self) -> list[Reply]:
        """Return the replies to orders to train."""
        return [reply for reply, _ in self if reply.kind == "train"]
