"""The engine `stacked`: a cohort at once, every tensor with a leading client axis, `torch.func.vmap` over the step.

Batches are padded to one width and masked. Clients are ordered by how many steps they take, so that those still training are
always the first rows of the stack; one that has finished is simply not in the slice any more.

On a GPU a phase runs as a program (`program.py`): traced, compiled where that pays, replayed as a CUDA graph, in a few sizes. The
plain way, step by step from Python, is what a CPU does, and the oracle for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from ..core import tree
from ..core.errors import InputError, Shown
from ..core.method import Phase
from ..core.metric import Tally
from ..core.optim import Optimizer
from ..core.plan import Length, Tables, private_tables, ragged_tables
from ..core.tree import Params, Tree, put
from .bench import Bench, Done, Store, TooMany, Work, results_of
from .hooks import calls
from .kept import KEPT, with_kept
from .malloc import keep_freed_memory
from .stackable import Way
from .step import (
    ClientView,
    StackStep,
    Watched,
    check_begun,
    check_unchanged,
    each_step,
    explained,
    over_clients,
    shared_loss,
    versions,
)  # fmt: skip

ONE_EPOCH = Length(1)
ROWS = 32_768  # samples in one pass of scoring, over all clients


class Programs(Protocol):
    """What runs a cohort's phases as programs (see `stage.Programs`)."""

    stages: dict[Any, Any]

    def run(self, cohort: Cohort, number: int, phase: Phase, length: Length, local: Tree) -> Tree | None:
        """Train a phase; None where it has to go step by step."""

    def close(self) -> None:
        """Free what programs consist of."""


