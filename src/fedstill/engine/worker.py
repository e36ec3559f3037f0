"""The inside of a worker process, which does one job after another until its parent is gone, and the messages between the two.

A message is JSON after its length, on a pair of sockets. Tensors are in shared memory (`arena`): messages name their places.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import autograd

from ..core import tree
from ..core.errors import InputError, Shown, TrainingError
from ..core.tree import Tree
from .arena import Arena
from .bench import Bench, PartName, Work
from .one import One

HEAD = 8  # bytes of a message's length
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
EXPENDABLE = 300  # how much rather the kernel ends a worker than its parent where memory runs out


@dataclass(frozen=True)
class Job:
    """One client's work: to train in a round or to score on a part, with which trees, and how long it is."""

    kind: str
    when: int | str
    client: int
    trees: Tree
    units: int
    part: PartName = "all"  # of a round's work
    last: int = 0  # the round in which the client last trained
    watch: bool = False  # whether the trained model is asked for besides

    @property
    def header(self) -> list[Any]:
        """All but the trees, in the order in which `do` takes it."""
        return [self.kind, self.when, self.client, self.part, self.units, self.last, self.watch]


def training_job(round: int, work: Work, steps: int) -> Job:
    """Return a client's work as a job."""
    trees = {"down": work.down, "memory": work.memory, "local": work.local}
    return Job("train", round, work.client, trees, steps, work.part, work.last, work.watch)


class Line:
    """One end of a pair of sockets that carry messages. What has come of a message is kept until the rest is there."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._come = bytearray()

    def fileno(self) -> int:
        """Return the file that can be waited for."""
        return self.end.fileno()

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Send a message; raise TimeoutError where the other side has not taken it in so many seconds."""
        self.end.settimeout(seconds)
        self.end.sendall(len(message).to_bytes(HEAD, "little") + message)
        self.end.settimeout(None)

    def receive(self) -> bytes | None:
        """Take what has come (or wait for it); return a message once it is whole, else None.

        Raises EOFError where the other side is gone.
        """
        part = self.end.recv(1 << 20)
        if not part:
            raise EOFError
        self._come += part
        size = HEAD + int.from_bytes(self._come[:HEAD], "little")
        if len(self._come) < max(HEAD, size):
            return None
        message = bytes(self._come[HEAD:size])
        del self._come[:size]
        return message

    def close(self) -> None:
        """Close this end."""
        self.end.close()


def serve(
    parent: int, line: Line, bench: Bench, one: One, common: Arena, inbox: Arena, outbox: Arena, main: bool
) -> NoReturn:
    """Do one job after another; end with the parent. `main` says whether its main thread has forked this process."""
    try:
        _settle(parent, main)
        line.send(b'"ready"')
        while True:
            message = line.receive()
            while message is None:
                message = line.receive()
            header, spec = json.loads(message)
            trees = tree.map(lambda place: (inbox if place[0] else common).get(place[1:]), spec)
            try:
                result, numbers = do(bench, one, trees, *header)
                outbox.clear()
                answer = [tree.map(lambda leaf: cast(Any, outbox.put(leaf)), result), numbers, None]
            except Exception as error:
                answer = [{}, [], report(error)]
            outbox.clear()
            line.send(json.dumps(answer).encode())
            flush()
    except BaseException:
        os._exit(1)


def _settle(parent: int, main: bool) -> None:
    """Make a forked copy of the parent a worker: no handlers of the parent's, one thread, an end with the parent."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if main:  # the kernel ends us with the thread that has forked us, even while we are stopped
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    gc.freeze()  # what is inherited is not collected here: to look at it would copy its pages
    torch.set_num_threads(1)  # before anything else: OpenMP's threads do not survive a fork
    with contextlib.suppress(OSError, ValueError):
        adjust = Path("/proc/self/oom_score_adj")
        adjust.write_text(str(min(1000, int(adjust.read_text()) + EXPENDABLE)))
    with torch.enable_grad():
        probe = torch.ones(1, requires_grad=True)
        autograd.grad(probe.sum(), probe)  # refused where autograd cannot be forked


def _watch(parent: int) -> None:
    """End with the parent, even if it was killed in the middle of a job."""
    with contextlib.suppress(OSError, AttributeError):
        ended = select.poll()
        ended.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:
            ended.poll()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def flush() -> None:
    """Flush the streams: a child must not print again what was printed before, nor lose what it prints."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def do(
    bench: Bench,
    one: One,
    trees: Tree,
    kind: str,
    when: Any,
    client: int,
    part: PartName,
    steps: int,
    last: int,
    watch: bool,
) -> tuple[Tree, list[Any]]:
    """Do a job; return the tree and the numbers that come of it."""
    if kind == "train":
        work = Work(client, trees["down"], trees["memory"], part, trees["local"], steps, last, watch)
        (done,) = one.train(bench, when, [work])
        return {"up": done.up, "memory": done.memory, "local": done.local}, [done.loss, done.steps, done.samples]
    models = [(client, trees["params"])]
    with torch.no_grad():
        if kind == "score":
            return {}, [*one.score(bench, when, models)]
        ((score, statistics),) = one.measure(bench, when, models)
        return statistics, [score]


def report(error: Exception) -> dict[str, str]:
    """Return an exception as text."""
    report = {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    if isinstance(error, InputError):
        shown = str(error.value) if isinstance(error.value, Shown) else repr(error.value)
        report |= {"field": error.field, "value": shown, "right": error.right}
    return report


def restored(report: dict[str, str]) -> Exception:
    """Return the exception of a report, with the worker's traceback as a note."""
    error: Exception
    if report["kind"] == "InputError" and "field" in report:
        error = InputError(report["field"], Shown(report["value"]), report["right"])
    elif report["kind"] == "TrainingError":
        error = TrainingError(report["message"])
    else:
        kind = getattr(builtins, report["kind"], None)
        plain = isinstance(kind, type) and issubclass(kind, ValueError | ArithmeticError | TypeError | MemoryError)
        known = kind if plain and kind is not UnicodeDecodeError and kind is not UnicodeEncodeError else None
        error = known(report["message"]) if known else RuntimeError(f"{report['kind']}: {report['message']}")
    error.add_note(f"in a worker process:\n{report['trace']}")
    return error
