"""What travels between the coordinator and the edges: orders down, replies up, and the protocols of what carries them."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar

from ..core.tree import Params, Tree

T = TypeVar("T")
Kind: TypeAlias = Literal["train", "score", "begin", "idle", "tune", "model", "state", "restore"]
NEW_ID = functools.partial(secrets.randbits, 53)  # a number that others cannot guess; no result depends on it


@dataclass(frozen=True)
class Order:
    """What the server asks of a client.

    train     train from `down`; with `work` "generic" (wait-free) personal training is left for later
    score     sum up how well the personal model, and `generic` where it came along, do on the samples of `split`: how many they
              get right, or their errors; with the run's metrics and, in `up`, what these can be pooled from
    begin     take `down` as what personal training goes on from (wait-free, a client that is not asked to train)
    idle      make `steps` of personal training; `keep` false: on a copy, for a score only
    tune      train the client's model for `epochs` more, on a copy, and score it before and after
    model     return the personal model
    state     return all that is kept for the client; `restore` puts it back
    """

    kind: Kind
    round: int
    client: int
    down: Tree = field(default_factory=dict)
    generic: Params | None = None
    split: str = "test"
    work: Literal["all", "generic"] = "all"
    steps: int = 0
    keep: bool = True
    epochs: int = 0
    subset: Literal["head", "all"] = "all"  # what `tune` trains
    watch: bool = False  # `train` also scores the downloaded and the trained model
    run: int = 0
    decided: int = 0  # of the client's replies up to this round it is decided whether the server took them
    taken: int = 0  # the round of the last reply that it took; 0: none
    most: int = 0  # bytes that the reply may have on the wire; 0: any
    id: int = field(default_factory=NEW_ID)  # the reply must carry it: a reply in another client's name cannot


@dataclass(frozen=True)
class Reply:
    """A client's answer. `up` is all that leaves the client, or the statistics of its tests; `report` holds plain numbers."""

    kind: Kind
    round: int
    client: int
    up: Tree = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)
    run: int = 0
    refusal: str = ""  # why the client did not do the work; empty: it did
    order: int = 0  # the id of the order that it answers
    fault: str = ""  # why the server's side cannot take it (bytes that are no message …); does not travel


@dataclass(frozen=True)
class Request:
    """What a coordinator yields: orders to send out, and which replies to wait for.

    "all": the replies to these orders, until all are in or `deadline` seconds have passed; "any": whatever has arrived first of
    all orders that are out, these included; "now": as that, without waiting for it.
    """

    orders: Sequence[Order] = ()
    deadline: float | None = None
    until: Literal["all", "any", "now"] = "all"


Dialogue: TypeAlias = Generator[Request, list[Reply], T]  # yields requests, is sent the replies, returns a T


class Transport(Protocol):
    """Carries orders to edges and replies back."""

    seconds: float  # spent so far on carrying messages, while no client was at work

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Send orders out; does not wait."""

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield replies as they arrive, until no order is out any more or `timeout` seconds have passed."""

    def alive(self) -> Sequence[int]:
        """Return the clients that can be asked."""


class Answering(Protocol):
    """What a transport hands orders to: an `edge.edge.Edge`."""

    clients: int

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Yield the replies to the orders."""