@dataclass(eq=False)
class Stacked:
    """Trains a cohort at once. What it holds besides its settings are programs and measurements, nothing of the training."""

    way: Way = "plain"
    exact: bool = False  # float32 products in full precision, no TF32
    programs: Programs | None = None  # how phases run as programs; None: step by step
    drawn: dict[Any, dict[str, Tensor]] = field(default_factory=dict)  # batches of this round and the next

    def train(self, bench: Bench, round: int, works: Sequence[Work], store: Store | None = None) -> Iterator[Done]:
        """Train every client; results in the order of `works`. With a store, memories come from there and new ones go back."""
        if bench.net.device.type == "cpu":
            keep_freed_memory()
        if not works:
            return
        order = sorted(range(len(works)), key=lambda i: (-bench.length(works[i], ONE_EPOCH), i))
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
            for number, phase, length in cohort.phases:
                if phase.enter is not None and bench.method.step is None:
                    local = cohort.enter(number, local)
                staged = self.programs is not None and cohort.part != "idle"
                trained = self.programs.run(cohort, number, phase, length, local) if staged and self.programs else None
                local = cohort.run(number, phase, length, local) if trained is None else trained
            cohort.finish(local)
        return cohort.done()

    def personals(self, bench: Bench, round: int, works: Sequence[Work]) -> list[Params]:
        """Return the personal model of each client; the works bring the memories."""
        with _precision(self.exact), explained(bench.method, bench.task, stacked=True):
            return Cohort(bench, round, works).personals()

    def score(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the sum of the scores of each client's samples."""
        score = bench.task.objective.score
        found = [torch.where(real, score(out, y), 0) for out, y, real in self._outputs(bench, part, models)]
        return torch.cat(found, 1).sum(1).tolist() if found else []

    def measure(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[tuple[float, Tree]]:
        """Return the sum of the scores of each client's samples, and the statistics of its metrics."""
        tallies = [Tally(bench.measures) for _ in models]
        for out, y, real in self._outputs(bench, part, models):
            for row, count in enumerate(real.sum(1).tolist()):
                tallies[row].add(out[row, :count], y[row, :count])
        return [tally.done() for tally in tallies]

    def losses(self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]) -> list[float]:
        """Return the mean loss of each client's model on the client's samples, in evaluation mode."""
        sums = []
        for out, y, real in self._outputs(bench, part, models):
            each = bench.task.objective.plain_losses(out.double(), y.double() if y.is_floating_point() else y)
            sums.append(torch.where(real, each, 0.0).sum(1))
        sizes = [bench.data.part(part).sizes[client] for client, _ in models]
        return (
            [float(total) / n for total, n in zip(torch.stack(sums).sum(0).tolist(), sizes, strict=True)]
            if sums
            else []
        )

    def _outputs(
        self, bench: Bench, part: str, models: Sequence[tuple[int, Params]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (output, label, whether it is one of the client's) of all clients' samples, [clients, rows] at a time."""
        if not models:
            return
        data, clients = bench.data.part(part), [client for client, _ in models]
        width = max(data.sizes[k] for k in clients)
        rows = data.rows(clients, width)
        size = put([data.sizes[k] for k in clients], rows.device).unsqueeze(1)
        shared = all(params is models[0][1] for _, params in models)
        params = models[0][1] if shared else tree.stack([params for _, params in models])
        forward = vmap(lambda p, x: bench.net(p, x, train=False), in_dims=(None if shared else 0, 0))
        step = max(1, ROWS // len(clients))
        with _precision(self.exact):
            for first in range(0, width, step):
                part_rows = rows[:, first : first + step]
                real = torch.arange(first, first + part_rows.shape[1], device=rows.device) < size
                yield forward(params, data.x[part_rows]), data.y[part_rows], real

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


def rows_of(active: int) -> Callable[[Tensor], Tensor]:
    """Return what takes the first rows of a tensor."""
    return lambda t: t[:active]


class Cohort:
    """One cohort's round: its stacked trees, and how many steps each client takes. Clients come in order of their steps."""

    def __init__(
        self,
        bench: Bench,
        round: int,
        works: Sequence[Work],
        store: Store | None = None,
        *,
        planned: bool = False,
        drawn: dict[Any, dict[str, Tensor]] | None = None,
    ) -> None:
        """`planned` is for programs, whose shapes must not differ from round to round; `drawn` keeps batches between rounds."""
        self.bench, self.round, self.works, self.store, self.planned = bench, round, works, store, planned
        self.drawn = {} if drawn is None else drawn
        self.clients, self.part = [work.client for work in works], works[0].part
        self.watched = Watched.of(dataclasses.replace(bench.task, round=round))
        self.task = dataclasses.replace(bench.task, round=round)
        self.view = ClientView(bench, self.task)
        self.phases = bench.part(self.part, round, self.watched)
        train, full_round = bench.data.train, bench.phases(round, self.watched)
        self.by_round = self.watched.asked[0]  # whether the phases depend on the round
        self.sizes = [train.sizes[k] for k in self.clients]
        self.steps = [sum(bench.length(work, length) for _, _, length in self.phases) for work in works]
        self.x, self.y, self.dtype, self.device = train.x, train.y, bench.net.dtype, train.y.device
        self.down = tree.stack_shared([work.down for work in works])
        self.rows = max(train.sizes if planned else self.sizes)
        per_sample = bench.method.per_sample
        if store is not None:
            self.memory = store.gather(self.clients, per_sample, self.rows)
        else:
            self.memory = tree.stack([tree.fit_rows(work.memory, per_sample, self.rows) for work in works])
        self.whole, self.kept = self.memory, dict[str, Tree]()  # with the optimiser's state; what phases leave of it
        self.memory = tree.without(self.memory, KEPT)
        self.arguments = versions(down=self.down, memory=self.memory)  # to see whether a hook changes it
        self.site: Tree = {  # what differs between clients; the samples themselves lie in one shared array
            "index": train.rows(self.clients, self.rows),
            "samples": put(self.sizes, self.device, self.dtype),
            "steps": put([bench.steps(k, full_round) for k in self.clients], self.device, self.dtype),
            "last": put([float(work.last) for work in works], self.device, torch.float64),
        }
        if (balances := [bench.balance(k) for k in self.clients])[0] is not None:
            self.site["balance"] = torch.stack([b for b in balances if b is not None])
        if bench.varied:
            self.site["fields"] = {
                name: put([values[k] for k in self.clients], self.device, self.dtype)
                for name, values in bench.varied.items()
            }
        self.total = torch.zeros(len(works), dtype=self.dtype, device=self.device)

    @calls("begin")
    def begin(self) -> Tree:
        """Return where the work begins: the round's beginning or, at an idle part, what the generic part left."""
        before: list[Tree] = [work.local if self.part == "idle" else {} for work in self.works]
        if not all(before):
            with torch.no_grad():
                begun: Tree = over_clients(self._begin, self.site, self.down, self.memory)
            models = [phase.model for _, phase, _ in self.phases if self.bench.method.step is None]
            check_begun(self.bench.method, models, begun)
            check_unchanged(self.bench.method, "begin", self.arguments)
            if not any(before):
                return begun
            before = [local or tree.unstack(begun, row) for row, local in enumerate(before)]
        return tree.stack([tree.fit_rows(local, self.bench.method.per_sample, self.rows) for local in before])

    def _begin(self, site: Tree, down: Tree, memory: Tree) -> Tree:
        return self.view.method(site).begin(self.view.at(site, self.x, self.y), down, memory)

    @calls("enter")
    def enter(self, number: int, local: Tree) -> Tree:
        """Return `local` as a phase finds it."""

        def entered(site: Tree, local: Tree) -> Tree:
            enter = self.view.phase(site, self.x, self.y, number).enter
            assert enter is not None
            return enter(self.view.at(site, self.x, self.y), local)

        with torch.no_grad():
            return over_clients(entered, self.site, local)  # type: ignore[no-any-return]

    @calls("finish")
    def finish(self, local: Tree) -> None:
        """End the work: what goes up, the memory and, of a generic part, `local`."""
        arguments = self.arguments + versions(local=local)
        with torch.no_grad():
            up, memory = over_clients(self._finish, self.site, self.down, self.memory, local)
        check_unchanged(self.bench.method, "finish", arguments)
        memory = with_kept(memory, self.whole, self.kept) if KEPT in self.whole else memory
        trained = self.bench.method.phases(self.watched)[-1].model if self.works[0].watch else ""
        self.up, self.memory_after, self.local = results_of(self.part, up, memory, local, trained)

    def _finish(self, site: Tree, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        return self.view.method(site).finish(self.view.at(site, self.x, self.y), down, memory, local)

    @calls("personal")
    def personals(self) -> list[Params]:
        """Return each client's personal model."""

        def personal(site: Tree, down: Tree, memory: Tree) -> Params:
            return self.view.method(site).personal(self.view.at(site, self.x, self.y), down, memory)

        with torch.no_grad():
            return tree.rows(over_clients(personal, self.site, self.down, self.memory), len(self.works))

    def done(self) -> list[Done]:
        """Return every client's result; the one moment at which the host waits for the device."""
        finite = tree.finite_rows(len(self.works), self.up, self.memory_after)
        memories: list[Tree] = [{} for _ in self.works]
        if self.store is None:
            memories = self.fitted(self.memory_after)
        elif self.part != "generic":
            self.store.scatter(self.clients, self.memory_after, self.bench.method.per_sample, self.sizes)
        ups = tree.rows(self.up, len(self.works))
        locals_ = [tree.clone(local) for local in self.fitted(self.local)]  # these live long: no views of the stack
        totals, good = torch.stack([self.total.double(), finite.to(self.total.device).double()]).tolist()
        return [
            Done(client, up, memory, total / max(1, steps), steps, size, bool(ok), local)
            for client, up, memory, total, steps, size, ok, local in zip(
                self.clients, ups, memories, totals, self.steps, self.sizes, good, locals_, strict=True
            )
        ]

    def fitted(self, stack: Tree) -> list[Tree]:
        """Return each client's entry of a stacked tree, without the padding of entries with a row for each sample."""
        entries, per_sample = tree.rows(stack, len(self.works)), self.bench.method.per_sample
        return [tree.fit_rows(entry, per_sample, n) for entry, n in zip(entries, self.sizes, strict=True)]

    # ---- phases ------------------------------------------------------------------------------------------------------
    def state(self, number: int, phase: Phase, local: Tree) -> Tree:
        """Return the rows that a step works on (see `StackStep`), as a phase finds them: views of `local`, not copies.

        The optimiser's state is what the clients kept of it; where it starts afresh, only its shapes are to be used.
        """
        rows: Tree = {"site": self.site, "total": self.total, "local": local}
        lr = self.own_rates(phase)
        if lr is not None:
            rows["lr"] = lr
        if self.bench.method.step is not None:
            return rows
        start: Params = local[phase.model]
        names = self.moving(phase, local)
        rows["weights"] = {n: start[n] for n in names}
        rows["buffers"] = {n: start[n] for n in self.bench.net.buffers if n in start}
        rows["fixed"] = {n: v for n, v in start.items() if n not in rows["weights"] and n not in rows["buffers"]}
        slots = self.optimizer(phase).slots(rows["weights"]) if names else {}
        rows["optimizer"] = self.past(number) if self.keeps(number) else slots
        return rows

    def optimizer(self, phase: Phase) -> Optimizer:
        """Return the optimiser of a phase, with this round's learning rate."""
        return self.task.optimizer_of(phase)

    def keeps(self, number: int) -> bool:
        """Return whether the clients keep the optimiser's state of a phase."""
        return str(number) in self.whole.get(KEPT, {})

    def past(self, number: int) -> Tree:
        """Return the state of a phase's optimiser that the clients have kept."""
        return self.whole[KEPT][str(number)]  # type: ignore[no-any-return]

    def own_rates(self, phase: Phase) -> Tensor | None:
        """Return each client's learning rate of this round where clients differ in it, or a method's own step must be told it."""
        lr: Tensor | None = self.site.get("fields", {}).get("lr") if phase.lr is None else None
        if lr is not None:
            return lr * self.task.factor
        if self.bench.method.step is not None and self.task.recipe.schedule is not None:
            return torch.full((len(self.works),), self.task.rate, dtype=self.dtype, device=self.device)
        return None

    def rates(self, phase: Phase, length: Length) -> dict[str, Tensor]:
        """Return the learning rates of a phase, [steps, clients], where a schedule changes them from step to step."""
        recipe, lengths = self.task.recipe, self.lengths(length)
        if not recipe.by_step:
            return {}
        table = torch.zeros(max(lengths), len(lengths), dtype=torch.float64)
        for client, count in enumerate(lengths):
            table[:count, client] = torch.tensor(recipe.factors(count), dtype=torch.float64)
        lr = self.own_rates(phase)
        base = self.optimizer(phase).lr if lr is None else lr.double()
        return {"lr": (put(table, self.device) * base).to(self.dtype)}

    def moving(self, phase: Phase, local: Tree) -> tuple[str, ...]:
        """Return the names of the parameters that move."""
        if self.bench.method.step is not None:
            return ()
        return tuple(n for n in self.bench.moving(phase)[0] if n in local[phase.model])

    def trained(self, phase: Phase, local: Tree, rows: Tree) -> Tree:
        """Return `local` as the phase leaves it; buffers that do not move keep their values."""
        if self.bench.method.step is not None:
            return rows["local"]  # type: ignore[no-any-return]
        moving = self.bench.moving(phase)[1]
        new = {**rows["weights"], **{n: v for n, v in rows["buffers"].items() if n in moving}}
        return {**local, phase.model: {name: new.get(name, value) for name, value in local[phase.model].items()}}

    def run(self, number: int, phase: Phase, length: Length, local: Tree) -> Tree:
        """Train a phase step by step."""
        names, rows, before_it = self.moving(phase, local), self.state(number, phase, local), versions(local=local)
        step = StackStep(
            self.view, number, names, self.optimizer(phase), shared_loss(self.bench, phase), phase.model != "params"
        )
        rows |= {name: tree.clone(rows[name]) for name in ("weights", "buffers") if name in rows}
        rows["optimizer"] = (tree.clone if self.keeps(number) else tree.zeros)(rows.get("optimizer", {}))
        if self.bench.method.step is not None:
            rows["local"] = tree.clone(local)
        smooths = phase.after_epoch is not None and self.bench.method.step is None
        before = tree.clone({**rows["weights"], **rows["buffers"]}) if smooths else {}
        per_epoch = put([self.bench.plan.steps(n, 1) for n in self.sizes], self.device)
        now, shown = rows, len(self.works)
        for count, (active, batch) in enumerate(self._batches(number, phase, length), start=1):
            head = rows_of(active)
            if active != shown:
                now, shown = tree.map(head, rows), active
            step(now, batch, self.x, self.y)
            if smooths:
                ended = count % per_epoch[:active] == 0
                self.end_epoch(
                    number, ended, tree.map(head, before), {**now["weights"], **now["buffers"]}, now["fixed"]
                )
        check_unchanged(self.bench.method, "loss" if self.bench.method.step is None else "step", before_it)
        if self.keeps(number):
            self.kept[str(number)] = rows["optimizer"]
        return self.trained(phase, local, rows)

    @calls("after_epoch")
    def end_epoch(self, number: int, ended: Tensor, before: Params, now: Params, fixed: Params) -> None:
        """For clients whose epoch has ended, put the phase's new values in place and remember them as the next start."""

        def renew(site: Tree, before: Params, now: Params, fixed: Params, ended: Tensor) -> Params:
            after = self.view.phase(site, self.x, self.y, number).after_epoch
            assert after is not None
            task = self.view.at(site, self.x, self.y)
            new = {**now, **after(task, {**fixed, **before}, {**fixed, **now})}
            return {name: torch.where(ended, new[name], now[name]) for name in now}

        with torch.no_grad():
            site = tree.map(rows_of(len(ended)), self.site)
            for name, value in over_clients(renew, site, before, now, fixed, ended).items():
                now[name].copy_(value)
                shape = (-1, *[1] * (value.ndim - 1))
                before[name].copy_(torch.where(ended.reshape(shape), value, before[name]))

    # ---- what a program depends on -------------------------------------------------------------------------------------
    def recurs(self, phase: Phase) -> bool:
        """Return whether this phase is the same in other rounds: one of the method's own losses, of the usual length."""
        own = phase.loss is None or getattr(phase.loss, "__self__", None) is self.bench.method
        return not self.by_round or (own and not phase.own_length)

    def signature(self, phase: Phase, length: Length, local: Tree) -> tuple[Any, ...]:
        """Return what a program of this phase depends on, besides the method and the model."""
        loss = phase.loss or self.bench.method.loss
        names = tuple(self.bench.moving(phase)[0])
        shapes = tuple((name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.leaves(local))
        optimizer = dataclasses.replace(self.optimizer(phase), lr=0.0)
        kind = getattr(loss, "__qualname__", repr(loss)), phase.model, phase.after_epoch is not None
        return *kind, names, length, optimizer, KEPT in self.whole, shapes, self.rows

    # ---- batches -----------------------------------------------------------------------------------------------------
    def lengths(self, length: Length) -> list[int]:
        """Return how many steps of a phase each client takes, the longest first."""
        return [self.bench.length(work, length) for work in self.works]

    def tables(self, length: Length, width: int) -> dict[str, Tensor]:
        """Return a phase's batches: `rows` are places in the shared array, `index` among the client's own samples."""
        return self._tables(self.round, length, width) if self.part == "idle" else self._once(self.round, length, width)

    def draw_ahead(self, length: Length, width: int) -> None:
        """Draw the next round's batches while the device works on this round's: if all clients take part, they are known."""
        if len(self.clients) == len(self.bench.data.train.sizes) and self.round < self.bench.task.rounds:
            self._once(self.round + 1, length, width)

    def _once(self, round: int, length: Length, width: int) -> dict[str, Tensor]:
        """Return tables that several phases of a round share, kept for this round and the next."""
        near = range(self.round, self.round + 2)
        for old in [key for key in self.drawn if key[0] not in near]:
            del self.drawn[old]
        key = (round, length, width, *self.clients)
        if key not in self.drawn:
            self.drawn[key] = self._tables(round, length, width)
        return self.drawn[key]

    def _tables(self, round: int, length: Length, width: int) -> dict[str, Tensor]:
        if self.part == "idle":
            drawn = ragged_tables(self.bench.plan, self.round, self.clients, self.sizes, self.steps, width, self.device)
        else:
            drawn = self.bench.plan.tables(round, self.clients, self.sizes, length, width, self.device)
        return self._placed(drawn)

    def _placed(self, drawn: Tables) -> dict[str, Tensor]:
        starts = put([self.bench.data.train.starts[k] for k in self.clients], self.device)
        return {
            "rows": drawn.index + starts[:, None],
            "index": drawn.index,
            "mask": drawn.real.to(self.dtype),
            "key": drawn.key,
        }

    def _private_tables(self, number: int, length: Length) -> dict[str, Tensor]:
        plan, lengths = self.bench.plan, self.lengths(length)
        drawn = private_tables(plan, self.round, number, self.clients, self.sizes, lengths, self.device)
        return self._placed(drawn)

    def _batches(self, number: int, phase: Phase, length: Length) -> Iterator[tuple[int, Tree]]:
        """Yield for each step how many clients still train, and their batches, padded to one width."""
        width = min(self.bench.plan.batch_size, max(self.sizes))
        tables = self._private_tables(number, length) if self.bench.private(phase) else self.tables(length, width)
        full, rates = tables["mask"].all(2).cpu().numpy(), self.rates(phase, length)
        for s, active in enumerate(each_step(self.lengths(length))):
            rows = tables["rows"][s, :active]
            batch = {"x": self.x[rows], "y": self.y[rows]}
            batch.update({name: tables[name][s, :active] for name in ("index", "key")})
            batch.update({name: table[s, :active] for name, table in rates.items()})
            if not full[s, :active].all():
                batch["mask"] = tables["mask"][s, :active]
            yield active, batch
