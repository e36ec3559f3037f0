"""Workers that end, stop or wait for ever: replaced, their clients done again with the same bits, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.core.errors import TrainingError
from fedstill.engine import crew
from fedstill.engine.bench import Work
from fedstill.engine.pool import Pool
from fedstill.engine.worker import Line, training_job

from ..problems import finish, identical, states
from .test_pool import alive, children, nothing_is_left, prepared  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked, on Linux alone")
PARENT = os.getpid()


@dataclass(frozen=True, kw_only=True)
class Struck(fs.SCAFFOLD):
    """Does something to its own worker at the client with ten samples (client 3), `times` times, after its training."""

    folder: str = fs.setting("", "where it leaves a file each time")
    times: int = fs.setting(1, "how often")
    pace: float = fs.setting(0.0, "seconds that other clients take")

    def finish(self, task, down, memory, local):
        time.sleep(0 if len(task.here().y) == 10 else self.pace)
        if len(task.here().y) == 10 and os.getpid() != PARENT:
            number = len(os.listdir(self.folder))
            if number < self.times:
                Path(self.folder, str(number)).touch()
                STRIKE()
        return super().finish(task, down, memory, local)


STRIKE: Callable[[], None]


def struck(strike: Callable[[], None], folder: Path, times: int = 1, pace: float = 0.0, **changes):
    """The run in which that happens."""
    global STRIKE
    STRIKE = strike
    method = Struck(folder=str(folder), times=times, pace=pace)
    return prepared(method, participation=1.0, rounds=2, **changes)


@pytest.fixture
def quick(monkeypatch) -> None:
    """Little patience."""
    monkeypatch.setattr(crew, "TICK", 0.05)
    monkeypatch.setattr(crew, "PATIENCE", crew.Patience(stopped=0.3, asleep=0.6))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The models that the run ends with when nothing happens."""
    return states(finish(struck(lambda: None, tmp_path_factory.mktemp("quiet"))))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_ever() -> None:
    time.sleep(3600)


def leave() -> None:
    os._exit(7)


def finish_holding_the_line() -> None:
    """End, and leave a child behind that has the worker's side of the line open."""
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    os._exit(0)


@pytest.mark.parametrize(
    ("strike", "line"),
    [
        (kill, "was ended by signal 9"), (leave, "ended with status 7"), (stop, "was stopped for N seconds"),
        (wait_for_ever, "used no processor time for N seconds"), (finish_holding_the_line, "ended with status 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_worker_is_replaced_with_the_same_bits(strike, line, times, tmp_path, quick, undisturbed, capfd) -> None:
    ready = struck(strike, tmp_path, times)
    sizes = []
    found = finish(ready, progress=lambda record: sizes.append(len(ready.trainer.engine.pids)))
    assert identical(undisturbed, states(found))
    assert sizes == [2, 2]
    said = f"fedstill: a worker process at work on client 3 {line}: another one does that again\n"
    assert re.sub(r"for \d+ seconds", "for N seconds", capfd.readouterr().err) == said * times


def test_a_client_that_ends_every_worker_ends_the_run_by_name(tmp_path) -> None:
    with pytest.raises(TrainingError) as caught:
        finish(struck(kill, tmp_path, times=99))
    assert str(caught.value) == (
        "3 worker processes ended at work on client 3, the last one was ended by signal 9; "
        "if memory ran out, fewer workers or a smaller batch_size need less"
    )
    assert len(os.listdir(tmp_path)) == 3


def test_the_last_try_has_the_machine_for_itself(tmp_path, monkeypatch) -> None:
    """What ends workers for want of memory may succeed where no other client is at work."""
    tries, together = [], []
    send = crew.Crew._send

    def watched(self, worker, number, job, shared):
        send(self, worker, number, job, shared)
        if job.kind == "train" and job.when == 1:
            at_work = [other.job[1].client for other in self.workers if other.job is not None]
            tries.extend([3] * (job.client == 3))
            together.extend([at_work] * (len(tries) == 3 and 3 in at_work))

    monkeypatch.setattr(crew.Crew, "_send", watched)
    finish(struck(kill, tmp_path, times=2, pace=0.2))
    assert together == [[3]]


def test_workers_killed_at_any_moment(tmp_path, undisturbed, monkeypatch) -> None:
    """A process of its own kills a worker again and again, at work, idle or not yet ready."""
    monkeypatch.setattr(crew, "LOSSES", 10**6)
    script = """
        import os, random, signal, sys, time
        parent, draw = int(sys.argv[1]), random.Random(4)
        while True:
            time.sleep(draw.uniform(0.01, 0.06))
            pids = open(f"/proc/{parent}/task/{parent}/children").read().split()
            pids = [int(pid) for pid in pids if int(pid) != os.getpid()]
            if pids:
                os.kill(draw.choice(pids), signal.SIGKILL)
    """
    killer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(PARENT)])
    try:
        for _ in range(3):
            assert identical(undisturbed, states(finish(struck(lambda: None, tmp_path))))
    finally:
        killer.kill()
        killer.wait()


def test_an_answer_counts_though_its_worker_is_killed_after_it(monkeypatch) -> None:
    """The memory that the answer is in is read before it is freed."""
    monkeypatch.setattr(crew, "TICK", 0.0)
    ready = prepared(fs.FedAvg(), participation=1.0)
    engine, bench = ready.trainer.engine, ready.trainer.bench
    assert isinstance(engine, Pool)
    jobs = [training_job(1, Work(k, {"params": ready.initial}), 1) for k in range(5)]
    results = []
    for strike in (False, True):
        team = crew.Crew(bench, engine.one, 2)
        found = team.run(jobs)
        first = next(found)
        pids = [worker.pid for worker in team.workers]
        time.sleep(0.3)  # both have answered
        for pid in pids if strike else ():
            os.kill(pid, signal.SIGKILL)
            while alive(pid):
                time.sleep(0.001)
        results.append({str(k): up["up"]["params"] for k, (up, _) in enumerate([first, *found])})
        assert bool(set(pids) & {worker.pid for worker in team.workers}) is not strike
        team.close()
    assert identical(*results)


def test_an_idle_worker_that_is_killed_is_replaced(undisturbed, tmp_path) -> None:
    ready = struck(lambda: None, tmp_path)
    engine = ready.trainer.engine
    assert isinstance(engine, Pool)

    def strike(record) -> None:
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)

    assert identical(undisturbed, states(finish(ready, progress=strike)))


