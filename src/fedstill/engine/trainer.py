"""The Training Optimizer: trains n ≥ 1 clients for a round, and scores models on clients' data.

Two engines compute the same numbers to rounding: `one` takes each client in turn (what wins on a CPU, and the oracle for
the other); `stacked` trains a cohort at once, every tensor with a leading client axis. `auto` chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from ..core import tree
from ..core.errors import InputError
from ..core.task import CHUNK
from ..core.tree import Params, Tree
from ..nn.kernels import winograd
from ..nn.kernels.autotune import Choices, Lowering
from ..nn.mode import Execution
from . import pool, stackable
from .bench import (
    SMALL,
    Bench,
    CompileName,
    Done,
    EngineName,
    FederationData,
    PrecisionName,
    Store,
    TooMany,
    Work,
    threads,
)  # fmt: skip
from .one import One
from .pool import Pool
from .recognise import recognise
from .stacked import Stacked
from .stage import Programs, say
from .threads import available, check_obtainable, is_small

T = TypeVar("T")
SMALL_MODEL = 20_000  # parameters below which stacking many clients beats a perceptron's own loop


class Engine(Protocol):
    """A way to train a cohort and to score models."""

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return for each (client, model) the sum of the scores of the client's samples: how many are right, or the errors."""

    def measure(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[tuple[float, Tree]]:
        """Return the same, and the statistics of the run's metrics."""

    def losses(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return for each (client, model) the mean loss on the client's samples in that part, in evaluation mode."""


@dataclass(frozen=True)
class Tuning:
    """From where on faster ways pay, as measured; tests set limits that make them take small problems."""

    pool: pool.Limits = pool.LIMITS
    winograd: winograd.Limits = winograd.LIMITS


TUNING = Tuning()
AT_ONCE = 16  # times the samples of one client's pass that a GPU takes in one pass for many clients


class Trainer:
    """Trains cohorts with the chosen engine, `cohort` clients at a time (0: all that are asked for and fit into memory)."""

    def __init__(
        self,
        bench: Bench,
        engine: EngineName = "auto",
        cohort: int = 0,
        together: int = 1,
        *,
        fast: bool = True,
        compile: CompileName = "auto",
        precision: PrecisionName = "tf32",
        choices: Choices | None = None,
        workers: int = 0,
        tuning: Tuning = TUNING,
    ) -> None:
        """`together` is how many clients a round usually asks for; `choices` what an earlier part of the run measured.

        The trainer's `bench` has a view of the model that is executed as the engine needs it.
        """
        self.cohort, self.together = cohort, together
        self.choices = choices or Choices()
        self._settings: dict[str, Any] = dict(
            fast=fast, compile=compile, precision=precision, choices=self.choices, workers=workers, tuning=tuning
        )
        self._others: weakref.WeakSet[Trainer] = weakref.WeakSet()
        net, lowering, bf16, at_once = bench.net, None, precision == "bf16", min(together, cohort or together)
        on_cpu = net.device.type == "cpu"
        self.threads = available() if on_cpu else torch.get_num_threads()
        """The most threads that this process works with."""
        with threads(1 if on_cpu else self.threads):
            perceptron = recognise(bench) if fast and engine != "stacked" and not bf16 else None
            if engine == "auto":
                pays = prefers_stacked(bench, at_once, None if perceptron is None else perceptron.many)
                reason = stackable.refusal(bench) if pays else None
                engine = "stacked" if pays and reason is None else "one"
                if reason is not None:
                    say(f"clients are trained one by one: {reason}")
            elif engine == "stacked" and (reason := stackable.refusal(bench)) is not None:
                raise InputError("engine", "stacked", f"'one' for this model: {reason}")
        self.name: EngineName = engine
        size, single = pool.share(workers, together, net.device)
        self._small = on_cpu and is_small(bench, at_once if engine == "stacked" else 1)
        self._single = on_cpu and single and engine == "one"
        self.engine: Engine
        if engine == "stacked":
            way = stackable.way_of(bench, compile, fast)
            exact = precision == "full"
            self.engine = Stacked(way, exact, None if way == "plain" else Programs(way, exact, self.choices))
            if way != "plain" and net.has_convolution:
                lowering = Lowering(self.choices, precision == "full")
                self.choices.expect(net.device)
            execution = Execution(bf16=bf16, lowering=lowering, pool_first=fast and lowering is not None)
        else:
            one = One(perceptron)
            self.engine = Pool(one, size, tuning.pool) if size > 1 else one
            last = net.has_convolution and on_cpu
            wide = fast and last and any(winograd.worth(module, tuning.winograd) for module in net.module.modules())
            limits = tuning.winograd if wide else None
            execution = Execution(channels_last=last, winograd=limits, pool_first=fast, bf16=bf16)
        with threads(1 if on_cpu else self.threads):
            view = net.under(execution)
        self.bench = dataclasses.replace(bench, task=dataclasses.replace(bench.task, net=view))

    @property
    def training_threads(self) -> int:
        """How many threads clients train on. On a CPU the last bits of results may depend on it: a resumed run uses as many."""
        return 1 if self._small else self.choices.threads or (1 if self._single else self.threads)

    def recall(self, chosen: Mapping[str, Any]) -> None:
        """Take over what was chosen when the run began; refuse a number of threads that cannot be had here."""
        check_obtainable(chosen.get("threads", 1))
        self.choices.update(dict(chosen))

    def over(self, bench: Bench, together: int = 0, **changes: Any) -> Trainer:
        """Return a trainer that works in the same way but for `changes`, for another method or other data of the same model."""
        other = Trainer(bench, self.name, self.cohort, together or self.together, **{**self._settings, **changes})
        self._others.add(other)
        return other

    @property
    def data(self) -> FederationData:
        """All of a run's data; where several runs are one stack, each has its own."""
        return cast(FederationData, self.bench.data)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the rounds of a run, in which this process uses as many threads as clients train on.

        OpenMP's threads wait in a busy loop, so those of the server's few operations would take the workers' cores.
        """
        self._note_threads()
        return threads(self.training_threads)

    def close(self) -> None:
        """End worker processes and undo what programs changed, for trainers made by `over` too; a later use starts anew."""
        for trainer in (self, *self._others):
            if isinstance(trainer.engine, Pool | Stacked):
                trainer.engine.close()

    def train(self, round: int, works: Sequence[Work], store: Store | None = None) -> Iterator[Done]:
        """Train clients as the method says; results share no memory with anything else.

        With a store, every client's memory is taken from there and, unless the part is the generic one, put back before its
        result is yielded. All works are of one part.
        """
        if len(parts := {work.part for work in works}) > 1:
            raise ValueError(f"works of the parts {', '.join(sorted(parts))}: should be of one")
        self._note_threads()
        with threads(self.training_threads):
            yield from self._train(round, works, store)

    def _note_threads(self) -> None:
        """Note the number of threads among the choices, where results depend on it."""
        if not self._small and self.bench.net.device.type == "cpu":
            self.choices.threads = self.training_threads

    def _engine(self) -> Engine:
        """Return the engine; a pool's workers have one thread each, so a run that began with more goes on without them."""
        return self.engine.one if isinstance(self.engine, Pool) and self.training_threads > 1 else self.engine

    def _train(self, round: int, works: Sequence[Work], store: Store | None) -> Iterator[Done]:
        if isinstance(self.engine, Stacked):
            yield from self._stacks(self.engine, round, works, store)
            return
        for group in self._groups(works):
            if store is not None:
                group = [dataclasses.replace(work, memory=store.get(work.client)) for work in group]
            for work, done in zip(group, self._engine().train(self.bench, round, group), strict=True):
                up = tree.unalias(done.up, work.down, work.memory)
                memory = tree.unalias(done.memory, up, work.down, work.memory, work.local)
                local = tree.unalias(done.local, up, work.down, work.memory) if done.local else {}
                finite = tree.finite(up) and tree.finite(memory)
                if store is not None and work.part != "generic":
                    store.put(work.client, memory)
                yield dataclasses.replace(done, up=up, memory=memory, finite=finite, local=local)

    def _stacks(self, engine: Stacked, round: int, works: Sequence[Work], store: Store | None) -> Iterator[Done]:
        """Train as many clients at once as memory allows; the next ones' memories are fetched meanwhile."""
        first = 0
        while first < len(works):
            left = works[first:]
            most = self.cohort or self.choices.cohort or len(left)
            size = -(-len(left) // -(-len(left) // most))  # groups of about equal size
            if store is not None:
                store.prefetch([work.client for work in left[size : 2 * size]])
            try:
                results = list(engine.train(self.bench, round, left[:size], store))
            except TooMany as refused:
                self.choices.cohort = refused.fits
                continue
            yield from results
            first += size

    def personals(self, round: int, works: Sequence[Work]) -> list[Params]:
        """Return the personal model of each client, stacked: as many at once as a cohort has and memory allows."""
        assert isinstance(self.engine, Stacked)
        found: list[Params] = []
        samples = min(CHUNK, max((self.bench.data.train.sizes[work.client] for work in works), default=1))
        passes = 1 if self.bench.net.device.type == "cpu" else AT_ONCE
        size = min(self.cohort or len(works), max(1, passes * CHUNK // samples))
        while len(found) < len(works):
            try:
                found += self.engine.personals(self.bench, round, works[len(found) : len(found) + size])
                continue
            except torch.cuda.OutOfMemoryError:
                if size == 1:
                    raise
            torch.cuda.empty_cache()  # outside of the handler, whose error keeps the tensors alive
            size = -(-size // 2)
        return found

    def score(self, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the sum of the scores of each client's own samples: how many its model gets right, or its errors."""
        with torch.no_grad(), threads(self.training_threads):
            return [hit for group in self._groups(models) for hit in self._engine().score(self.bench, part, group)]

    def measure(self, part: str, models: Sequence[tuple[int, Params]]) -> list[tuple[float, Tree]]:
        """Return the same, and the statistics of the run's metrics."""
        with torch.no_grad(), threads(self.training_threads):
            return [one for group in self._groups(models) for one in self._engine().measure(self.bench, part, group)]

    def losses(self, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the mean loss of each client's model on the client's own samples, in evaluation mode."""
        with torch.no_grad(), threads(self.training_threads):
            return [loss for group in self._groups(models) for loss in self._engine().losses(self.bench, part, group)]

    def _groups(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        size = (self.cohort or self.choices.cohort if self.name == "stacked" else 0) or max(1, len(items))
        for first in range(0, len(items), size):
            yield items[first : first + size]


def prefers_stacked(bench: Bench, together: int, many: int | None = None) -> bool:
    """Return whether stacking pays: on a GPU always; on a CPU where steps are so small that their overhead dominates.

    Measured on two cores with 5 to 100 clients of 9 thousand to 2 million parameters: stacked multi-layer perceptrons gain up
    to 7×, from about ten clients on; large ones and convolutions lose. Beside a loop of the model's own (`fused`) they gain only
    with `many` clients of a tiny model (100 of 10 thousand parameters: 1.7×; 20 of them, or 35 thousand: nothing).
    """
    net = bench.net
    if net.device.type != "cpu":
        return True
    if many is not None:
        return together >= many and net.size < SMALL_MODEL
    return together >= 10 and not net.has_convolution and net.size * bench.plan.batch_size < SMALL
