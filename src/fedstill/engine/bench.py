"""What engines work with: a client's work and its result, and the bench with method, task, plan and data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from ..core.method import Method, Phase
from ..core.metric import NO_METRICS, Measures
from ..core.plan import JointPlan, Length, Plan
from ..core.secret import Secret
from ..core.task import Absent, Site, Task, by_autograd
from ..core.tree import Tree
from ..data.samples import Part
from ..nn.net import Net
from .progress import Savepoint

SMALL = 20_000_000  # parameters × batch size below which a step is mostly overhead
PartName: TypeAlias = Literal["all", "generic", "idle"]
EngineName: TypeAlias = Literal["auto", "one", "stacked"]
CompileName: TypeAlias = Literal["auto", "on", "off", "traced"]  # traced: programs without a compiler, on a CPU too
PrecisionName: TypeAlias = Literal["tf32", "bf16", "full"]


@dataclass(frozen=True)
class Work:
    """What a client trains from, and which part of its round.

    "generic" is all up to the upload: the phases of `params`. "idle" is what may follow it: `steps` SGD steps of the one
    phase of another model, from the `local` that the generic part left or, where that is empty, from the round's beginning.
    """

    client: int
    down: Tree
    memory: Tree = field(default_factory=dict)
    part: PartName = "all"
    local: Tree = field(default_factory=dict)  # of an idle part; entries named by `per_sample` are fitted as a memory's
    steps: int = 0  # of an idle part
    last: int = 0  # the round in which the client last trained; 0: never
    watch: bool = False  # also return the model that was trained last, as `local["trained"]`
    savepoint: Savepoint | None = None  # keeps the work while it goes on (engine `one`, in this process)

    def __post_init__(self) -> None:
        if self.part not in get_args(PartName):
            raise ValueError(f"part = {self.part!r}: should be one of {', '.join(get_args(PartName))}")
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}: should be at least 0")


@dataclass(frozen=True)
class Done:
    """A client's result. `loss` is the mean over its steps; `finite` says whether upload and memory hold finite numbers only.

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


def results_of(part: PartName, up: Tree, memory: Tree, local: Tree, trained: str = "") -> tuple[Tree, Tree, Tree]:
    """Return (upload, memory, local) without what this part of a round does not give; `trained` names a model to give besides."""
    if part != "generic":
        local = {"trained": local[trained]} if trained else {}
    return {} if part == "idle" else up, {} if part == "generic" else memory, local


class ClientData(Protocol):
    """The clients' data, as an engine needs it."""

    @property
    def train(self) -> Part:
        """All clients' training samples."""

    def part(self, name: str) -> Part:
        """Return train, val or test."""


class FederationData(ClientData, Protocol):
    """All data of a run (see `edge.data_manager.DataManager`)."""

    @property
    def clients(self) -> int:
        """How many clients there are."""

    @property
    def test(self) -> Part:
        """All clients' test samples."""

    @property
    def val(self) -> Part | None:
        """All clients' validation samples."""

    @property
    def common(self) -> tuple[Tensor, Tensor] | None:
        """Test samples that belong to no client."""


