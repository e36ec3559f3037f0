"""What a round sends and where its time goes, measured as it happens: the numbers that its record gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.tree import Tree
from ..transport.messages import Order, Reply

SPLIT = ("communication", "client", "server")  # where a round's time goes


def nbytes(sent: Tree, seen: dict[int, int] | None = None) -> int:
    """The bytes of a tree's tensors, every leaf as often as it stands there (the wire sends it so); nothing waits for a device.

    `seen` remembers branches by identity: what all clients are sent is looked at once.
    """
    if seen is not None and id(sent) in seen:
        return seen[id(sent)]
    found = sum(nbytes(part, seen) if isinstance(part, dict) else part.nbytes for part in sent.values())
    if seen is not None:
        seen[id(sent)] = found
    return found


def traffic(orders: Sequence[Order], replies: Sequence[Reply]) -> dict[str, float]:
    """Mean bytes down to a client that was asked and up from one that answered, and the round's total."""
    down, up = _all(order.down for order in orders), _all(reply.up for reply in replies)
    return {
        "bytes_down": down / max(1, len(orders)),
        "bytes_up": up / max(1, len(replies)),
        "bytes_total": down + up,
    }


def each(trees: Iterable[Tree]) -> list[int]:
    """The bytes of each of several trees, which may share branches."""
    kept = list(trees)  # alive while identities are compared
    seen: dict[int, int] = {}
    return [nbytes(sent, seen) for sent in kept]


def _all(trees: Iterable[Tree]) -> int:
    return sum(each(trees))


def split(carrying: float, waited: float, whole: float) -> dict[str, Any]:
    """A round's seconds: what the transport spent on carrying messages, the rest of the wait for replies, and the rest."""
    parts = (carrying, max(0.0, waited - carrying), max(0.0, whole - waited))
    return {f"{name}_seconds": value for name, value in zip(SPLIT, parts, strict=True)}
