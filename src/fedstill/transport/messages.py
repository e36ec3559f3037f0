"""How orders and replies travel between the coordinator and the edges (the Communication Manager)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..core.tree import Params, Tree


@dataclass(frozen=True)
class Order:
    """What the server asks of a client in a round: to train, or to score models on its own data.

    `generic` is the model for everybody, sent along where the client is to score it. Wait-free: `train` with `work` "generic"
    leaves personal training for later; `begin` is a model for a client that is not asked to train, from which its personal
    training goes on; `idle` says how many `steps` that has made since, for good or (`keep` false) for a score only.
    """

    kind: Literal["train", "score", "begin", "idle"]
    round: int
    client: int
    down: Tree
    generic: Params | None = None
    part: str = "test"
    work: Literal["all", "generic"] = "all"
    steps: int = 0
    keep: bool = True


@dataclass(frozen=True)
class Reply:
    """A client's answer. `up` is all that leaves the client in training; `report` holds plain numbers."""

    kind: Literal["train", "score", "begin", "idle"]
    round: int
    client: int
    up: Tree = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)


class Transport(Protocol):
    """Carries orders to edges and replies back."""

    seconds: float  # spent so far on carrying messages, while no client was at work

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Send orders out; does not wait."""

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Replies as they arrive; ends when no order is out any more, or after `timeout` seconds."""

    def alive(self) -> Sequence[int]:
        """Clients that can be asked."""
