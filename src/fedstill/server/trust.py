"""The server's own training for FLTrust: what a few samples that it owns make of the model, round by round.

Choices: (1) The server trains as FedAvg's clients do: the experiment's epochs, batch size and SGD, plain cross-entropy, also for
methods whose clients train otherwise. (2) Its samples come from the common test set, which is then scored without them; where
there is none, they are drawn from all clients' training samples together, before attackers poison theirs, as in the paper.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ..core import plan
from ..core.errors import InputError
from ..core.plan import JointPlan, Plan
from ..core.task import Average, Task
from ..core.tree import Tree
from ..data.federation import Federation, Pair
from ..data.samples import Part, Samples, Splits, at, read, together
from ..engine.bench import Bench, Work
from ..engine.trainer import Trainer
from ..methods.fedavg import FedAvg
from .robust import fltrust


def root_of(federation: Federation, number: int, seed: int) -> tuple[Pair, Federation]:
    """Return `number` samples for the server, and the federation without them where they come from its common test set."""
    if federation.test is None and federation.whole is not None:
        right = "another with clients in other processes, or data with a common test set: the server has no samples of its own"
        raise InputError("average", "fltrust", right)
    x, y = federation.test if federation.test is not None else _union(federation)
    most = len(y) - 1 if federation.test is not None else len(y)
    if number > most:
        whose = "the common test set leaves" if federation.test is not None else "all clients have for training"
        raise InputError("root_samples", number, f"at most {most}, which {whose}")
    order = torch.from_numpy(plan.permutation(plan.key(seed, plan.ROOT), len(y)))
    mine, rest = order[:number], order[number:].sort().values
    left = federation if federation.test is None else replace(federation, test=(at(x, rest), y[rest]))
    return (x[mine], y[mine]), left


def _union(federation: Federation) -> Pair:
    y = torch.cat([client.y_train for client in federation.clients])
    return together([client.x_train for client in federation.clients]), y


@dataclass(frozen=True, eq=False)
class Trust:
    """Makes each round's rule: FLTrust around the server's model, with what the server's own training makes of it."""

    trainer: Trainer

    @classmethod
    def of(cls, task: Task, root: Pair, seed: int, batch_size: int) -> Trust:
        """Return the server's training on its own samples."""
        x, y = read(root[0], task.net.device, task.net.example.dtype), root[1].to(task.net.device)
        part = Part(Samples(x), y, (0,), (len(y),))
        own = JointPlan((Plan(plan.key(seed, plan.ROOT, 1), batch_size),), 1)
        return cls(Trainer(Bench(FedAvg(), task, own, Splits(part, part)), "one", workers=1))

    def __call__(self, task: Task, server: Tree) -> Average:
        """Return the rule of a round, given the server's state before it."""
        (done,) = self.trainer.train(task.round, [Work(0, {"params": server["params"]})])
        return functools.partial(fltrust, trained=done.up["params"])
