"""The forgetting gap (pFedSD's Fig. 2): what a client loses when the download takes the place of the model it had trained.

    gap_k = acc(v_k) − acc(w),     forgetting = mean of gap_k over the participants that took part before

v_k is the model with which client k ended its local training when it last took part (of several models, the one trained last);
w the downloaded one, completed by the client's own parts where a method sends only some. Both on the client's own test data, and
w before training. A method that sends nothing (Local) has no gap.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.method import Method
from ..core.task import Task
from ..core.tree import Params, Tree
from ..edge.edge import Controller
from ..edge.model_store.store import ModelStore
from ..engine.bench import Work
from ..engine.trainer import Trainer
from ..transport.messages import Order, Reply

TRAINED = "fedstill:trained"  # in an upload on its way from the engine to the controller; it never leaves the client


class _Watched:
    """Mixed into a method's class: `finish` also hands out the model that was trained last."""

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        up, kept = super().finish(task, down, memory, local)  # type: ignore[misc]
        return {**up, TRAINED: local[self.phases(task)[-1].model]}, kept  # type: ignore[attr-defined]


def _watched(method: Method) -> Method:
    """The same method, watched."""
    made = copy.copy(method)
    object.__setattr__(made, "__class__", type(type(method).__name__, (_Watched, type(method)), {}))
    return made


class Watching(Controller):
    """A controller that also scores each participant's downloaded model before training and its own after."""

    def __init__(self, method: Method, trainer: Trainer, store: ModelStore) -> None:
        super().__init__(method, trainer, store)
        self.watched = trainer.over(dataclasses.replace(trainer.bench, method=_watched(method)))

    def _train(self, orders: Sequence[Order]) -> Iterator[Reply]:
        task = dataclasses.replace(self.trainer.bench.task, round=orders[0].round)
        downloaded = self.trainer.score("test", [(order.client, self._downloaded(task, order)) for order in orders])
        sizes = self.trainer.data.test.sizes
        works = [Work(order.client, order.down, last=self.last.get(order.client, 0)) for order in orders]
        trained = self.watched.train(orders[0].round, works, self.store)
        for order, before, done in zip(orders, downloaded, trained, strict=True):
            up = {name: part for name, part in done.up.items() if name != TRAINED}
            self.last[order.client] = order.round
            (after,) = self.trainer.score("test", [(order.client, done.up[TRAINED])])
            report = {"loss": done.loss, "steps": float(done.steps), "samples": float(done.samples)}
            seen = {"downloaded": before, "trained": after, "tests": sizes[order.client]}
            yield Reply("train", order.round, order.client, up, {**report, **{n: float(v) for n, v in seen.items()}})

    def _downloaded(self, task: Task, order: Order) -> Params:
        """What came down, completed by the client's own."""
        received = order.down.get("params", {})
        if received.keys() >= set(task.net.names):
            return {name: received[name] for name in task.net.names}
        return {**self.personal(order), **received}


class Forgetting:
    """The gap of a round from the participants' replies, given the history so far."""

    def __init__(self, history: Sequence[dict[str, Any]]) -> None:
        self.last: dict[str, float] = {}  # each client's accuracy when it last ended its training
        for record in history:
            self.last.update(record.get("trained_clients", {}))

    def __call__(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The numbers that a round's record gets; none where nobody was watching."""
        replies = [reply for reply in replies if "tests" in reply.report]
        if not replies:
            return {}
        downloaded, trained = (
            {str(r.client): r.report[name] / r.report["tests"] for r in replies} for name in ("downloaded", "trained")
        )
        gaps = [self.last[k] - rate for k, rate in downloaded.items() if k in self.last]
        self.last.update(trained)
        gap = {"forgetting": float(np.mean(gaps))} if gaps else {}
        return {**gap, "downloaded_clients": downloaded, "trained_clients": trained}