@pytest.mark.parametrize("times", [1, 2])
def test_where_no_other_can_be_forked_the_rest_goes_on(times, tmp_path, monkeypatch, undisturbed) -> None:
    """With one worker left, and with none: then this process trains."""
    ready = struck(kill, tmp_path, times)
    fork, left = os.fork, [2]

    def scarce() -> int:
        if not left[0]:
            raise BlockingIOError("no more processes")
        left[0] -= 1
        return fork()

    monkeypatch.setattr(os, "fork", scarce)
    sizes = []
    found = finish(ready, progress=lambda record: sizes.append(len(ready.trainer.engine.pids)))
    assert identical(undisturbed, states(found))
    assert sizes == [2 - times] * 2


def test_a_worker_holds_no_memory_of_another(tmp_path) -> None:
    """Else what a lost worker had would stay as long as any that was forked after it."""
    ready = struck(kill, tmp_path)
    held = []

    def look(record) -> None:
        for pid in ready.trainer.engine.pids:
            files = [file for file in Path(f"/proc/{pid}/fd").iterdir() if "memfd:fedstill" in os.readlink(file)]
            held.append(len({file.stat().st_ino for file in files}))

    finish(ready, progress=look)
    assert held == [3, 3, 3, 3]  # what goes to all, to it and from it


def test_a_killed_parent_leaves_no_stopped_worker() -> None:
    script = """
        import os, signal, sys, time
        sys.path.insert(0, "TESTS")
        from tests.problems import *
        def stop(record):
            pids = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            for pid in pids:
                os.kill(int(pid), signal.SIGSTOP)
            print(*pids, flush=True)
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


def test_a_message_that_is_cut_short_blocks_nobody() -> None:
    ours, theirs = (Line(end) for end in socket.socketpair())
    try:
        theirs.send(b"first")
        assert ours.receive() == b"first"
        whole = (6).to_bytes(8, "little") + b"second"
        for part in (whole[:3], whole[3:9]):
            theirs.end.sendall(part)
            assert ours.receive() is None
        theirs.end.sendall(whole[9:])
        assert ours.receive() == b"second"
        with pytest.raises(TimeoutError):
            theirs.send(bytes(10_000_000), seconds=0.05)
        theirs.close()
        with pytest.raises(EOFError):
            list(iter(ours.receive, b""))
    finally:
        ours.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_process_is_forked_is_not_lost(number: signal.Signals) -> None:
    """Python ignores one that arrives in a fork's own handlers: it waits until the fork is over."""

    def handler(number, frame) -> None:
        raise KeyboardInterrupt

    reached, before = [], signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt), crew._signals_later():  # noqa: PT012 - the context itself raises
            os.kill(os.getpid(), number)
            reached.append("the end of the fork")
        assert reached
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_nothing_runs_besides() -> None:
    assert not children()
