"""The driver on a transport whose replies come from other threads: late, lost, doubled, for one run or for several."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from fedstill.core.errors import TrainingError
from fedstill.run.driver import Driver
from fedstill.transport.messages import Dialogue, Order, Reply, Request

LONG = 30.0  # seconds that no test waits


class Posted:
    """A transport whose replies arrive from another thread, each after its client's own delay; None: never."""

    seconds = 0.0

    def __init__(self, delays: dict[int, float | None]) -> None:
        self.delays = delays
        self.box: queue.Queue[Reply] = queue.Queue()
        self.dispatched: list[Order] = []

    def dispatch(self, orders: Sequence[Order]) -> None:
        self.dispatched += orders
        for order in orders:
            delay = self.delays[order.client]
            if delay is not None:
                timer = threading.Timer(delay, self.box.put, (answer(order),))
                timer.daemon = True
                timer.start()

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        end = time.monotonic() + (LONG if timeout is None else timeout)
        while True:
            try:
                yield self.box.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return

    def alive(self) -> Sequence[int]:
        return sorted(self.delays)


def answer(order: Order) -> Reply:
    return Reply(order.kind, order.round, order.client, {}, {"samples": 1.0}, order.run, order=order.id)


def orders(clients: Sequence[int], round: int = 1, run: int = 0) -> list[Order]:
    return [Order("train", round, k, run=run) for k in clients]


def names(replies: Sequence[Reply]) -> list[tuple[int, int]]:
    return [(r.client, r.round) for r in replies]


# ---- one request -----------------------------------------------------------------------------------------------------
def test_all_are_waited_for_and_come_by_client() -> None:
    driver = Driver(Posted({0: 0.10, 1: 0.0, 2: 0.05}))
    began = time.monotonic()
    replies = driver.exchange({0: Request(orders([0, 1, 2]), deadline=LONG)})[0]
    assert names(replies) == [(0, 1), (1, 1), (2, 1)]
    assert time.monotonic() - began < LONG  # nobody waits for the deadline


def test_the_deadline_leaves_out_the_late_and_the_lost() -> None:
    driver = Driver(Posted({0: 0.0, 1: 2 * LONG, 2: None}))
    began = time.monotonic()
    assert names(driver.exchange({0: Request(orders([0, 1, 2]), deadline=1.0)})[0]) == [(0, 1)]
    assert 0.95 < time.monotonic() - began < LONG


