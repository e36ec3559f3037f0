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
from ..nn.mode import Execution
from .bench import SMALL, Bench
from .kept import KEPT
from .one import run_phase

aten = torch.ops.aten
COUNTED = Execution(plain=True)  # as written, but for kernels whose products torch's counter does not see


@dataclass(frozen=True)
class Flops:
    """A number of FLOPs; `forward` is everything outside autograd's backward passes."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Flops:
        """Return this work done so many times."""
        return Flops(factor * self.forward, factor * self.backward)


@dataclass(frozen=True)
class RoundFlops:
    """The FLOPs of a client's round: before its first step, of each phase with all its steps, after its last step."""

    begin: Flops
    phases: tuple[Flops, ...]
    finish: Flops

    @property
    def total(self) -> Flops:
        """The whole round."""
        return sum(self.phases, self.begin + self.finish)


@dataclass(frozen=True)
class Counted:
    """The result of counting a round: the work, its SGD steps, and the upload (fake tensors or zeros: only its shape counts)."""

    work: RoundFlops
    steps: float
    up: Tree


def count(
    bench: Bench, round: int, down: Tree, memory: Tree, samples: int, rounds: int = 0, fake: bool | None = None
) -> Counted:
    """Count the work of a client with so many samples, this download and this memory, in this round.

    Lengths that are drawn by round (L2GD's) are taken at their mean over the run's rounds, or over `rounds`. `fake` is chosen
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
    method, train, net = bench.method, bench.data.train, bench.net
    # No optimiser is counted, and SGD reads no tensor.
    sgd = dataclasses.replace(bench.task.recipe, optimizer="sgd")
    as_written = dataclasses.replace(bench.task, net=bench.net.under(COUNTED), recipe=sgd)
    bench = dataclasses.replace(bench, task=as_written)
    full = min(bench.plan.batch_size, samples)
    batches = _batches(bench, rounds or bench.task.rounds, samples)
    steps = sum(whole + partial for whole, partial in batches)
    with _world(fake) as own, torch.enable_grad():
        down, memory = own(down), own(memory)

        def data(rows: int) -> tuple[Tensor, Tensor]:
            x = torch.zeros((rows, *train.x.shape[1:]), dtype=train.x.dtype, device=train.x.device)
            return x, train.y.new_zeros((rows, *train.y.shape[1:]))

        x, y = data(samples)
        rows = torch.arange(samples, device=x.device)
        made = (
            torch.full((), samples, dtype=net.dtype, device=x.device),
            torch.full((), steps, dtype=net.dtype, device=x.device),
        )
        site = Site(x, y, rows, *made, torch.ones((), dtype=torch.float64))
        task = dataclasses.replace(bench.task, round=round, site=site)
        memory = tree.without(tree.fit_rows(memory, method.per_sample, samples), KEPT)
        with Counter() as begin, torch.no_grad():
            local = method.begin(task, down, memory)
        by_phase = []
        for phase, (whole, partial) in zip(method.phases(task), batches, strict=True):
            if not whole:
                by_phase.append(Flops())
                continue
            with Counter() as enter, torch.no_grad():
                local = phase.enter(task, local) if phase.enter is not None and method.step is None else local
            bare = dataclasses.replace(phase, enter=None)
            per_step, after = _step(bench, task, local, bare, *data(full))
            rest = _step(bench, task, local, bare, *data(samples % full))[0] if samples % full else Flops()
            by_phase.append(enter.flops + per_step.times(whole) + rest.times(partial))
            local = after
        with Counter() as finish, torch.no_grad():
            up, _ = method.finish(task, down, memory, local)
    return Counted(RoundFlops(begin.flops, tuple(by_phase), finish.flops), steps, up)


def _step(bench: Bench, task: Task, local: Tree, phase: Any, x: Tensor, y: Tensor) -> tuple[Flops, Tree]:
    """Run one step on these samples: return its FLOPs and the state after it."""
    batch = Part(Samples(x), y, (0,), (len(y),))
    alone = dataclasses.replace(bench, plan=Plan(0, len(y)), data=Only(batch))
    total = torch.zeros((), dtype=bench.net.dtype, device=x.device)
    with Counter() as counter:
        after, _ = run_phase(alone, task, task.round, 0, local, phase, 1, total, None)
    return counter.flops, after


def _batches(bench: Bench, rounds: int, samples: int) -> list[tuple[float, float]]:
    """Return each phase's steps on whole batches and on what is left of an epoch, mean over so many rounds."""
    tasks = [dataclasses.replace(bench.task, round=t) for t in range(1, rounds + 1)]
    by_round = [[bench.plan.steps(samples, p.length(t)) for p in bench.method.phases(t)] for t in tasks]
    per_epoch = bench.plan.steps(samples, 1)
    left = samples % min(bench.plan.batch_size, samples) > 0  # whether an epoch ends with an incomplete batch
    partial = [[steps // per_epoch * left for steps in row] for row in by_round]
    means = [[sum(column) / len(column) for column in zip(*rows, strict=True)] for rows in (by_round, partial)]
    return [(steps - fewer, fewer) for steps, fewer in zip(*means, strict=True)]


@dataclass(frozen=True)
class Only:
    """Client data with training samples alone."""

    train: Part

    def part(self, name: str) -> Part:
        """Return the training samples."""
        return self.train


@contextlib.contextmanager
def _world(fake: bool) -> Iterator[Callable[[Tree], Tree]]:
    """Make new tensors fake inside the context if `fake`; yield what turns a tree of the run into one that may be used there."""
    if not fake:
        yield tree.clone
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield lambda given_tree: tree.map(lambda leaf: mode.from_tensor(leaf.detach()), given_tree)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs while active, those of backward passes separately."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = Flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        if formula is not None:
            done = float(formula(*args, **kwargs, out_val=out))
            backward = torch._C._current_graph_task_id() != -1
            self.flops = self.flops + (Flops(backward=done) if backward else Flops(forward=done))
        return out


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **kwargs: Any) -> int:
    """Return the forward pass's FLOPs for the input's gradient and again for the weights'; torch's own overcounts groups."""
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
