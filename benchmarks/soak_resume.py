"""Damage to runs and their folders: kills, torn and changed files, a full disk, signals. Every one ends bit-equal or is refused.

What a run ends with is compared whole: records, timelines and scores without their seconds, and the last checkpoint, which
holds weights, every client's memory, and what simulated time has under way. Random numbers are drawn from the seed, the round and
the client, so there is no other random state. Runs are `fedstill` in real processes; those of the sections kill, checkpoint
and disk are forked from one that has imported everything, so that a kill costs no import.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedstill.cli import main
from fedstill.core import files
from fedstill.run.checkpoint import NAME
from fedstill.run.lock import LOCK

Row = tuple[str, str, str]
TINY = ["--clients", "4", "--epochs", "1", "--dtype", "float64", "--workers", "1"]
TIMED = ["--profile", "lognormal:0.8"]
RUNS = {
    "a synchronous run": ["run", "scaffold", "--engine", "one", *TIMED, "--drop", "0.1"],
    "a FedBuff run": ["run", "ditto", "--engine", "one", *TIMED, "--mode", "fedbuff", "--buffer", "2"],
    "a wait-free run": [
        "run",
        "spectral",
        "--engine",
        "one",
        *TIMED,
        "--wait-free",
        "until-download",
        "--personal-cap",
        "30",
    ],
    "a stacked comparison": ["compare", "fedavg", "pfedsd", "--engine", "stacked", "--seeds", "2"],
}
SERVER = """
import errno, json, os, pathlib, signal, sys
import fedstill.cli.execute
fedstill.cli.execute.folders.draw = lambda *words: ""  # a picture takes longer than such a run
for words in json.loads(sys.argv[1]):  # so that nothing is imported again in every fork
    fedstill.cli.main(words)
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        left = [job["at"]]
        def hooked(call):
            def counted(*words, **more):
                if left[0] == 0 and job["how"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if left[0] <= 0 and job["how"] == "full":
                    raise OSError(errno.ENOSPC, "No space left on device")
                left[0] -= 1
                return call(*words, **more)
            return counted
        if job["how"]:
            os.fsync, pathlib.Path.replace = hooked(os.fsync), hooked(pathlib.Path.replace)
        status = 99
        try:
            status = fedstill.cli.main(job["words"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Commands in processes of their own, forked from one that has imported fedstill."""

    def __init__(self) -> None:
        descriptor, log = tempfile.mkstemp(prefix="fedstill-soak-said-")
        os.close(descriptor)
        self.log = Path(log)  # what the last command printed
        warm = [[*RUNS[name], *TINY, "--rounds", "1"] for name in ("a synchronous run", "a stacked comparison")]
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(warm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while self.server.stdout.readline() != "ready\n":
            pass

    def begin(self, words: Sequence[str], how: str = "", at: int = -1) -> int:
        """Begin a command; return its process. `how` is what happens at the `at`-th time that a file is flushed or renamed."""
        job = {"words": list(words), "log": str(self.log), "how": how, "at": at}
        print(json.dumps(job), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def end(self) -> int:
        """Wait for the command's end; return its exit status."""
        return int(self.server.stdout.readline())

    def run(self, words: Sequence[str], how: str = "", at: int = -1) -> tuple[int, str]:
        """Run a command; return its exit status and what it printed."""
        self.begin(words, how, at)
        return self.end(), self.log.read_text()

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()
        self.log.unlink()


@functools.cache
def one_for_all() -> Forks:
    """Return what forks commands, the same for all sections."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


@contextlib.contextmanager
def workshop() -> Iterator[tuple[Path, Forks]]:
    """Yield a temporary folder and what forks commands."""
    with tempfile.TemporaryDirectory(prefix="fedstill-soak-") as folder:
        yield Path(folder), one_for_all()


def contents(folder: Path) -> dict[str, Any]:
    """Return all numbers that a command left behind, but seconds."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("metrics.jsonl")):
        name = file.parent.relative_to(folder).as_posix()
        for lines in (file, file.with_name("timeline.jsonl")):
            if lines.exists():
                records = [json.loads(line) for line in lines.read_text().splitlines()]
                kept = [{k: v for k, v in record.items() if "seconds" not in k} for record in records]
                found[f"{name}/{lines.name}"] = kept
        last = sorted(file.parent.glob("checkpoints/round-*.safetensors"))[-1]
        found[f"{name}/state"] = (last.name, last.read_bytes())
        scores = file.parent / "scores.json"
        found[f"{name}/scores"] = scores.read_text() if scores.exists() else None
    assert found
    return found


def recorded(folder: Path) -> int:
    try:
        return sum(file.read_bytes().count(b"\n") for file in folder.glob("**/metrics.jsonl"))
    except FileNotFoundError:  # a folder that is just being made
        return 0


def quiet(words: Sequence[str]) -> int:
    """Run a command in this process, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return main(words)


def tidy(folder: Path) -> None:
    """Check that nothing temporary is left."""
    left = [file for file in folder.rglob("*") if file.name.endswith(files.PART) or file.name.startswith("fedstill-m")]
    assert not left, left


def go_on(words: Sequence[str], out: Path) -> list[str]:
    """Return the command to give next: resume where something has begun, else the same again."""
    begun = (out / "experiment.toml").exists() or (out / "job.json").exists()
    return ["resume", str(out)] if begun else [*words, "--out", str(out)]


def one_line(said: str) -> str:
    """Return the line of stderr that ends a command's output; there is no traceback."""
    assert "Traceback" not in said, said
    last = said.splitlines()[-1]
    assert last.startswith("fedstill: "), said
    return last


# ---- kills -----------------------------------------------------------------------------------------------------------
def kill(short: bool) -> list[Row]:
    """SIGKILL at random moments, resumed each time."""
    rows, draw = [], random.Random(13)
    kills, rounds = (3, 12) if short else (20, 120)
    with workshop() as (folder, forks):
        for name, words in list(RUNS.items())[:: 3 if short else 1]:
            command = [*words, *TINY, "--rounds", str(rounds), "--checkpoint-every", "1" if short else "3"]
            began = time.monotonic()
            assert forks.run([*command, "--out", str(folder / "whole")])[0] == 0, forks.log.read_text()
            took, all_rounds = time.monotonic() - began, recorded(folder / "whole")
            done, out, again = 0, folder / "cut", 0
            for number in range(kills):
                process = forks.begin(go_on(command, out))
                end = time.monotonic() + took
                if (
                    number % 3
                ):  # after the next share of the rounds; else at any time, mostly before and at the beginning
                    share = all_rounds * (number + draw.random()) / (kills + 1)
                    while recorded(out) < share and time.monotonic() < end:
                        time.sleep(0.001)
                time.sleep(draw.random() * took / (2 * kills))
                before = recorded(out)
                os.kill(process, signal.SIGKILL)
                done += forks.end() == -signal.SIGKILL
                again = max(again, before)
            status, said = forks.run(go_on(command, out))
            assert status == 0, said
            assert "Traceback" not in said
            assert contents(out) == contents(folder / "whole"), name
            tidy(out)
            rows.append((f"SIGKILL at random moments, {name}", "bit-equal end", f"{done} kills, {all_rounds} rounds"))
            for made in (out, folder / "whole"):
                shutil.rmtree(made)
    return rows


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def checkpoint(short: bool) -> list[Row]:
    """Kills at every file operation, and every kind of damage to a folder."""
    with workshop() as (folder, forks):
        return [*_kills_at_operations(folder, forks, short), *_damage(folder, forks, short)]


def _kills_at_operations(folder: Path, forks: Forks, short: bool) -> list[Row]:
    command = [*RUNS["a synchronous run"], *TINY, "--rounds", "3", "--checkpoint-every", "1"]
    assert forks.run([*command, "--out", str(folder / "whole")])[0] == 0
    whole, points, out = contents(folder / "whole"), 0, folder / "cut"
    at, step = (5, 11) if short else (0, 1)
    while forks.run([*command, "--out", str(out)], "kill", at)[0] == -signal.SIGKILL:
        if not short:  # killed once more at an operation of the resume
            forks.run(go_on(command, out), "kill", at % 7)
        status, said = forks.run(go_on(command, out))
        assert status == 0, (at, said)
        assert contents(out) == whole, at
        tidy(out)
        shutil.rmtree(out)
        points, at = points + 1, at + step
    assert points > 2
    shutil.rmtree(out)
    fault = "SIGKILL when a file is flushed or renamed, at the beginning, in records and in checkpoints"
    return [(fault, "bit-equal end; before the beginning the same command runs", f"{points} points")]


def _damage(folder: Path, forks: Forks, short: bool) -> list[Row]:
    """Change one file of a stopped run in one way; resume."""
    draw = random.Random(7)
    command = [*RUNS["a synchronous run"], *TINY, "--rounds", "4", "--checkpoint-every", "1", "--out"]
    stopped, out = folder / "stopped", folder / "cut"
    assert forks.run([*command, str(folder / "all")])[0] == 0
    whole = contents(folder / "all")
    assert forks.run([*command, str(stopped)], "kill", _operations(forks, command, folder) - 9)[0] == -signal.SIGKILL
    names = [file.relative_to(stopped) for file in sorted(stopped.rglob("*")) if file.is_file() and file.name != LOCK]
    counts = {"equal": 0, "refused": 0}
    newest = max(int(match[1]) for name in names if (match := NAME.fullmatch(name.name)))
    kept = [name for name in names if f"round-{newest:06d}" in name.name]
    assert len(kept) == 2, names
    damages = ["flip", "truncate", "empty", "remove", "tail"]
    trials = [(name, damage) for name in names for damage in damages for _ in range(1 if short else 12)]
    if short:
        trials = [(name, damage) for name, damage in trials if name in kept][::2] + draw.sample(trials, 6)
    for name, damage in trials:
        shutil.copytree(stopped, out)
        file = out / name
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif damage == "truncate":
            del data[draw.randrange(len(data)) :]
        elif damage == "empty":
            data.clear()
        elif damage == "tail":
            data += draw.randbytes(20)
        file.unlink() if damage == "remove" else file.write_bytes(data)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != LOCK}
        status, said = forks.run(["resume", str(out)])
        what = (str(name), damage, said)
        assert "Traceback" not in said, what
        if status == 0:
            assert contents(out) == whole, what
            tidy(out)
            if name in kept and damage != "flip":  # a changed space in JSON is none
                assert f"goes on after round {newest - 1}" in said, what
        else:
            assert status == 2, what
            assert name not in kept, what
            one_line(said)
            after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != LOCK}
            assert after == before, what
        counts["equal" if status == 0 else "refused"] += 1
        shutil.rmtree(out)
    fault = "one file of a run folder changed (a bit, its end, all of it, removed, bytes added)"
    outcome = "bit-equal end, from the checkpoint before where need be; or refused in a line, nothing changed"
    return [(fault, outcome, f"{len(trials)} files: {counts['equal']} equal, {counts['refused']} refused")]


def _operations(forks: Forks, command: Sequence[str], folder: Path) -> int:
    """Return how many file operations a command has."""
    low, high = 0, 400
    while low < high:
        middle = (low + high) // 2
        killed = forks.run([*command, str(folder / "count")], "kill", middle)[0] == -signal.SIGKILL
        shutil.rmtree(folder / "count")
        low, high = (middle + 1, high) if killed else (low, middle)
    return low


# ---- disks -----------------------------------------------------------------------------------------------------------
def disk(short: bool) -> list[Row]:
    """A disk that is full at every operation; a small one that fills; a folder that is read-only."""
    rows = []
    command = [*RUNS["a synchronous run"], *TINY, "--rounds", "3", "--checkpoint-every", "1"]
    with workshop() as (folder, forks):
        assert forks.run([*command, "--out", str(folder / "whole")])[0] == 0
        whole, out, points = contents(folder / "whole"), folder / "cut", 0
        at, step = (1, 13) if short else (0, 1)
        while True:
            status, said = forks.run([*command, "--out", str(out)], "full", at)
            if status == 0:
                break
            assert status == 1, said
            assert "No space left" in one_line(said), said
            _whole_again(forks, command, out, whole)
            points, at = points + 1, at + step
        rows.append(("disk full at an operation", "stop in one line, status 1; goes on bit-equal", f"{points} points"))
        if _can_mount(folder):
            rows += _small_disks(folder, forks, command, whole, short)
    return rows


def _whole_again(forks: Forks, command: Sequence[str], out: Path, whole: dict[str, Any]) -> None:
    """Nothing temporary is left, and the run goes on to its end."""
    tidy(out)
    status, said = forks.run(go_on(command, out))
    assert status == 0, said
    assert contents(out) == whole
    for made in out.iterdir():
        shutil.rmtree(made) if made.is_dir() else made.unlink()


def _small_disks(folder: Path, forks: Forks, command: Sequence[str], whole: dict[str, Any], short: bool) -> list[Row]:
    disk, stops = folder / "disk", 0
    disk.mkdir()
    for size in (600,) if short else range(16, 4000, 96):
        with _mounted(disk, f"size={size}k"):
            out = disk / "run"
            status, said = forks.run([*command, "--out", str(out)])
            if status == 0:
                continue
            assert status == 1, (size, said)
            assert "No space left" in one_line(said), said
            stops += 1
            subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
            _whole_again(forks, command, out, whole)
    assert stops
    with _mounted(disk, "size=20m"):
        out = disk / "run"
        assert forks.run([*command, "--out", str(out)])[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for words in (
            ["resume", str(out)],
            ["resume", str(out), "--rounds", "9"],
            [*command, "--out", str(disk / "n")],
        ):
            status, said = forks.run(words)
            assert status == 2, said
            assert "Read-only" in one_line(said), said
            assert said.count("\n") == 1, said
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    full = ("a small disk (tmpfs) that fills", "stop in one line, status 1; goes on bit-equal", f"{stops} sizes")
    return [full, ("a folder that is read-only", "refused in one line, status 2", "run, resume, resume --rounds")]


def _can_mount(folder: Path) -> bool:
    """Return whether this user may mount file systems."""
    with contextlib.suppress(OSError):
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)
            return True
    return False


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- signals ---------------------------------------------------------------------------------------------------------
def signals(short: bool) -> list[Row]:
    """Ctrl-C and SIGTERM at random moments, from the import on; a second process."""
    draw, sent, finished = random.Random(5), 0, 0
    kinds = [("a FedBuff run", signal.SIGTERM)] if short else [(name, n) for name in RUNS for n in (2, 15)]
    with tempfile.TemporaryDirectory(prefix="fedstill-soak-") as made_here:
        folder = Path(made_here)
        for name, number in kinds:
            command = [*RUNS[name], *TINY, "--rounds", "20" if short else "40", "--checkpoint-every", "10"]
            assert quiet([*command, "--out", str(folder / "whole")]) == 0
            out, before = folder / "cut", 0
            for trial in range(2 if short else 8):
                process = _process(go_on(command, out))
                if trial % 4 != 3:  # while rounds are run; else at any time, also during the import
                    while recorded(out) < before + 2 and process.poll() is None:
                        time.sleep(0.002)
                time.sleep(draw.random() * (0.1 if trial % 4 != 3 else 3.0))
                process.send_signal(number)
                if trial == 5:
                    process.send_signal(number)
                said = process.communicate()[0]
                sent += 1
                assert "Traceback" not in said, said
                if process.returncode == 0:
                    finished += 1
                    break
                before = recorded(out)
                assert process.returncode in (128 + number, -number), (process.returncode, said)
                if "stopped after round" in said:
                    assert f"'fedstill resume {out}' goes on" in one_line(said), said
                    for file in out.rglob("metrics.jsonl"):  # every round that is recorded is in the checkpoint, too
                        last = max(int(index.stem[6:]) for index in file.parent.glob("checkpoints/round-*.json"))
                        assert last == file.read_bytes().count(b"\n"), said
            assert quiet(go_on(command, out)) == 0
            assert contents(out) == contents(folder / "whole"), name
            tidy(out)
            for made in (out, folder / "whole"):
                shutil.rmtree(made)
        outcome = "round finished, saved, one line, 130 or 143; bit-equal end, no round done again"
        rows = [("Ctrl-C, SIGTERM at random moments", outcome, f"{sent} signals")]
        return [*rows, *_second(folder, short)]


def _second(folder: Path, short: bool) -> list[Row]:
    """A second process is refused, and the first is not disturbed."""
    command, out = [*RUNS["a stacked comparison"], *TINY, "--rounds", "8" if short else "25"], folder / "busy"
    assert quiet([*command, "--out", str(folder / "whole")]) == 0
    first, refused = _process([*command, "--out", str(out)]), 0
    while recorded(out) < 4:
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)  # so that it does not end before
    try:
        commands = [
            ["resume", str(out)], ["resume", str(out / "fedavg" / "seed-0")], [*command, "--out", str(out)],
            ["run", "fedavg", *TINY, "--out", str(out / "fedavg" / "seed-0")],
        ]  # fmt: skip
        for words in commands[: 1 if short else None]:
            second = _process(words)
            said = second.communicate()[0]
            assert second.returncode == 2, said
            one_line(said)
            assert said.count("\n") == 1, said
            refused += 1
    finally:
        first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0
    assert contents(out) == contents(folder / "whole")
    return [
        (
            "a second process on one folder",
            "refused in one line, status 2; the first ends bit-equal",
            f"{refused} commands",
        )
    ]


def _process(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedstill", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


SECTIONS = {"kill": kill, "checkpoint": checkpoint, "disk": disk, "signals": signals}
