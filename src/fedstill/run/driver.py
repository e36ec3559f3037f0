"""The driver: carries the requests of coordinators over one transport, for one run or for several side by side.

Every coordinator runs as if it were alone. In each turn the orders of all that are waiting go out together, so that an edge can
train their clients as one cohort, and each is sent its own replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..core.errors import Paused, TrainingError
from ..transport.messages import Dialogue, Kind, Order, Reply, Request, Transport

Key: TypeAlias = tuple[int, Kind, int, int]  # run, kind, round and client of an order
OnFailure: TypeAlias = Callable[[int, TrainingError], None]


class Driver:
    """One transport, and the orders that are out on it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.out: dict[int, Key] = {}  # orders of requests that wait for "any" reply, and may be answered later
        self.early: list[Reply] = []  # answers to these that came while their run waited for something else

    def run(
        self, dialogues: Mapping[int, Dialogue[None]], on_failure: OnFailure | None = None
    ) -> dict[int, TrainingError]:
        """Run coordinators, by the number of their run, to their ends; return why some could not continue.

        A run whose training fails leaves the others alone; `on_failure` is called with its number and the error at once.
        """
        failed: dict[int, TrainingError] = {}
        for _ in self.turns(dialogues, failed, on_failure):
            pass
        return failed

    def turns(
        self,
        dialogues: Mapping[int, Dialogue[None]],
        failed: dict[int, TrainingError],
        on_failure: OnFailure | None = None,
    ) -> Iterator[None]:
        """Run coordinators, and yield whenever all have got their replies; `failed` is filled with what went wrong."""
        waiting: dict[int, Request] = {}
        replies: dict[int, list[Reply] | None] = dict.fromkeys(dialogues)
        while replies:
            for run, received in replies.items():
                try:
                    waiting[run] = next(dialogues[run]) if received is None else dialogues[run].send(received)
                except (StopIteration, Paused):
                    pass
                except TrainingError as error:
                    failed[run] = error
                    if on_failure is not None:
                        on_failure(run, error)
            yield
            replies = dict(self.exchange(waiting)) if waiting else {}
            waiting = {}

    def ask(self, orders: Sequence[Order], run: int = 0) -> list[Reply]:
        """Send orders of one run outside of its rounds, and return the replies."""
        return self.exchange({run: Request(orders)})[run]

    def exchange(self, requests: Mapping[int, Request]) -> dict[int, list[Reply]]:
        """Send the orders of all requests out, and return for each run its replies by ascending client, or where it waits for
        any reply as they arrived.

        Replies to nobody's order, doubles, and those that come after the deadline are dropped. A reply is matched by the id
        of its order, which other clients do not know; one that names another client, kind, run or round is faulty.
        """
        patient = {run for run, request in requests.items() if request.until == "all"}
        self.transport.dispatch([order for request in requests.values() for order in request.orders])
        missing: dict[int, Key] = {}
        for run, request in requests.items():
            (missing if run in patient else self.out).update({order.id: _key(order) for order in request.orders})
        waiting = frozenset(set(requests) - patient)  # for any reply, or for none
        deadlines = [request.deadline for request in requests.values()]
        deadline = None if None in deadlines else max((d for d in deadlines if d is not None), default=None)
        end = None if deadline is None else time.monotonic() + deadline
        received = [reply for reply in self.early if reply.run in waiting]
        self.early = [reply for reply in self.early if reply.run not in waiting]
        now = {run for run, request in requests.items() if request.until == "now"}
        eager = set(waiting - now - {reply.run for reply in received})
        if missing or eager:
            for reply in self.transport.replies(deadline):
                if end is not None and time.monotonic() > end:
                    break
                if not isinstance(reply.order, int):
                    continue
                asked = missing.pop(reply.order, None)
                key = self.out.pop(reply.order, None) if asked is None else asked
                if key is None:
                    continue
                reply = _checked(reply, key)
                if asked is not None or reply.run in waiting:
                    received.append(reply)
                    eager.discard(reply.run)
                else:
                    self.early.append(reply)
                if not missing and not eager:
                    break
        replies: dict[int, list[Reply]] = {run: [] for run in requests}
        for reply in received:
            replies[reply.run].append(reply)
        return {
            run: sorted(some, key=lambda reply: reply.client) if run in patient else some
            for run, some in replies.items()
        }


def _checked(reply: Reply, key: Key) -> Reply:
    """Return the reply; where it is not to the order that it answers, one without content that says so."""
    if _key(reply) == key:
        return reply
    run, kind, round, client = key
    named = [str(value)[:20] for value in (reply.kind, reply.client, reply.round, reply.run)]
    fault = "it answers an order {!r} to client {}, round {}, run {}: not its own".format(*named)
    return Reply(kind, round, client, run=run, order=reply.order, fault=fault)


def _key(message: Order | Reply) -> Key:
    return message.run, message.kind, message.round, message.client
