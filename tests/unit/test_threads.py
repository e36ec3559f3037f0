"""How many threads a run takes: one for small work, and never more than there are free cores."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.engine.bench import threads
from fedstill.engine.threads import available, check_obtainable
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import EAGER, SETTINGS, finish, identical, make, ragged, retuned, run, states


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


def large(tmp_path: Path, **how) -> fs.Run:
    """A stacked run of one client, large enough for several threads, with its folder."""
    settings = {**SETTINGS, "engine": "stacked", "dtype": "float32", "rounds": 12, "batch_size": 100, **how}
    data = ragged(((100, 4),), shape=(1, 8, 8))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.init.normal_(model[0].weight)
    return fs.simulate(Counting(), model=model, data=data, head="3", out=tmp_path / "run", **settings)


def stopped(tmp_path: Path, after: int) -> None:
    """Leave a folder in which that run was stopped after a round (0: before the first)."""

    class Stop:
        def on_start(self, coordinator) -> None:
            if after == 0:
                raise KeyboardInterrupt

        def on_round(self, coordinator, record) -> None:
            if record["round"] == after:
                raise KeyboardInterrupt

        def on_end(self, coordinator) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        large(tmp_path, callbacks=[Stop()])


@pytest.mark.parametrize("after", [0, 11])
def test_a_run_goes_on_with_the_threads_that_it_began_with(after: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads(2):
        stopped(tmp_path, after)
    assert json.loads((tmp_path / "run" / "choices.json").read_text())["threads"] == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    class Begun:
        """Forgets what was seen before the first round, in which the hooks are rehearsed."""

        def on_start(self, coordinator) -> None:
            SEEN.clear()

        def on_round(self, coordinator, record) -> None: ...

        def on_end(self, coordinator) -> None: ...

    with threads(1):
        resumed = large(tmp_path, resume=True, callbacks=[Begun()])
    assert {2} == SEEN
    assert resumed.trainer.training_threads == 2


def test_where_so_many_threads_cannot_be_had_the_run_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads(2):
        stopped(tmp_path, 11)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    with (
        threads(1),
        pytest.raises(InputError, match=r"^OMP_THREAD_LIMIT = 1: should be at least 2: the run began with 2"),
    ):
        large(tmp_path, resume=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before


def test_limits_of_openmp_and_of_the_system_are_noticed(monkeypatch) -> None:
    for name in ("OMP_THREAD_LIMIT", "OMP_DYNAMIC"):
        monkeypatch.delenv(name, raising=False)
    check_obtainable(1)
    check_obtainable(torch.get_num_threads() + 3)
    for wrong in (0, -1, True, "2", 2.0, None, 10**9):
        with pytest.raises(InputError, match=r"threads = .*a whole number from 1 to"):
            check_obtainable(wrong)
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
    with pytest.raises(InputError, match="OMP_DYNAMIC = 'true': should be false"):
        check_obtainable(2)
    check_obtainable(1)
    monkeypatch.delenv("OMP_DYNAMIC")
    begin, room = threading.Thread.start, [2]

    def start(self) -> None:
        if not room[0]:
            raise RuntimeError("can't start new thread")
        room[0] -= 1
        begin(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    running = threading.active_count()
    with threads(1), pytest.raises(InputError, match="threads = 6: should be at most 3, "):
        check_obtainable(6)
    assert threading.active_count() == running


@pytest.mark.parametrize(("began", "seen"), [(4, 4), (1, 1)])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_of_one_by_one_goes_on_as_it_began_on_a_larger_machine(began: int, seen: int, workers: int) -> None:
    """Where cores are many all threads work on each client in turn, elsewhere a pool with a thread each."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    how = Training(**{**SETTINGS, "engine": "one", "dtype": "float32", "workers": workers, "rounds": 1})
    ready = simulation.prepare(Counting(), model, ragged(((5, 1),) * 4, shape=(1, 8, 8)), "3", how)
    ready = retuned(ready, tuning=EAGER)
    assert ready.trainer.training_threads == 1
    ready.trainer.recall({"threads": began})
    SEEN.clear()
    finish(ready)
    assert ready.trainer.training_threads == seen
    assert {seen} == SEEN
