"""What a round sends and where its time goes, measured as it happens: the numbers that its record gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.tree import Tree
from ..transport.messages import Order, Reply

SPLIT = ("communication", "client", "server")  # where a round's time goes


def nbytes(sent: Tree, seen: dict[int, int] | None = None) -> int:
    """Return the bytes of a tree's tensors, every leaf as often as it is sent; nothing waits for a device.

    `seen` remembers branches by identity: what all clients are sent is looked at once.
    """
    if seen is not None and id(sent) in seen:
        return seen[id(sent)]
    total = sum(nbytes(leaf, seen) if isinstance(leaf, dict) else leaf.nbytes for leaf in sent.values())
    if seen is not None:
        seen[id(sent)] = total
    return total


def traffic(orders: Sequence[Order], replies: Sequence[Reply]) -> dict[str, float]:
    """Return the mean bytes down to a client that was asked and up from one that answered, and the round's total."""
    down, up = _all(order.down for order in orders), _all(reply.up for reply in replies)
    return {
        "bytes_down": down / max(1, len(orders)),
        "bytes_up": up / max(1, len(replies)),
        "bytes_total": down + up,
    }


def each(trees: Iterable[Tree]) -> list[int]:
    """Return the bytes of each of several trees, which may share branches."""
    alive = list(trees)  # while identities are compared
    seen: dict[int, int] = {}
    return [nbytes(sent, seen) for sent in alive]


def _all(trees: Iterable[Tree]) -> int:
    return sum(each(trees))


def split_seconds(carrying: float, waited: float, total: float) -> dict[str, Any]:
    """Return a round's seconds: what the transport spent on carrying messages, the rest of the wait for replies, the rest."""
    parts = (carrying, max(0.0, waited - carrying), max(0.0, total - waited))
    return {f"{name}_seconds": value for name, value in zip(SPLIT, parts, strict=True)}
