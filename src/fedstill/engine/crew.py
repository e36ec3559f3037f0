"""Worker processes that train and score clients one by one, and what travels between them and their parent.

Workers are forked, so model, method and data are inherited and never copied or pickled. Tensors travel through shared memory
(`arena`): what several clients are sent is written once a round. A pipe to each worker carries small messages in JSON. An idle
worker takes the next client, longest first; results come in the order that was asked for.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, autograd

from ..core import tree
from ..core.errors import InputError, Shown, TrainingError
from ..core.tree import Tree
from .arena import Arena
from .bench import Bench, PartName, Work
from .one import One

PATIENCE = 60.0  # seconds in which a new worker must have reported


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


@dataclass
class _Worker:
    """A worker process as its parent sees it."""

    pid: int
    pipe: Connection
    inbox: Arena
    outbox: Arena
    job: tuple[int, Job] | None = None  # what it works on: the number in the call, and the job


class Crew:
    """The worker processes of one bench, and the memory shared with them."""

    def __init__(self, bench: Bench, one: One, size: int) -> None:
        self.bench, self.bytes = bench, 0
        self.common = Arena()
        self.workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self.workers, self.common)
        _flush()
        try:
            for _ in range(size):
                self._hire(bench, one)
            if not all(worker.pipe.poll(PATIENCE) and self._hear(worker) == "ready" for worker in self.workers):
                raise TimeoutError
        except (OSError, EOFError) as error:
            self.close()
            raise OSError("no process that can train can be forked here") from error

    def _hire(self, bench: Bench, one: One) -> None:
        inbox, outbox = Arena(), Arena()
        parent_end, child_end = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads: the child uses none of theirs
            with _interrupt_later():
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        if pid == 0:
            for pipe in [parent_end, *(worker.pipe for worker in self.workers)]:
                pipe.close()
            _serve(parent, child_end, bench, one, self.common, inbox, outbox)
        child_end.close()
        self.workers.append(_Worker(pid, parent_end, inbox, outbox))

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Tree, list[Any]]]:
        """Do every job; yield for each, in their order, the tree and the numbers that came back."""
        for worker in list(self.workers):  # jobs of an earlier call whose results nobody waited for
            if worker.job is not None:
                self._answer(worker)
        self.common.clear()
        leaves = Counter(id(leaf) for job in jobs for leaf in {id(x): x for _, x in tree.leaves(job.trees)}.values())
        shared = {leaf for leaf, count in leaves.items() if count > 1}
        waiting = deque(sorted(range(len(jobs)), key=lambda i: (-jobs[i].units, i)))
        results: dict[int, tuple[Tree, list[Any]]] = {}

        def give(worker: _Worker) -> None:
            number = waiting.popleft()
            self._send(worker, number, jobs[number], shared)

        def turn(block: bool) -> None:
            """Give idle workers something to do, and take the results that have come."""
            for worker in self.workers:
                if worker.job is None and waiting:
                    give(worker)
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            for pipe in wait(list(busy), None if block else 0):
                worker = busy[pipe]  # type: ignore[index]
                number, answer = self._take(worker)
                results[number] = answer
                if waiting:
                    give(worker)

        for i in range(len(jobs)):
            while i not in results:
                turn(block=True)
            turn(block=False)  # so that no worker waits while the caller is at work on this one
            yield results.pop(i)
        self.common.clear()

    def _send(self, worker: _Worker, number: int, job: Job, shared: set[int]) -> None:
        worker.job = number, job

        def place(leaf: Tensor) -> Any:
            return (0, *self.common.put(leaf)) if id(leaf) in shared else (1, *worker.inbox.put(leaf))

        header = [job.kind, job.when, job.client, job.part, job.units, job.last, job.watch]
        message = json.dumps([header, tree.map(place, job.trees)]).encode()
        self.bytes += len(message)
        try:
            worker.pipe.send_bytes(message)
        except OSError:
            self._lost(worker)

    def _hear(self, worker: _Worker) -> Any:
        message = worker.pipe.recv_bytes()
        self.bytes += len(message)
        return json.loads(message)

    def _answer(self, worker: _Worker) -> Any:
        try:
            answer = self._hear(worker)
        except (EOFError, OSError):
            self._lost(worker)
        worker.job = None
        worker.inbox.clear()
        return answer

    def _take(self, worker: _Worker) -> tuple[int, tuple[Tree, list[Any]]]:
        """Return a worker's job number and its answer, copied out of the shared memory."""
        assert worker.job is not None
        number = worker.job[0]
        spec, numbers, failure = self._answer(worker)
        if failure is not None:
            raise _restored(failure)
        return number, (tree.map(lambda place: worker.outbox.get(place).clone(), spec), numbers)

    def _lost(self, worker: _Worker) -> NoReturn:
        """Raise an error that says whose work a worker had that is gone."""
        self.workers.remove(worker)
        code = _reap(worker)
        ending = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        hint = "; if memory ran out, fewer workers need less" if code == -signal.SIGKILL else ""
        whose = f" at work on client {worker.job[1].client}" if worker.job is not None else ""
        raise TrainingError(f"a worker process{whose} {ending}{hint}")

    def close(self) -> None:
        """End the processes and free the memory."""
        self._end()


