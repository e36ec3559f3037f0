"""The Controller: takes orders, has the trainer carry them out, keeps the client's memory in the store, and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ..method import Method
from ..transport import Order, Reply
from .model_store import ModelStore
from .trainer import Trainer, Work


class Controller:
    """Answers orders for one client or for many: the same code at a real site and in a simulation."""

    def __init__(self, method: Method, trainer: Trainer, store: ModelStore) -> None:
        self.method, self.trainer, self.store = method, trainer, store

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Replies to the orders, in their order; all must be of one kind and round."""
        if orders:
            yield from self._train(orders) if orders[0].kind == "train" else self._score(orders)

    def _train(self, orders: Sequence[Order]) -> Iterator[Reply]:
        works = [Work(order.client, order.down, self.store.get(order.client)) for order in orders]
        for order, done in zip(orders, self.trainer.train(orders[0].round, works), strict=True):
            self.store.put(order.client, done.memory)
            report = {"loss": done.loss, "steps": float(done.steps), "samples": float(done.samples)}
            report["finite"] = float(done.finite)
            yield Reply("train", order.round, order.client, done.up, report)

    def _score(self, orders: Sequence[Order]) -> Iterator[Reply]:
        task = dataclasses.replace(self.trainer.bench.task, round=orders[0].round)
        part = orders[0].part
        hits: dict[str, list[int]] = {}
        if "personal" in self.method.scores:
            personal = [
                (order.client, self.method.personal(task, order.down, self.store.get(order.client))) for order in orders
            ]
            hits["personal"] = self.trainer.score(part, personal)
        generic = [(order.client, order.generic) for order in orders if order.generic is not None]
        if generic:
            hits["generic"] = self.trainer.score(part, generic)
        sizes = self.trainer.bench.data.part(part).sizes
        for row, order in enumerate(orders):
            report = {model: float(right[row]) for model, right in hits.items()}
            yield Reply("score", order.round, order.client, {}, {**report, "samples": float(sizes[order.client])})
