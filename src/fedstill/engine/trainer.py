"""The Training Optimizer: trains n ≥ 1 clients for a round, and scores models on clients' data.

Two engines compute the same numbers to rounding: `one` takes each client in turn (what wins on a CPU, and the oracle for
the other); `stacked` trains a cohort at once, every tensor with a leading client axis. `auto` chooses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..core import tree
from ..core.errors import InputError
from ..core.method import Method, Phase
from ..core.optim import SGD
from ..core.plan import Tables
from ..core.task import Site, Task
from ..core.tree import Params, Tree
from ..edge.data_manager import DataManager, Part
from ..nn.kernels import winograd
from ..nn.kernels.convolution import Choices, Lowering
from ..nn.net import Net

if TYPE_CHECKING:
    from .stacked import Stacked

T = TypeVar("T")
SMALL = 20_000_000  # parameters × batch size below which a step is mostly overhead
MANY, TINY = 50, 20_000  # clients and parameters from which on, and below which, stacking beats a perceptron's own loop
EngineName: TypeAlias = Literal["auto", "one", "stacked"]
CompileName: TypeAlias = Literal["auto", "on", "off"]
PrecisionName: TypeAlias = Literal["tf32", "bf16", "full"]
PartName: TypeAlias = Literal["all", "generic", "idle"]


@dataclass(frozen=True)
class Work:
    """What a client is asked to train from, and which part of its round.

    "generic" is all up to the upload: the phases of `params`. "idle" is what may follow it: `steps` SGD steps of the one
    phase of another model, from the `local` that the generic part left, or as the round begins where that is empty.
    """

    client: int
    down: Tree
    memory: Tree = field(default_factory=dict)
    part: PartName = "all"
    local: Tree = field(default_factory=dict)  # of an idle part; entries named by `per_sample` are fitted as a memory's
    steps: int = 0  # of an idle part
    last: int = 0  # the round in which the client last trained; 0: never

    def __post_init__(self) -> None:
        if self.part not in get_args(PartName):
            raise ValueError(f"part = {self.part!r}: should be one of {', '.join(get_args(PartName))}")
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}: should be at least 0")


@dataclass(frozen=True)
class Done:
    """What a client's training gave. `loss` is the mean over its steps; `finite` whether what goes up and what is kept is.

    A generic part gives `up` and `local` and leaves the memory as it was, an idle one gives `memory` alone.
    """

    client: int
    up: Tree
    memory: Tree
    loss: float
    steps: int
    samples: int
    finite: bool = True
    local: Tree = field(default_factory=dict)


def given(part: PartName, up: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree, Tree]:
    """Of the end of a client's work what a part gives: (up, memory, local)."""
    return {} if part == "idle" else up, {} if part == "generic" else memory, local if part == "generic" else {}


class Planned(Protocol):
    """What an engine asks a plan: who trains on which batches."""

    @property
    def batch_size(self) -> int:
        """Samples a step."""

    def steps(self, samples: int, epochs: int) -> int:
        """SGD steps of so many samples."""

    def order(self, round: int, client: int, samples: int, epoch: int) -> NDArray[np.int64]:
        """The order of a client's samples."""

    def step_keys(self, round: int, client: int, steps: int) -> NDArray[np.int64]:
        """The keys of a phase's steps."""

    def tables(
        self, round: int, clients: Sequence[int], samples: Sequence[int], epochs: int, width: int, device: torch.device
    ) -> Tables:
        """All batches of a phase of several clients."""


class Held(Protocol):
    """The clients' data, as an engine asks for it."""

    @property
    def train(self) -> Part:
        """All clients' training samples."""

    def part(self, name: str) -> Part:
        """train, val or test."""


