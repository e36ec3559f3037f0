"""The engine `stacked`: a cohort at once, every tensor with a leading client axis, `torch.func.vmap` over the step.

Batches are padded to one width and masked. Clients are ordered by how many steps they take, so that those still at work are
always the first rows of the stack; one that has finished is simply not in the slice any more.

On a GPU a phase runs as a program (`program.py`): traced, compiled where that pays, replayed as a CUDA graph, in a few sizes. The
plain way, step by step from Python, is what a CPU does, and the oracle for the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core import tree
from ..core.device import put
from ..core.errors import InputError, Shown, first_line
from ..core.method import Phase
from ..core.tree import Params, Tree
from ..nn.kernels.convolution import Choices
from ..nn.net import Net
from .bench import Bench, Done, Store, Work
from .cohort import Cohort
from .malloc import keep_freed_memory
from .program import over_clients
from .stage import Stage, TooMany, say
from .trainer import CompileName

ROWS = 32_768  # samples in one pass of scoring, over all clients
WORTH_COMPILING = 2_000  # steps of a run from which on compiling the step pays
Way: TypeAlias = Literal["plain", "traced", "compiled"]


@dataclass(eq=False)
class Stacked:
    """A cohort at once. What it holds besides its settings are programs and measurements, nothing of the training."""

    way: Way = "plain"
    exact: bool = False  # float32 products in full precision, no TF32
    choices: Choices = field(default_factory=Choices)
    bytes_a_client: float = 0.0  # of the device's memory that a step was seen to take
    drawn: dict[Any, dict[str, Tensor]] = field(default_factory=dict)  # batches of this round and the next
    _stages: dict[Any, Stage | None] = field(default_factory=dict)
    _pool: Any = None

    def train(self, bench: Bench, round: int, works: Sequence[Work], store: Store | None = None) -> Iterator[Done]:
        """Train every client; results in the order of `works`. With a store, memories come from there and new ones go back."""
        if bench.net.device.type == "cpu":
            keep_freed_memory()
        if not works:
            return
        order = sorted(range(len(works)), key=lambda i: (-bench.length(works[i], 1), i))
        cohort: Cohort | None = None
        with _precision(self.exact):
            try:
                cohort = Cohort(self, bench, round, [works[i] for i in order], store)
                with torch.enable_grad():
                    cohort.run()
                found = cohort.done()
            except torch.cuda.OutOfMemoryError as error:
                if len(works) == 1:
                    raise InputError("model", Shown("its step"), "one that fits into the GPU's memory") from error
                fits = len(works) // 2
            else:
                fits = 0
            if fits:
                cohort = None
                self._stages.clear()
                torch.cuda.empty_cache()
                raise TooMany(fits)
        place = {i: row for row, i in enumerate(order)}
        for i in range(len(works)):
            yield found[place[i]]

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's samples its model gets right."""
        if not models:
            return []
        data, clients = bench.data.part(part), [client for client, _ in models]
        width = max(data.sizes[k] for k in clients)
        rows = data.rows(clients, width)
        size = put([data.sizes[k] for k in clients], rows.device).unsqueeze(1)
        shared = all(params is models[0][1] for _, params in models)
        params = models[0][1] if shared else tree.stack([params for _, params in models])
        forward = vmap(lambda p, x: bench.net(p, x, train=False), in_dims=(None if shared else 0, 0))
        hits = torch.zeros(len(clients), dtype=torch.int64, device=rows.device)
        step = max(1, ROWS // len(clients))
        with _precision(self.exact):
            for first in range(0, width, step):
                part_rows = rows[:, first : first + step]
                right = forward(params, data.x[part_rows]).argmax(-1) == data.y[part_rows]
                real = torch.arange(first, first + part_rows.shape[1], device=rows.device) < size
                hits += (right & real).sum(1)
        return [int(h) for h in hits.tolist()]

    def stage(self, cohort: Cohort, number: int, phase: Phase, epochs: int, local: Tree) -> Stage | None:
        """The memory and programs of a phase; None where it has to go step by step."""
        key = (number, *cohort.signature(phase, epochs, local))
        found = self._stages.get(key)
        if found is not None and found.rows < len(cohort.works):
            del self._stages[key]
        if key not in self._stages:
            began = time.perf_counter()
            try:
                cohort.watched.asked[0] = False
                made = Stage(self, cohort, number, phase, epochs, local)
                # A step that asks for the round would have to be traced anew in every one: it goes step by step.
                self._stages[key] = None if cohort.watched.asked[0] or not cohort.comes_again(phase) else made
            except (TooMany, torch.cuda.OutOfMemoryError):
                raise
            except Exception as error:
                say(f"phase {number + 1} runs step by step, its step could not be traced: {first_line(error)}")
                self._stages[key] = None
            self.choices.seconds += time.perf_counter() - began
        return self._stages[key]

    def strike(self, stage: Stage, number: int, why: str) -> None:
        """A phase whose program cannot be had goes step by step from now on."""
        say(f"phase {number + 1} runs step by step, its step could not be replayed: {why}")
        self._stages.update({key: None for key, found in self._stages.items() if found is stage})

    @property
    def pool(self) -> Any:
        """The memory that all graphs use in turn."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


@contextlib.contextmanager
def _precision(exact: bool) -> Iterator[None]:
    """Products of float32 numbers in TF32 on a GPU that has it, or exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if exact else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def way_of(bench: Bench, compile: CompileName, fast: bool) -> Way:
    """How steps are run: on a CPU one by one from Python, on a GPU traced; compiled where it was asked for or will pay."""
    if not fast or (bench.net.device.type != "cuda" and compile != "on"):
        return "plain"
    sizes = bench.data.train.sizes
    longest = sum(bench.plan.steps(max(sizes), epochs) for _, epochs in bench.phases(1))
    return (
        "compiled"
        if compile == "on" or (longest * bench.task.rounds >= WORTH_COMPILING and compile == "auto")
        else "traced"
    )


def refusal(bench: Bench) -> str | None:
    """Why this model cannot be stacked, or None.

    Tried in float64 without effect: two clients with two samples each and one row of padding, against the two samples alone. A
    model whose samples see one another (other than through BatchNorm), or that `vmap` does not take, is refused.
    """
    run_net, data = bench.net, bench.data.train
    if run_net.cumulative:
        return "a BatchNorm with momentum=None keeps a cumulative average, which cannot be stacked"
    net = Net(run_net.module, run_net.device, torch.float64)
    x = data.x[:3].double()
    x = torch.cat([x, x, x])[:3] if len(x) < 3 else x
    x = x + torch.linspace(0, 0.1, 3, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
    mask, key = x.new_tensor([1.0, 1.0, 0.0]), torch.tensor(7, device=x.device)
    names = set(net.parameters)

    def objective(weights: Params, rest: Params, x: Tensor, key: Tensor, mask: Tensor | None) -> Any:
        copies = {name: value.clone() for name, value in rest.items()}
        out = net({**weights, **copies}, x, train=True, key=key, mask=mask)
        return (out[:2] * torch.arange(1.0, 1 + out[:2].numel(), device=x.device).reshape(out[:2].shape)).sum(), copies

    try:
        start = net.initial()
        weights, rest = ({n: p for n, p in start.items() if (n in names) is side} for side in (True, False))
        alone = grad_and_value(objective, has_aux=True)(weights, rest, x[:2], key, None)
        stacks = (tree.stack([t, t]) for t in (weights, rest))
        step = grad_and_value(objective, has_aux=True)
        both = over_clients(step, *stacks, *(torch.stack([t, t]) for t in (x, key, mask)))
    except Exception as error:
        return first_line(error)
    (g1, (v1, b1)), (g2, (v2, b2)) = alone, both
    pairs = [(v1, v2[0]), *((g1[n], g2[n][0]) for n in g1), *((b1[n], b2[n][0]) for n in b1)]
    if any((a - b).abs().max() > 1e-8 * (1 + a.abs().max()) for a, b in pairs if a.numel()):
        return "its samples see one another, so that padding a batch would change the result"
    return None
