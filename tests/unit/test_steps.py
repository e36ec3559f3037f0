"""Local training counted in steps: the batches of a hand-written loop, and what is counted, timed and refused by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fedstill as fs
from fedstill.core.method import Phase
from fedstill.core.plan import Length, Plan
from fedstill.core.task import Task
from fedstill.engine import flops
from fedstill.report.local_work import without_effect, work
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, SIZES, Tampered, finish, make, ragged, run


def by_hand(federation: fs.Federation, client: int, steps: int) -> dict[str, torch.Tensor]:
    """One client's round of plain SGD with momentum, batch after batch, epoch after epoch, until the steps are made."""
    own, model, plan = federation.clients[client], make("plain"), Plan(SETTINGS["seed"], SETTINGS["batch_size"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    made, epoch = 0, 0
    while made < steps:
        order = torch.as_tensor(plan.order(1, client, len(own.y_train), epoch))
        for rows in order.split(SETTINGS["batch_size"])[: steps - made]:
            optimizer.zero_grad()
            F.cross_entropy(model(own.x_train[rows].double()), own.y_train[rows]).backward()
            optimizer.step()
            made += 1
        epoch += 1
    return model.state_dict()


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_batches_are_those_of_a_loop_by_hand(engine: str, steps: int) -> None:
    federation = ragged()
    trained = run(fs.Local(), data=federation, engine=engine, rounds=1, participation=1.0, local_steps=steps)
    for k in range(len(SIZES)):
        for name, value in by_hand(federation, k, steps).items():
            assert torch.allclose(trained.personal(k)[name].double(), value, atol=1e-12), (k, name)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_every_client_makes_as_many_steps(engine: str) -> None:
    history = run(fs.FedAvg(), engine=engine, participation=1.0, local_steps=3).history
    assert [record["steps"] for record in history] == [3 * len(SIZES)] * 3
    both = run(fs.Ditto(personal_epochs=1), engine=engine, participation=1.0, local_steps=3, rounds=1).history
    per_epoch = sum(-(-n // 4) for n, _ in SIZES)
    assert both[0]["steps"] == 3 * len(SIZES) + per_epoch  # a phase's own epochs stay epochs


def test_a_method_may_count_its_own_phases_in_steps() -> None:
    class TwoSteps(fs.FedAvg):
        def phases(self, task: Task) -> tuple[Phase, ...]:
            return (Phase(steps=2),)

    trained = run(TwoSteps(), participation=1.0, rounds=2)
    assert [record["steps"] for record in trained.history] == [2 * len(SIZES)] * 2
    with pytest.raises(ValueError, match="one of the two"):
        Phase(epochs=1, steps=2)


def test_a_reply_with_more_steps_than_were_asked_for_is_refused() -> None:
    def claim(reply: Any) -> Any:
        if reply.kind == "train" and reply.client == 1:
            return dataclasses.replace(reply, report={**reply.report, "steps": 4})
        return reply

    def ready(steps: int) -> Any:
        settings = Training(**{**SETTINGS, "participation": 1.0, "rounds": 1}, local_steps=steps)
        return simulation.prepare(fs.FedAvg(), make("plain"), ragged(), None, settings)

    (record,) = finish(ready(3), Tampered(claim)).history
    assert list(record["rejected"]) == ["1"]
    assert "steps" in record["rejected"]["1"]
    (record,) = finish(ready(4), Tampered(claim)).history
    assert "rejected" not in record


def test_flops_count_whole_and_partial_batches() -> None:
    """A linear layer's forward pass and its weight's gradient are 2·4·3 FLOPs a sample each: of 4, 4, 2, 4, 4 samples."""
    net = torch.nn.Linear(4, 3)
    ready = simulation.prepare(
        fs.FedAvg(), net, ragged(((10, 2),) * 2), None, Training(**{**SETTINGS, "rounds": 1}, local_steps=5)
    )
    counted = flops.count(ready.trainer.bench, 1, {"params": dict(net.double().state_dict())}, {}, 10)
    assert counted.steps == 5
    assert counted.work.total.total == (4 + 4 + 2 + 4 + 4) * 2 * (2 * 4 * 3)


def test_simulated_time_is_that_of_the_steps() -> None:
    """A step lasts as long as a client's epoch divided by its batches; the profile's devices do 500 samples a second."""
    (record,) = run(fs.FedAvg(), participation=1.0, rounds=1, local_steps=6, profile="uniform").history
    expected = [6 / -(-n // 4) * n / 500 for n, _ in SIZES]
    assert record["timeline"]["generic"] == pytest.approx(expected, rel=1e-12)
    method = fs.SpectralCoDistillation(generic_epochs=1, personal_epochs=2)  # its phases have lengths of their own
    (record,) = run(method, participation=1.0, rounds=1, local_steps=6, profile="uniform").history
    assert record["timeline"]["generic"] == pytest.approx([n / 500 for n, _ in SIZES], rel=1e-12)


def test_privacy_is_charged_by_the_step() -> None:
    how = {"privacy": "local", "noise_multiplier": 1.0, "clip_norm": 0.5, "participation": 1.0, "rounds": 2}
    records = run(fs.FedAvg(), local_steps=3, **how).history
    assert records[-1]["spent"] == {str(k): 6 for k in range(len(SIZES))}


def test_what_has_no_effect_is_named() -> None:
    steps = Training(epochs=2, local_steps=3)
    assert steps.without_effect({"epochs"}) == [("epochs", "with `local_steps`")]
    task = simulation.prepare(fs.FedAvg(), make("plain"), ragged(), None, steps).trainer.bench.task
    assert work(fs.FedAvg(), task, steps) == "3 steps"
    assert work(fs.FedRep(), task, steps) == "10 (head) + 1 (body)"
    assert work(fs.Ditto(personal_epochs=2), task, steps) == "3 steps + 2 (v)"
    assert without_effect(fs.FedAvg(), task, steps, {"local_steps"}) == []
    assert without_effect(fs.FedRep(), task, steps, {"local_steps"}) == [
        ("local_steps", "on fedrep: its own are 10 (head) + 1 (body)")
    ]
    with pytest.raises(fs.InputError, match="local_steps = -1"):
        Training(local_steps=-1)


def test_lengths() -> None:
    assert not Length()
    assert Length(2).of(9, 4) == 6
    assert Length(steps=5).of(9, 4) == 5
    assert Length(steps=5).epochs_of(9, 4) == 5 / 3
    assert Length(2).epochs_of(9, 4) == 2
