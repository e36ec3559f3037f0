"""The engine `one`: each client in turn, no padding, updates in place. Fast on a CPU, and the oracle for `stacked`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, autograd

from .. import tree
from ..batch import Batch
from ..method import Method, Phase
from ..task import Site, Task
from ..tree import Params, Tree
from .trainer import SMALL, Bench, Done, Work


class One:
    """Clients one after another."""

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""
        _keep_freed_memory()
        with _threads(bench), torch.enable_grad():
            for work in works:
                yield _train(bench, round, work)

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's samples its model gets right."""
        hits = []
        with _threads(bench):
            for client, params in models:
                x, y = bench.data.part(part).of(client)
                hits.append((bench.task.predict(params, x).argmax(-1) == y).sum())
        return [int(h) for h in torch.stack(hits).tolist()] if hits else []


@functools.cache
def _keep_freed_memory() -> None:
    """Have glibc keep freed blocks for the next step: by default it hands large ones back to the kernel, and every step
    faults its activations in again, page by page (a fifth of a small CNN's time). Once a process; no effect elsewhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: blocks up to a gigabyte come from the heap
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap is not given back


@contextlib.contextmanager
def _threads(bench: Bench) -> Iterator[None]:
    """One thread while steps are so small that handing work to a second costs more than it saves."""
    net, before = bench.task.net, torch.get_num_threads()
    if net.device.type == "cpu" and not net.has_convolution and net.size * bench.plan.batch_size < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(bench: Bench, round: int, work: Work) -> Done:
    method, phases = bench.method, bench.phases(round)
    x, y = bench.data.train.of(work.client)
    steps = bench.steps(work.client, phases)
    site = Site(x, y, torch.arange(len(y), device=x.device), x.new_tensor(len(y)), x.new_tensor(steps))
    task = bench.at(round, site)
    memory = tree.fit_rows(work.memory, method.per_sample, len(y))
    with torch.no_grad():
        local = method.begin(task, work.down, memory)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for phase, epochs in phases:
        local = _phase(bench, task, round, work.client, local, phase, epochs, total)
    with torch.no_grad():
        up, kept = method.finish(task, work.down, memory, local)
    return Done(work.client, up, kept, float(total) / max(1, steps), steps, len(y))


def _phase(
    bench: Bench, task: Task, round: int, client: int, local: Tree, phase: Phase, epochs: int, total: Tensor
) -> Tree:
    """One phase of one client; adds every step's loss to `total`."""
    method, net = bench.method, task.net
    if method.step is not None:
        for batch in _batches(bench, round, client, epochs):
            local, loss = method.step(task, local, batch)
            total += loss.detach()
        return local
    if phase.enter is not None:
        with torch.no_grad():
            local = phase.enter(task, local)
    names, buffers = bench.moving(phase)
    start: Params = local[phase.model]
    params = {
        name: net.fast_layout(value.detach()).clone(memory_format=torch.preserve_format)
        for name, value in start.items()
    }
    weights = [params[name].requires_grad_() for name in names]
    sgd, loss_of = bench.sgd(phase), phase.loss or method.loss
    state = sgd.init(weights)
    corrects = type(method).correct is not Method.correct
    per_epoch = bench.plan.steps(len(task.here().y), 1)
    before = tree.clone(params) if phase.after_epoch is not None else params
    for step, batch in enumerate(_batches(bench, round, client, epochs), start=1):
        loss = loss_of(task, params, local, batch)
        if not weights:  # everything is frozen; only BatchNorm's statistics may move
            total += loss.detach()
            continue
        grads = list(autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))
        if corrects:
            corrected = method.correct(task, local, dict(zip(names, grads, strict=True)))
            grads = [corrected[name] for name in names]
        sgd.update(weights, grads, state)
        total += loss.detach()
        if phase.after_epoch is not None and step % per_epoch == 0:
            with torch.no_grad():
                for name, value in phase.after_epoch(task, before, params).items():
                    params[name].copy_(value)
                before = tree.clone(params)
    moved = {*names, *buffers}
    # Contiguous again: what leaves the engine is laid out the same whether it came from here, the wire or a checkpoint.
    trained = {n: params[n].detach().contiguous() if n in moved else start[n] for n in net.names if n in params}
    return {**local, phase.model: trained}


def _batches(bench: Bench, round: int, client: int, epochs: int) -> Iterator[Batch]:
    """The client's batches: one gather per epoch, then slices of it."""
    x, y = bench.data.train.of(client)
    size, step = min(bench.plan.batch_size, len(y)), 0
    keys = torch.from_numpy(bench.plan.step_keys(round, client, bench.plan.steps(len(y), epochs))).to(x.device)
    for epoch in range(epochs):
        index = torch.from_numpy(bench.plan.order(round, client, len(y), epoch)).to(x.device)
        xs, ys = x[index], y[index]
        for first in range(0, len(y), size):
            rows = slice(first, first + size)
            yield Batch(xs[rows], ys[rows], index[rows], keys[step])
            step += 1
