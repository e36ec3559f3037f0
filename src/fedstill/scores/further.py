"""Training after the federation: fine-tuning of every client's model (+FT), and clients that join late.

Both train with the run's own engine, optimiser and batch size, from the model that the method serves: the personal one, else the
generic. The batches are those of round T+1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
from torch import Tensor

from ..core.batch import Batch
from ..core.errors import InputError, TrainingError
from ..core.method import Method, Phase
from ..core.plan import Plan, key, permutation
from ..core.task import Task
from ..core.tree import Params, Tree
from ..engine.bench import Work
from ..engine.trainer import Trainer
from ..run.evaluate import worst_tenth
from ..server.sampler import count

if TYPE_CHECKING:
    from ..run.result import Run

Part: TypeAlias = Literal["head", "all"]
JOIN = 5  # what the draw is for; plan.py has 1 to 4


@dataclass(frozen=True, kw_only=True)
class Further(Method):
    """Trains the model that comes down by the data term of the method that made it, and hands it back. Keeps nothing."""

    id: ClassVar[str] = "(further training)"

    made_by: Method
    epochs: int
    part: Part

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """From the model that came down."""
        return {"params": down["params"]}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The trained model goes back; nothing is kept."""
        return {"params": local["params"]}, memory

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """So many epochs of the head or of everything; what does not move keeps its values, BatchNorm's included."""
        return (Phase(epochs=self.epochs, moves=task.need_split().head if self.part == "head" else None),)

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """The method's own data term."""
        return self.made_by.fit(task, params, batch)


def newcomers(plan: Plan, clients: int, wanted: int) -> tuple[int, ...]:
    """Which clients join only after the federation: the last of a random order that the seed alone makes."""
    if wanted >= clients:
        raise InputError("newcomers", wanted, f"at most {clients - 1}: one of the {clients} clients must train")
    return tuple(sorted(int(k) for k in permutation(key(plan.seed, JOIN), clients)[clients - wanted :]))


def fine_tuned(run: Run, epochs: int, part: Part = "head") -> dict[str, Any]:
    """The clients' accuracies on their own tests after `epochs` more, named as a round's record names the personal ones."""
    rates = _trained(run, run.clients, epochs, part)
    sizes = [run.trainer.data.test.sizes[k] for k in run.clients]
    return {
        "fine_tuned": float(np.mean(rates)),
        "fine_tuned_sample": float(np.average(rates, weights=sizes)),
        "fine_tuned_std": float(np.std(rates)),
        "fine_tuned_worst": worst_tenth(rates),
        "fine_tuned_clients": _by_client(run.clients, rates),
    }


def joined(run: Run, epochs: int) -> dict[str, Any]:
    """The newcomers' accuracies with what the method gives them, and after `epochs` of training all of it."""
    if not run.newcomers:
        raise InputError("newcomers", 0, "at least 1 when the federation is trained: all clients of this run took part")
    before = _rates(run, run.trainer, [(k, run.served(k)) for k in run.newcomers])
    after = _trained(run, run.newcomers, epochs, "all")
    return {
        "newcomers_before": float(np.mean(before)),
        "newcomers_after": float(np.mean(after)),
        "newcomers_before_clients": _by_client(run.newcomers, before),
        "newcomers_after_clients": _by_client(run.newcomers, after),
    }


def _trained(run: Run, clients: Sequence[int], epochs: int, part: Part) -> list[float]:
    """Accuracies after training, a cohort at a time; the models themselves are not kept."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError("epochs", epochs, "a whole number at least 1")
    if part not in ("head", "all"):
        raise InputError("part", part, "'head' or 'all'")
    bench = dataclasses.replace(run.trainer.bench, method=Further(made_by=run.method, epochs=epochs, part=part))
    bench.method.phases(bench.task)  # refuses a head that the model does not have
    trainer = run.trainer.over(bench)
    together = run.trainer.cohort or count(run.task.clients, run.training.participation)
    rates = []
    for first in range(0, len(clients), together):
        works = [Work(k, {"params": run.served(k)}, {}) for k in clients[first : first + together]]
        models = []
        for done in trainer.train(run.task.rounds + 1, works):
            if not math.isfinite(done.loss):
                raise TrainingError(
                    f"training after the federation, client {done.client}: the loss is {done.loss}; "
                    f"a smaller lr (now {run.task.lr:g}) usually helps"
                )
            models.append((done.client, done.up["params"]))
        rates += _rates(run, trainer, models)
    return rates


def _rates(run: Run, trainer: Trainer, models: Sequence[tuple[int, Params]]) -> list[float]:
    sizes = run.trainer.data.test.sizes
    return [hit / sizes[k] for hit, (k, _) in zip(trainer.score("test", models), models, strict=True)]


def _by_client(clients: Sequence[int], rates: Sequence[float]) -> dict[str, float]:
    return {str(k): rate for k, rate in zip(clients, rates, strict=True)}
