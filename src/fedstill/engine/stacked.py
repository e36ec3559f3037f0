"""The engine `stacked`: a cohort at once, every tensor with a leading client axis, `torch.func.vmap` over the step.

Batches are padded to one width and masked. Clients are ordered by how many steps they take, so that those still training are
always the first rows of the stack; one that has finished is simply not in the slice any more.

On a GPU a phase runs as a program (`program.py`): traced, compiled where that pays, replayed as a CUDA graph, in a few sizes. The
plain way, step by step from Python, is what a CPU does, and the oracle for the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core import tree
from ..core.errors import InputError, Shown, first_line
from ..core.tree import Params, put
from ..nn.kernels.autotune import Choices
from ..nn.net import Net
from .bench import Bench, CompileName, Done, Store, Work
from .cohort import Cohort
from .hooks import explained
from .malloc import keep_freed_memory
from .stage import CannotReplay, Programs, TooMany
from .step import over_clients

ROWS = 32_768  # samples in one pass of scoring, over all clients
WORTH_COMPILING = 2_000  # steps of a run from which on compiling the step pays
Way: TypeAlias = Literal["plain", "traced", "compiled"]


@dataclass(eq=False)
class Stacked:
    """Trains a cohort at once. What it holds besides its settings are programs and measurements, nothing of the training."""

    way: Way = "plain"
    exact: bool = False  # float32 products in full precision, no TF32
    choices: Choices = field(default_factory=Choices)
    drawn: dict[Any, dict[str, Tensor]] = field(default_factory=dict)  # batches of this round and the next
    programs: Programs | None = None

    def __post_init__(self) -> None:
        if self.programs is None and self.way != "plain":
            self.programs = Programs(self.way, self.exact, self.choices)

    def train(self, bench: Bench, round: int, works: Sequence[Work], store: Store | None = None) -> Iterator[Done]:
        """Train every client; results in the order of `works`. With a store, memories come from there and new ones go back."""
        if bench.net.device.type == "cpu":
            keep_freed_memory()
        if not works:
            return
        order = sorted(range(len(works)), key=lambda i: (-bench.length(works[i], 1), i))
        results: list[Done] = []
        with _precision(self.exact):
            try:
                with explained(bench.method, bench.task, stacked=True):
                    results = self._round(bench, round, [works[i] for i in order], store)
            except torch.cuda.OutOfMemoryError as error:
                if len(works) == 1:
                    raise InputError("model", Shown("its step"), "one that fits into the GPU's memory") from error
        if not results:  # outside of the handler, whose error keeps the cohort's tensors alive
            if self.programs is not None:
                self.programs.stages.clear()
            torch.cuda.empty_cache()
            raise TooMany(len(works) // 2)
        place = {i: row for row, i in enumerate(order)}
        for i in range(len(works)):
            yield results[place[i]]

    def _round(self, bench: Bench, round: int, works: Sequence[Work], store: Store | None) -> list[Done]:
        """Begin, train every phase, finish. An idle part goes step by step: its length is another one each time."""
        cohort = Cohort(bench, round, works, store, planned=self.way != "plain", drawn=self.drawn)
        with torch.enable_grad():
            local = cohort.begin()
            for number, phase, epochs in cohort.phases:
                if phase.enter is not None and bench.method.step is None:
                    local = cohort.enter(number, local)
                programs = self.programs if cohort.part != "idle" else None
                stage = programs.stage(cohort, number, phase, epochs, local) if programs is not None else None
                if stage is not None and programs is not None:
                    try:
                        local = stage.run(programs, cohort, phase, epochs, local)
                        continue
                    except CannotReplay as why:
                        programs.discard(stage, number, str(why))
                local = cohort.run(number, phase, epochs, local)
            cohort.finish(local)
        return cohort.done()

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """Return how many of each client's samples its model classifies correctly."""
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

    def close(self) -> None:
        """Put the objects that programs consist of back under garbage collection."""
        if self.programs is not None:
            self.programs.close()


@contextlib.contextmanager
def _precision(exact: bool) -> Iterator[None]:
    """Multiply float32 numbers in TF32 on a GPU that has it, or exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if exact else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def way_of(bench: Bench, compile: CompileName, fast: bool) -> Way:
    """Return how steps run: on a CPU one by one from Python, on a GPU traced; compiled where it was asked for or will pay."""
    if not fast or (bench.net.device.type != "cuda" and compile not in ("on", "traced")):
        return "plain"
    sizes = bench.data.train.sizes
    longest = sum(bench.plan.steps(max(sizes), epochs) for _, epochs in bench.phases(1))
    return (
        "compiled"
        if compile == "on" or (longest * bench.task.rounds >= WORTH_COMPILING and compile == "auto")
        else "traced"
    )


def refusal(bench: Bench) -> str | None:
    """Return why this model cannot be stacked, or None.

    Tried in float64 without effect: two clients with two samples each and one row of padding, against the two samples alone. A
    model whose samples see one another (other than through BatchNorm), or that `vmap` does not take, with a gradient or without,
    is refused.
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
        with torch.no_grad():  # as models are scored: some modules take one path with a gradient and another without
            for params, axis in ((start, None), (tree.stack([start, start]), 0)):
                vmap(lambda p, x: net(p, x, train=False), in_dims=(axis, 0))(params, torch.stack([x, x]))
    except Exception as error:
        return first_line(error)
    (g1, (v1, b1)), (g2, (v2, b2)) = alone, both
    pairs = [(v1, v2[0]), *((g1[n], g2[n][0]) for n in g1), *((b1[n], b2[n][0]) for n in b1)]
    if any((a - b).abs().max() > 1e-8 * (1 + a.abs().max()) for a, b in pairs if a.numel()):
        return "its samples see one another, so that padding a batch would change the result"
    return None
