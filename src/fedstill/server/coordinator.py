"""The Coordinator: runs rounds, in simulation and in deployment alike.

sample → send orders → collect replies until all or the deadline → merge → score → journal
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..evaluate import Scores, summary
from ..method import Method
from ..plan import Plan
from ..task import Task
from ..transport import Order, Reply, Transport
from ..tree import Tree
from .aggregator import Aggregator
from .sampler import Sampler, uniform

Record: TypeAlias = dict[str, Any]
CommonScore: TypeAlias = Callable[[Tree], float | None]


@dataclass(frozen=True)
class Coordinator:
    """One run's rounds. `per_round` clients are asked each round; scores are taken every `eval_every` rounds and at the end."""

    method: Method
    task: Task
    plan: Plan
    transport: Transport
    per_round: int
    eval_every: int = 1
    parts: tuple[str, ...] = ("test",)  # the first is the one reported; "val" besides where there is validation data
    sampler: Sampler = uniform
    aggregator: Aggregator = field(default_factory=Aggregator)
    common: CommonScore = lambda generic: None  # the generic model's accuracy on a test set that belongs to nobody
    away: frozenset[int] = frozenset()  # clients that are neither trained nor scored
    watch: Callable[[Sequence[Reply]], Record] = lambda replies: {}  # what else a record says of a round's replies

    def present(self) -> list[int]:
        """Clients that can be asked."""
        return [k for k in self.transport.alive() if k not in self.away]

    def rounds(self, server: Tree, first: int = 1) -> Iterator[tuple[Tree, Record]]:
        """Run rounds `first` … T from a server state; after each: the new state and the round's record."""
        for t in range(first, self.task.rounds + 1):
            began = time.perf_counter()
            task = dataclasses.replace(self.task, round=t)
            cohort = self.sampler(self.plan, t, self.present(), self.per_round)
            orders = [Order("train", t, k, self.method.send(task, server, k)) for k in cohort]
            self.transport.dispatch(orders)
            replies = self.aggregator.collect(self.transport, orders)
            server = self.aggregator.merge(self.method, task, server, replies)
            weights = [r.report["steps"] for r in replies]
            losses = [r.report["loss"] * w for r, w in zip(replies, weights, strict=True)]
            record: Record = {
                "round": t,
                "participants": [r.client for r in replies],
                "missing": sorted(set(cohort) - {r.client for r in replies}),
                "loss": sum(losses) / max(1.0, sum(weights)),
                "steps": int(sum(weights)),
                "train_seconds": time.perf_counter() - began,
                **self.watch(replies),
            }
            if t % self.eval_every == 0 or t == self.task.rounds:
                record.update(self.score(server, t))
            record["seconds"] = time.perf_counter() - began
            yield server, record

    def score(self, server: Tree, round: int) -> Record:
        """Every client's models on its own data, and the generic model on the common test set."""
        task = dataclasses.replace(self.task, round=round)
        generic = self.method.generic(task, server) if "generic" in self.method.scores else None
        found: Record = {}
        for part in self.parts:
            orders = [
                Order("score", round, k, self.method.send(task, server, k), generic, part) for k in self.present()
            ]
            self.transport.dispatch(orders)
            scores = Scores.read(Aggregator().collect(self.transport, orders), self.method.scores)
            found.update(summary(scores, "" if part == self.parts[0] else f"{part}_"))
        common = self.common(generic) if generic is not None else None
        if common is not None:
            found["generic_common"] = common
        return found
