"""Workers: the same bits for any number of them, nothing copied through a pipe, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill.core.errors import InputError, TrainingError
from fedstill.engine import pool
from fedstill.engine.arena import Arena
from fedstill.engine.bench import Work
from fedstill.engine.one import One
from fedstill.engine.pool import Pool
from fedstill.engine.trainer import Tuning
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.run.journal import Journal
from fedstill.run.session import Start, start

from ..problems import EAGER, SETTINGS, finish, identical, make, ragged, retuned, states

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked, on Linux alone")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test there are no workers, nor any of their memory."""
    OTHERS.update(children())  # as the service of a tracker that another test has used
    yield
    gc.collect()
    assert not children()
    assert not [link for link in open_files() if "memfd:fedstill" in link]


OTHERS: set[int] = set()  # processes that are none of these tests'


def children() -> list[int]:
    """Processes that this one has started since and that are still there, zombies too."""
    every = [int(k) for k in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [k for k in every if k not in OTHERS]


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def prepared(
    method: fs.Method, model: str | torch.nn.Module = "normed", data=None, tuning: Tuning = EAGER, head=None, **changes
) -> simulation.Simulation:
    """A run whose smallest work is handed out to workers."""
    module = make(model) if isinstance(model, str) else model
    how = Training(**{**SETTINGS, "engine": "one", "workers": 2, **changes})
    return retuned(simulation.prepare(method, module, data or ragged(), head, how), tuning=tuning)


METHODS = [
    fs.FedAvg(),
    fs.SCAFFOLD(),
    fs.PFedSD(),
    fs.PFedSD(teacher="predictions"),
    fs.PFedSD(stateless=True),
    fs.FedRep(head_epochs=2),
    fs.CD2PFed(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.id} {m.teacher if m.id == 'pfedsd' else ''}")
@pytest.mark.parametrize("model", ["normed", "convolved"])
def test_the_same_bits_for_any_number_of_workers(method: fs.Method, model: str) -> None:
    alone, two, three = (finish(prepared(method, model, workers=n, dtype="float32")) for n in (1, 2, 3))
    assert identical(states(alone), states(two))
    assert identical(states(alone), states(three))
    for other in (two, three):
        for a, b in zip(alone.history, other.history, strict=True):
            assert {k: v for k, v in a.items() if "seconds" not in k} == {k: b[k] for k in b if "seconds" not in k}


def test_threads_of_the_parent_do_not_matter() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads, workers in ((1, 1), (2, 1), (2, 2)):
            torch.set_num_threads(threads)
            data = ragged(((40, 4), (40, 4), (40, 4)), shape=(1, 28, 28))
            model = fs.models.build("cnn-fmnist", (1, 28, 28), 3)
            how = dict(rounds=1, epochs=1, batch_size=20, dtype="float32", workers=workers)
            results.append(states(finish(prepared(fs.FedAvg(), model, data, **how))))
    finally:
        torch.set_num_threads(before)
    assert identical(results[0], results[1])
    assert identical(results[0], results[2])


def test_a_parent_that_ran_many_threads_does_not_hang_its_workers() -> None:
    script = """
        import sys, torch
        torch.set_num_threads(4)
        (torch.rand(1500, 1500) @ torch.rand(1500, 1500)).sum()
        torch.nn.functional.conv2d(torch.rand(8, 8, 64, 64), torch.rand(8, 8, 5, 5)).sum()
        sys.path.insert(0, "TESTS")
        from tests.problems import *
        results = [states(run(fs.PFedSD(), "convolved", workers=2, trainer={"tuning": EAGER})) for _ in range(2)]
        (torch.rand(1500, 1500) @ torch.rand(1500, 1500)).sum()
        assert identical(*results) and identical(results[0], states(run(fs.PFedSD(), "convolved", workers=1)))
        print("well")
    """
    root = Path(__file__).parents[2]
    code = textwrap.dedent(script).replace("TESTS", str(root))
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.stdout.strip() == "well", done.stderr


def test_workers_last_from_round_to_round_and_messages_are_small() -> None:
    ready = prepared(fs.PFedSD(), participation=1.0, rounds=4)
    engine = ready.trainer.engine
    assert isinstance(engine, Pool)
    seen, carried = [], []
    for _ in start([Start(ready)]).rounds():
        seen.append(tuple(engine.pids))
        carried.append(engine.bytes)
    assert len(seen[0]) == 2
    assert len(set(seen)) == 1
    assert set(seen[0]) == set(children())
    leaves = len(make("normed").state_dict())
    jobs = 5 + 5 + 5  # trained, scored with the personal and with the generic model
    for before, after in itertools.pairwise(carried):
        assert after - before < jobs * (leaves * 4 * 80 + 200)  # names and places, never numbers
    ready.trainer.close()
    assert not children()


def test_messages_do_not_grow_with_the_model() -> None:
    sizes = []
    for width in (8, 800):
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        ready = prepared(fs.SCAFFOLD(), model, head="2", rounds=2)
        for _ in start([Start(ready)]).rounds():
            pass
        sizes.append(ready.trainer.engine.bytes)
        ready.trainer.close()
    assert sizes[1] < 1.2 * sizes[0]


def test_what_all_clients_are_sent_is_written_once(monkeypatch) -> None:
    written = []
    put = Arena.put

    def counted(self, leaf):
        known = id(leaf) in self._places
        place = put(self, leaf)
        if not known:
            written.append(leaf.numel())
        return place

    monkeypatch.setattr(Arena, "put", counted)
    finish(prepared(fs.FedAvg(), rounds=1, participation=1.0, eval_every=1))
    state = sum(v.numel() for v in make("normed").state_dict().values())
    assert sum(written) == 2 * state  # down once, and the generic model that all are scored with once


def test_results_share_no_memory_with_the_workers() -> None:
    ready = prepared(fs.PFedSD(), participation=1.0, rounds=1)
    result = finish(ready)
    before = states(result)
    finish(ready)
    assert identical(before, states(result))


@dataclass(frozen=True, kw_only=True)
class Failing(fs.FedAvg):
    """Fails at the client with ten samples."""

    def finish(self, task, down, memory, local):
        if len(task.here().y) == 10:
            raise ERROR
        return super().finish(task, down, memory, local)


ERROR: Exception


@pytest.mark.parametrize(
    "error",
    [
        InputError("lr", 3.5, "smaller"),
        TrainingError("round 1: no good"),
        ValueError("not that"),
        OSError("of the disk"),
        KeyError("name"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_in_a_worker_reaches_the_caller(error: Exception) -> None:
    global ERROR
    ERROR = error
    expected = InputError if isinstance(error, InputError) else TrainingError
    ready = prepared(Failing(), participation=1.0)
    with pytest.raises(expected) as caught:
        finish(ready)
    assert str(error) in str(caught.value)
    assert type(caught.value) is expected
    assert "in a worker process" in caught.value.__notes__[0]
    assert not children()


def test_an_interrupt_leaves_no_process() -> None:
    ready = prepared(fs.FedAvg(), participation=1.0)

    def stop(record) -> None:
        assert children()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(ready, progress=stop)
    assert not children()


def test_results_that_nobody_waits_for_do_no_harm() -> None:
    ready = prepared(fs.FedAvg(), participation=1.0)
    trainer = ready.trainer
    works = [Work(k, {"params": ready.initial}) for k in range(5)]
    first = trainer.train(1, works)
    next(first)
    first.close()
    again = [done.up for done in trainer.train(1, works)]
    trainer.close()
    alone = [done.up for done in prepared(fs.FedAvg(), participation=1.0, workers=1).trainer.train(1, works)]
    assert all(
        torch.equal(a["params"][n], b["params"][n]) for a, b in zip(again, alone, strict=True) for n in a["params"]
    )


def test_a_collected_trainer_takes_its_workers_with_it() -> None:
    ready = prepared(fs.FedAvg(), participation=1.0)
    session = start([Start(ready)])
    rounds = session.rounds()
    next(rounds)
    assert children()
    del ready, session, rounds
    gc.collect()
    assert not children()


def test_a_killed_parent_leaves_no_worker() -> None:
    script = """
        import os, signal, sys
        sys.path.insert(0, "TESTS")
        from tests.problems import *
        def stop(record):
            print(*open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        how = Training(**{**SETTINGS, "engine": "one", "workers": 2})
        ready = simulation.prepare(fs.FedAvg(), make("plain"), ragged(), None, how)
        finish(retuned(ready, tuning=EAGER), progress=stop)
    """
    code = textwrap.dedent(script).replace("TESTS", str(Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(k) for k in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("first", [1, 2])
def test_resuming_with_another_number_of_workers(first: int, tmp_path: Path) -> None:
    def ready(workers: int) -> simulation.Simulation:
        return prepared(fs.PFedSD(), workers=workers, rounds=4)

    def stop(record) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    journal = Journal(tmp_path / "run")
    journal.begin("", {}, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        finish(ready(first), journal=journal, checkpoint_every=2, progress=stop)
    resumed = finish(ready(3 - first), journal=journal, resume=True)
    assert identical(states(finish(ready(first))), states(resumed))


def test_small_work_stays_here() -> None:
    ready = prepared(fs.FedAvg(), participation=1.0, tuning=Tuning(pool.Limits(call=5, start=0)))
    pids = []
    finish(ready, progress=lambda record: pids.extend(ready.trainer.engine.pids))
    assert not pids


def test_where_no_process_can_be_forked_all_is_done_here(monkeypatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    expected = states(finish(prepared(fs.FedAvg())))
    monkeypatch.setattr(os, "fork", refuse)
    assert identical(expected, states(finish(prepared(fs.FedAvg()))))


def test_how_many_workers() -> None:
    cpu = torch.device("cpu")
    assert pool.share(0, 20, cpu, 16) == (16, True)
    assert pool.share(0, 5, cpu, 16) == (5, True)
    assert pool.share(3, 20, cpu, 16) == (3, True)
    assert pool.share(1, 20, cpu, 16) == (1, True)  # one thread, as each of several would have
    assert pool.share(0, 1, cpu, 16) == (1, False)
    assert pool.share(4, 2, cpu, 16) == (1, False)  # two clients and sixteen cores: all threads on each in turn
    assert pool.share(0, 20, torch.device("cuda"), 16) == (1, False)
    assert pool.share(0, 20, cpu, 16, forks=False) == (1, False)


def test_the_setting_is_refused_and_recorded() -> None:
    with pytest.raises(InputError, match="workers = -1"):
        Training(workers=-1)
    assert isinstance(prepared(fs.FedAvg(), workers=1).trainer.engine, One)
    assert "workers = 3" in replace(fs.Experiment(), workers=3).to_toml()


def test_an_arena_keeps_strides_and_grows() -> None:
    arena = Arena()
    leaves = [
        torch.rand(3, 5).t(),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.rand(1).expand(4),
        torch.rand(300_000, dtype=torch.float64),
        torch.tensor([True, False]),
    ]
    places = [arena.put(leaf) for leaf in leaves]
    for leaf, place in zip(leaves, places, strict=True):
        found = arena.get(place)
        assert torch.equal(found, leaf)
        assert found.dtype == leaf.dtype
        assert found.data_ptr() % 64 == 0
        if leaf.is_contiguous() or leaf.ndim in (2, 4):
            assert found.stride() == leaf.stride()
    assert arena.put(leaves[0]) is places[0]
    arena.close()
