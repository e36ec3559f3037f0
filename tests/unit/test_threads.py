"""How many threads a run takes: one for small work, and never more than there are free cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.engine.bench import threads
from fedstill.engine.threads import available
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, identical, make, ragged, run, states


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@dataclass(frozen=True, kw_only=True)
class Counting(fs.FedAvg):
    """Notes on how many threads it is run."""

    def finish(self, task, down, memory, local):
        SEEN.add(torch.get_num_threads())
        return super().finish(task, down, memory, local)


SEEN: set[int] = set()


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_small_work_is_done_on_one_thread(engine: str, two_threads) -> None:
    SEEN.clear()
    found = run(Counting(), "normed", engine=engine, workers=1)
    assert {1} == SEEN
    assert found.trainer.training_threads == 1
    assert found.trainer.choices.to_dict() == {}
    assert torch.get_num_threads() == 2  # as before


def wide(clients: int) -> simulation.Simulation:
    """Clients whose steps are small one by one, and large together."""
    model = nn.Sequential(nn.Linear(4, 400_000), nn.ReLU(), nn.Linear(400_000, 3))
    how = Training(**{**SETTINGS, "engine": "stacked", "dtype": "float32", "participation": 1.0})
    return simulation.prepare(fs.FedAvg(), model, ragged(((5, 1),) * clients), "2", how)


def test_large_work_is_done_on_the_threads_that_there_are(two_threads, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # somebody has chosen
    assert wide(1).trainer.training_threads == 1
    trainer = wide(2).trainer
    assert trainer.training_threads == trainer.threads == 2
    trainer.choices.update({"threads": 1})  # as the run began
    assert trainer.training_threads == 1


def test_a_stack_has_the_same_bits_with_more_threads(two_threads) -> None:
    how = dict(model="mlp", clients=12, partition="iid", rounds=1, epochs=1, engine="stacked", device="cpu")
    two = fs.run(fs.Experiment(method=fs.PFedSD(), **how))
    with threads(1):
        one = fs.run(fs.Experiment(method=fs.PFedSD(), **how))
    assert identical(states(one), states(two))


@pytest.mark.parametrize(
    ("count", "machine", "running", "expected"),
    [
        (2, 2, [1], 2), (2, 2, [3], 1), (2, 2, [2], 1), (2, 2, [9, 9, 1], 2), (16, 16, [5], 12), (16, 16, [99], 1),
        (4, 64, [21], 4), (4, 64, [63], 2), (1, 16, [99], 1),
    ],
)  # fmt: skip
def test_cores_that_others_use_are_left_to_them(count: int, machine: int, running: list[int], expected: int) -> None:
    """`running` is what several looks see; a load that is gone at the next look is none."""
    looks = itertools.chain(running, itertools.repeat(running[-1]))
    assert available(count, False, count, machine, lambda: next(looks)) == expected


def test_a_number_that_was_chosen_stays(monkeypatch) -> None:
    def busy() -> int:
        return 99

    assert available(8, True, 8, 8, busy) == 8
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert available(8, None, 8, 8, busy) == 1
    assert available(5, None, 16, 16, busy) == 5  # by torch.set_num_threads
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert available(8, None, 8, 8, busy) == 8


def test_where_nobody_can_tell_all_are_taken() -> None:
    def absent() -> int:
        raise FileNotFoundError("/proc/loadavg")

    assert available(8, False, 8, 8, absent) == 8


def test_the_trainer_of_a_stack_of_runs_has_more_clients_at_once(two_threads, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    trainer = wide(1).trainer
    assert trainer.over(trainer.bench, together=2).training_threads == 2
    assert simulation.prepare(
        fs.FedAvg(), make("plain"), ragged(), None, Training(**SETTINGS)
    ).trainer.training_threads == 1  # fmt: skip
