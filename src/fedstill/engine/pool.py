"""The engine `one` over several cores: a pool of worker processes (`crew`) that lasts as long as the run.

Results come in the order that was asked for, so a merge adds in the same order and gives the same bits for any number of
workers. For that every worker, and `one` itself where there could be several, computes on one thread.

Small work is not handed out: the first clients are trained in this process, and workers start once the time they took says that
it pays. Where a process cannot be forked (not Linux, or autograd's threads for a GPU are running), all is done in this process.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..core.errors import TrainingError
from ..core.tree import Params, Tree
from .bench import Bench, Done, PartName, Work, threads
from .crew import Crew
from .one import One
from .worker import Job, training_job

T = TypeVar("T")
CORES_PER_CLIENT = 8  # cores for each client of a round from which on all of them work on one client at a time


@dataclass(frozen=True)
class Limits:
    """From where on it pays to hand work out, in seconds."""

    call: float = 0.01  # of work in one call (handing it out costs 0.2 to 0.3 ms a client)
    start: float = 0.5  # of work in the rest of the run, to start workers (about 20 ms each)
    warm: float = 0.5  # that a first client must take for its time to be believed: a first one also warms up


LIMITS = Limits()


def share(
    workers: int, together: int, device: torch.device, cores: int | None = None, forks: bool = sys.platform == "linux"
) -> tuple[int, bool]:
    """Return how many workers serve rounds of `together` clients, and whether each client trains on one thread.

    `workers` is as asked (0: one a core), `cores` how many this process may use, `forks` whether the system can fork.

    The threads do not depend on `workers`, so neither do the bits. Where a round has a single client, or very few for the
    cores, all threads work on each client in turn instead.
    """
    if device.type != "cpu" or not forks:
        return 1, False
    cores = cores or len(os.sched_getaffinity(0))
    if together == 1 or together * CORES_PER_CLIENT <= cores:
        return 1, False
    return min(workers or cores, together), True


class _Meter:
    """Measures what a unit of work takes in this process: the least of what was seen."""

    def __init__(self, warm: float) -> None:
        self.warm = warm
        self.seen, self.least = 0, float("inf")

    def add(self, seconds: float, units: int) -> None:
        self.seen += 1
        if self.seen > 1 or seconds > self.warm:
            self.least = min(self.least, seconds / max(1, units))

    def expects(self, units: int) -> float:
        """Return the seconds for so many units; 0 before anything was measured."""
        return units * self.least if self.least < float("inf") else 0.0


class Pool:
    """An engine: `one`, spread over worker processes."""

    def __init__(self, one: One, workers: int, limits: Limits = LIMITS) -> None:
        self.one, self.workers, self.limits = one, workers, limits
        # A step costs another time in each part of a round.
        self._training: defaultdict[PartName, _Meter] = defaultdict(lambda: _Meter(limits.warm))
        self._scoring = _Meter(limits.warm)
        self._crew: Crew | None = None
        self._alone = False  # no process can be forked here
        self._busy = False

    @property
    def pids(self) -> list[int]:
        """The workers' processes; none before they have started."""
        return [] if self._crew is None else [worker.pid for worker in self._crew.workers]

    @property
    def bytes(self) -> int:
        """Bytes that have gone through the pipes so far."""
        return 0 if self._crew is None else self._crew.bytes

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""
        if not works:
            return
        phases, meter = bench.part(works[0].part, round), self._training[works[0].part]
        steps = [sum(bench.length(work, length) for _, _, length in phases) for work in works]
        for i, work in enumerate(works):
            rounds = max(1, bench.task.rounds - round + 1)
            if self._pays(bench, meter.expects(sum(steps[i:])), len(works) - i, rounds):
                jobs = [training_job(round, w, units) for w, units in zip(works[i:], steps[i:], strict=True)]
                for job, (result, numbers) in zip(jobs, self._spread(jobs), strict=True):
                    loss, took, samples = numbers
                    yield Done(job.client, result["up"], result["memory"], loss, took, samples, local=result["local"])
                return
            began = time.perf_counter()
            (done,) = self.one.train(bench, round, [work])
            if steps[i]:
                meter.add(time.perf_counter() - began, steps[i])
            yield done

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the sum of the scores of each client's samples."""
        return self._scored("score", bench, part, models, lambda: self.one.score(bench, part, models), lambda n, _: n)

    def measure(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[tuple[float, Tree]]:
        """Return the sum of the scores of each client's samples, and the statistics of its metrics."""
        return self._scored(
            "measure", bench, part, models, lambda: self.one.measure(bench, part, models), lambda n, found: (n, found)
        )

    def _scored(
        self,
        kind: str,
        bench: Bench,
        part: str,
        models: Sequence[tuple[int, Params]],
        here: Callable[[], list[T]],
        take: Callable[[float, Tree], T],
    ) -> list[T]:
        """Score in the workers where that pays, else in this process."""
        sizes = bench.data.part(part).sizes
        jobs = [Job(kind, part, client, {"params": params}, sizes[client]) for client, params in models]
        if self._crew is not None and self._pays(
            bench, self._scoring.expects(sum(j.units for j in jobs)), len(jobs), 1
        ):
            return [take(numbers[0], result) for result, numbers in self._spread(jobs)]
        began = time.perf_counter()
        found = here()
        self._scoring.add(time.perf_counter() - began, sum(job.units for job in jobs))
        return found

    def losses(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the mean loss of each client's model on the client's samples, computed in this process."""
        return self.one.losses(bench, part, models)

    def close(self) -> None:
        """End the workers; the next use that pays starts new ones."""
        if self._crew is not None:
            self._crew.close()
        self._crew, self._busy = None, False

    def _pays(self, bench: Bench, seconds: float, jobs: int, rounds: int) -> bool:
        """Return whether to hand this out; start the workers where that pays and there are none."""
        if jobs < 2 or seconds < self.limits.call or self._busy or self._alone:
            return False
        if self._crew is not None and self._crew.bench is not bench:
            self.close()
        if self._crew is None and seconds * rounds >= self.limits.start:
            try:
                self._crew = Crew(bench, self.one, self.workers)
            except OSError:
                self._alone = True
        return self._crew is not None

    def _spread(self, jobs: Sequence[Job]) -> Iterator[tuple[Tree, list[Any]]]:
        assert self._crew is not None
        self._busy = True
        try:
            with threads(1):
                yield from self._crew.run(jobs)
        except (TrainingError, KeyboardInterrupt):
            self.close()
            raise
        finally:
            self._busy = False
