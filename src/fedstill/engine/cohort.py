"""A cohort's round in the engine `stacked`: the stacked trees, where each client is, and the plain way, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from ..core import tree
from ..core.device import put
from ..core.method import Method, Phase
from ..core.plan import Tables
from ..core.task import Site, Task
from ..core.tree import Params, Tree
from . import program
from .bench import Bench, Done, Store, Work, given
from .program import Watched, as_batch, over_clients
from .stage import CannotReplay, rows_of

if TYPE_CHECKING:
    from .stacked import Stacked


class Cohort:
    """One cohort's round: its stacked trees, and how far each client has to go."""

    def __init__(self, engine: Stacked, bench: Bench, round: int, works: Sequence[Work], store: Store | None) -> None:
        self.engine, self.bench, self.round, self.works, self.store = engine, bench, round, works, store
        self.clients, self.part = [work.client for work in works], works[0].part
        self.watched = Watched.of(dataclasses.replace(bench.task, round=round))
        self.phases = bench.part(self.part, round, self.watched)
        train, whole = bench.data.train, bench.phases(round, self.watched)
        self.by_round = self.watched.asked[0]  # whether the phases go by the round
        self.sizes = [train.sizes[k] for k in self.clients]
        self.steps = [sum(bench.length(work, epochs) for _, _, epochs in self.phases) for work in works]
        self.x, self.y, self.dtype, self.device = train.x, train.y, bench.net.dtype, train.y.device
        self.down = tree.stack_shared([work.down for work in works])
        self.planned = engine.way != "plain"
        self.rows = max(train.sizes if self.planned else self.sizes)
        per_sample = bench.method.per_sample
        if store is not None:
            self.memory = store.gather(self.clients, per_sample, self.rows)
        else:
            self.memory = tree.stack([tree.fit_rows(work.memory, per_sample, self.rows) for work in works])
        self.site: Tree = {  # what differs between clients; the samples themselves lie in one shared array
            "index": train.rows(self.clients, self.rows),
            "samples": put(self.sizes, self.device, self.dtype),
            "steps": put([bench.steps(k, whole) for k in self.clients], self.device, self.dtype),
            "last": put([float(work.last) for work in works], self.device, torch.float64),
        }
        if bench.varied:
            self.site["fields"] = {
                name: put([values[k] for k in self.clients], self.device, self.dtype)
                for name, values in bench.varied.items()
            }
        self.total = torch.zeros(len(works), dtype=self.dtype, device=self.device)

    def method(self, site: Tree) -> Method:
        """The method as one client of the stack has it."""
        return self.bench.method_at({n: v for n, v in site.get("fields", {}).items() if n != "lr"})

    def phase(self, site: Tree, number: int) -> Phase:
        """One of the phases as one client of the stack has it."""
        return self.method(site).phases(self.task(site))[number]

    def _enter(self, site: Tree, local: Tree, number: int) -> Tree:
        enter = self.phase(site, number).enter
        assert enter is not None
        return enter(self.task(site), local)

    def rate(self, phase: Phase) -> Tensor | None:
        """The clients' learning rates, where they differ and the phase does not say its own."""
        return self.site.get("fields", {}).get("lr") if phase.lr is None else None

    def task(self, site: Tree) -> Task:
        """The task as one client of the stack sees it (inside `vmap`)."""
        place = Site(self.x, self.y, site["index"], site["samples"], site["steps"], site["last"])
        return dataclasses.replace(self.bench.at(self.round, place), **program.own(site))

    def start(self) -> Tree:
        """Where the work begins: as the round does, or for clients at an idle part where their generic one has ended."""
        before: list[Tree] = [work.local if self.part == "idle" else {} for work in self.works]
        if not all(before):
            with torch.no_grad():
                begun: Tree = over_clients(
                    lambda s, d, m: self.method(s).begin(self.task(s), d, m), self.site, self.down, self.memory
                )
            if not any(before):
                return begun
            before = [local or tree.unstack(begun, row) for row, local in enumerate(before)]
        return tree.stack([tree.fit_rows(local, self.bench.method.per_sample, self.rows) for local in before])

    def run(self) -> None:
        """Begin, every phase, finish. An idle part goes step by step: its length is another one each time."""
        method, local = self.bench.method, self.start()
        staged = self.planned and self.part != "idle"
        for number, phase, epochs in self.phases:
            if phase.enter is not None and method.step is None:
                with torch.no_grad():
                    local = over_clients(lambda s, mine, at=number: self._enter(s, mine, at), self.site, local)
            stage = self.engine.stage(self, number, phase, epochs, local) if staged else None
            if stage is not None:
                try:
                    local = stage.run(self, epochs, local)
                    continue
                except CannotReplay as why:
                    self.engine.strike(stage, number, str(why))
            if method.step is not None:
                local = self._steps(phase, epochs, local)
            else:
                local = self._phase(number, phase, epochs, local)
        with torch.no_grad():
            up, kept = over_clients(
                lambda s, d, m, local: self.method(s).finish(self.task(s), d, m, local),
                self.site,
                self.down,
                self.memory,
                local,
            )
        trained = method.phases(self.watched)[-1].model if self.works[0].watch else ""
        self.up, self.kept, self.local = given(self.part, up, kept, local, trained)

    def done(self) -> list[Done]:
        """Every client's result; the one moment at which the host waits for the device."""
        finite = tree.finite_rows(len(self.works), self.up, self.kept)
        kept: list[Tree] = [{} for _ in self.works]
        if self.store is None:
            kept = self.fitted(self.kept)
        elif self.part != "generic":
            self.store.scatter(self.clients, self.kept, self.bench.method.per_sample, self.sizes)
        ups = tree.rows(self.up, len(self.works))
        left = [tree.clone(local) for local in self.fitted(self.local)]  # kept for long, each by itself
        totals, good = torch.stack([self.total.double(), finite.to(self.total.device).double()]).tolist()
        return [
            Done(client, up, memory, total / max(1, steps), steps, size, bool(ok), local)
            for client, up, memory, total, steps, size, ok, local in zip(
                self.clients, ups, kept, totals, self.steps, self.sizes, good, left, strict=True
            )
        ]

    def fitted(self, stack: Tree) -> list[Tree]:
        """Each client's entry of a stacked tree, without the padding of what has a row for each sample."""
        entries, per_sample = tree.rows(stack, len(self.works)), self.bench.method.per_sample
        return [tree.fit_rows(entry, per_sample, n) for entry, n in zip(entries, self.sizes, strict=True)]

    def comes_again(self, phase: Phase) -> bool:
        """Whether this phase is the same in other rounds: one of the method's own losses, for the usual epochs."""
        own = phase.loss is None or getattr(phase.loss, "__self__", None) is self.bench.method
        return not self.by_round or (own and phase.epochs is None)

    def signature(self, phase: Phase, epochs: int, local: Tree) -> tuple[Any, ...]:
        """What a program of this phase depends on, besides the method and the model."""
        loss = phase.loss or self.bench.method.loss
        names = tuple(self.bench.moving(phase)[0])
        shapes = tuple((name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.leaves(local))
        sgd = dataclasses.replace(self.bench.sgd(phase), lr=0.0)
        what = getattr(loss, "__qualname__", repr(loss)), phase.model, phase.after_epoch is not None
        return *what, names, epochs, sgd, shapes, self.rows

    def _phase(self, number: int, phase: Phase, epochs: int, local: Tree) -> Tree:
        bench = self.bench
        names, moving_buffers = bench.moving(phase)
        start: Params = local[phase.model]
        names = [n for n in names if n in start]
        weights = {name: start[name].detach().clone() for name in names}
        buffers = {name: start[name].detach().clone() for name in bench.net.buffers if name in start}
        fixed = {name: value for name, value in start.items() if name not in weights and name not in buffers}

        def objective(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            params = {**fixed, **weights, **{name: value.clone() for name, value in buffers.items()}}
            loss_of = program.loss_of(self.method(site), self.task(site), number)
            loss = loss_of(self.task(site), params, local, as_batch(b))
            return loss, {name: params[name] for name in buffers}

        def step(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            grads, (loss, moved) = grad_and_value(objective, has_aux=True)(weights, buffers, fixed, local, site, b)
            return self.method(site).correct(self.task(site), local, grads), loss.detach(), moved

        def look(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            loss, moved = objective(weights, buffers, fixed, local, site, b)
            return {}, loss.detach(), moved

        sgd, lr = bench.sgd(phase), self.rate(phase)
        state = sgd.init(list(weights.values()))
        before = tree.clone({**weights, **buffers}) if phase.after_epoch is not None else {}
        per_epoch = put([bench.plan.steps(n, 1) for n in self.sizes], self.device)
        for count, (active, batch) in enumerate(self._batches(epochs), start=1):
            head = rows_of(active)
            now, kept = tree.map(head, weights), tree.map(head, buffers)
            args = (tree.map(head, t) for t in (fixed, local, self.site))
            grads, loss, moved = over_clients(step if names else look, now, kept, *args, batch)
            if names:
                rate = None if lr is None else lr[:active]
                sgd.update(list(now.values()), [grads[n] for n in names], [head(s) for s in state], rate)
            for name, value in moved.items():
                kept[name].copy_(value)
            self.total[:active] += loss
            if phase.after_epoch is not None:
                ended = count % per_epoch[:active] == 0
                self.end_epoch(number, ended, tree.map(head, before), {**now, **kept}, tree.map(head, fixed))
        trained = {**weights, **{n: buffers[n] for n in moving_buffers if n in buffers}}
        return {**local, phase.model: {name: trained.get(name, value) for name, value in start.items()}}

    def end_epoch(self, number: int, ended: Tensor, before: Params, now: Params, fixed: Params) -> None:
        """For the clients whose epoch has ended: the phase's new values in place, and those as the next epoch's start."""

        def renew(site: Tree, before: Params, now: Params, fixed: Params, ended: Tensor) -> Params:
            after = self.phase(site, number).after_epoch
            assert after is not None
            new = {**now, **after(self.task(site), {**fixed, **before}, {**fixed, **now})}
            return {name: torch.where(ended, new[name], now[name]) for name in now}

        with torch.no_grad():
            site = tree.map(rows_of(len(ended)), self.site)
            for name, value in over_clients(renew, site, before, now, fixed, ended).items():
                now[name].copy_(value)
                shape = (-1, *[1] * (value.ndim - 1))
                before[name].copy_(torch.where(ended.reshape(shape), value, before[name]))

    def _steps(self, phase: Phase, epochs: int, local: Tree) -> Tree:
        """A phase of a method that brings its own whole step."""
        local = tree.clone(local)
        for active, batch in self._batches(epochs):
            now = tree.map(rows_of(active), local)
            site = tree.map(rows_of(active), self.site)
            new, loss = over_clients(
                lambda s, mine, b: _step(self.method(s))(self.task(s), mine, as_batch(b)), site, now, batch
            )
            tree.map(lambda old, value: old.copy_(value), now, new)
            self.total[:active] += loss.detach()
        return local

    def lengths(self, epochs: int) -> list[int]:
        """How many steps of a phase each client takes, the longest first."""
        return [self.bench.length(work, epochs) for work in self.works]

    def tables(self, epochs: int, width: int) -> dict[str, Tensor]:
        """A phase's batches: `rows` are places in the shared array, `index` among the client's own samples."""
        return self._tables(self.round, epochs, width) if self.part == "idle" else self._once(self.round, epochs, width)

    def draw_ahead(self, epochs: int, width: int) -> None:
        """The next round's batches, while the device is at work on this one's: where everybody takes part, they are known."""
        if len(self.clients) == len(self.bench.data.train.sizes) and self.round < self.bench.task.rounds:
            self._once(self.round + 1, epochs, width)

    def _once(self, round: int, epochs: int, width: int) -> dict[str, Tensor]:
        """Tables that several phases of a round share, kept for this round and the next."""
        near = range(self.round, self.round + 2)
        self.engine.drawn = drawn = {key: found for key, found in self.engine.drawn.items() if key[0] in near}
        key = (round, epochs, width, *self.clients)
        if key not in drawn:
            drawn[key] = self._tables(round, epochs, width)
        return drawn[key]

    def _tables(self, round: int, epochs: int, width: int) -> dict[str, Tensor]:
        if self.part == "idle":
            found = self._drawn(width)
        else:
            found = self.bench.plan.tables(round, self.clients, self.sizes, epochs, width, self.device)
        starts = put([self.bench.data.train.starts[k] for k in self.clients], self.device)
        return {
            "rows": found.index + starts[:, None],
            "index": found.index,
            "mask": found.real.to(self.dtype),
            "key": found.key,
        }

    def _drawn(self, width: int) -> Tables:
        """The tables of clients that take any number of steps each: drawn client by client, as many epochs as it needs."""
        plan, shape = self.bench.plan, (self.steps[0], len(self.works))
        index, key = np.full((*shape, width), -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, (client, n, steps) in enumerate(zip(self.clients, self.sizes, self.steps, strict=True)):
            size, per_epoch = min(plan.batch_size, n), plan.steps(n, 1)
            drawn = np.full((-(-steps // per_epoch), per_epoch * size), -1, dtype=np.int64)
            for epoch, order in enumerate(drawn):
                order[:n] = plan.order(self.round, client, n, epoch)
            index[:steps, row, :size] = drawn.reshape(-1, size)[:steps]
            key[:steps, row] = plan.step_keys(self.round, client, steps)
        places = put(index, self.device)
        return Tables(places.clamp(min=0), places >= 0, put(key, self.device))

    def _batches(self, epochs: int) -> Iterator[tuple[int, Tree]]:
        """For each step: how many clients still work, and their batches, padded to one width."""
        width = min(self.bench.plan.batch_size, max(self.sizes))
        tables = self.tables(epochs, width)
        full = tables["mask"].all(2).cpu().numpy()
        for s, active in enumerate(program.each_step(self.lengths(epochs))):
            rows = tables["rows"][s, :active]
            batch = {"x": self.x[rows], "y": self.y[rows]}
            batch.update({name: tables[name][s, :active] for name in ("index", "key")})
            if not full[s, :active].all():
                batch["mask"] = tables["mask"][s, :active]
            yield active, batch


def _step(method: Method) -> Callable[..., Any]:
    assert method.step is not None
    return method.step
