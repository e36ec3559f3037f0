"""What engines work with: a client's work and what it gave, and the bench with method, task, plan and data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.method import Method, Phase
from ..core.optim import SGD
from ..core.plan import Tables
from ..core.task import Site, Task
from ..core.tree import Tree
from ..data.samples import Part
from ..nn.net import Net

SMALL = 20_000_000  # parameters × batch size below which a step is mostly overhead
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
    watch: bool = False  # also return the model that was trained last, as `local["trained"]`

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


def given(part: PartName, up: Tree, memory: Tree, local: Tree, trained: str = "") -> tuple[Tree, Tree, Tree]:
    """Select what this part of a round returns: (up, memory, local). `trained` names the model to return besides."""
    if part != "generic":
        local = {"trained": local[trained]} if trained else {}
    return {} if part == "idle" else up, {} if part == "generic" else memory, local


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
