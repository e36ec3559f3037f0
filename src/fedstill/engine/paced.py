"""Personal training whose end nobody knows yet (wait-free, at a real site): step by step, and its result after any step.

The steps are those of the engine `one`: after n of them the result is that of an idle part of n steps, to the bit.
"""

from __future__ import annotations

import torch

from ..core import tree
from ..core.tree import Tree
from .bench import Bench, Done, Work, results_of
from .one import PhaseTraining, _batches, _finish
from .step import explained

MOST = 1_000_000  # steps between two downloads at most


class Paced:
    """The idle part of one client's round, of which as many steps are made as there is time for."""

    def __init__(self, bench: Bench, round: int, work: Work, most: int = MOST) -> None:
        """Begin; of `work.steps` nothing is read."""
        method, self.task = bench.method, bench.home(round, work.client, work.last)
        self.bench, self.work, self.most = bench, work, most
        ((_, phase, _),) = bench.part("idle", round)
        if method.step is not None:
            raise ValueError(f"{method.id} makes its own steps: their number must be known")
        self.memory = tree.fit_rows(work.memory, method.per_sample, len(self.task.here().y))
        with explained(method, self.task, stacked=False), torch.no_grad():
            local = work.local or method.begin(self.task, work.down, self.memory)
            self.local: Tree = local if phase.enter is None else phase.enter(self.task, local)
        self.training = PhaseTraining(bench, self.task, self.local, phase)
        self.total = torch.zeros((), dtype=bench.net.dtype, device=bench.net.device)
        self.batches = _batches(bench, round, work.client, most)

    def step(self) -> bool:
        """Make a step; return whether there is another."""
        batch = next(self.batches, None)
        if batch is None:
            return False
        with explained(self.bench.method, self.task, stacked=False), torch.enable_grad():
            self.total += self.training.step(batch)
        return self.training.steps < self.most

    def result(self) -> Done:
        """Return what the steps so far have made; later steps do not change it."""
        method, work, steps = self.bench.method, self.work, self.training.steps
        local = {**self.local, self.training.phase.model: tree.clone(self.training.trained())}
        with explained(method, self.task, stacked=False):
            up, memory = _finish(method, self.task, work.down, self.memory, local)
        _, memory, _ = results_of("idle", up, memory, local)
        memory = tree.unalias(memory, work.down, work.memory, work.local)
        loss, finite = float(self.total) / max(1, steps), tree.finite(memory)
        return Done(work.client, {}, memory, loss, steps, len(self.task.here().y), finite)
