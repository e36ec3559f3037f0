"""Worker processes that train and score clients one by one, seen from their parent (`worker` is their inside).

Workers are forked, so model, method and data are inherited and never copied or pickled. What several clients are sent is
written once a round. An idle worker takes the next client, longest first; results come in the order that was asked for.

A worker that ends, whatever ends it, is replaced by a fresh fork of the parent and the client that it had in hand is done again:
a client's result depends on nothing but its job, and nothing of a worker's memory is read before its answer is whole, so the
bits are the same. A client at whose work `LOSSES` workers have ended, the last with no other at work, ends the run. A worker that
does not go on is ended, too: one that is stopped (SIGSTOP), or that uses no processor time for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from ..core import tree
from ..core.errors import TrainingError
from ..core.tree import Tree
from .arena import Arena
from .bench import Bench
from .one import One
from .stage import say
from .worker import Job, Line, do, flush, restored, serve

LOSSES = 3  # workers that may end at one client's work, or before they were ready, one after another
TICK = 1.0  # seconds between two looks at the workers


@dataclass(frozen=True)
class Patience:
    """For how many seconds a worker may give no sign of going on, before it is ended and replaced."""

    start: float = 60.0  # a new one that has not reported
    stopped: float = 10.0  # one that was stopped by a signal
    asleep: float = (
        300.0  # one that waits and uses no processor time; ten times the longest work so far, if that is longer
    )


PATIENCE = Patience()


@dataclass(eq=False)
class _Worker:
    """A worker process as its parent sees it."""

    pid: int
    line: Line
    inbox: Arena
    outbox: Arena
    ready: bool = False
    job: tuple[int, Job] | None = None  # what it works on: the number in the call, and the job
    began: float = 0.0  # when it was given the job
    used: int = 0  # processor time, in the kernel's ticks, at the last look
    silent: float = 0.0  # seconds without a sign of going on


@dataclass(frozen=True)
class _Loss:
    """How a worker ended, instead of its answer."""

    how: str
    hint: str = ""


class Crew:
    """The worker processes of one bench, and the memory shared with them."""

    def __init__(self, bench: Bench, one: One, size: int, patience: Patience | None = None) -> None:
        self.bench, self.one, self.size, self.bytes = bench, one, size, 0
        self.patience = patience or PATIENCE
        self.common = Arena()
        self.workers: list[_Worker] = []
        self._stillborn = 0  # workers in a row that ended before they were ready
        self._longest = 0.0  # seconds that a job has taken
        self._looked = time.monotonic()
        self._end = weakref.finalize(self, _end, os.getpid(), self.workers, self.common)
        try:
            for _ in range(size):
                self._hire()
            while not all(worker.ready for worker in self.workers):
                if any(isinstance(answer, _Loss) for _, _, answer in self._hear(block=True)):
                    raise ChildProcessError
        except OSError as error:
            self.close()
            raise OSError("no process that can train can be forked here") from error
        except BaseException:
            self.close()
            raise

    def _hire(self) -> None:
        """Fork a worker; it is ready when it has said so."""
        inbox, outbox = Arena(), Arena()
        ours, theirs = (Line(end) for end in socket.socketpair())
        parent, main = os.getpid(), threading.current_thread() is threading.main_thread()
        flush()
        try:
            with warnings.catch_warnings(), _signals_later():
                # Of forks beside threads: the child uses none of theirs.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
                if pid == 0:
                    self._forget()
                    ours.close()
                    serve(parent, theirs, self.bench, self.one, self.common, inbox, outbox, main)
                self.workers.append(_Worker(pid, ours, inbox, outbox))
        except BaseException:
            if os.getpid() != parent:
                os._exit(1)
            if all(worker.line is not ours for worker in self.workers):
                for shared in (ours, inbox, outbox):
                    shared.close()
            raise
        finally:
            theirs.close()

    def _forget(self) -> None:
        """Close a new child's copies of what its parent shares with the others."""
        for worker in self.workers:
            for shared in (worker.line, worker.inbox, worker.outbox):
                shared.close()

    def _replace(self) -> None:
        """Fork workers in the place of those that are gone, as long as that works."""
        while len(self.workers) < self.size and self._stillborn < LOSSES:
            try:
                self._hire()
            except OSError:
                self._stillborn += 1

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Tree, list[Any]]]:
        """Do every job; yield for each, in their order, the tree and the numbers that came back."""
        while any(worker.job is not None for worker in self.workers):
            self._hear(block=True)  # jobs of an earlier call whose results nobody waited for
        self.common.clear()
        leaves = Counter(id(leaf) for job in jobs for leaf in {id(x): x for _, x in tree.leaves(job.trees)}.values())
        shared = {leaf for leaf, count in leaves.items() if count > 1}
        waiting = deque(sorted(range(len(jobs)), key=lambda i: (-jobs[i].units, i)))
        results: dict[int, tuple[Tree, list[Any]]] = {}
        losses: Counter[int] = Counter()

        def give() -> None:
            """Give idle workers something to do."""
            self._replace()
            for worker in self.workers:
                if not waiting or not worker.ready or worker.job is not None:
                    continue
                busy = [other.job[0] for other in self.workers if other.job is not None]
                if busy and LOSSES - 1 in (losses[number] for number in (waiting[0], *busy)):
                    break  # a last try has the machine for itself: memory may be short
                number = waiting.popleft()
                self._send(worker, number, jobs[number], shared)

        def turn(block: bool) -> None:
            """Give idle workers something to do, and take the results that have come."""
            give()
            if not self.workers and waiting:
                number = waiting.popleft()
                results[number] = self._do_here(jobs[number])
            for worker, job, answer in self._hear(block):
                if job is None:
                    continue
                if isinstance(answer, _Loss):
                    losses[job[0]] += 1
                    _check_losses(job[1], losses[job[0]], answer)
                    waiting.appendleft(job[0])
                else:
                    results[job[0]] = _taken(worker, answer)
            give()

        for i in range(len(jobs)):
            while i not in results:
                turn(block=True)
            turn(block=False)  # so that no worker waits while the caller is at work on this one
            yield results.pop(i)
        self.common.clear()

    def _send(self, worker: _Worker, number: int, job: Job, shared: set[int]) -> None:
        worker.job, worker.began, worker.silent = (number, job), time.monotonic(), 0.0

        def place(leaf: Tensor) -> Any:
            return (0, *self.common.put(leaf)) if id(leaf) in shared else (1, *worker.inbox.put(leaf))

        message = json.dumps([job.header, tree.map(place, job.trees)]).encode()
        self.bytes += len(message)
        try:
            worker.line.send(message, self.patience.start)
        except OSError:  # it is gone, or does not listen: it is taken for lost when it is heard next
            _kill(worker.pid)

    def _do_here(self, job: Job) -> tuple[Tree, list[Any]]:
        """Do a job in this process, where no worker is left and none can be forked."""
        return do(self.bench, self.one, job.trees, *job.header)

    def _hear(self, block: bool) -> list[tuple[_Worker, tuple[int, Job] | None, Any]]:
        """Return workers with the job that is over and its answer, or how they ended (the job is None where they had none)."""
        lines = {worker.line: worker for worker in self.workers}
        if not lines:
            return []
        heard: list[tuple[_Worker, tuple[int, Job] | None, Any]] = []
        lost: list[tuple[_Worker, str]] = []
        for line in wait(list(lines), TICK if block else 0):  # type: ignore[arg-type]
            worker = lines[line]  # type: ignore[index]
            try:
                message = worker.line.receive()
            except (OSError, EOFError):
                lost.append((worker, ""))
                continue
            if message is None:
                continue
            self.bytes += len(message)
            worker.silent = 0.0
            if not worker.ready:
                worker.ready, self._stillborn = True, 0
                continue
            job, worker.job = worker.job, None
            self._longest = max(self._longest, time.monotonic() - worker.began)
            worker.inbox.clear()
            heard.append((worker, job, json.loads(message)))
        known = [worker for worker, *_ in (*heard, *lost)]  # what has just answered must first be read
        lost += [(worker, why) for worker, why in self._silent() if worker not in known]
        return heard + [(worker, worker.job, self._lose(worker, why)) for worker, why in lost]

    def _silent(self) -> list[tuple[_Worker, str]]:
        """Return workers that have given no sign of going on for too long, with what is wrong with them."""
        passed = time.monotonic() - self._looked
        if passed < TICK:
            return []
        self._looked += passed
        passed = min(passed, 2 * TICK)  # the rest of the time this process was stopped itself, or busy elsewhere
        lost = []
        for worker in self.workers:
            state, used = _state(worker.pid)
            limit, why = max(self.patience.asleep, 10 * self._longest), "used no processor time"
            if not worker.ready:
                limit, why = self.patience.start, "did not report"
            if state == "T":
                limit, why = self.patience.stopped, "was stopped"
            # t: a debugger has it
            going_on = worker.ready and (worker.job is None or state in "Rt" or used > worker.used)
            worker.silent = 0.0 if going_on else worker.silent + passed
            worker.used = used
            if state == "Z":
                lost.append((worker, ""))
            elif worker.silent > limit:
                lost.append((worker, f"{why} for {worker.silent:.0f} seconds"))
        return lost

    def _lose(self, worker: _Worker, why: str) -> _Loss:
        """Free all that a worker held; return how it ended."""
        self.workers.remove(worker)
        self._stillborn += not worker.ready
        if why:
            _kill(worker.pid)
        code = _reap(worker)
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        short = code == -signal.SIGKILL and not why
        loss = _Loss(
            why or ended, "; if memory ran out, fewer workers or a smaller batch_size need less" if short else ""
        )
        if worker.job is not None:
            say(f"a worker process at work on client {worker.job[1].client} {loss.how}: another one does that again")
        return loss

    def close(self) -> None:
        """End the processes and free the memory."""
        self._end()


