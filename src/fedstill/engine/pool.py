"""The engine `one` over several cores: a pool of worker processes that lasts as long as the run.

Workers are forked, so model, method and data are inherited and never copied or pickled. Tensors travel through shared memory
(`arena`): what several clients are sent is written once a round. A pipe to each worker carries small messages in JSON. An idle
worker takes the next client, longest first; results are given out in the order that was asked for, so a merge adds in the same
order and gives the same bits for any number of workers. For that every worker, and `one` itself where there could be several,
computes on one thread.

Small work is not handed out: the first clients are trained in this process, and workers start once the time they took says that
it pays. Where a process cannot be forked (not Linux, or autograd's threads for a GPU are running), all is done in this process.
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
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, autograd

from ..core import tree
from ..core.errors import InputError, Shown, TrainingError
from ..core.tree import Params, Tree
from .arena import Arena
from .bench import Bench, Done, PartName, Work
from .one import One, threads

CALL = 0.01  # seconds of work in one call below which handing it out costs more than it saves (0.2 to 0.3 ms a client)
START = 0.5  # seconds of work in the rest of the run below which starting workers does (about 20 ms each)
WARM = 0.5  # seconds that a first client must take for its time to be believed: a first one also warms up
PATIENCE = 60.0  # seconds in which a new worker must have said that it is there
FEW = 8  # cores for each client of a round from which on all of them work on one client at a time


def share(workers: int, together: int, device: torch.device) -> tuple[int, bool]:
    """How many workers for rounds of `together` clients (`workers` as asked, 0: one a core), and whether on one thread each.

    The threads do not depend on `workers`, so neither do the bits. Where a round has a single client, or very few for the
    cores, all threads work on each client in turn instead.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return 1, False
    cores = len(os.sched_getaffinity(0))
    if together == 1 or together * FEW <= cores:
        return 1, False
    return min(workers or cores, together), True


@dataclass(frozen=True)
class _Job:
    """One client's work: what to do in which round or on which part, with which tree, and how long it is."""

    kind: str
    when: int | str
    client: int
    given: Tree
    units: int
    part: PartName = "all"  # of a round's work
    last: int = 0  # the round in which the client last trained
    watch: bool = False


class _Meter:
    """What a unit of work takes in this process: the least of what was seen."""

    def __init__(self) -> None:
        self.seen, self.least = 0, float("inf")

    def add(self, seconds: float, units: int) -> None:
        self.seen += 1
        if self.seen > 1 or seconds > WARM:
            self.least = min(self.least, seconds / max(1, units))

    def expects(self, units: int) -> float:
        """Seconds for so many units; none before anything was measured."""
        return units * self.least if self.least < float("inf") else 0.0


