"""FLOPs of a client's round, counted on the method's own hooks in the engine `one`.

Counted are matrix products and convolutions (2 FLOPs a multiply-add) as torch's own counter has them, and Fourier
transforms (5·d·log₂d complex, half of that real). Elementwise work is not: losses, activations, normalisation, the
optimiser, terms on weights such as FedProx's. One step of each phase is run on a full batch and one on what is left over at
the end of an epoch, and multiplied by how many of each there are. Models with convolutions and large ones are run on fake
tensors, which have shapes and no numbers, so counting costs neither time nor memory; small ones on zeros, which is quicker
still. Nothing of the run is touched, and nothing is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..core import tree
from ..core.plan import Plan
from ..core.task import Site, Task
from ..core.tree import Tree
from ..data.samples import Part, Samples
from ..nn.mode import AS_WRITTEN
from .bench import SMALL, Bench
from .one import run_phase

aten = torch.ops.aten


@dataclass(frozen=True)
class Flops:
    """Forward: everything outside autograd's backward passes."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Flops:
        """So many times the same."""
        return Flops(factor * self.forward, factor * self.backward)


@dataclass(frozen=True)
class Work:
    """A client's round: before its first step, each phase with all its epochs, after its last step."""

    begin: Flops
    phases: tuple[Flops, ...]
    finish: Flops

    @property
    def total(self) -> Flops:
        """All of it."""
        return sum(self.phases, self.begin + self.finish)


@dataclass(frozen=True)
class Counted:
    """What counting a round gave: the work, its SGD steps, and the upload (as fake tensors or zeros: only its shape counts)."""

    work: Work
    steps: float
    up: Tree


def count(
    bench: Bench, round: int, down: Tree, memory: Tree, samples: int, rounds: int = 0, fake: bool | None = None
) -> Counted:
    """The work of a client with so many samples that downloads `down` and has kept `memory`, in the state of this round.

    Epochs that are drawn by round (L2GD's) are taken at their mean over the run's rounds, or over `rounds`. `fake` is chosen
    by the model; where a hook needs values after all, zeros are used.
    """
    net = bench.net
    if fake is None:
        fake = net.has_convolution or net.size * samples > SMALL
    if fake:
        with contextlib.suppress(Exception):
            return _count(bench, round, down, memory, samples, rounds, True)
    return _count(bench, round, down, memory, samples, rounds, False)


def _count(bench: Bench, round: int, down: Tree, memory: Tree, samples: int, rounds: int, fake: bool) -> Counted:
    method, train = bench.method, bench.data.train
    as_written = dataclasses.replace(bench.task, net=bench.net.under(AS_WRITTEN))
    bench = dataclasses.replace(bench, task=as_written)
    epochs = _epochs(bench, rounds or bench.task.rounds)
    full = min(bench.plan.batch_size, samples)
    steps = sum(epochs) * -(-samples // full)
    with _world(fake) as own, torch.enable_grad():
        down, memory = own(down), own(memory)

        def data(rows: int) -> tuple[Tensor, Tensor]:
            x = torch.zeros((rows, *train.x.shape[1:]), dtype=train.x.dtype, device=train.x.device)
            return x, torch.zeros(rows, dtype=torch.int64, device=x.device)

        x, y = data(samples)
        rows = torch.arange(samples, device=x.device)
        site = Site(x, y, rows, x.new_full((), samples), x.new_full((), steps), torch.ones((), dtype=torch.float64))
        task = dataclasses.replace(bench.task, round=round, site=site)
        memory = tree.fit_rows(memory, method.per_sample, samples)
        with Counter() as begin, torch.no_grad():
            local = method.begin(task, down, memory)
        found = []
        for phase, often in zip(method.phases(task), epochs, strict=True):
            if not often:
                found.append(Flops())
                continue
            with Counter() as enter, torch.no_grad():
                local = phase.enter(task, local) if phase.enter is not None and method.step is None else local
            bare = dataclasses.replace(phase, enter=None)
            whole, after = _step(bench, task, local, bare, *data(full))
            rest = _step(bench, task, local, bare, *data(samples % full))[0] if samples % full else Flops()
            found.append(enter.flops + (whole.times(samples // full) + rest).times(often))
            local = after
        with Counter() as finish, torch.no_grad():
            up, _ = method.finish(task, down, memory, local)
    return Counted(Work(begin.flops, tuple(found), finish.flops), steps, up)


def _step(bench: Bench, task: Task, local: Tree, phase: Any, x: Tensor, y: Tensor) -> tuple[Flops, Tree]:
    """One step on these samples: what it takes, and what it leaves."""
    batch = Part(Samples(x), y, (0,), (len(y),))
    alone = dataclasses.replace(bench, plan=Plan(0, len(y)), data=Only(batch))
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    with Counter() as counter:
        after = run_phase(alone, task, task.round, 0, local, phase, 1, total, None)
    return counter.flops, after


def _epochs(bench: Bench, rounds: int) -> list[float]:
    """Each phase's epochs, mean over so many rounds."""
    task = bench.task
    tasks = [dataclasses.replace(task, round=t) for t in range(1, rounds + 1)]
    by_round = [[task.epochs if p.epochs is None else p.epochs for p in bench.method.phases(t)] for t in tasks]
    return [sum(column) / len(column) for column in zip(*by_round, strict=True)]


@dataclass(frozen=True)
class Only:
    """Data of which there is one part."""

    train: Part

    def part(self, name: str) -> Part:
        """That one."""
        return self.train


@contextlib.contextmanager
def _world(fake: bool) -> Iterator[Callable[[Tree], Tree]]:
    """Within, new tensors are fake where that is asked for; gives what makes a tree of one's own of the run's."""
    if not fake:
        yield tree.clone
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield lambda given: tree.map(lambda leaf: mode.from_tensor(leaf.detach()), given)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, counts FLOPs; those of a backward pass by themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = Flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        out = func(*args, **kwargs)
        if formula is not None:
            done = float(formula(*args, **kwargs, out_val=out))
            backward = torch._C._current_graph_task_id() != -1
            self.flops = self.flops + (Flops(backward=done) if backward else Flops(forward=done))
        return out


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **kwargs: Any) -> int:
    """As much as the forward pass for the input's gradient, and again for the weights'; torch's own over-counts groups."""
    transposed, mask = rest[4], rest[7]
    forward = 2 * (x if transposed else grad).numel() * weight[0].numel()
    return forward * (int(mask[0]) + int(mask[1]))


def _fourier(factor: float) -> Callable[..., float]:
    def count(x: Tensor, dim: Any, *rest: Any, out_val: Tensor, **kwargs: Any) -> float:
        big = max(x.numel(), out_val.numel())
        length = math.prod(max(x.shape[d], out_val.shape[d]) for d in dim)
        return factor * big * math.log2(max(2, length))

    return count


FORMULAS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    aten.convolution_backward: _convolution_backward,
    aten._fft_r2c: _fourier(2.5),
    aten._fft_c2r: _fourier(2.5),
    aten._fft_c2c: _fourier(5.0),
}