def _taken(worker: _Worker, answer: Any) -> tuple[Tree, list[Any]]:
    """Return what an answer holds, copied out of the shared memory; raise what was raised in the worker."""
    spec, numbers, failure = answer
    if failure is not None:
        raise restored(failure)
    return tree.map(lambda place: worker.outbox.get(place).clone(), spec), numbers


def _check_losses(job: Job, losses: int, last: _Loss) -> None:
    """Refuse to do a client again at whose work too many workers have ended."""
    if losses == LOSSES:
        ends = f"{losses} worker processes ended at work on client {job.client}, the last one {last.how}"
        raise TrainingError(f"{ends}{last.hint}")


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state (R: running, T: stopped, …) and the processor time that it has used, in the kernel's ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):  # nobody can tell
        return "R", 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end(owner: int, workers: list[_Worker], common: Arena) -> None:
    """End the workers, once: at close, when the crew is collected, or at exit. A forked child, which has a copy, does nothing."""
    if os.getpid() != owner:
        return
    with _signals_later():
        for worker in workers:
            _kill(worker.pid)
        for worker in workers:
            _reap(worker)
        common.close()
        workers.clear()


def _reap(worker: _Worker) -> int:
    """Wait for a worker's end, free what was shared with it, and return its exit code."""
    code, until = 0, time.monotonic() + TICK
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        while not pid and time.monotonic() < until:
            time.sleep(0.002)
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if not pid:  # it has left the line, and goes on
            _kill(worker.pid)
            _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
    for shared in (worker.line, worker.inbox, worker.outbox):
        shared.close()
    return code


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Hold signals back until the end of the context: Python ignores one that arrives while it forks a process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    owner, before = os.getpid(), {}
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(kind)
        if callable(handler):
            before[int(kind)] = handler
            signal.signal(kind, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        if os.getpid() == owner:
            for number, handler in before.items():
                signal.signal(number, handler)
    if os.getpid() == owner:
        for number, frame in arrived:
            before[number](number, frame)
