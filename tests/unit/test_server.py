"""Sampler, aggregator and coordinator, with transports that are late, lossy or noisy."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.server.aggregator import Aggregator
from fedstill.server.sampler import count
from fedstill.transport import wire
from fedstill.transport.local import LocalTransport
from fedstill.transport.messages import Order, Reply

from ..problems import SETTINGS, identical, make, ragged


class Posted:
    """A transport whose replies arrive from another thread, each after its own delay."""

    def __init__(self, delays: dict[int, float | None]) -> None:
        self.delays = delays
        self.box: queue.Queue[Reply] = queue.Queue()

    def dispatch(self, orders: Sequence[Order]) -> None:
        self.out = len(orders)
        for order in orders:
            delay = self.delays[order.client]
            if delay is not None:
                report = {"loss": 1.0, "steps": 1.0, "samples": float(order.client + 1)}
                reply = Reply(
                    "train", order.round, order.client, {"params": {"w": torch.tensor(float(order.client))}}, report
                )
                threading.Timer(delay, self.box.put, (reply,)).start()

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                yield self.box.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                return

    def alive(self) -> Sequence[int]:
        return sorted(self.delays)


def orders(clients: Sequence[int], round: int = 1) -> list[Order]:
    return [Order("train", round, k, {}) for k in clients]


def test_fires_as_soon_as_all_are_in_and_sorts_by_client() -> None:
    transport = Posted({0: 0.10, 1: 0.0, 2: 0.05})
    transport.dispatch(orders([0, 1, 2]))
    began = time.monotonic()
    replies = Aggregator(deadline=30).collect(transport, orders([0, 1, 2]))
    assert [r.client for r in replies] == [0, 1, 2]
    assert time.monotonic() - began < 5


def test_fires_at_the_deadline_without_the_late_and_the_lost() -> None:
    transport = Posted({0: 0.0, 1: 5.0, 2: None})
    transport.dispatch(orders([0, 1, 2]))
    began = time.monotonic()
    replies = Aggregator(deadline=0.3).collect(transport, orders([0, 1, 2]))
    assert [r.client for r in replies] == [0]
    assert 0.25 < time.monotonic() - began < 2


def test_strays_of_an_earlier_round_and_doubles_do_not_count() -> None:
    class Noisy(Posted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            yield Reply(
                "train", 0, 1, {"params": {"w": torch.tensor(99.0)}}, {"loss": 1.0, "steps": 1.0, "samples": 1.0}
            )
            first = next(super().replies(timeout))
            yield first
            yield first
            yield from super().replies(timeout)

    transport = Noisy({0: 0.0, 1: 0.05})
    transport.dispatch(orders([0, 1]))
    replies = Aggregator().collect(transport, orders([0, 1]))
    assert [(r.client, r.round) for r in replies] == [(0, 1), (1, 1)]


def test_below_the_minimum_the_model_stays() -> None:
    server = {"params": {"w": torch.tensor(5.0)}}
    assert Aggregator(minimum=1).merge(fs.FedAvg(), None, server, []) is server  # type: ignore[arg-type]


def test_lost_replies_equal_a_round_whose_cohort_were_the_survivors(monkeypatch) -> None:
    """Whoever does not answer is not merged: the same server model as if it had not been asked."""

    class Lossy(LocalTransport):
        def replies(self, timeout=None):
            return (r for r in super().replies(timeout) if r.kind == "score" or r.client != 3)

    how = Training(**{**SETTINGS, "rounds": 1, "participation": 1.0}, engine="one")
    prepared = simulation.prepare(fs.FedAvg(), make("plain"), ragged(), None, how)
    monkeypatch.setattr(simulation, "LocalTransport", Lossy)
    lossy = prepared.run()
    assert lossy.history[0]["missing"] == [3]
    assert lossy.history[0]["participants"] == [0, 1, 2, 4]
    monkeypatch.undo()

    class Absent(LocalTransport):
        def alive(self):
            return [0, 1, 2, 4]

    monkeypatch.setattr(simulation, "LocalTransport", Absent)
    assert identical({"g": prepared.run().generic()}, {"g": lossy.generic()})


def test_a_loss_that_is_not_finite_stops_the_run_and_is_named() -> None:
    with pytest.raises(fs.TrainingError, match=r"round \d+, client \d+: the training loss is (nan|inf)"):
        fs.simulate(fs.FedAvg(), model=make("plain"), data=ragged(), **{**SETTINGS, "lr": 1e200}, engine="one")


@pytest.mark.parametrize(
    ("clients", "share", "expected"), [(20, 1.0, 20), (100, 0.1, 10), (5, 0.01, 1), (3, 0.5, 2), (20, 0.6, 12)]
)
def test_how_many_a_share_is(clients: int, share: float, expected: int) -> None:
    assert count(clients, share) == expected


def test_messages_survive_the_wire_to_the_bit() -> None:
    shared = torch.randn(3, 2)
    down = {
        "params": {"b": shared, "a.w": shared, "n": torch.tensor(3)},
        "empty": {},
        "half": torch.randn(2).bfloat16(),
    }
    order = wire.decode(wire.encode(Order("score", 4, 2, down, {"b": shared}, "val")), Order)
    assert (order.kind, order.round, order.client, order.part) == ("score", 4, 2, "val")
    assert tree.outline(order.down) == tree.outline(down)
    assert list(order.down["params"]) == ["b", "a.w", "n"]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(order.down), tree.leaves(down), strict=True))
    reply = Reply("train", 1, 0, {"params": {"w": shared.t()}}, {"loss": 0.1})
    back = wire.decode(wire.encode(reply), Reply)
    assert torch.equal(back.up["params"]["w"], shared.t())
    assert back.report == {"loss": 0.1}


def test_who_never_took_part_is_scored_with_the_generic_model() -> None:
    run = fs.simulate(
        fs.PFedSD(), model=make("plain"), data=ragged(), **{**SETTINGS, "participation": 0.2}, engine="one"
    )
    took_part = {k for record in run.history for k in record["participants"]}
    absent = set(range(5)) - took_part
    assert absent
    assert took_part
    for k in absent:
        assert identical({"m": run.personal(k)}, {"m": run.generic()})
    earlier = took_part - set(run.history[-1]["participants"])  # the last round's only client is the mean
    assert earlier
    assert not any(identical({"m": run.personal(k)}, {"m": run.generic()}) for k in earlier)


def test_weights_that_are_no_longer_finite_stop_the_run() -> None:
    """A last step that overflows leaves a finite loss behind it."""
    settings = {
        **SETTINGS,
        "lr": 1e300,
        "rounds": 1,
        "epochs": 1,
        "batch_size": 100,
        "momentum": 0.0,
        "weight_decay": 1e10,
    }
    with pytest.raises(fs.TrainingError, match="weights are no longer finite"):
        fs.simulate(fs.FedAvg(), model=make("plain"), data=ragged(), **settings, engine="one")


def test_data_beyond_float32_is_refused_as_such() -> None:
    import numpy as np

    x, y = np.full((3, 4), 1e39), np.array([0, 1, 2])
    with pytest.raises(fs.InputError, match="dtype = 'float32'"):
        fs.simulate(fs.FedAvg(), model=make("plain"), data=fs.Federation.from_arrays([(x, y, x, y)]), rounds=1)


def test_a_server_step_above_one_does_not_touch_batchnorms_statistics() -> None:
    run = fs.simulate(fs.SCAFFOLD(server_lr=3.0), model=make("normed"), data=ragged(), **SETTINGS, engine="one")
    assert (run.generic()["bn.running_var"] > 0).all()


def test_a_field_may_not_hide_a_hook_and_a_method_needs_an_id() -> None:
    with pytest.raises(TypeError, match="begin"):

        class Hiding(fs.FedAvg):
            begin: str = "x"