class Store(Protocol):
    """Where clients' memories are kept, as a trainer asks for them (see `ModelStore`)."""

    def get(self, client: int) -> Tree:
        """A client's memory."""

    def put(self, client: int, memory: Tree) -> None:
        """Keep a new memory."""

    def gather(self, clients: Sequence[int], per_sample: frozenset[str], rows: int) -> Tree:
        """The clients' memories as one stacked tree."""

    def scatter(self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str], sizes: Sequence[int]) -> None:
        """Keep the rows of a stacked tree."""

    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to fetch."""


@dataclass(frozen=True)
class Bench:
    """Everything an engine works with, fixed for the run."""

    method: Method
    task: Task
    plan: Planned
    data: Held
    varied: Mapping[str, Sequence[float]] = field(default_factory=dict)  # fields that differ between clients

    @property
    def net(self) -> Net:
        """The model, with what engines need to know of it."""
        assert isinstance(self.task.net, Net)
        return self.task.net

    def phases(self, round: int, task: Task | None = None) -> list[tuple[Phase, int]]:
        """The method's phases with their epochs; phases of no epochs are left out."""
        return [(phase, epochs) for _, phase, epochs in self.part("all", round, task)]

    def part(self, part: PartName, round: int, task: Task | None = None) -> list[tuple[int, Phase, int]]:
        """The phases of a part of a round, each with its place among the method's and its epochs.

        Phases of no epochs are left out. The idle part has the phase of another model than `params`, whatever its epochs.
        """
        task = task or dataclasses.replace(self.task, round=round)
        every = enumerate(self.method.phases(task))
        phases = [(number, p, task.epochs if p.epochs is None else p.epochs) for number, p in every]
        if part == "all":
            return [found for found in phases if found[2] > 0]
        if part == "generic":
            return [found for found in phases if found[2] > 0 and found[1].model == "params"]
        others = [found for found in phases if found[1].model != "params"]
        if len(others) > 1:
            models = ", ".join(phase.model for _, phase, _ in others)
            name = self.method.id or type(self.method).__name__
            raise ValueError(f"{name} has {len(others)} phases of other models than params ({models}): should be one")
        return others

    def method_at(self, fields: Tree) -> Method:
        """The method with some fields replaced by a client's own numbers (tensors, inside `vmap`)."""
        if not fields:
            return self.method
        found = copy.copy(self.method)
        for name, value in fields.items():
            object.__setattr__(found, name, value)  # past the checks, which are for numbers
        return found

    def steps(self, client: int, phases: list[tuple[Phase, int]]) -> int:
        """SGD steps of one client over all phases."""
        return sum(self.plan.steps(self.data.train.sizes[client], epochs) for _, epochs in phases)

    def length(self, work: Work, epochs: int) -> int:
        """SGD steps of one phase of a client's work."""
        return work.steps if work.part == "idle" else self.plan.steps(self.data.train.sizes[work.client], epochs)

    def sgd(self, phase: Phase) -> SGD:
        """The optimiser of a phase."""
        t = self.task
        momentum = t.momentum if phase.momentum is None else phase.momentum
        lr = t.lr if phase.lr is None else phase.lr
        return SGD(lr, momentum, t.nesterov and momentum > 0, t.weight_decay)

    def moving(self, phase: Phase) -> tuple[list[str], list[str]]:
        """Names of the parameters and of the buffers that a phase may change."""
        chosen = set(self.task.net.names) if phase.moves is None else phase.moves
        net = self.net
        return [n for n in net.parameters if n in chosen], [n for n in net.buffers if n in chosen]

    def at(self, round: int, site: Site) -> Task:
        """The task as a client sees it."""
        return dataclasses.replace(self.task, round=round, site=site)

    def home(self, round: int, client: int, last: int = 0) -> Task:
        """Return the task as a client by itself sees it, with its own training data and no padding."""
        x, y = self.data.train.of(client)
        steps = self.steps(client, self.phases(round))
        index = torch.arange(len(y), device=x.device)
        when = torch.tensor(float(last), dtype=torch.float64, device=y.device)
        return self.at(round, Site(x, y, index, x.new_tensor(len(y)), x.new_tensor(steps), when))


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
