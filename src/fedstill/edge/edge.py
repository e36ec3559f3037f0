"""The Controller: takes orders, has the trainer carry them out, keeps the client's memory in the store, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..core.method import Method
from ..core.tree import Params, Tree
from ..engine.bench import Done, Work
from ..engine.trainer import Trainer
from ..transport.messages import Order, Reply
from .model_store.store import ModelStore
from .monitor import Monitor


class Controller:
    """Answers orders for one client or for many: the same code at a real site and in a simulation."""

    def __init__(self, method: Method, trainer: Trainer, store: ModelStore) -> None:
        self.method, self.trainer, self.store = method, trainer, store
        self.monitor: Monitor | None = None  # None: nobody refuses
        self.begun: dict[
            int, tuple[int, Tree, Tree]
        ] = {}  # wait-free: round, download and local state of personal work
        self.last: dict[int, int] = {}  # the round in which each client last trained
        self.copies: dict[int, Tree] = {}  # wait-free: memories as they would be now, for scoring

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Replies to the orders, refusals first, else in their order; all must be of one kind and round."""
        refusals, orders = self.refusals(orders)
        yield from refusals
        if orders:
            todo = {"train": self._train, "score": self._score, "begin": self._begin, "idle": self._idle}
            yield from todo[orders[0].kind](orders)

    def refusals(self, orders: Sequence[Order]) -> tuple[list[Reply], Sequence[Order]]:
        """The answers of clients that do not take on the work, and the orders of the others."""
        if self.monitor is None or not orders or orders[0].kind != "train":
            return [], orders
        away = {order.client for order in orders if self.monitor.refusal(order.round, order.client) is not None}
        refusals = [Reply("train", o.round, o.client, {}, {"refused": 1.0}) for o in orders if o.client in away]
        return refusals, [order for order in orders if order.client not in away]

    def _train(self, orders: Sequence[Order]) -> Iterator[Reply]:
        works = [Work(o.client, o.down, part=o.work, last=self.last.get(o.client, 0)) for o in orders]
        self.copies.clear()
        for order, done in zip(orders, self.trainer.train(orders[0].round, works, self.store), strict=True):
            if order.work == "generic":
                self.begun[order.client] = (order.round, order.down, done.local)
            else:
                self.last[order.client] = order.round  # it counts as seen once its memory is there
            yield self.trained(order, done)

    def _begin(self, orders: Sequence[Order]) -> Iterator[Reply]:
        for order in orders:
            self.begun[order.client] = (order.round, order.down, {})
            yield Reply("begin", order.round, order.client)

    def _idle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Personal training up to now; where it is not for good, the memory that it gives is a copy's."""
        works, round, keep = [], orders[0].round, orders[0].keep
        still = {order.client for order in orders if not order.steps and not self.begun[order.client][2]}
        for client in sorted(still):  # a model was sent, no step was made from it: the memory is what it was
            if keep:
                del self.begun[client]
            yield Reply("idle", round, client, {}, {"loss": 0.0, "steps": 0.0})
        orders = [order for order in orders if order.client not in still]
        for order in orders:
            _, down, local = self.begun[order.client]
            memory = {} if keep else self.store.get(order.client)
            last = self.last.get(order.client, 0)
            works.append(Work(order.client, down, memory, "idle", local, order.steps, last))
        trained = self.trainer.train(round, works, self.store if keep else None)
        for order, done in zip(orders, trained, strict=True):
            self.copies.pop(order.client, None)
            if keep:
                del self.begun[order.client]
                self.last[order.client] = round
            else:
                self.copies[order.client] = done.memory
            report = {"loss": done.loss, "steps": float(done.steps), "finite": float(done.finite)}
            yield Reply("idle", order.round, order.client, {}, report)

    def kept(self) -> Tree:
        """What a checkpoint must hold: personal work that has begun."""
        return {
            str(k): {"round": torch.tensor(float(round)), "down": down, "local": local}
            for k, (round, down, local) in self.begun.items()
        }

    def go_on(self, kept: Tree) -> None:
        """As it was when `kept` was made."""
        self.begun = {
            int(k): (int(part["round"]), part.get("down", {}), part.get("local", {})) for k, part in kept.items()
        }

    def trained(self, order: Order, done: Done) -> Reply:
        """What a client answers when it has trained."""
        report = {"loss": done.loss, "steps": float(done.steps), "samples": float(done.samples)}
        return Reply("train", order.round, order.client, done.up, {**report, "finite": float(done.finite)})

    def personal(self, order: Order) -> Params:
        """The client's own model, given what came down."""
        last = self.last.get(order.client, 0) or int(order.client in self.copies)
        task = self.trainer.bench.home(order.round, order.client, last)
        memory = self.copies[order.client] if order.client in self.copies else self.store.get(order.client)
        return self.method.personal(task, order.down, memory)

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
