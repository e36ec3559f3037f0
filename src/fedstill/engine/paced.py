"""Personal training whose end nobody knows yet (wait-free, at a real site): step by step, and its result after any step.

The steps are those of the engine `one`: after n of them the result is that of an idle part of n steps, to the bit.
"""

from __future__ import annotations

import torch

from ..core import tree
from ..core.tree import Params, Tree
from .bench import Bench, Done, Work, results_of
from .one import _batches, _finish
from .step import Step, by_autograd, explained

MOST = 1_000_000  # steps between two downloads at most


class Paced:
    """The idle part of one client's round, of which as many steps are made as there is time for."""

    def __init__(self, bench: Bench, round: int, work: Work, most: int = MOST) -> None:
        """Begin; of `work.steps` nothing is read."""
        method, self.task = bench.method, bench.home(round, work.client, work.last)
        self.bench, self.round, self.work, self.most, self.steps = bench, round, work, most, 0
        ((_, self.phase, _),) = bench.part("idle", round)
        if method.step is not None:
            raise ValueError(f"{method.id} makes its own steps: their number must be known")
        net, phase = self.task.net, self.phase
        self.memory = tree.fit_rows(work.memory, method.per_sample, len(self.task.here().y))
        with explained(method, self.task, stacked=False), torch.no_grad():
            local = work.local or method.begin(self.task, work.down, self.memory)
            self.local: Tree = local if phase.enter is None else phase.enter(self.task, local)
        self.start: Params = self.local[phase.model]
        self.params = {
            name: bench.net.fast_layout(value.detach()).clone(memory_format=torch.preserve_format)
            for name, value in self.start.items()
        }
        moving, buffers = bench.moving(phase)
        names = [name for name in moving if name in self.start]
        self.moved = {*names, *buffers}
        self.weights = {name: self.params[name].requires_grad_() for name in names}
        self.buffers = {name: self.params[name] for name in net.buffers if name in self.params}
        self.fixed = {n: v for n, v in self.params.items() if n not in self.weights and n not in self.buffers}
        self.sgd, self.values = bench.sgd(phase), list(self.weights.values())
        self.state = self.sgd.init(self.values)
        self.before = tree.clone(self.params) if phase.after_epoch is not None else self.params
        x = self.task.here().x
        self.total = torch.zeros((), dtype=x.dtype, device=x.device)
        self.own = Step(method, self.task, phase.loss or method.loss, phase.model != "params")
        self.per_epoch = bench.plan.steps(len(self.task.here().y), 1)
        self.batches = _batches(bench, round, work.client, most)

    def step(self) -> bool:
        """Make a step; return whether there is another."""
        batch = next(self.batches, None)
        if batch is None:
            return False
        with explained(self.bench.method, self.task, stacked=False), torch.enable_grad():
            grads, loss, _ = self.own.gradient(by_autograd, self.weights, self.buffers, self.fixed, self.local, batch)
            self.sgd.update(self.values, [grads[name] for name in self.weights], self.state)
        self.total += loss
        self.steps += 1
        if self.phase.after_epoch is not None and self.steps % self.per_epoch == 0:
            with torch.no_grad():
                for name, value in self.phase.after_epoch(self.task, self.before, self.params).items():
                    self.params[name].copy_(value)
                self.before = tree.clone(self.params)
        return self.steps < self.most

    def result(self) -> Done:
        """Return what the steps so far have made; later steps do not change it."""
        method, work, net = self.bench.method, self.work, self.task.net
        trained = {
            n: self.params[n].detach().contiguous().clone() if n in self.moved else self.start[n]
            for n in net.names
            if n in self.params
        }
        local = {**self.local, self.phase.model: trained}
        with explained(method, self.task, stacked=False):
            up, memory = _finish(method, self.task, work.down, self.memory, local)
        _, memory, _ = results_of("idle", up, memory, local)
        memory = tree.unalias(memory, work.down, work.memory, work.local)
        loss, finite = float(self.total) / max(1, self.steps), tree.finite(memory)
        return Done(work.client, {}, memory, loss, self.steps, len(self.task.here().y), finite)
