"""A phase of a stack of clients as a program on fixed memory.

The step is traced once per shape (`make_fx`: any Python that `vmap` takes), compiled where a compiler is available and it pays,
and on a GPU replayed as a CUDA graph. A counter on the device picks the step's row of the tables of batches, which are drawn on
the device; so a round is tables and then replays, and the host waits for nothing until it is over. Rows of the stack without a
client, or whose client has finished, take part with their updates switched off (`live`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Tree
from ..data.samples import Samples
from .step import StackStep

SHIFTS = (torch.ops.aten.__rshift__.Scalar, torch.ops.aten.bitwise_right_shift.Tensor_Scalar)  # of which hashes consist
HASH_OPERATIONS = 10  # after which inductor writes a value of a step with long hashes down; by itself 30
Level: TypeAlias = Literal["traced", "compiled"]
Program: TypeAlias = Callable[[], None]  # one step on the memory that it was built for


@dataclass(frozen=True, eq=False)
class Definition:
    """A step on fixed memory: what is traced. `tables` and `counter` say on which batch of `source` it works."""

    step: StackStep
    samples: Samples

    def __call__(self, rows: Tree, tables: Tree, source: Tree, counter: Tensor) -> None:
        """Take one step of all rows, in place on `rows`."""
        batch = {name: table.index_select(0, counter).squeeze(0) for name, table in tables.items()}
        live, places = batch.pop("live"), batch.pop("rows")
        samples = self.samples.over(source["x"])
        batch.update(x=samples[places], y=source["y"][places])
        with self.step.view.bench.net.fixed.replaced(source["constants"]):
            self.step(rows, batch, samples, source["y"], live)


def trace(definition: Definition, rows: Tree, tables: Tree, source: Tree, counter: Tensor) -> tuple[Any, list[str]]:
    """Return the step as a graph of plain operations that change `rows` and `counter`, and the names of its inputs in order."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = {"rows": rows, "tables": tables, "source": source}
    outline, flat = tree.outline(inputs), tree.flatten(inputs)

    def step(*values: Tensor) -> Tensor:
        at = tree.fill(outline, dict(zip(flat, values[:-1], strict=True)))
        definition(at["rows"], at["tables"], at["source"], values[-1])
        return values[-1].add_(1)

    # Tensors that are neither (a model's constants outside of its state) become part of the graph.
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    return traced(*flat.values(), counter), list(flat)


def build(
    definition: Definition, rows: Tree, tables: Tree, source: Tree, counter: Tensor, level: Level, pool: Any
) -> Program:
    """Trace the step on this memory, compile it, and on a GPU capture it as a CUDA graph.

    Running it changes `rows` and `counter`: the caller loads them afterwards.
    """
    device = counter.device
    graph, _ = trace(definition, rows, tables, source, counter)
    inputs: list[Any] = [*tree.flatten({"rows": rows, "tables": tables, "source": source}).values(), counter]
    run: Callable[..., Any] = graph
    if level == "compiled":
        run = compiled(graph, inputs)
    if device.type != "cuda":

        def replay() -> None:
            with torch.no_grad():
                run(*inputs)

        return replay
    counter.zero_()
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside), torch.no_grad():
        for _ in range(2):
            run(*inputs)
            counter.zero_()
    torch.cuda.current_stream(device).wait_stream(aside)
    recorded = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(recorded, pool=pool):
        run(*inputs)
    torch.cuda.synchronize(device)
    return recorded.replay


def compiled(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph by inductor, which keeps what it compiled on disk: the same graph is read from there.

    Inductor looks in its cache only where there is an environment of symbolic shapes, although all shapes here are fixed. Each
    line of a hash uses its word twice, and inductor follows both uses down to a value that it has written down: where a step
    has hashes (augmentation; dropout too, except on a GPU, where `nn.kernels.masks` is one kernel) it writes values down more
    often, and compiles in seconds instead of minutes.
    """
    from torch import _inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        hashes = any(node.target in SHIFTS for node in graph.graph.nodes)
        options = {"realize_opcount_threshold": HASH_OPERATIONS} if hashes else {}
        return _inductor.compile(graph, inputs, options=options)  # type: ignore[no-any-return]


def levels(most: int) -> list[int]:
    """Return the few sizes that a stack of at most `most` rows runs in: halves, so that shapes repeat."""
    sizes = [most]
    while sizes[-1] > 1 and len(sizes) < 4:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def fitting(sizes: Sequence[int], rows: int) -> int:
    """Return the smallest of the sizes that holds so many rows."""
    return min(size for size in sizes if size >= rows)


def zeros_for(like: Tensor, rows: int) -> Tensor:
    """Return zeros for `rows` clients; convolution kernels lie channels last, as the stacked convolution reads them."""
    shape = tuple(like.shape[1:])
    if len(shape) == 4:
        o, c, h, w = shape
        return like.new_zeros((rows, o, h, w, c)).permute(0, 1, 4, 2, 3)
    return like.new_zeros((rows, *shape))