class Pool:
    """An engine: `one`, spread over worker processes."""

    def __init__(self, one: One, workers: int) -> None:
        self.one, self.workers = one, workers
        self._training: defaultdict[PartName, _Meter] = defaultdict(_Meter)  # a step costs another time in each part
        self._scoring = _Meter()
        self._crew: _Crew | None = None
        self._alone = False  # no process can be forked here
        self._busy = False

    @property
    def pids(self) -> list[int]:
        """The workers' processes; none before they have started."""
        return [] if self._crew is None else [worker.pid for worker in self._crew.workers]

    @property
    def bytes(self) -> int:
        """What has gone through the pipes so far."""
        return 0 if self._crew is None else self._crew.bytes

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""
        if not works:
            return
        phases, meter = bench.part(works[0].part, round), self._training[works[0].part]
        steps = [sum(bench.length(work, epochs) for _, _, epochs in phases) for work in works]
        for i, work in enumerate(works):
            rounds = max(1, bench.task.rounds - round + 1)
            if self._pays(bench, meter.expects(sum(steps[i:])), len(works) - i, rounds):
                jobs = [_asked(round, w, units) for w, units in zip(works[i:], steps[i:], strict=True)]
                for job, (found, numbers) in zip(jobs, self._spread(jobs), strict=True):
                    loss, took, samples = numbers
                    yield Done(job.client, found["up"], found["memory"], loss, took, samples, local=found["local"])
                return
            began = time.perf_counter()
            (done,) = self.one.train(bench, round, [work])
            if steps[i]:
                meter.add(time.perf_counter() - began, steps[i])
            yield done

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's samples its model gets right."""
        sizes = bench.data.part(part).sizes
        jobs = [_Job("score", part, client, {"params": params}, sizes[client]) for client, params in models]
        if self._crew is not None and self._pays(
            bench, self._scoring.expects(sum(j.units for j in jobs)), len(jobs), 1
        ):
            return [int(numbers[0]) for _, numbers in self._spread(jobs)]
        began = time.perf_counter()
        hits = self.one.score(bench, part, models)
        self._scoring.add(time.perf_counter() - began, sum(job.units for job in jobs))
        return hits

    def close(self) -> None:
        """End the workers; the next use that pays starts new ones."""
        if self._crew is not None:
            self._crew.close()
        self._crew, self._busy = None, False

    def _pays(self, bench: Bench, seconds: float, jobs: int, rounds: int) -> bool:
        """Whether to hand this out; starts the workers where it does and there are none."""
        if jobs < 2 or seconds < CALL or self._busy or self._alone:
            return False
        if self._crew is not None and self._crew.bench is not bench:
            self.close()
        if self._crew is None and seconds * rounds >= START:
            try:
                self._crew = _Crew(bench, self.one, self.workers)
            except OSError:
                self._alone = True
        return self._crew is not None

    def _spread(self, jobs: Sequence[_Job]) -> Iterator[tuple[Tree, list[Any]]]:
        assert self._crew is not None
        self._busy = True
        try:
            with threads(1):
                yield from self._crew.run(jobs)
        except TrainingError:
            self.close()
            raise
        finally:
            self._busy = False


@dataclass
class _Worker:
    """A process as its parent sees it."""

    pid: int
    pipe: Connection
    inbox: Arena
    outbox: Arena
    job: tuple[int, _Job] | None = None  # what it is at: its number in the call, and the job


class _Crew:
    """The worker processes of one bench, and what is shared with them."""

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
        here, there = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads: the child uses none of theirs
            pid = os.fork()
        if pid == 0:
            for pipe in [here, *(worker.pipe for worker in self.workers)]:
                pipe.close()
            _serve(parent, there, bench, one, self.common, inbox, outbox)
        there.close()
        self.workers.append(_Worker(pid, here, inbox, outbox))

    def run(self, jobs: Sequence[_Job]) -> Iterator[tuple[Tree, list[Any]]]:
        """Have every job done; for each, in their order, the tree and the numbers that came back."""
        for worker in list(self.workers):  # jobs of an earlier call whose results nobody waited for
            if worker.job is not None:
                self._answer(worker)
        self.common.clear()
        leaves = Counter(id(leaf) for job in jobs for leaf in {id(x): x for _, x in tree.leaves(job.given)}.values())
        shared = {leaf for leaf, count in leaves.items() if count > 1}
        waiting = deque(sorted(range(len(jobs)), key=lambda i: (-jobs[i].units, i)))
        found: dict[int, tuple[Tree, list[Any]]] = {}

        def give(worker: _Worker) -> None:
            number = waiting.popleft()
            self._give(worker, number, jobs[number], shared)

        def turn(block: bool) -> None:
            """Give idle workers something to do, and take what has come."""
            for worker in self.workers:
                if worker.job is None and waiting:
                    give(worker)
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            for pipe in wait(list(busy), None if block else 0):
                worker = busy[pipe]  # type: ignore[index]
                number, answer = self._take(worker)
                found[number] = answer
                if waiting:
                    give(worker)

        for i in range(len(jobs)):
            while i not in found:
                turn(block=True)
            turn(block=False)  # so that no worker waits while the caller is at work on this one
            yield found.pop(i)
        self.common.clear()

    def _give(self, worker: _Worker, number: int, job: _Job, shared: set[int]) -> None:
        worker.job = number, job

        def place(leaf: Tensor) -> Any:
            return (0, *self.common.put(leaf)) if id(leaf) in shared else (1, *worker.inbox.put(leaf))

        about = [job.kind, job.when, job.client, job.part, job.units, job.last, job.watch]
        message = json.dumps([about, tree.map(place, job.given)]).encode()
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
        """A worker's answer and its number, copied out of the shared memory."""
        assert worker.job is not None
        number = worker.job[0]
        spec, numbers, failure = self._answer(worker)
        if failure is not None:
            raise _raised(failure)
        return number, (tree.map(lambda place: worker.outbox.get(place).clone(), spec), numbers)

    def _lost(self, worker: _Worker) -> NoReturn:
        """A worker is gone: say whose work it had."""
        self.workers.remove(worker)
        code = _gone(worker)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        hint = "; if memory ran out, fewer workers need less" if code == -signal.SIGKILL else ""
        whose = f" at work on client {worker.job[1].client}" if worker.job is not None else ""
        raise TrainingError(f"a worker process{whose} {how}{hint}")

    def close(self) -> None:
        """End the processes and free the memory."""
        self._end()


