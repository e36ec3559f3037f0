"""Orders wait for sites that ask; replies are bound to the site that sends them."""

import threading
import time

import pytest
import torch

from fedstill.core.errors import TrainingError
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply
from fedstill.transport.sites import Sites

LIMIT = 10_000


def order(client: int, round: int = 1, kind: str = "train") -> Order:
    return Order(kind, round, client, {"params": {"w": torch.tensor([float(client)])}})  # type: ignore[arg-type]


def reply_to(data: bytes, **changed: object) -> bytes:
    asked = wire.decode(data, Order)
    fields = {"up": {"params": {"w": asked.down["params"]["w"] + 1}}, "order": asked.id, **changed}
    return wire.encode(Reply(asked.kind, asked.round, fields.pop("client", asked.client), **fields))  # type: ignore[arg-type]


def refusing(patience: float | None = None) -> tuple[Sites, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    return Sites(
        ["a", "b"], limit=LIMIT, patience=patience, refused=lambda site, reason: told.append((site, reason))
    ), told


def test_an_order_waits_until_it_is_answered_and_replies_come_as_they_are_sent() -> None:
    sites, told = refusing()
    sites.dispatch([order(0), order(1)])
    first = sites.next("b")
    assert first is not None
    assert sites.next("b") == first  # a site that was restarted is given it again
    assert sites.take("b", reply_to(first)) == ""
    assert sites.next("b") is None
    replies = sites.replies()
    one = next(replies)
    assert (one.client, float(one.up["params"]["w"])) == (1, 2.0)
    threading.Timer(0.05, lambda: sites.take("a", reply_to(sites.next("a") or b""))).start()
    assert [reply.client for reply in replies] == [0]
    assert not told


def test_orders_that_are_out_after_the_deadline_are_withdrawn_and_late_replies_refused() -> None:
    sites, told = refusing()
    sites.dispatch([order(0), order(1)])
    late, early = sites.next("a"), sites.next("b")
    assert late is not None
    assert early is not None
    sites.take("b", reply_to(early))
    began = time.monotonic()
    assert [reply.client for reply in sites.replies(0.1)] == [1]
    assert 0.05 < time.monotonic() - began < 2
    assert "no longer" in sites.take("a", reply_to(late))
    assert sites.next("a") is None
    assert told == [("a", "it answered an order that is not, or no longer, its own")]


def test_patience_bounds_what_has_no_deadline_of_its_own() -> None:
    sites, _ = refusing(patience=0.05)
    sites.dispatch([order(0)])
    assert list(sites.replies()) == []


def test_a_site_cannot_answer_for_another_nor_twice() -> None:
    sites, told = refusing()
    sites.dispatch([order(0), order(1)])
    mine, others = sites.next("a"), sites.next("b")
    assert mine is not None
    assert others is not None
    assert "not, or no longer, its own" in sites.take("a", reply_to(others))  # the order of b, sent by a
    assert sites.take("a", reply_to(mine)) == ""
    assert sites.take("a", reply_to(mine)) == "it sent a reply twice"
    assert sites.take("b", reply_to(others, client=0)) == "its reply is not to its own order"
    replies = list(sites.replies())
    assert [(reply.client, bool(reply.fault)) for reply in replies] == [(0, False), (1, True)]
    assert [site for site, _ in told] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "no reply"), (b"\x00" * 100, "no reply"), (b"\xff" * 100, "no reply"), (bytes(LIMIT + 1), "more than")],
)
def test_whatever_the_bytes_are_the_site_is_faulty_and_nothing_is_raised(data: bytes, reason: str) -> None:
    sites, told = refusing()
    sites.dispatch([order(0)])
    assert reason in sites.take("a", data)
    (reply,) = sites.replies()
    assert reply.fault
    assert len(told) == 1


def test_a_reply_cut_at_any_byte_or_with_a_byte_changed_raises_nothing() -> None:
    sites, _ = refusing()
    sites.dispatch([order(0)])
    whole = reply_to(sites.next("a") or b"")
    for length in range(0, len(whole), 7):
        sites.dispatch([order(0)])
        assert sites.take("a", whole[:length]) != ""
    for place in range(0, len(whole), 5):
        sites.take("a", whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])


def test_a_site_that_lost_its_state_and_a_hub_that_stops_end_the_run() -> None:
    sites, _ = refusing()
    sites.dispatch([order(0, kind="restore")])
    sites.take("a", reply_to(sites.next("a") or b"", refusal="its state of round 3 is gone"))
    with pytest.raises(TrainingError, match="site a: its state of round 3 is gone"):
        list(sites.replies())
    sites.dispatch([order(1)])
    threading.Timer(0.05, lambda: sites.close("the hub stops")).start()
    with pytest.raises(TrainingError, match="the hub stops"):
        list(sites.replies())


def test_a_site_that_is_late_is_not_waited_for_twice() -> None:
    sites, _ = refusing(patience=0.3)
    sites.dispatch([order(0), order(1)])
    sites.next("a")
    sites.take("b", reply_to(sites.next("b") or b""))
    assert [reply.client for reply in sites.replies()] == [1]
    sites.dispatch([order(0, kind="score"), order(1, kind="score")])
    sites.take("b", reply_to(sites.next("b") or b""))
    began = time.monotonic()
    assert [reply.client for reply in sites.replies()] == [1]
    assert time.monotonic() - began < 0.2
    sites.dispatch([order(0, round=2)])  # it may be back by the next round
    began = time.monotonic()
    assert list(sites.replies()) == []
    assert time.monotonic() - began > 0.25
    sites.next("a")  # it is
    sites.dispatch([order(0, kind="score")])
    threading.Timer(0.1, lambda: sites.take("a", reply_to(sites.next("a") or b""))).start()
    assert [reply.client for reply in sites.replies()] == [0]
