"""The Training Optimizer: trains n ≥ 1 clients for a round, and scores models on clients' data.

Two engines compute the same numbers to rounding: `one` takes each client in turn (what wins on a CPU, and the oracle for
the other); `stacked` trains a cohort at once, every tensor with a leading client axis. `auto` chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch

from ..core import tree
from ..core.errors import InputError
from ..core.tree import Params
from ..edge.data_manager import DataManager
from ..nn.kernels import winograd
from ..nn.kernels.convolution import Choices, Lowering
from .bench import SMALL, Bench, Done, Store, Work

if TYPE_CHECKING:
    from .stacked import Stacked

T = TypeVar("T")
MANY, TINY = 50, 20_000  # clients and parameters from which on, and below which, stacking beats a perceptron's own loop
EngineName: TypeAlias = Literal["auto", "one", "stacked"]
CompileName: TypeAlias = Literal["auto", "on", "off"]
PrecisionName: TypeAlias = Literal["tf32", "bf16", "full"]


class Engine(Protocol):
    """A way to train a cohort and to score models."""

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """For each (client, model): how many of the client's samples in that part it gets right."""


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
    ) -> None:
        """`together` is how many clients a round usually asks for; `choices` what an earlier part of the run measured."""
        from . import fused, one, pool, stacked

        self.bench, self.cohort, self.together = bench, cohort, together
        self.choices = choices or Choices()
        self._how: dict[str, Any] = {"fast": fast, "compile": compile, "precision": precision, "choices": self.choices}
        self._how["workers"] = workers
        self.threads = torch.get_num_threads()  # of this process, where it does not keep to one
        self._others: weakref.WeakSet[Trainer] = weakref.WeakSet()
        net = bench.net
        net.bf16 = precision == "bf16"
        own = fused.recognise(bench) if fast and engine != "stacked" else None
        if engine == "auto":
            pays = prefers_stacked(bench, min(together, cohort or together), own is not None)
            engine = "stacked" if pays and stacked.refusal(bench) is None else "one"
        elif engine == "stacked" and (reason := stacked.refusal(bench)) is not None:
            raise InputError("engine", "stacked", f"'one' for this model: {reason}")
        self.name: EngineName = engine
        net.channels_last = engine == "one" and net.has_convolution and net.device.type == "cpu"
        net.winograd = fast and net.channels_last and any(map(winograd.worth, net.module.modules()))
        net.rewrite(fast and engine == "one")
        self.engine: Engine
        if engine == "stacked":
            way = stacked.way_of(bench, compile, fast)
            self.engine = stacked.Stacked(way, precision == "full", self.choices)
            if way != "plain" and net.has_convolution:
                net.lowering = Lowering(self.choices, precision == "full")
        else:
            size, single = pool.share(workers, together, net.device)
            alone = one.One(own, single)
            self.engine = pool.Pool(alone, size) if size > 1 else alone

    def over(self, bench: Bench, together: int = 0) -> Trainer:
        """Another trainer that works in the same way, for another method or other data of the same model."""
        other = Trainer(bench, self.name, self.cohort, together or self.together, **self._how)
        self._others.add(other)
        return other

    @property
    def data(self) -> DataManager:
        """All of a run's data; where several runs are one stack, each has its own."""
        assert isinstance(self.bench.data, DataManager)
        return self.bench.data

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """For the rounds of a run: where clients are trained on one thread each, this process works on one, too.

        OpenMP's threads wait for more in a loop, so those of the server's few operations would take the workers' cores.
        """
        from .one import One
        from .pool import Pool

        one = self.engine.one if isinstance(self.engine, Pool) else self.engine
        return one.threads(self.bench) if isinstance(one, One) else contextlib.nullcontext()

    def close(self) -> None:
        """End worker processes, those of trainers made by `over` too; a later use starts new ones."""
        from .pool import Pool

        gc.unfreeze()  # what programs set aside (see `Stage`)
        for trainer in (self, *self._others):
            if isinstance(trainer.engine, Pool):
                trainer.engine.close()

    def train(self, round: int, works: Sequence[Work], store: Store | None = None) -> Iterator[Done]:
        """Train clients as the method says; nothing that comes back shares memory with what is kept elsewhere.

        With a store, every client's memory is taken from there and, unless the part is the generic one, put back before its
        result is yielded. All works are of one part.
        """
        from .stacked import Stacked

        if len(parts := {work.part for work in works}) > 1:
            raise ValueError(f"works of the parts {', '.join(sorted(parts))}: should be of one")
        if isinstance(self.engine, Stacked):
            yield from self._stacks(self.engine, round, works, store)
            return
        for group in self._groups(works):
            if store is not None:
                group = [dataclasses.replace(work, memory=store.get(work.client)) for work in group]
            for work, done in zip(group, self.engine.train(self.bench, round, group), strict=True):
                up = tree.unalias(done.up, work.down, work.memory)
                memory = tree.unalias(done.memory, up, work.down, work.memory, work.local)
                local = tree.unalias(done.local, up, work.down, work.memory) if done.local else {}
                finite = tree.finite(up) and tree.finite(memory)
                if store is not None and work.part != "generic":
                    store.put(work.client, memory)
                yield dataclasses.replace(done, up=up, memory=memory, finite=finite, local=local)

    def _stacks(self, engine: Stacked, round: int, works: Sequence[Work], store: Store | None) -> Iterator[Done]:
        """As many clients at once as memory allows; the next ones' memories are fetched meanwhile."""
        from .stage import TooMany

        first = 0
        while first < len(works):
            left = works[first:]
            most = self.cohort or self.choices.cohort or len(left)
            size = -(-len(left) // -(-len(left) // most))  # groups of about equal size
            if store is not None:
                store.prefetch([work.client for work in left[size : 2 * size]])
            try:
                found = list(engine.train(self.bench, round, left[:size], store))
            except TooMany as refused:
                self.choices.cohort = refused.fits
                continue
            yield from found
            first += size

    def score(self, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's own samples its model gets right."""
        with torch.no_grad():
            return [hit for group in self._groups(models) for hit in self.engine.score(self.bench, part, group)]

    def _groups(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        size = (self.cohort or self.choices.cohort if self.name == "stacked" else 0) or max(1, len(items))
        for first in range(0, len(items), size):
            yield items[first : first + size]


def prefers_stacked(bench: Bench, together: int, fused: bool = False) -> bool:
    """Where stacking pays: on a GPU always; on a CPU where steps are so small that their overhead rules.

    Measured on two cores with 5 to 100 clients of 9 thousand to 2 million parameters: stacked multi-layer perceptrons gain up
    to 7×, from about ten clients on; large ones and convolutions lose. Beside a loop of the model's own (`fused`) they gain
    only with many clients of a tiny model (100 of 10 thousand parameters: 1.7×; 20 of them, or 35 thousand: nothing).
    """
    net = bench.net
    if net.device.type != "cpu":
        return True
    if fused:
        return together >= MANY and net.size < TINY
    return together >= 10 and not net.has_convolution and net.size * bench.plan.batch_size < SMALL
