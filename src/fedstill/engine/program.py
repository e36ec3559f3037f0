"""A phase of a stack of clients as a program on memory that stays where it is.

The step is traced once per shape (`make_fx`: any Python that `vmap` takes), compiled where compiling is to be had and pays, and
on a GPU replayed as a CUDA graph. A device counter picks the step's row of the tables of batches, which are drawn on the device;
so a round is tables and then replays, and nothing is asked back until it is over. Rows of the stack that have no client, or whose
client has finished, run along with their updates switched off (`live`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core import tree
from ..core.batch import Batch
from ..core.method import Loss, Method
from ..core.optim import SGD
from ..core.task import Site, Task
from ..core.tree import Params, Tree
from ..data.samples import Samples
from .bench import Bench

Level: TypeAlias = Literal["traced", "compiled"]


class Watched(Task):
    """A task that remembers whether anybody asked for the round: what did must not be used in another round."""

    asked: list[bool]

    @classmethod
    def of(cls, task: Task) -> Watched:
        """A watched copy."""
        found = cls(**{f.name: getattr(task, f.name) for f in dataclasses.fields(task)})
        object.__setattr__(found, "asked", [False])
        return found

    def at(self, **changes: Any) -> Watched:
        """The same with other values, at a client say; it reports to the same list."""
        values = {f.name: object.__getattribute__(self, f.name) for f in dataclasses.fields(Task)}
        found = type(self)(**{**values, **changes})
        object.__setattr__(found, "asked", self.asked)
        return found

    def __getattribute__(self, name: str) -> Any:
        if name == "round":
            with contextlib.suppress(AttributeError):  # while it is made
                object.__getattribute__(self, "asked")[0] = True
        return object.__getattribute__(self, name)


def over_clients(f: Callable[..., Any], *trees: Any) -> Any:
    """`vmap` over the leading axis; a tree without leaves has no axis, so it is left out of the mapping."""
    dims = tuple(0 if not isinstance(t, dict) or next(tree.leaves(t), None) is not None else None for t in trees)
    return vmap(f, in_dims=dims, randomness="error")(*trees)


def loss_of(method: Method, task: Task, number: int) -> Loss:
    """The loss of one of the phases, of the method as a client has it: it knows the client's own fields."""
    return method.phases(task)[number].loss or method.loss


def own(site: Tree) -> Tree:
    """What of the task is a client's own, where clients differ in it: the learning rate."""
    fields = site.get("fields", {})
    return {"lr": fields["lr"]} if "lr" in fields else {}


def as_batch(b: Tree) -> Batch:
    """A batch from its tree."""
    return Batch(b["x"], b["y"], b["index"], b["key"], b.get("mask"))


