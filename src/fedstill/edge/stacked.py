"""The engine `stacked`: a cohort at once, every tensor with a leading client axis, `torch.func.vmap` over the step.

Batches are padded to one width and masked. Clients are ordered by how many steps they take, so that those still at work are
always the first rows of the stack; one that has finished is simply not in the slice any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from .. import tree
from ..batch import Batch
from ..functional import Net
from ..method import Phase
from ..task import CHUNK, Site, Task
from ..tree import Params, Tree
from .trainer import Bench, Done, Work


class Stacked:
    """A cohort at once."""

    def train(self, bench: Bench, round: int, works: Sequence[Work]) -> Iterator[Done]:
        """Train every client; results in the order of `works`."""
        if not works:
            return
        sizes = bench.data.train.sizes
        order = sorted(range(len(works)), key=lambda i: (-bench.plan.steps(sizes[works[i].client], 1), i))
        cohort = _Cohort(bench, round, [works[i] for i in order])
        with torch.enable_grad():
            cohort.run()
        place = {i: row for row, i in enumerate(order)}
        for i in range(len(works)):
            yield cohort.done(place[i])

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[int]:
        """How many of each client's samples its model gets right."""
        if not models:
            return []
        data, clients = bench.data.part(part), [client for client, _ in models]
        width = max(data.sizes[k] for k in clients)
        rows = data.rows(clients, width)
        size = torch.tensor([data.sizes[k] for k in clients], device=rows.device).unsqueeze(1)
        shared = all(params is models[0][1] for _, params in models)
        params = models[0][1] if shared else tree.stack([params for _, params in models])
        forward = vmap(lambda p, x: bench.task.net(p, x, train=False), in_dims=(None if shared else 0, 0))
        hits = torch.zeros(len(clients), dtype=torch.int64, device=rows.device)
        for first in range(0, width, CHUNK):
            part_rows = rows[:, first : first + CHUNK]
            right = forward(params, data.x[part_rows]).argmax(-1) == data.y[part_rows]
            real = torch.arange(first, first + part_rows.shape[1], device=rows.device) < size
            hits += (right & real).sum(1)
        return [int(h) for h in hits.tolist()]


