"""The Controller: takes orders, has the trainer carry them out, keeps the client's memory in the store, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..method import Method
from ..transport import Order, Reply
from ..tree import Params
from .model_store import ModelStore
from .monitor import Monitor
from .trainer import Done, Trainer, Work


class Controller:
    """Answers orders for one client or for many: the same code at a real site and in a simulation."""

    def __init__(self, method: Method, trainer: Trainer, store: ModelStore) -> None:
        self.method, self.trainer, self.store = method, trainer, store
        self.monitor: Monitor | None = None  # None: nobody refuses

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Replies to the orders, refusals first, else in their order; all must be of one kind and round."""
        refusals, orders = self.refusals(orders)
        yield from refusals
        if orders:
            yield from self._train(orders) if orders[0].kind == "train" else self._score(orders)

    def refusals(self, orders: Sequence[Order]) -> tuple[list[Reply], Sequence[Order]]:
        """The answers of clients that do not take on the work, and the orders of the others."""
        if self.monitor is None or not orders or orders[0].kind != "train":
            return [], orders
        away = {order.client for order in orders if self.monitor.refusal(order.round, order.client) is not None}
        refusals = [Reply("train", o.round, o.client, {}, {"refused": 1.0}) for o in orders if o.client in away]
        return refusals, [order for order in orders if order.client not in away]

    def _train(self, orders: Sequence[Order]) -> Iterator[Reply]:
        works = [Work(order.client, order.down) for order in orders]
        for order, done in zip(orders, self.trainer.train(orders[0].round, works, self.store), strict=True):
            yield self.trained(order, done)

    def trained(self, order: Order, done: Done) -> Reply:
        """What a client answers when it has trained."""
        report = {"loss": done.loss, "steps": float(done.steps), "samples": float(done.samples)}
        return Reply("train", order.round, order.client, done.up, {**report, "finite": float(done.finite)})

    def personal(self, order: Order) -> Params:
        """The client's own model, given what came down."""
        task = self.trainer.bench.home(order.round, order.client)
        return self.method.personal(task, order.down, self.store.get(order.client))

    def _score(self, orders: Sequence[Order]) -> Iterator[Reply]:
        part = orders[0].part
        hits = {model: self.trainer.score(part, models) for model, models in self.models(orders).items()}
        yield from self.scored(orders, hits)

    def models(self, orders: Sequence[Order]) -> dict[str, list[tuple[int, Params]]]:
        """What is to be scored: the clients' own models, and the generic one where it came along."""
        found = {}
        if "personal" in self.method.scores:
            found["personal"] = [(order.client, self.personal(order)) for order in orders]
        generic = [(order.client, order.generic) for order in orders if order.generic is not None]
        return {**found, "generic": generic} if generic else found

    def scored(self, orders: Sequence[Order], hits: Mapping[str, Sequence[int]]) -> Iterator[Reply]:
        """What clients answer when they have scored."""
        sizes = self.trainer.bench.data.part(orders[0].part).sizes
        for row, order in enumerate(orders):
            report = {model: float(right[row]) for model, right in hits.items()}
            yield Reply("score", order.round, order.client, {}, {**report, "samples": float(sizes[order.client])})
