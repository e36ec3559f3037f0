"""Sampler, aggregator and coordinator, with transports that are lossy."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.server.coordinator import Aggregator
from fedstill.server.sampler import count
from fedstill.transport import wire
from fedstill.transport.local import LocalTransport
from fedstill.transport.messages import Order, Reply, Request

from ..problems import SETTINGS, WIRED, Tampered, finish, identical, make, ragged, states


def test_below_the_minimum_the_model_stays() -> None:
    server = {"params": {"w": torch.tensor(5.0)}}
    assert Aggregator(minimum=1).merge(fs.FedAvg(), None, server, []) is server  # type: ignore[arg-type]


def test_lost_replies_equal_a_round_whose_cohort_were_the_survivors() -> None:
    """Whoever does not answer is not merged: the same server model as if it had not been asked."""

    class Absent(LocalTransport):
        def alive(self):
            return [0, 1, 2, 4]

    training = Training(**{**SETTINGS, "rounds": 1, "participation": 1.0}, engine="one")
    prepared = prepare(fs.FedAvg(), make("plain"), ragged(), None, training)
    lossy = finish(prepared, Tampered(lambda reply: None if reply.kind == "train" and reply.client == 3 else reply))
    assert lossy.history[0]["missing"] == [3]
    assert lossy.history[0]["participants"] == [0, 1, 2, 4]
    assert identical({"g": finish(prepared, Absent).generic()}, {"g": lossy.generic()})


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
    sent = Order("score", 4, 2, down, {"b": shared}, "val", run=1, decided=3, taken=2)
    order = wire.decode(wire.encode(sent), Order)
    plain = [field.name for field in dataclasses.fields(Order) if field.name not in ("down", "generic")]
    assert [getattr(order, name) for name in plain] == [getattr(sent, name) for name in plain]
    assert torch.equal(order.generic["b"], shared)
    assert wire.decode(wire.encode(dataclasses.replace(sent, generic=None)), Order).generic is None
    assert tree.outline(order.down) == tree.outline(down)
    assert list(order.down["params"]) == ["b", "a.w", "n"]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(order.down), tree.leaves(down), strict=True))
    reply = Reply("train", 1, 0, {"params": {"w": shared.t()}}, {"loss": 0.1}, 2, "no battery")
    back = wire.decode(wire.encode(reply), Reply)
    assert torch.equal(back.up["params"]["w"], shared.t())
    assert (back.report, back.run, back.refusal) == ({"loss": 0.1}, 2, "no battery")


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


def test_callbacks_follow_a_run_and_may_ask_its_clients() -> None:
    """`on_round` as a coroutine: it sees the round's record and state, and each client's personal model of then."""
    calls: list[str] = []
    asked: dict[int, dict] = {}

    class Curious:
        def on_start(self, coordinator) -> None:
            calls.append(f"start {coordinator.state.round}")

        def on_round(self, coordinator, record):
            calls.append(f"round {record['round']}")
            assert coordinator.state.history[-1] is record
            task = dataclasses.replace(coordinator.task, round=record["round"])
            replies = yield Request([coordinator.order("model", task, k) for k in (0, 3)])
            asked[record["round"]] = {f"personal {r.client}": tree.clone(r.up["params"]) for r in replies}

        def on_end(self, coordinator) -> None:
            calls.append(f"end {coordinator.state.round}")

    for transport in (None, WIRED):
        calls.clear()
        run = fs.simulate(
            fs.PFedSD(), model=make("plain"), data=ragged(), **SETTINGS, engine="one", transport=transport,
            callbacks=[Curious()], progress=lambda record: calls.append(f"progress {record['round']}"),
        )  # fmt: skip
        rounds = [f"{who} {t}" for t in (1, 2, 3) for who in ("progress", "round")]
        assert calls == ["start 0", *rounds, "end 3"]
        two = fs.simulate(fs.PFedSD(), model=make("plain"), data=ragged(), **{**SETTINGS, "rounds": 2}, engine="one")
        for t, models in ((2, two), (3, run)):
            assert identical(asked[t], {f"personal {k}": models.served(k) for k in (0, 3)})
        assert identical(states(run), states(fs.simulate(
            fs.PFedSD(), model=make("plain"), data=ragged(), **SETTINGS, engine="one"
        )))  # fmt: skip
