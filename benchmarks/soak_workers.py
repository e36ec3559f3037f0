"""Damage to the processes of a run: workers killed and stopped, memory over 1,000 rounds, other load, another number of threads.

Every run is a process of its own, `python benchmarks/soak_workers.py FOLDER '{…}'`, that trains a convolution on made-up images.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import fedstill as fs

Row = tuple[str, str, str]
GROWTH = 0.02  # of memory that is allowed after round `WARM`
WARM = 50
MODELS, KEPT = "models.safetensors", "kept.json"  # what a run ends with, and what its processes held
LIMIT = 900.0  # seconds in which any of these runs must have ended


# ---- the run that is damaged ---------------------------------------------------------------------------------------------


def images(clients: int, samples: int, side: int) -> fs.Federation:
    """Return clients with random images of three kinds."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(3, 1, side, side))
    data = []
    for k in range(clients):
        train, test = (draw.integers(0, 3, size=n) for n in (samples + k, 12))
        x, held = (centres[y] + draw.normal(size=(len(y), 1, side, side)) for y in (train, test))
        data.append((x, train, held, test))
    return fs.Federation.from_arrays(data, classes=3)


def network(side: int, channels: int) -> nn.Module:
    """Return a small convolution."""
    torch.manual_seed(0)
    size = channels * (side // 4) ** 2
    return nn.Sequential(
        nn.Conv2d(1, channels, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(size, 3)
    )


class Watch:
    """A callback that notes after every round what the run's processes hold, and may end this process by a signal."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at, self.seen = folder, kill_at, []

    def on_start(self, coordinator: Any) -> None:
        """Do nothing."""

    def on_round(self, coordinator: Any, record: dict[str, Any]) -> None:
        """Note memory, files and processes."""
        pids = [os.getpid(), *children(os.getpid())]
        held = sum(memory(pid) for pid in pids)
        self.seen.append({"bytes": held, "files": len(os.listdir("/proc/self/fd")), "processes": len(pids)})
        if record["round"] == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_end(self, coordinator: Any) -> None:
        """Write all that was noted."""
        (self.folder.parent / KEPT).write_text(json.dumps(self.seen))


def child(folder: str, options: str) -> None:
    """Run in this process, to the end or to the round in which it is to be killed."""
    how = json.loads(options)
    side, channels = how.pop("side", 16), how.pop("channels", 8)
    data = images(how.pop("clients", 6), how.pop("samples", 40), side)
    watch = Watch(Path(folder), how.pop("kill_at", 0))
    settings = {"epochs": 2, "batch_size": 16, "lr": 0.02, "device": "cpu", **how}
    run = fs.simulate(
        fs.SCAFFOLD(), model=network(side, channels), data=data, out=folder, callbacks=[watch], **settings
    )
    models = {"generic": run.generic()} | {f"personal {k}": run.personal(k) for k in range(run.task.clients)}
    tensors = {f"{model} {name}": value.clone() for model, params in models.items() for name, value in params.items()}
    save_file(tensors, Path(folder).parent / MODELS)


# ---- what is looked at from outside ----------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, zombies too."""
    with contextlib.suppress(OSError):
        return [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def memory(pid: int) -> int:
    """Return the bytes that a process has in memory, besides mapped files.

    Pages that a fork shares count in each process: they are copied bit by bit as they are written to, which is no leak.
    """
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))
    return 0


def shared_files() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Return whether all these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while any(state(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def state(pid: int) -> str:
    """Return a process's state, one letter; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextlib.contextmanager
def started(folder: Path, threads: int = 1, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in a folder; end it and its workers when the context is left."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, str(folder / "run"), json.dumps(how)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def whole(folder: Path, threads: int = 1, **how: Any) -> dict[str, Any]:
    """Run in a folder to the end; return everything that the run ends with."""
    with started(folder, threads, **how) as process:
        status = process.wait(LIMIT)
    assert status == 0, f"ended with {status}: {(folder / 'log').read_text()[-2000:]}"
    return result(folder)


def result(folder: Path) -> dict[str, Any]:
    """Return the bytes of a run's final models, and its records without the seconds."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]
    return {"models": (folder / MODELS).read_bytes(), "records": records}


def rounds_done(folder: Path) -> int:
    """Return how many rounds a run has recorded."""
    with contextlib.suppress(OSError):
        return (folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def check_same(folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise where two runs differ in anything."""
    for name, value in expected.items():
        assert found[name] == value, f"other {name} than the undisturbed run: {(folder / 'log').read_text()[-2000:]}"


def until_workers(process: subprocess.Popen[bytes], count: int = 2) -> list[int]:
    """Return the workers' processes, once they are there."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if len(pids := children(process.pid)) >= count:
            return pids
        time.sleep(0.005)
    raise AssertionError("no workers were started")


# ---- the damage ------------------------------------------------------------------------------------------------------------


def workers(short: bool) -> list[Row]:
    """Kill and stop workers of a run at random moments; compare its end with that of the run left alone."""
    how: dict[str, Any] = dict(rounds=20 if short else 150, workers=2, engine="one", samples=80, channels=16)
    draw, rows = random.Random(13), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        expected = whole(root / "quiet", **how)
        for fault, number, times in (
            ("a worker killed (SIGKILL)", signal.SIGKILL, 3 if short else 20),
            ("a worker stopped (SIGSTOP)", signal.SIGSTOP, 1 if short else 5),
        ):
            struck, folder, before = 0, root / number.name, shared_files()
            moments = sorted(draw.sample(range(3, how["rounds"] * 4 // 5), times))
            with started(folder, **how) as process:
                while process.poll() is None and struck < times:
                    if rounds_done(folder) < moments[struck]:
                        time.sleep(0.005)
                        continue
                    time.sleep(draw.uniform(0, 0.05))
                    pids = [pid for pid in children(process.pid) if state(pid) not in ("", "T", "Z")]
                    if pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(draw.choice(pids), number)
                            struck += 1
                status = process.wait(LIMIT)
            log = (folder / "log").read_text()
            assert status == 0, f"{fault}: the run ended with {status}: {log[-2000:]}"
            assert struck == times, f"{fault}: the run was over after {struck} of {times}"
            check_same(folder, result(folder), expected)
            assert shared_files() <= before
            redone = log.count("another one does that again")
            rows.append(
                (fault, "replaced, bit-equal end", f"{struck} times in {how['rounds']} rounds, {redone} at work")
            )
    return rows


def leaks(short: bool) -> list[Row]:
    """Run many rounds; nothing grows, and nothing is left after the end, a kill or Ctrl-C."""
    rounds = 100 if short else 1000
    how = dict(workers=2, engine="one", samples=80, clients=4, eval_every=10)
    before, rows = shared_files(), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with started(root / "end", rounds=rounds, **how) as process:
            pids = [process.pid, *until_workers(process)]
            assert process.wait(LIMIT) == 0, (root / "end" / "log").read_text()[-2000:]
        seen = json.loads((root / "end" / KEPT).read_text())
        warm, last = seen[WARM - 10 : WARM], seen[-10:]
        middle = [sorted(entry["bytes"] for entry in part)[5] for part in (warm, last)]
        growth = middle[1] / middle[0] - 1
        assert growth < GROWTH, f"{growth:.1%} more memory after {rounds} rounds than after {WARM}"
        for kind in ("files", "processes"):
            assert last[-1][kind] <= warm[-1][kind], (
                f"{kind}: {warm[-1][kind]} after {WARM} rounds, {last[-1][kind]} at the end"
            )
        figure = f"{growth:+.2%} of {middle[0] / 2**20:.0f} MiB, {last[-1]['files']} files, {last[-1]['processes']} processes"
        rows.append((f"{rounds} rounds", f"memory grows by less than {GROWTH:.0%} after round {WARM}", figure))
        assert gone(pids)
        assert shared_files() <= before
        for number in (signal.SIGKILL, signal.SIGINT):
            folder = root / number.name
            with started(folder, rounds=10_000, **how) as process:
                pids = [process.pid, *until_workers(process)]
                time.sleep(0.3)
                os.kill(process.pid, number)
                process.wait(60)
                began = time.monotonic()
                assert gone(pids), f"processes are left after {number.name}"
                took = time.monotonic() - began
            left = shared_files() - before
            assert not left, f"left in /dev/shm after {number.name}: {sorted(left)}"
            figure = f"all {len(pids)} processes gone {took:.1f} s after the run"
            rows.append((f"a run of two workers ended by {number.name}", "no process, nothing in /dev/shm", figure))
    return rows


def thread_count(short: bool) -> list[Row]:
    """Stop a stacked run under two threads and go on under one: the bits are those of the run that was never stopped."""
    how = dict(rounds=12, engine="stacked", samples=64, channels=32, batch_size=64, clients=1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        one, two = (whole(root / str(n), n, **how) for n in (1, 2))
        assert one["models"] != two["models"], "one thread and two give the same bits: nothing is shown here"
        rows = []
        for first, second, expected in ((2, 1, two),) if short else ((2, 1, two), (1, 2, one)):
            folder = root / f"{first} then {second}"
            with started(folder, first, kill_at=11, **how) as process:
                assert process.wait(LIMIT) == -signal.SIGKILL
            check_same(folder, whole(folder, second, resume=True, **how), expected)
            fault = f"a stacked run, killed under {first} threads, resumed under OMP_NUM_THREADS={second}"
            rows.append((fault, "bit-equal end", f"goes on with {first} threads"))
    return rows


def busy(short: bool) -> list[Row]:
    """Compare a default run beside two busy loops, both on two cores, with the same run on a quiet machine."""
    if short:  # the machine of the tests is never quiet
        return []
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    try:
        pairs = [(load.seconds(0), load.seconds(2)) for _ in range(3)]
    finally:
        os.sched_setaffinity(0, cores)
    quiet, loaded = (sorted(pair[i] for pair in pairs)[1] for i in (0, 1))
    assert loaded <= load.MOST * quiet, f"{loaded / quiet:.1f} times as long beside two busy loops ({pairs})"
    figure = f"{loaded / quiet:.1f}× ({quiet:.1f} s and {loaded:.1f} s)"
    return [("two busy loops beside it on two cores", f"at most {load.MOST:g}× its quiet time", figure)]


SECTIONS = {"workers": workers, "leaks": leaks, "threads": thread_count, "load": busy}

if __name__ == "__main__":
    child(*sys.argv[1:])