class Store(Protocol):
    """Where clients' memories are kept (see `edge.model_store`)."""

    def get(self, client: int) -> Tree:
        """Return a client's memory."""

    def put(self, client: int, memory: Tree) -> None:
        """Store a new memory."""

    def gather(self, clients: Sequence[int], per_sample: frozenset[str], rows: int) -> Tree:
        """Return the clients' memories as one stacked tree."""

    def scatter(self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str], sizes: Sequence[int]) -> None:
        """Store the rows of a stacked tree."""

    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to load memories that are needed next."""


@dataclass(frozen=True)
class Bench:
    """Everything an engine works with, fixed for the run."""

    method: Method
    task: Task
    plan: Plan | JointPlan
    data: ClientData
    varied: Mapping[str, Sequence[float]] = field(default_factory=dict)  # fields that differ between clients
    hidden: Hidden | None = None  # what DP-SGD draws from at a client whose server must not know it (engine `one`)
    measures: Measures = NO_METRICS  # the metrics beside the objective's score
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what `home` gives to many clients

    @property
    def net(self) -> Net:
        """The model, as the class that engines need."""
        assert isinstance(self.task.net, Net)
        return self.task.net

    def phases(self, round: int, task: Task | None = None) -> list[tuple[Phase, Length]]:
        """Return the method's phases with their lengths, without phases of no step."""
        return [(phase, length) for _, phase, length in self.part("all", round, task)]

    def part(self, part: PartName, round: int, task: Task | None = None) -> list[tuple[int, Phase, Length]]:
        """Return the phases of a part of a round, each with its place among the method's and its length.

        Phases of no step are left out. The idle part has the phase of another model than `params`, whatever its length.
        """
        task = task or dataclasses.replace(self.task, round=round)
        numbered = enumerate(self.method.phases(task))
        phases = [(number, p, p.length(task)) for number, p in numbered]
        if part == "all":
            return [entry for entry in phases if entry[2]]
        if part == "generic":
            return [entry for entry in phases if entry[2] and entry[1].model == "params"]
        others = [entry for entry in phases if entry[1].model != "params"]
        if len(others) > 1:
            models = ", ".join(phase.model for _, phase, _ in others)
            name = self.method.id or type(self.method).__name__
            raise ValueError(f"{name} has {len(others)} phases of other models than params ({models}): should be one")
        return others

    def method_at(self, fields: Tree) -> Method:
        """Return the method with some fields replaced by a client's own numbers (tensors, inside `vmap`)."""
        if not fields:
            return self.method
        method = copy.copy(self.method)
        for name, value in fields.items():
            object.__setattr__(method, name, value)  # past the checks, which are for numbers
        return method

    def steps(self, client: int, phases: list[tuple[Phase, Length]]) -> int:
        """Return the number of SGD steps of one client over all phases."""
        return sum(self.plan.steps(self.data.train.sizes[client], length) for _, length in phases)

    def length(self, work: Work, length: Length) -> int:
        """Return the number of SGD steps of one phase of a client's work."""
        return work.steps if work.part == "idle" else self.plan.steps(self.data.train.sizes[work.client], length)

    def private(self, phase: Phase) -> bool:
        """Return whether a phase is trained by DP-SGD: what goes up comes from phases of "params"."""
        return self.task.private is not None and phase.model == "params"

    def moving(self, phase: Phase) -> tuple[list[str], list[str]]:
        """Return the names of the parameters and of the buffers that a phase may change."""
        chosen = set(self.task.net.names) if phase.moves is None else phase.moves
        net = self.net
        return [n for n in net.parameters if n in chosen], [n for n in net.buffers if n in chosen]

    def at(self, round: int, site: Site) -> Task:
        """Return the task as a client sees it."""
        return dataclasses.replace(self.task, round=round, site=site)

    def home(self, round: int, client: int, last: int = 0, shared: bool = False) -> Task:
        """Return the task as a client by itself sees it, with its own training data and no padding.

        Where its samples are not in this process, only what asks for them fails. With `shared` they are rows of everybody's,
        so that nothing is copied before it is asked for, and whether it has taken part is known on the host.
        """
        train = self.data.train
        device, size = train.y.device, train.sizes[client]
        x: Any
        y: Any
        index: Any
        if train.held is not None and client not in train.held:
            x = y = index = Absent(client)
        elif shared:
            x, y, start = train.x, train.y, train.starts[client]
            index = self._once(len(y), lambda n: torch.arange(n, device=device), "rows")[start : start + size]
        else:
            x, y = train.of(client)
            index = torch.arange(size, device=device)
        if self._made.get("round") != round:
            self._made.update(round=round, steps={})
        steps = self._made["steps"]
        if size not in steps:
            steps[size] = self.steps(client, self.phases(round))

        def number(n: int, dtype: torch.dtype = self.net.dtype) -> Tensor:
            made = functools.partial(torch.full, (), dtype=dtype, device=device)
            return self._once(n, made, str(dtype)) if shared else made(n)

        when, known = number(last, torch.float64), last > 0 if shared else None
        balance = None if isinstance(y, Absent) else self.balance(client)
        site = Site(x, y, index, number(size), number(steps[size]), when, known, balance)
        task = self.at(round, site)
        if task.private is None:  # whose gradients of single samples are taken inside vmap
            task = dataclasses.replace(task, differentiate=by_autograd)
        return dataclasses.replace(task, lr=self.varied["lr"][client]) if "lr" in self.varied else task

    def _once(self, n: int, make: Callable[[int], Tensor], what: str) -> Tensor:
        """Return a tensor that many clients read, made when it is first asked for."""
        if (what, n) not in self._made:
            self._made[what, n] = make(n)
        return self._made[what, n]  # type: ignore[no-any-return]

    def balance(self, client: int) -> Tensor | None:
        """Return the weights of the classes for a client, by its training targets; None where all weigh alike."""
        if self.task.objective.class_weights is None:
            return None
        train = self.data.train
        train.check_held([client])
        first = train.starts[client]
        return self.task.objective.balance(train.y[first : first + train.sizes[client]])


class Hidden(Protocol):
    """Gives a client's work the secret that its batches and its noise are drawn from."""

    def of(self, round: int, work: Work, samples: int, steps: int) -> Secret:
        """Return it, the same for the same work alone: whatever could make the upload another one makes another secret.

        `steps` is how many of DP-SGD the work takes. Raises `TrainingError` where they would cost too much.
        """


class TooMany(Exception):
    """So many clients do not fit into the device's memory."""

    def __init__(self, fits: int) -> None:
        super().__init__(f"only {fits} clients fit into memory at once")
        self.fits = fits


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch work with so many threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
