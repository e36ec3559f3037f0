"""The transport `sites`: orders wait until the process of a real site asks for them, and its replies are taken as it sends them.

A site asks, so that it needs no open port, and so that one that was away has nothing to catch up with: its order still waits.
Whoever carries the bytes (`deploy/flare.py`) knows which site it is talking to; here only that name counts, never what a message
says of itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..core.errors import TrainingError, first_line
from . import wire
from .messages import Order, Reply


@dataclass
class Box:
    """What waits for one site."""

    orders: dict[int, tuple[Order, bytes]] = field(default_factory=dict)  # by id, oldest first
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=64))  # ids, to name a reply that comes twice
    seen: float = 0.0  # when the site last asked
    sent: int = 0  # bytes
    received: int = 0
    begun: dict[int, float] = field(default_factory=dict)  # by id of an order when the site was first given it
    late: bool = False  # an order of it was withdrawn, and it has said nothing since
    train_seconds: float = 0.0  # seconds from there to the last reply to `train`


class Sites:
    """The sites of one run: client k is the site `names[k]`."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        limit: int,
        patience: float | None = None,
        refused: Callable[[str, str], None] = lambda site, reason: None,
        noted: Callable[[str, str, Order, bytes], None] = lambda what, site, order, data: None,
        standing: bool = False,
    ) -> None:
        """Take replies of at most `limit` bytes. `refused` is told of every message that is not taken, `noted` of every
        order that goes out and every reply that is taken, with its bytes.

        `patience` is for how many seconds anything is waited for; None: until all have answered. With `standing` orders to
        train are never withdrawn: sites work at them across rounds.
        """
        self.names, self.limit, self.patience, self._refused = tuple(names), limit, patience, refused
        self.seconds = 0.0
        self._client = {name: k for k, name in enumerate(self.names)}
        self.boxes = {name: Box() for name in self.names}
        self._noted, self._standing = noted, standing
        self._arrived: deque[Reply] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    # ---- as a transport ----------------------------------------------------------------------------------------------
    def dispatch(self, orders: Sequence[Order]) -> None:
        """Have the orders wait for their sites."""
        began = time.perf_counter()
        packed = [(order, wire.encode(order)) for order in orders]
        self.seconds += time.perf_counter() - began
        with self._changed:
            for order, data in packed:
                self._noted("order", self.names[order.client], order, data)
                self.boxes[self.names[order.client]].orders[order.id] = order, data
            self._changed.notify_all()

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield replies as they arrive; after the time for them the orders that are still out are withdrawn."""
        most = self.patience if timeout is None else timeout
        end = None if most is None else time.monotonic() + most
        while True:
            with self._changed:
                while not self._arrived and self._awaited() and not self._closed:
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        if self._withdraw() or not self._standing or timeout is not None:
                            break
                        end = None  # what is out now stands
                        continue
                    self._changed.wait(left)
                if self._closed:
                    raise TrainingError(self._closed)
                if not self._arrived:
                    self._withdraw()
                    return
                reply = self._arrived.popleft()
            if reply.kind == "restore" and (reply.refusal or reply.fault):
                raise TrainingError(f"site {self.names[reply.client]}: {reply.refusal or reply.fault}")
            yield reply

    def alive(self) -> Sequence[int]:
        """Return every site: one that is away for a moment is asked as the others, and missed where a deadline passes."""
        return range(len(self.names))

    # ---- as a site's process sees it ---------------------------------------------------------------------------------
    def next(self, site: str, wait: float = 0.0) -> bytes | None:
        """Return the oldest order that waits for a site, again until it is answered; None if there is none in `wait` seconds."""
        box, end = self.boxes[site], time.monotonic() + wait
        with self._changed:
            box.seen, box.late = time.time(), False
            while not box.orders and not self._closed:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            if self._closed:
                return None
            order, data = next(iter(box.orders.values()))
            box.begun.setdefault(order.id, time.monotonic())
            box.sent += len(data)
        return data

    def take(self, site: str, data: bytes) -> str:
        """Take a site's reply; return why not, "" if it was taken. Whatever the bytes are, nothing is raised."""
        box, fault = self.boxes[site], ""
        try:
            if len(data) > self.limit:
                fault = f"it sent {len(data):,} bytes, more than {self.limit:,}"
            else:
                reply = wire.decode(data, Reply)
        except Exception as error:
            fault = f"it sent bytes that are no reply ({first_line(error)[:80]})"
        with self._changed:
            box.seen, box.late = time.time(), False
            box.received += len(data)
            if fault:
                return self._fail(site, fault)
            order, _ = box.orders.get(reply.order, (None, b"")) if isinstance(reply.order, int) else (None, b"")
            if order is None:
                again = reply.order in box.answered
                reason = "it sent a reply twice" if again else "it answered an order that is not, or no longer, its own"
                self._refused(site, reason)
                return reason
            if (reply.client, reply.kind, reply.round, reply.run) != (order.client, order.kind, order.round, order.run):
                return self._fail(site, "its reply is not to its own order", order)
            del box.orders[order.id]
            box.answered.append(order.id)
            self._noted("reply", site, order, data)
            seconds = time.monotonic() - box.begun.pop(order.id, time.monotonic())
            if order.kind == "train":
                box.train_seconds = seconds
            self._arrived.append(reply)
            self._changed.notify_all()
        if isinstance(reply.refusal, str) and reply.refusal:
            self._refused(site, f"it does not do round {order.round}'s work: {reply.refusal[:300]}")
        return ""

    def close(self, reason: str) -> None:
        """Have whoever waits for replies end with an error."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _fail(self, site: str, reason: str, order: Order | None = None) -> str:
        """Have the order that the site was at end with a fault: it is not waited for any longer."""
        box = self.boxes[site]
        if order is None and box.orders:
            order, _ = next(iter(box.orders.values()))
        if order is not None:
            del box.orders[order.id]
            self._arrived.append(
                Reply(order.kind, order.round, order.client, run=order.run, order=order.id, fault=reason)
            )
            self._changed.notify_all()
        self._refused(site, reason)
        return reason

    def _awaited(self) -> bool:
        """Return whether any order is out that is worth waiting for: a site that is late is waited for in training alone.

        Orders that stand are waited for where there are no others.
        """
        out = [(box, order) for box in self.boxes.values() for order, _ in box.orders.values()]
        others = [(box, order) for box, order in out if order.kind != "train"] if self._standing else []
        return any(not box.late or order.kind == "train" for box, order in others or out)

    def _withdraw(self) -> bool:
        """Withdraw the orders that are out, but for those that stand; return whether there were any."""
        withdrawn = False
        for box in self.boxes.values():
            for order, _ in list(box.orders.values()):
                if not (self._standing and order.kind == "train"):
                    box.late = withdrawn = True
                    del box.orders[order.id]
                    box.begun.pop(order.id, None)
        return withdrawn