def _end(owner: int, workers: list[_Worker], common: Arena) -> None:
    """End the workers, once: at close, when the crew is collected, or at exit. A forked child, which has a copy, does nothing."""
    if os.getpid() != owner:
        return
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        _reap(worker)
    common.close()
    workers.clear()


def _reap(worker: _Worker) -> int:
    """Wait for a worker's end, free what was shared with it, and return its exit code."""
    worker.pipe.close()
    code = 0
    with contextlib.suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    worker.inbox.close()
    worker.outbox.close()
    return code


def _serve(
    parent: int, pipe: Connection, bench: Bench, one: One, common: Arena, inbox: Arena, outbox: Arena
) -> NoReturn:
    """Do one job after another in a worker, until the parent is gone."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        torch.set_num_threads(1)  # before anything else: OpenMP's threads do not survive a fork
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        with torch.enable_grad():
            probe = torch.ones(1, requires_grad=True)
            autograd.grad(probe.sum(), probe)  # refused where autograd cannot be forked
        pipe.send_bytes(b'"ready"')
        while True:
            header, spec = json.loads(pipe.recv_bytes())
            trees = tree.map(lambda place: (inbox if place[0] else common).get(place[1:]), spec)
            try:
                answer, numbers = _do(bench, one, trees, *header)
                outbox.clear()
                message = [tree.map(lambda leaf: cast(Any, outbox.put(leaf)), answer), numbers, None]
            except Exception as error:
                message = [{}, [], _report(error)]
            outbox.clear()
            pipe.send_bytes(json.dumps(message).encode())
            _flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def training_job(round: int, work: Work, steps: int) -> Job:
    """Return a client's work as a job."""
    trees = {"down": work.down, "memory": work.memory, "local": work.local}
    return Job("train", round, work.client, trees, steps, work.part, work.last, work.watch)


def _do(
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
    if kind == "train":
        work = Work(client, trees["down"], trees["memory"], part, trees["local"], steps, last, watch)
        (done,) = one.train(bench, when, [work])
        return {"up": done.up, "memory": done.memory, "local": done.local}, [done.loss, done.steps, done.samples]
    with torch.no_grad():
        return {}, one.score(bench, when, [(client, trees["params"])])


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Hold an interrupt back until the end of the context: Python ignores one that arrives while it forks a process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    parent = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == parent:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if arrived and callable(before) and os.getpid() == parent:
        before(*arrived[0])


def _flush() -> None:
    """Flush the streams: a child must not print again what was printed before, nor lose what it prints."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _watch(parent: int) -> None:
    """End with the parent, even if it was killed in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _report(error: Exception) -> dict[str, str]:
    """Return an exception as text."""
    report = {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    if isinstance(error, InputError):
        shown = str(error.value) if isinstance(error.value, Shown) else repr(error.value)
        report |= {"field": error.field, "value": shown, "right": error.right}
    return report


def _restored(report: dict[str, str]) -> Exception:
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
