"""The Training Optimizer: trains n ≥ 1 clients for a round, and scores models on clients' data.

Two engines compute the same numbers to rounding: `one` takes each client in turn (what wins on a CPU, and the oracle for
the other); `stacked` trains a cohort at once, every tensor with a leading client axis. `auto` chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch

from .. import tree
from ..errors import InputError
from ..method import Method, Phase
from ..plan import Plan
from ..task import Site, Task
from ..tree import Params, Tree
from .data_manager import DataManager
from .sgd import SGD

T = TypeVar("T")
SMALL = 20_000_000  # parameters × batch size below which a step is mostly overhead
EngineName: TypeAlias = Literal["auto", "one", "stacked"]


@dataclass(frozen=True)
class Work:
    """What a client is asked to train from."""

    client: int
    down: Tree
    memory: Tree


@dataclass(frozen=True)
class Done:
    """What a client's training gave. `loss` is the mean over its steps; `finite` whether all that it left is."""

    client: int
    up: Tree
    memory: Tree
    loss: float
    steps: int
    samples: int
    finite: bool = True


@dataclass(frozen=True)
class Bench:
    """Everything an engine works with, fixed for the run."""

    method: Method
    task: Task
    plan: Plan
    data: DataManager

    def phases(self, round: int) -> list[tuple[Phase, int]]:
        """The method's phases with their epochs; phases of no epochs are left out."""
        task = dataclasses.replace(self.task, round=round)
        phases = [(p, task.epochs if p.epochs is None else p.epochs) for p in self.method.phases(task)]
        return [(p, epochs) for p, epochs in phases if epochs > 0]

    def steps(self, client: int, phases: list[tuple[Phase, int]]) -> int:
        """SGD steps of one client over all phases."""
        return sum(self.plan.steps(self.data.train.sizes[client], epochs) for _, epochs in phases)

    def sgd(self, phase: Phase) -> SGD:
        """The optimiser of a phase."""
        t = self.task
        momentum = t.momentum if phase.momentum is None else phase.momentum
        lr = t.lr if phase.lr is None else phase.lr
        return SGD(lr, momentum, t.nesterov and momentum > 0, t.weight_decay)

    def moving(self, phase: Phase) -> tuple[list[str], list[str]]:
        """Names of the parameters and of the buffers that a phase may change."""
        chosen = set(self.task.net.names) if phase.moves is None else phase.moves
        net = self.task.net
        return [n for n in net.parameters if n in chosen], [n for n in net.buffers if n in chosen]

    def at(self, round: int, site: Site) -> Task:
        """The task as a client sees it."""
        return dataclasses.replace(self.task, round=round, site=site)


class Engine(Protocol):
    """A way to train a cohort and to score models."""

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """For each (client, model): how many of the client's samples in that part it gets right."""


class Trainer:
    """Trains cohorts with the chosen engine, `cohort` clients at a time (0: all that are asked for)."""

    def __init__(self, bench: Bench, engine: EngineName = "auto", cohort: int = 0, together: int = 1) -> None:
        """`together` is how many clients a round usually asks for."""
        from . import one, stacked

        self.bench, self.cohort = bench, cohort
        if engine == "auto":
            pays = prefers_stacked(bench, min(together, cohort or together))
            engine = "stacked" if pays and stacked.refusal(bench) is None else "one"
        elif engine == "stacked" and (reason := stacked.refusal(bench)) is not None:
            raise InputError("engine", "stacked", f"'one' for this model: {reason}")
        self.name = engine
        net = bench.task.net
        net.channels_last = engine == "one" and net.has_convolution and net.device.type == "cpu"
        self.engine: Engine = stacked.Stacked() if engine == "stacked" else one.One()

    def train(self, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train clients as the method says; nothing that comes back shares memory with what is kept elsewhere."""
        for group in self._groups(works):
            for work, done in zip(group, self.engine.train(self.bench, round, group), strict=True):
                up = tree.unalias(done.up, work.down, work.memory)
                memory = tree.unalias(done.memory, up, work.down, work.memory)
                yield dataclasses.replace(done, up=up, memory=memory, finite=tree.finite(up) and tree.finite(memory))

    def score(self, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's own samples its model gets right."""
        with torch.no_grad():
            return [hit for group in self._groups(models) for hit in self.engine.score(self.bench, part, group)]

    def _groups(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self.cohort or max(1, len(items))
        for first in range(0, len(items), size):
            yield items[first : first + size]


def prefers_stacked(bench: Bench, together: int) -> bool:
    """Where stacking pays: on a GPU always; on a CPU where steps are so small that their overhead rules.

    Measured on two cores with 5 to 100 clients of 9 thousand to 2 million parameters: stacked multi-layer perceptrons gain up
    to 7×, from about ten clients on; large ones and convolutions lose.
    """
    net = bench.task.net
    if net.device.type != "cpu":
        return True
    return together >= 10 and not net.has_convolution and net.size * bench.plan.batch_size < SMALL
