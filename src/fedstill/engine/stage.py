"""Programs of a stacked engine: for each phase fixed memory, and programs for a few numbers of rows."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.errors import first_line
from ..core.method import Phase
from ..core.plan import Length
from ..core.tree import Tree, put
from ..nn.kernels.autotune import Choices
from . import program
from .bench import TooMany
from .program import Definition, Level, Program
from .stacked import Cohort, rows_of
from .step import ClientView, StackStep, each_step, shared_loss

SPARE = 0.85  # share of the device's free memory that a stack may take


class CannotReplay(Exception):
    """A traced step cannot be made a program: the phase goes step by step, from where it began."""


def say(line: str) -> None:
    """Print one line for the user."""
    print(f"fedstill: {line}", file=sys.stderr, flush=True)


@dataclass(eq=False)
class Programs:
    """The stages of all phases, and what they share: how programs are made, graph memory, measurements."""

    level: Level
    exact: bool  # float32 products in full precision, no TF32
    choices: Choices
    trace: Callable[..., tuple[Any, list[str]]] = program.trace
    build: Callable[..., Program] = program.build
    client_bytes: float = 0.0  # of the device's memory that a step was seen to take for a client
    stages: dict[Any, Stage | None] = field(default_factory=dict)  # None: goes step by step
    _graph_pool: Any = None
    _unfreeze: weakref.finalize[Any, Any] | None = None

    def run(self, cohort: Cohort, number: int, phase: Phase, length: Length, local: Tree) -> Tree | None:
        """Train a phase as a program; None where it has to go step by step."""
        stage = self.stage(cohort, number, phase, length, local)
        if stage is None:
            return None
        try:
            return stage.run(self, cohort, phase, length, local)
        except CannotReplay as why:
            self.discard(stage, number, str(why))
            return None

    def stage(self, cohort: Cohort, number: int, phase: Phase, length: Length, local: Tree) -> Stage | None:
        """Return the memory and programs of a phase; None where it has to go step by step."""
        key = (number, *cohort.signature(phase, length, local))
        known = self.stages.get(key)
        if known is not None and known.size < len(cohort.works):
            del self.stages[key]
        if key not in self.stages:
            began = time.perf_counter()
            try:
                cohort.watched.asked[0] = False
                made = Stage(self, cohort, number, phase, length, local)
                # A step that asks for the round would have to be traced anew in every one: it goes step by step.
                self.stages[key] = None if cohort.watched.asked[0] or not cohort.recurs(phase) else made
            except (TooMany, torch.cuda.OutOfMemoryError):
                raise
            except Exception as error:
                say(f"phase {number + 1} runs step by step, its step could not be traced: {first_line(error)}")
                self.stages[key] = None
            finally:
                self.choices.seconds += time.perf_counter() - began
        return self.stages[key]

    def discard(self, stage: Stage, number: int, why: str) -> None:
        """Run a phase whose program cannot be made step by step from now on."""
        say(f"phase {number + 1} runs step by step, its step could not be replayed: {why}")
        self.stages.update({key: None for key, known in self.stages.items() if known is stage})

    def make(self, definition: Definition, *memory: Any) -> Program:
        """Build a program on this memory; where it cannot be compiled, and from then on, as it was traced."""
        counter = memory[-1]
        if self._graph_pool is None and counter.is_cuda:
            self._graph_pool = torch.cuda.graph_pool_handle()
        began = time.perf_counter()
        try:
            made = self.build(definition, *memory, self.level, self._graph_pool)
        except Exception as error:
            if self.level == "traced" or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            say(f"the step runs without being compiled: {first_line(error)}")
            self.level = "traced"
            made = self.build(definition, *memory, "traced", self._graph_pool)
        finally:
            self._freeze()
            self.choices.seconds += time.perf_counter() - began
        return made

    def _freeze(self) -> None:
        """Take tracing's millions of objects out of Python's garbage collection, 40 ms each time, until `close`."""
        gc.collect()
        gc.freeze()
        if self._unfreeze is None:
            self._unfreeze = weakref.finalize(self, gc.unfreeze)  # at the latest when these programs are gone

    def close(self) -> None:
        """Put the objects that programs consist of back under garbage collection."""
        if self._unfreeze is not None:
            self._unfreeze()
            self._unfreeze = None


class Stage:
    """A phase's fixed memory, and its programs for a few numbers of rows."""

    def __init__(
        self, programs: Programs, cohort: Cohort, number: int, phase: Phase, length: Length, local: Tree
    ) -> None:
        bench = cohort.bench
        self.size = len(cohort.works)
        sizes = bench.data.train.sizes
        self.width = min(bench.plan.batch_size, max(sizes))
        self.masked = any(n % self.width for n in sizes)
        self.longest = bench.plan.steps(max(sizes), length)
        names, loss = cohort.moving(phase, local), shared_loss(bench, phase)
        step = StackStep(ClientView(bench, cohort.watched), number, names, bench.sgd(phase), loss)
        self.definition = Definition(step, cohort.x)
        self.source = {"x": cohort.x.tensors(), "y": cohort.y, "constants": dict(bench.net.constants)}
        self.programs: dict[int, Program] = {}
        self.counter = torch.zeros(1, dtype=torch.int64, device=cohort.device)
        start = _start(cohort, phase, local)
        self.unused: frozenset[str] = frozenset()
        self._look(programs, cohort, start)
        self.memory = self._room(start, self.size)
        self.tables = self._table_room(cohort, self.size)

    def _room(self, like: Tree, rows: int) -> Tree:
        """Return memory for `rows` clients; what the step does not read gets none."""
        flat = {}
        for name, leaf in tree.leaves(like):
            if name in self.unused:
                flat[name] = leaf.new_zeros(1).expand(rows, *leaf.shape[1:])
            else:
                flat[name] = program.zeros_for(leaf, rows)
        return tree.fill(tree.outline(like), flat)

    def _table_room(self, cohort: Cohort, rows: int) -> dict[str, Tensor]:
        shape, device = (self.longest, rows, self.width), cohort.device
        room = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("rows", "index")}
        room["key"] = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        room["live"] = torch.zeros(shape[:2], dtype=torch.bool, device=device)
        if self.masked:
            room["mask"] = torch.ones(shape, dtype=cohort.dtype, device=device)
        return room

    def _look(self, programs: Programs, cohort: Cohort, start: Tree) -> None:
        """Trace the step for one client: what it reads, which convolutions it meets, and how much memory it takes."""
        one = tree.map(lambda leaf: leaf[:1].clone(), start)
        tables = self._table_room(cohort, 1)
        graph, names = programs.trace(self.definition, one, tables, self.source, self.counter)
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        unread = {name for name, node in zip(names, holders, strict=False) if not node.users}
        prefix = f"rows{tree.SEPARATOR}"
        self.unused = frozenset(name.removeprefix(prefix) for name in unread if name.startswith(prefix))
        if cohort.device.type != "cuda":
            return
        programs.choices.measure(cohort.device, programs.exact, self.size)
        flat = [*tree.flatten({"rows": one, "tables": tables, "source": self.source}).values(), self.counter]
        with torch.no_grad():
            torch.cuda.synchronize(cohort.device)
            before = torch.cuda.memory_allocated(cohort.device)
            torch.cuda.reset_peak_memory_stats(cohort.device)
            graph(*flat)
            torch.cuda.synchronize(cohort.device)
        taken = torch.cuda.max_memory_allocated(cohort.device) - before
        used = sum(leaf[:1].nbytes for name, leaf in tree.leaves(start) if name not in self.unused)
        programs.client_bytes = max(programs.client_bytes, float(taken + used))
        free = torch.cuda.mem_get_info(cohort.device)[0] + torch.cuda.memory_reserved(cohort.device) - before
        fits = int(SPARE * free / programs.client_bytes)
        if self.size > max(1, fits):
            raise TooMany(max(1, fits))

    def run(self, programs: Programs, cohort: Cohort, phase: Phase, length: Length, local: Tree) -> Tree:
        """Train the phase for a cohort: load, replay, and read the result."""
        start, method, n = _start(cohort, phase, local), cohort.bench.method, len(cohort.works)
        lengths = self._load_tables(cohort, length)
        self._load(start, n)
        sizes = program.levels(self.size)
        for size in sorted({program.fitting(sizes, active) for active in each_step(lengths)}):
            if size not in self.programs:
                try:
                    self._build(programs, size)
                except torch.cuda.OutOfMemoryError:
                    raise
                except Exception as error:
                    if self.counter.is_cuda:  # what was begun must not write into memory that is then another's
                        torch.cuda.synchronize(self.counter.device)
                    raise CannotReplay(first_line(error)) from error
                self._load(start, n)
        per_epoch = [cohort.bench.plan.steps(size, 1) for size in cohort.sizes]
        memory = self.memory
        smooths = phase.after_epoch is not None and method.step is None
        before = tree.clone({**memory["weights"], **memory["buffers"]}) if smooths else {}
        self.counter.zero_()
        for number, active in enumerate(each_step(lengths), start=1):
            self.programs[program.fitting(sizes, active)]()
            ended = [number % often == 0 for often in per_epoch[:active]] if smooths else []
            if any(ended):
                head = rows_of(active)
                now = tree.map(head, {**memory["weights"], **memory["buffers"]})
                fixed = {n: v[:active] for n, v in start["fixed"].items()}
                marks = put(ended, cohort.device)
                cohort.end_epoch(self.definition.step.number, marks, tree.map(head, before), now, fixed)
        cohort.draw_ahead(length, self.width)
        cohort.total = memory["total"][:n].clone()

        def take(leaf: Tensor) -> Tensor:
            return leaf[:n].clone(memory_format=torch.contiguous_format)

        names = ("local",) if method.step is not None else ("weights", "buffers")
        return cohort.trained(phase, local, {name: tree.map(take, memory[name]) for name in names})

    def _load_tables(self, cohort: Cohort, length: Length) -> list[int]:
        """Load the round's batches; rows without a client, or past its last step, are not live and get samples all the same."""
        drawn, lengths = dict(cohort.tables(length, self.width)), cohort.lengths(length)
        steps, n = drawn["key"].shape
        live = torch.arange(steps, device=cohort.device)[:, None] < put(lengths, cohort.device)
        drawn["mask"] = torch.where(live.unsqueeze(2), drawn["mask"], 1)
        self.tables["live"].zero_()
        for name, table in {**drawn, "live": live}.items():
            if name in self.tables:
                self.tables[name][:steps, :n].copy_(table)
        return lengths

    def _load(self, start: Tree, n: int) -> None:
        room = tree.flatten(self.memory)
        for name, leaf in tree.leaves(start):
            if name.startswith(f"momentum{tree.SEPARATOR}"):
                room[name].zero_()
            elif name not in self.unused:
                room[name][:n].copy_(leaf)

    def _build(self, programs: Programs, size: int) -> None:
        rows, tables = tree.map(rows_of(size), self.memory), {name: t[:, :size] for name, t in self.tables.items()}
        self.programs[size] = programs.make(self.definition, rows, tables, self.source, self.counter)


def _start(cohort: Cohort, phase: Phase, local: Tree) -> Tree:
    """Return what the step works on, as the phase finds it."""
    lr = torch.full((len(cohort.works),), cohort.bench.sgd(phase).lr, dtype=cohort.dtype, device=cohort.device)
    return {"lr": lr, **cohort.state(phase, local)}