def _end(owner: int, workers: list[_Worker], common: Arena) -> None:
    """Called once: at close, when the crew is collected, or at exit. A forked child has a copy, and leaves it alone."""
    if os.getpid() != owner:
        return
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        _gone(worker)
    common.close()
    workers.clear()


def _gone(worker: _Worker) -> int:
    """Wait for a worker's end and free what was shared with it; its exit code."""
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
    """A worker's life: one job after another, until the parent is gone."""
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
            about, spec = json.loads(pipe.recv_bytes())
            given = tree.map(lambda place: (inbox if place[0] else common).get(place[1:]), spec)
            try:
                answer, numbers = _do(bench, one, given, *about)
                outbox.clear()
                message = [tree.map(lambda leaf: cast(Any, outbox.put(leaf)), answer), numbers, None]
            except Exception as error:
                message = [{}, [], _told(error)]
            outbox.clear()
            pipe.send_bytes(json.dumps(message).encode())
            _flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _asked(round: int, work: Work, steps: int) -> _Job:
    """The job that a client's work is."""
    trees = {"down": work.down, "memory": work.memory, "local": work.local}
    return _Job("train", round, work.client, trees, steps, work.part, work.last, work.watch)


def _do(
    bench: Bench,
    one: One,
    given: Tree,
    kind: str,
    when: Any,
    client: int,
    part: PartName,
    steps: int,
    last: int,
    watch: bool,
) -> tuple[Tree, list[Any]]:
    if kind == "train":
        work = Work(client, given["down"], given["memory"], part, given["local"], steps, last, watch)
        (done,) = one.train(bench, when, [work])
        return {"up": done.up, "memory": done.memory, "local": done.local}, [done.loss, done.steps, done.samples]
    with torch.no_grad():
        return {}, one.score(bench, when, [(client, given["params"])])


def _flush() -> None:
    """What was printed before a fork must not be printed by the child again, and what a child prints must not be lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _watch(parent: int) -> None:
    """End with the parent, even if it was killed in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _told(error: Exception) -> dict[str, str]:
    """An exception in words."""
    told = {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    if isinstance(error, InputError):
        shown = str(error.value) if isinstance(error.value, Shown) else repr(error.value)
        told |= {"field": error.field, "value": shown, "right": error.right}
    return told


def _raised(told: dict[str, str]) -> Exception:
    """The exception again, with the worker's own traceback as a note."""
    error: Exception
    if told["kind"] == "InputError" and "field" in told:
        error = InputError(told["field"], Shown(told["value"]), told["right"])
    elif told["kind"] == "TrainingError":
        error = TrainingError(told["message"])
    else:
        kind = getattr(builtins, told["kind"], None)
        plain = isinstance(kind, type) and issubclass(kind, ValueError | ArithmeticError | TypeError | MemoryError)
        known = kind if plain and kind is not UnicodeDecodeError and kind is not UnicodeEncodeError else None
        error = known(told["message"]) if known else RuntimeError(f"{told['kind']}: {told['message']}")
    error.add_note(f"in a worker process:\n{told['trace']}")
    return error