class _Cohort:
    """One cohort's round: its stacked trees, and how far each client has to go."""

    def __init__(self, bench: Bench, round: int, works: Sequence[Work]) -> None:
        self.bench, self.round, self.works = bench, round, works
        self.clients = [work.client for work in works]
        self.phases = bench.phases(round)
        train = bench.data.train
        self.sizes = [train.sizes[k] for k in self.clients]
        self.steps = [bench.steps(k, self.phases) for k in self.clients]
        self.x, self.y = train.x, train.y
        self.down = tree.stack([work.down for work in works])
        rows, per_sample = max(self.sizes), bench.method.per_sample
        self.memory = tree.stack([tree.fit_rows(work.memory, per_sample, rows) for work in works])
        self.site = {  # what differs between clients; the samples themselves lie in one shared array
            "index": train.rows(self.clients, max(self.sizes)),
            "samples": self.x.new_tensor(self.sizes),
            "steps": self.x.new_tensor(self.steps),
        }
        self.total = self.x.new_zeros(len(works))

    def task(self, site: Tree) -> Task:
        """The task as one client of the stack sees it (inside `vmap`)."""
        return self.bench.at(self.round, Site(self.x, self.y, site["index"], site["samples"], site["steps"]))

    def run(self) -> None:
        method = self.bench.method
        with torch.no_grad():
            local = _over_clients(lambda s, d, m: method.begin(self.task(s), d, m), self.site, self.down, self.memory)
        for phase, epochs in self.phases:
            local = self._steps(phase, epochs, local) if method.step is not None else self._phase(phase, epochs, local)
        with torch.no_grad():
            self.up, self.kept = _over_clients(
                lambda s, d, m, local: method.finish(self.task(s), d, m, local),
                self.site,
                self.down,
                self.memory,
                local,
            )

    def done(self, row: int) -> Done:
        loss = float(self.total[row]) / max(1, self.steps[row])
        up, memory = tree.unstack(self.up, row), tree.unstack(self.kept, row)
        memory = tree.fit_rows(memory, self.bench.method.per_sample, self.sizes[row])
        return Done(self.clients[row], up, memory, loss, self.steps[row], self.sizes[row])

    def _phase(self, phase: Phase, epochs: int, local: Tree) -> Tree:
        bench, method = self.bench, self.bench.method
        if phase.enter is not None:
            enter = phase.enter
            with torch.no_grad():
                local = _over_clients(lambda s, mine: enter(self.task(s), mine), self.site, local)
        names, moving_buffers = bench.moving(phase)
        start: Params = local[phase.model]
        names = [n for n in names if n in start]
        weights = {name: start[name].detach().clone() for name in names}
        buffers = {name: start[name].detach().clone() for name in bench.task.net.buffers if name in start}
        fixed = {name: value for name, value in start.items() if name not in weights and name not in buffers}
        loss_of = phase.loss or method.loss

        def objective(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            params = {**fixed, **weights, **{name: value.clone() for name, value in buffers.items()}}
            loss = loss_of(self.task(site), params, local, _batch(b))
            return loss, {name: params[name] for name in buffers}

        def step(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            grads, (loss, moved) = grad_and_value(objective, has_aux=True)(weights, buffers, fixed, local, site, b)
            return method.correct(self.task(site), local, grads), loss.detach(), moved

        def look(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            loss, moved = objective(weights, buffers, fixed, local, site, b)
            return {}, loss.detach(), moved

        sgd = bench.sgd(phase)
        state = sgd.init(list(weights.values()))
        before = tree.clone({**weights, **buffers}) if phase.after_epoch is not None else {}
        per_epoch = torch.tensor([bench.plan.steps(n, 1) for n in self.sizes], device=self.x.device)
        for number, (active, batch) in enumerate(self._batches(epochs), start=1):
            head = _rows(active)
            now, kept = tree.map(head, weights), tree.map(head, buffers)
            args = (tree.map(head, t) for t in (fixed, local, self.site))
            grads, loss, moved = _over_clients(step if names else look, now, kept, *args, batch)
            if names:
                sgd.update(list(now.values()), [grads[n] for n in names], [head(s) for s in state])
            for name, value in moved.items():
                kept[name].copy_(value)
            self.total[:active] += loss
            if phase.after_epoch is not None:
                ended = number % per_epoch[:active] == 0
                self._end_epoch(
                    phase.after_epoch, ended, tree.map(head, before), {**now, **kept}, tree.map(head, fixed)
                )
        trained = {**weights, **{n: buffers[n] for n in moving_buffers if n in buffers}}
        return {**local, phase.model: {name: trained.get(name, value) for name, value in start.items()}}

    def _end_epoch(
        self, after: Callable[..., Params], ended: Tensor, before: Params, now: Params, fixed: Params
    ) -> None:
        """For the clients whose epoch has ended: the phase's new values in place, and those as the next epoch's start."""

        def renew(site: Tree, before: Params, now: Params, fixed: Params, ended: Tensor) -> Params:
            new = {**now, **after(self.task(site), {**fixed, **before}, {**fixed, **now})}
            return {name: torch.where(ended, new[name], now[name]) for name in now}

        with torch.no_grad():
            site = tree.map(_rows(len(ended)), self.site)
            for name, value in _over_clients(renew, site, before, now, fixed, ended).items():
                now[name].copy_(value)
                shape = (-1, *[1] * (value.ndim - 1))
                before[name].copy_(torch.where(ended.reshape(shape), value, before[name]))

    def _steps(self, phase: Phase, epochs: int, local: Tree) -> Tree:
        """A phase of a method that brings its own whole step."""
        method = self.bench.method
        step = method.step
        assert step is not None
        local = tree.clone(local)
        for active, batch in self._batches(epochs):
            now = tree.map(_rows(active), local)
            site = tree.map(_rows(active), self.site)
            new, loss = _over_clients(lambda s, mine, b: step(self.task(s), mine, _batch(b)), site, now, batch)
            tree.map(lambda old, value: old.copy_(value), now, new)
            self.total[:active] += loss.detach()
        return local

    def _batches(self, epochs: int) -> Iterator[tuple[int, Tree]]:
        """For each step: how many clients still work, and their batches, padded to one width."""
        plan, device = self.bench.plan, self.x.device
        width = min(plan.batch_size, max(self.sizes))
        clients = list(zip(self.clients, self.sizes, strict=True))
        plans = [plan.batches(self.round, k, n, epochs, width) for k, n in clients]
        longest = len(plans[0])
        index = np.full((longest, len(plans), width), -1, dtype=np.int64)
        keys = np.zeros((longest, len(plans)), dtype=np.int64)
        for i, mine in enumerate(plans):
            index[: len(mine), i] = mine
            keys[: len(mine), i] = plan.step_keys(self.round, self.clients[i], len(mine))
        starts = np.array([self.bench.data.train.starts[k] for k in self.clients])[:, None]
        lengths = np.array([len(mine) for mine in plans])
        real = torch.from_numpy(index >= 0).to(device, self.x.dtype)
        within = torch.from_numpy(np.maximum(index, 0)).to(device)
        rows_of = torch.from_numpy(np.maximum(index, 0) + starts).to(device)
        key = torch.from_numpy(keys).to(device)
        for s in range(longest):
            active = int((lengths > s).sum())
            rows = rows_of[s, :active]
            batch = {"x": self.x[rows], "y": self.y[rows], "index": within[s, :active], "key": key[s, :active]}
            if (index[s, :active] < 0).any():
                batch["mask"] = real[s, :active]
            yield active, batch


def refusal(bench: Bench) -> str | None:
    """Why this model cannot be stacked, or None.

    Tried in float64 without effect: two clients with two samples each and one row of padding, against the two samples alone. A
    model whose samples see one another (other than through BatchNorm), or that `vmap` does not take, is refused.
    """
    run_net, data = bench.task.net, bench.data.train
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
        both = _over_clients(step, *stacks, *(torch.stack([t, t]) for t in (x, key, mask)))
    except Exception as error:
        return str(error).strip().splitlines()[0]
    (g1, (v1, b1)), (g2, (v2, b2)) = alone, both
    pairs = [(v1, v2[0]), *((g1[n], g2[n][0]) for n in g1), *((b1[n], b2[n][0]) for n in b1)]
    if any((a - b).abs().max() > 1e-8 * (1 + a.abs().max()) for a, b in pairs if a.numel()):
        return "its samples see one another, so that padding a batch would change the result"
    return None


def _rows(active: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t[:active]


def _batch(b: Tree) -> Batch:
    return Batch(b["x"], b["y"], b["index"], b["key"], b.get("mask"))


def _over_clients(f: Callable[..., Any], *trees: Any) -> Any:
    """`vmap` over the leading axis; a tree without leaves has no axis, so it is left out of the mapping."""
    dims = tuple(0 if not isinstance(t, dict) or next(tree.leaves(t), None) is not None else None for t in trees)
    return vmap(f, in_dims=dims, randomness="error")(*trees)