@dataclass(frozen=True, eq=False)
class Definition:
    """What a phase's step computes, for any number of clients: the one definition that is traced."""

    bench: Bench
    task: Task
    number: int  # which of the method's phases
    names: tuple[str, ...]  # the parameters that move
    sgd: SGD
    samples: Samples
    loss: Loss | None = None  # where it is the same for all clients, who else ask their own methods' phases for it

    def __call__(self, mine: Tree, tables: Tree, source: Tree, counter: Tensor) -> None:
        """One step of all rows, in place on `mine`; `tables` and `counter` say on which batch."""
        at = {name: table.index_select(0, counter).squeeze(0) for name, table in tables.items()}
        live = at.pop("live")
        site = mine["site"]
        samples = self.samples.over(source["x"])
        rows = at.pop("rows")
        batch = {"x": samples[rows], "y": source["y"][rows], **at}

        def here(site: Tree) -> Task:
            place = Site(samples, source["y"], site["index"], site["samples"], site["steps"], site["last"])
            if isinstance(self.task, Watched):
                return self.task.at(site=place, **own(site))
            return dataclasses.replace(self.task, site=place, **own(site))

        bench = self.bench

        def method(site: Tree) -> Method:
            return bench.method_at({n: v for n, v in site.get("fields", {}).items() if n != "lr"})

        def step(site: Tree, local: Tree, b: Tree) -> tuple[Tree, Tensor]:
            whole = method(site).step
            assert whole is not None
            return whole(here(site), local, as_batch(b))

        if bench.method.step is not None:
            new, loss = over_clients(step, site, mine["local"], batch)
            tree.map(lambda old, value: old.copy_(_where(live, value, old)), mine["local"], new)
            mine["total"].add_(torch.where(live, loss.detach(), torch.zeros_like(loss)))
            return

        def objective(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            params = {**fixed, **weights, **{name: value.clone() for name, value in buffers.items()}}
            measure = self.loss or loss_of(method(site), here(site), self.number)
            loss = measure(here(site), params, local, as_batch(b))
            return loss, {name: params[name] for name in buffers}

        def step_of(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            grads, (loss, moved) = grad_and_value(objective, has_aux=True)(weights, buffers, fixed, local, site, b)
            return method(site).correct(here(site), local, grads), loss.detach(), moved

        def look(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            loss, moved = objective(weights, buffers, fixed, local, site, b)
            return {}, loss.detach(), moved

        weights, buffers = mine["weights"], mine["buffers"]
        grads, loss, moved = over_clients(
            step_of if self.names else look, weights, buffers, mine["fixed"], mine["local"], site, batch
        )
        self._update(weights, grads, mine["momentum"], mine["lr"], live)
        for name, value in moved.items():
            buffers[name].copy_(_where(live, value, buffers[name]))
        mine["total"].add_(torch.where(live, loss, torch.zeros_like(loss)))

    def _update(self, weights: Params, grads: Params, momentum: Params, lr: Tensor, live: Tensor) -> None:
        """SGD as `SGD.update` does it, with a learning rate for each client; rows that are not live stay as they are."""
        sgd = self.sgd
        for name in self.names:
            w, g = weights[name], grads[name]
            if sgd.weight_decay:
                g = g + sgd.weight_decay * w
            if sgd.momentum:
                b = sgd.momentum * momentum[name] + g
                momentum[name].copy_(b)
                g = g + sgd.momentum * b if sgd.nesterov else b
            w.copy_(_where(live, w - lr.reshape(-1, *[1] * (w.ndim - 1)) * g, w))


def _where(live: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)


@dataclass(frozen=True, eq=False)
class Program:
    """A definition on fixed memory, for the first rows of it; `seconds` is what it took to trace, compile and capture."""

    run: Callable[[], None]
    seconds: float


def trace(definition: Definition, mine: Tree, tables: Tree, source: Tree, counter: Tensor) -> tuple[Any, list[str]]:
    """The step as a graph of plain operations that change `mine` and `counter`, and the names of its inputs in order."""
    from torch.fx.experimental.proxy_tensor import make_fx

    whole = {"mine": mine, "tables": tables, "source": source}
    outline, flat = tree.outline(whole), tree.flatten(whole)

    def step(*values: Tensor) -> Tensor:
        at = tree.fill(outline, dict(zip(flat, values[:-1], strict=True)))
        definition(at["mine"], at["tables"], at["source"], values[-1])
        return values[-1].add_(1)

    # Tensors that are neither (a model's constants outside of its state) become part of the graph.
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    return traced(*flat.values(), counter), list(flat)


def build(
    definition: Definition, mine: Tree, tables: Tree, source: Tree, counter: Tensor, level: Level, pool: Any
) -> Program:
    """Trace the step on this memory, compile it, and on a GPU capture it as a CUDA graph.

    Running it changes `mine` and `counter`: whoever builds loads them afterwards.
    """
    began = time.perf_counter()
    device = counter.device
    graph, _ = trace(definition, mine, tables, source, counter)
    given: list[Any] = [*tree.flatten({"mine": mine, "tables": tables, "source": source}).values(), counter]
    run: Callable[..., Any] = graph
    if level == "compiled":
        from torch import _inductor

        run = _inductor.compile(graph, given)
    if device.type != "cuda":

        def replay() -> None:
            with torch.no_grad():
                run(*given)

        return Program(replay, time.perf_counter() - began)
    counter.zero_()
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside), torch.no_grad():
        for _ in range(2):
            run(*given)
            counter.zero_()
    torch.cuda.current_stream(device).wait_stream(aside)
    recorded = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(recorded, pool=pool):
        run(*given)
    torch.cuda.synchronize(device)
    return Program(recorded.replay, time.perf_counter() - began)


def levels(most: int) -> list[int]:
    """The few sizes that a stack of at most `most` rows runs in: halves, so that shapes repeat."""
    found = [most]
    while found[-1] > 1 and len(found) < 4:
        found.append(-(-found[-1] // 2))
    return found


def fitting(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the sizes that holds so many rows."""
    return min(size for size in sizes if size >= rows)


def last_dimension_fast(like: Tensor, rows: int) -> Tensor:
    """Zeros for `rows` clients; convolution kernels lie channels last, as the stacked convolution reads them."""
    shape = tuple(like.shape[1:])
    if len(shape) == 4:
        o, c, h, w = shape
        return like.new_zeros((rows, o, h, w, c)).permute(0, 1, 4, 2, 3)
    return like.new_zeros((rows, *shape))


def each_step(lengths: Sequence[int]) -> Iterator[int]:
    """For each step, how many of the clients (longest first) are still at work."""
    active = len(lengths)
    for s in range(lengths[0] if lengths else 0):
        while lengths[active - 1] <= s:
            active -= 1
        yield active
