"""The stage on which a phase of a stack is run as a program: memory that stays where it is, and programs for a few sizes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import tree
from ..core.device import put
from ..core.errors import first_line
from ..core.method import Phase
from ..core.tree import Params, Tree
from . import program
from .program import Definition, Program

if TYPE_CHECKING:
    from .cohort import Cohort
    from .stacked import Stacked

SPARE = 0.85  # of the device's free memory is what a stack is allowed to take


class TooMany(Exception):
    """So many clients do not fit into the device's memory."""

    def __init__(self, fits: int) -> None:
        super().__init__(f"only {fits} clients fit into memory at once")
        self.fits = fits


class CannotReplay(Exception):
    """A step that was traced cannot be made a program: the phase goes step by step, from what it was given."""


def say(line: str) -> None:
    """One line for whoever watches."""
    print(f"fedstill: {line}", file=sys.stderr, flush=True)


class Stage:
    """A phase's fixed memory, and its programs for a few numbers of rows."""

    def __init__(self, engine: Stacked, cohort: Cohort, number: int, phase: Phase, epochs: int, local: Tree) -> None:
        bench, method = cohort.bench, cohort.bench.method
        self.engine, self.rows, self.phase = engine, len(cohort.works), phase
        names, self.moving_buffers = bench.moving(phase)
        start: Params = {} if method.step is not None else local[phase.model]
        self.names = tuple(n for n in names if n in start)
        net, sizes = bench.net, bench.data.train.sizes
        self.buffers = tuple(n for n in net.buffers if n in start)
        self.width = min(bench.plan.batch_size, max(sizes))
        self.masked = any(n % self.width for n in sizes)
        self.longest = bench.plan.steps(max(sizes), epochs)
        loss = None if bench.varied or method.step is not None else phase.loss or method.loss
        self.definition = Definition(bench, cohort.watched, number, self.names, bench.sgd(phase), cohort.x, loss)
        self.source = {"x": cohort.x.tensors(), "y": cohort.y}
        self.programs: dict[int, Program] = {}
        self.counter = torch.zeros(1, dtype=torch.int64, device=cohort.device)
        wanted = self._wanted(cohort, local)
        self.unused: frozenset[str] = frozenset()
        self._look(cohort, wanted)
        self.mine = self._room(wanted, self.rows)
        self.tables = self._table_room(cohort, self.rows)

    def _wanted(self, cohort: Cohort, local: Tree) -> Tree:
        """What the step works on, as the phase finds it."""
        rows, dtype = len(cohort.works), cohort.dtype
        lr = cohort.rate(self.phase)
        if lr is None:
            lr = torch.full((rows,), self.definition.sgd.lr, dtype=dtype, device=cohort.device)
        mine: Tree = {"site": cohort.site, "total": cohort.total, "lr": lr, "local": local}
        if cohort.bench.method.step is not None:
            return mine
        start: Params = local[self.phase.model]
        mine["weights"] = {n: start[n] for n in self.names}
        mine["buffers"] = {n: start[n] for n in self.buffers}
        mine["fixed"] = {n: v for n, v in start.items() if n not in mine["weights"] and n not in mine["buffers"]}
        mine["momentum"] = dict(mine["weights"]) if self.definition.sgd.momentum else {}
        return mine

    def _room(self, like: Tree, rows: int) -> Tree:
        """Memory for so many clients; what the step does not read gets none."""
        flat = {}
        for name, leaf in tree.leaves(like):
            if name in self.unused:
                flat[name] = leaf.new_zeros(1).expand(rows, *leaf.shape[1:])
            else:
                flat[name] = program.last_dimension_fast(leaf, rows)
        return tree.fill(tree.outline(like), flat)

    def _table_room(self, cohort: Cohort, rows: int) -> dict[str, Tensor]:
        shape, device = (self.longest, rows, self.width), cohort.device
        room = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("rows", "index")}
        room["key"] = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        room["live"] = torch.zeros(shape[:2], dtype=torch.bool, device=device)
        if self.masked:
            room["mask"] = torch.ones(shape, dtype=cohort.dtype, device=device)
        return room

    def _look(self, cohort: Cohort, wanted: Tree) -> None:
        """Trace the step for one client: what it reads, which convolutions it meets, and how much memory it takes."""
        engine, cuda = self.engine, cohort.device.type == "cuda"
        one = tree.map(lambda leaf: leaf[:1].clone(), wanted)
        tables = self._table_room(cohort, 1)
        graph, names = program.trace(self.definition, one, tables, self.source, self.counter)
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        unread = {name for name, node in zip(names, holders, strict=False) if not node.users}
        prefix = f"mine{tree.SEPARATOR}"
        self.unused = frozenset(name.removeprefix(prefix) for name in unread if name.startswith(prefix))
        if not cuda:
            return
        engine.choices.measure(cohort.device, engine.exact, self.rows)
        flat = [*tree.flatten({"mine": one, "tables": tables, "source": self.source}).values(), self.counter]
        with torch.no_grad():
            torch.cuda.synchronize(cohort.device)
            before = torch.cuda.memory_allocated(cohort.device)
            torch.cuda.reset_peak_memory_stats(cohort.device)
            graph(*flat)
            torch.cuda.synchronize(cohort.device)
        taken = torch.cuda.max_memory_allocated(cohort.device) - before
        used = sum(leaf[:1].nbytes for name, leaf in tree.leaves(wanted) if name not in self.unused)
        engine.bytes_a_client = max(engine.bytes_a_client, float(taken + used))
        free = torch.cuda.mem_get_info(cohort.device)[0] + torch.cuda.memory_reserved(cohort.device) - before
        fits = int(SPARE * free / engine.bytes_a_client)
        if self.rows > max(1, fits):
            raise TooMany(max(1, fits))

    def run(self, cohort: Cohort, epochs: int, local: Tree) -> Tree:
        """The phase for a cohort: load, replay, and read the result."""
        wanted, method, n = self._wanted(cohort, local), cohort.bench.method, len(cohort.works)
        lengths = self._load_tables(cohort, epochs)
        self._load(wanted, n)
        sizes = program.levels(self.rows)
        for level in sorted({program.fitting(sizes, active) for active in program.each_step(lengths)}):
            if level not in self.programs:
                try:
                    self._build(level)
                except torch.cuda.OutOfMemoryError:
                    raise
                except Exception as error:
                    if self.counter.is_cuda:  # what was begun must not write into memory that is then another's
                        torch.cuda.synchronize(self.counter.device)
                    raise CannotReplay(first_line(error)) from error
                self._load(wanted, n)
        per_epoch = [cohort.bench.plan.steps(size, 1) for size in cohort.sizes]
        after, mine = self.phase.after_epoch, self.mine
        before = tree.clone({**mine["weights"], **mine["buffers"]}) if after is not None else {}
        self.counter.zero_()
        for number, active in enumerate(program.each_step(lengths), start=1):
            self.programs[program.fitting(sizes, active)].run()
            ended = [number % length == 0 for length in per_epoch[:active]] if after is not None else []
            if any(ended):
                head = rows_of(active)
                now = tree.map(head, {**mine["weights"], **mine["buffers"]})
                fixed = {n: v[:active] for n, v in wanted["fixed"].items()}
                marks = put(ended, cohort.device)
                cohort.end_epoch(self.definition.number, marks, tree.map(head, before), now, fixed)
        cohort.draw_ahead(epochs, self.width)
        cohort.total = mine["total"][:n].clone()
        if method.step is not None:
            return tree.map(lambda leaf: leaf[:n].clone(), mine["local"])
        moved = {
            **mine["weights"],
            **{name: mine["buffers"][name] for name in self.moving_buffers if name in self.buffers},
        }
        start: Params = local[self.phase.model]
        trained = {
            name: moved[name][:n].clone(memory_format=torch.contiguous_format) if name in moved else value
            for name, value in start.items()
        }
        return {**local, self.phase.model: trained}

    def _load_tables(self, cohort: Cohort, epochs: int) -> list[int]:
        """The round's batches; rows without a client, or past its last step, are not live and get samples all the same."""
        found, lengths = dict(cohort.tables(epochs, self.width)), cohort.lengths(epochs)
        steps, n = found["key"].shape
        after = torch.arange(steps, device=cohort.device)[:, None] < put(lengths, cohort.device)
        found["mask"] = torch.where(after.unsqueeze(2), found["mask"], 1)
        self.tables["live"].zero_()
        for name, table in {**found, "live": after}.items():
            if name in self.tables:
                self.tables[name][:steps, :n].copy_(table)
        return lengths

    def _load(self, wanted: Tree, n: int) -> None:
        room = tree.flatten(self.mine)
        for name, leaf in tree.leaves(wanted):
            if name.startswith(f"momentum{tree.SEPARATOR}"):
                room[name].zero_()
            elif name not in self.unused:
                room[name][:n].copy_(leaf)

    def _build(self, level: int) -> None:
        engine = self.engine
        mine, tables = tree.map(rows_of(level), self.mine), {name: t[:, :level] for name, t in self.tables.items()}
        wanted: program.Level = "compiled" if engine.way == "compiled" else "traced"
        pool = engine.pool if self.counter.is_cuda else None
        given = (self.definition, mine, tables, self.source, self.counter)
        try:
            self.programs[level] = program.build(*given, wanted, pool)
        except Exception as error:
            if wanted == "traced" or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            say(f"the step runs without being compiled: {first_line(error)}")
            engine.way = "traced"
            self.programs[level] = program.build(*given, "traced", pool)
        engine.choices.seconds += self.programs[level].seconds
        # Tracing leaves millions of objects behind, and Python would look through them again and again, 40 ms each time:
        # they are set aside until the run ends (`Trainer.close`).
        gc.collect()
        gc.freeze()


def rows_of(active: int) -> Callable[[Tensor], Tensor]:
    """The first rows of a tensor."""
    return lambda t: t[:active]