def test_a_deadline_that_passes_between_two_replies_ends_the_round() -> None:
    """The transport keeps on giving: the driver stops asking."""

    class Endless(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            yield answer(self.dispatched[0])
            time.sleep(1.1)
            yield answer(self.dispatched[1])
            raise AssertionError("asked for more after the deadline")

    assert names(Driver(Endless({0: None, 1: None})).exchange({0: Request(orders([0, 1]), 1.0)})[0]) == [(0, 1)]


def test_strays_of_an_earlier_round_and_doubles_do_not_count() -> None:
    class Noisy(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            yield answer(Order("train", 0, 1))  # of a round before
            yield answer(Order("train", 1, 1, run=7))  # of a run that is not there
            yield answer(Order("train", 1, 9))  # of a client that was not asked
            yield Reply("train", 1, 1)  # without an order
            yield Reply("train", 1, 1, order=[])  # type: ignore[arg-type]
            first = next(super().replies(timeout))
            yield first
            yield first
            yield from super().replies(timeout)

    assert names(Driver(Noisy({0: 0.0, 1: 0.05})).exchange({0: Request(orders([0, 1]))})[0]) == [(0, 1), (1, 1)]


def test_a_reply_in_another_clients_name_does_not_win_and_costs_nobody_a_reply() -> None:
    """Client 0 answers as client 1, before client 1 does: with its own order's id, and with one that it has guessed."""

    class Spoofing(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            mine, other = self.dispatched
            yield dataclasses.replace(answer(other), order=other.id + 1, report={"samples": 66.0})
            yield dataclasses.replace(answer(other), order=mine.id, report={"samples": 66.0})
            yield from super().replies(timeout)

    zero, one = Driver(Spoofing({0: None, 1: 0.0})).exchange({0: Request(orders([0, 1]))})[0]
    assert (zero.client, zero.report) == (0, {})
    assert "'train' to client 1, round 1, run 0: not its own" in zero.fault
    assert (one.client, one.report, one.fault) == (1, {"samples": 1.0}, "")


@pytest.mark.parametrize("change", [{"round": 2}, {"kind": "score"}, {"run": 3}, {"client": 2}])
def test_a_reply_to_another_order_than_its_own_is_faulty(change: dict) -> None:
    class Confused(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            yield dataclasses.replace(answer(self.dispatched[0]), **change)

    (found,) = Driver(Confused({0: None})).exchange({0: Request(orders([0]))})[0]
    assert (found.kind, found.round, found.client, found.run) == ("train", 1, 0, 0)
    assert "not its own" in found.fault


def test_a_late_reply_is_a_stray_in_the_next_round() -> None:
    driver = Driver(Posted({0: 0.0, 1: 0.25}))
    assert names(driver.exchange({0: Request(orders([0, 1], 1), deadline=0.1)})[0]) == [(0, 1)]
    assert names(driver.exchange({0: Request(orders([0, 1], 2), deadline=LONG)})[0]) == [(0, 2), (1, 2)]


def test_no_orders_no_waiting() -> None:
    class Silent(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            raise AssertionError("nothing is out")

    assert Driver(Silent({})).exchange({0: Request(), 1: Request((), 0.5)}) == {0: [], 1: []}


def test_ask_gives_the_replies_of_one_run() -> None:
    driver = Driver(Posted({0: 0.0, 1: 0.0}))
    assert [r.run for r in driver.ask(orders([1, 0], run=3), run=3)] == [3, 3]


# ---- whatever has arrived --------------------------------------------------------------------------------------------
def test_any_returns_with_the_first_and_the_others_come_without_new_orders() -> None:
    """As FedBuff over a network asks: K replies at a time, while others are still at work."""
    transport = Posted({0: 0.15, 1: 0.0, 2: 0.3})
    seen: list[list[tuple[int, int]]] = []

    def buffered() -> Dialogue[None]:
        replies = yield Request(orders([0, 1, 2]), until="any")
        seen.append(names(replies))
        while sum(map(len, seen)) < 3:
            replies = yield Request((), until="any")
            seen.append(names(replies))
        replies = yield Request(orders([1], round=2), until="any")  # nobody but 1 is out any more
        seen.append(names(replies))

    assert Driver(transport).run({0: buffered()}) == {}
    assert seen == [[(1, 1)], [(0, 1)], [(2, 1)], [(1, 2)]]
    assert len(transport.dispatched) == 4


def test_any_with_a_deadline_may_come_back_empty_and_the_reply_still_counts() -> None:
    driver = Driver(Posted({0: 0.3}))
    assert driver.exchange({0: Request(orders([0]), 0.05, "any")}) == {0: []}
    assert names(driver.exchange({0: Request((), LONG, "any")})[0]) == [(0, 1)]


def test_a_reply_that_was_asked_for_by_any_does_not_count_twice() -> None:
    driver = Driver(Posted({0: 0.0, 1: 0.2}))
    assert names(driver.exchange({0: Request(orders([0, 1]), until="any")})[0]) == [(0, 1)]
    driver.transport.box.put(answer(driver.transport.dispatched[0]))  # type: ignore[attr-defined]
    assert names(driver.exchange({0: Request((), until="any")})[0]) == [(1, 1)]


# ---- several runs ----------------------------------------------------------------------------------------------------
def counting(run: int, rounds: int, log: list[tuple[int, int, list[int]]], clients=(0, 1)) -> Dialogue[None]:
    for t in range(1, rounds + 1):
        replies = yield Request(orders(clients, t, run))
        assert all((r.run, r.round) == (run, t) for r in replies)
        log.append((run, t, [r.client for r in replies]))


def test_runs_side_by_side_get_their_own_replies_and_may_end_apart() -> None:
    transport, log = Posted({0: 0.03, 1: 0.0, 2: 0.01}), []
    assert Driver(transport).run({0: counting(0, 2, log), 4: counting(4, 3, log, (2, 1))}) == {}
    assert [entry for entry in log if entry[0] == 0] == [(0, 1, [0, 1]), (0, 2, [0, 1])]
    assert [entry for entry in log if entry[0] == 4] == [(4, 1, [1, 2]), (4, 2, [1, 2]), (4, 3, [1, 2])]
    # The orders of all that are waiting go out together.
    assert [(o.run, o.round) for o in transport.dispatched[:4]] == [(0, 1), (0, 1), (4, 1), (4, 1)]


def test_one_that_asks_for_nothing_goes_on_beside_the_others() -> None:
    log: list[tuple[int, int, list[int]]] = []

    def idle() -> Dialogue[None]:
        for _ in range(3):
            assert (yield Request()) == []
        log.append((9, 0, []))

    Driver(Posted({0: 0.0, 1: 0.0})).run({0: counting(0, 3, log), 9: idle()})
    assert {entry[0] for entry in log} == {0, 9}
    assert len(log) == 4


def test_a_run_that_cannot_go_on_leaves_the_others_alone() -> None:
    log: list[tuple[int, int, list[int]]] = []

    def failing() -> Dialogue[None]:
        yield Request(orders([0], 1, 1))
        raise TrainingError("no more")

    failed = Driver(Posted({0: 0.0, 1: 0.0})).run({0: counting(0, 3, log), 1: failing()})
    assert {run: str(error) for run, error in failed.items()} == {1: "no more"}
    assert len(log) == 3


def test_any_other_error_is_raised() -> None:
    def broken() -> Dialogue[None]:
        yield Request(orders([0]))
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        Driver(Posted({0: 0.0})).run({0: broken()})


def test_the_slowest_deadline_counts_for_all_that_wait_together() -> None:
    driver = Driver(Posted({0: 0.2, 1: 0.0}))
    replies = driver.exchange({0: Request(orders([0], 1, 0), 0.05), 1: Request(orders([1], 1, 1), LONG)})
    # Run 1 is answered at once, but run 0's reply is still worth waiting for until the later of the two deadlines.
    assert (names(replies[0]), names(replies[1])) == ([(0, 1)], [(1, 1)])


def test_what_arrives_while_a_run_waits_for_something_else_is_there_when_it_asks_for_any() -> None:
    """Scoring or a checkpoint while clients are at work: their replies are not mixed with it, and not lost."""
    seen: list[list[tuple[str, int]]] = []

    def run() -> Dialogue[None]:
        for request in (
            Request(orders([0, 1, 2]), until="any"),
            Request([Order("score", 1, 3)]),
            Request((), until="any"),
            Request((), until="any"),
        ):
            replies = yield request
            seen.append([(r.kind, r.client) for r in replies])

    Driver(Posted({0: 0.0, 1: 0.05, 2: 0.4, 3: 0.2})).run({0: run()})
    assert seen == [[("train", 0)], [("score", 3)], [("train", 1)], [("train", 2)]]
