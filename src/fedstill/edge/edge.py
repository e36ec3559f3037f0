"""The edge: the Controller answers orders, with the engine, the Model Store and the data of its clients.

The same code serves one client at a real site, all clients of a simulation, and several runs side by side. Inside, clients are
numbered by slot: r·K + k is client k of run r, so that the engine trains all runs' clients as one cohort.

What a client keeps is committed when the server has taken its reply. Entries of its memory that must agree with the server's
state (`Method.coupled`) are kept as they were before the training as well, until an order says whether the reply was taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..core import tree
from ..core.method import Method
from ..core.tree import Params, Tree
from ..engine.bench import Done, Store, Work
from ..engine.kept import KEPT
from ..engine.progress import Savepoint
from ..engine.step import explained
from ..engine.trainer import Trainer
from ..transport.messages import Order, Reply
from .fine_tune import FineTune
from .monitor import Monitor


class MemoryStore(Store, Protocol):
    """Where clients' memories are kept: what engines ask for, and reading without moving anything."""

    def read(self, client: int) -> Tree:
        """Return a client's memory."""

    def forget(self, client: int) -> None:
        """Give the client its initial memory again."""


@dataclass(frozen=True)
class Undecided:
    """A reply of which the client has not been told whether the server took it."""

    round: int
    last: int  # the round in which the client had trained before


@dataclass(frozen=True)
class Begun:
    """Wait-free: personal work that has begun and is made up later."""

    round: int
    down: Tree
    local: Tree  # empty: the model was sent without an order to train


class Edge:
    """Answers the orders of `len(methods)` runs for the same number of clients each."""

    def __init__(
        self,
        methods: Sequence[Method],
        trainer: Trainer,
        store: MemoryStore,
        monitors: Sequence[Monitor | None],
        backup: MemoryStore,
    ) -> None:
        """Answer for all clients in `store`; `backup` keeps coupled entries as they were until the server has decided."""
        self.methods, self.trainer, self.store, self.monitors, self.backup = methods, trainer, store, monitors, backup
        self.clients = len(trainer.bench.data.train.sizes) // len(methods)
        self.last: dict[int, int] = {}  # the round in which each client last trained
        self.undecided: dict[int, Undecided] = {}
        self.begun: dict[int, Begun] = {}
        self.copies: dict[
            int, tuple[Tree, int]
        ] = {}  # wait-free: memories (and `last`) as they would be now, for scores
        self.changed: set[int] = set()  # clients whose memory is no longer the initial one
        self.savepoint: Callable[[Order], Savepoint | None] = lambda order: None
        """Return what keeps a training under way, so that another process can go on with it."""
        self._tuners: dict[tuple[int, int, str], Trainer] = {}

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Yield the replies: refusals first, then those of each kind of order, in the order of the orders."""
        for order in orders:
            self._settle(order)
        refusals = {id(order): reason for order in orders if (reason := self._refusal(order)) is not None}
        for order in orders:
            if id(order) in refusals:
                yield self._reply(order, refusal=refusals[id(order)])
        for group in _groups([order for order in orders if id(order) not in refusals]):
            yield from self._answers[group[0].kind](self, group)

    def slot(self, order: Order) -> int:
        """Return the client's number among those of all runs."""
        return order.run * self.clients + order.client

    def memory(self, slot: int) -> tuple[Tree, int]:
        """Return a client's memory as it is now, and the round in which it last trained."""
        return self.copies[slot] if slot in self.copies else (self.store.get(slot), self.last.get(slot, 0))

    # ---- training ----------------------------------------------------------------------------------------------------
    def _train(self, orders: Sequence[Order]) -> Iterator[Reply]:
        watched = [order for order in orders if order.watch]
        received = dict(zip(map(self.slot, watched), self._scores("test", watched, self._received), strict=True))
        self.copies.clear()
        works = []
        for order in orders:
            slot, coupled = self.slot(order), self.methods[order.run].coupled
            last = self.last.get(slot, 0)
            if coupled:
                before = {name: value for name, value in self.store.get(slot).items() if name in coupled}
                self.backup.put(slot, before)
                self.undecided[slot] = Undecided(order.round, last)
            savepoint = self.savepoint(order)
            works.append(Work(slot, order.down, part=order.work, last=last, watch=order.watch, savepoint=savepoint))
        for order, done in zip(orders, self.trainer.train(orders[0].round, works, self.store), strict=True):
            slot = done.client
            if order.work == "generic":
                self.begun[slot] = Begun(order.round, order.down, done.local)
            else:
                self._trained(slot, order.round)
            report = {**_report(done), "samples": float(done.samples)}
            if self.trainer.bench.task.private is not None:
                report["loss"] = 0.0  # it is not protected, so it is not sent
            if order.watch:
                (hits,) = self.trainer.score("test", [(slot, done.local["trained"])])
                tests = self.trainer.bench.data.part("test").sizes[slot]
                report |= {"downloaded": float(received[slot]), "trained": float(hits), "tests": float(tests)}
            yield self._reply(order, done.up, report)

    def _trained(self, slot: int, round: int) -> None:
        self.last[slot] = round
        self.changed.add(slot)

    def _received(self, order: Order) -> Params:
        """Return the downloaded model, completed by the client's own parts where the method sends only some."""
        received = order.down.get("params", {})
        names = self.trainer.bench.net.names
        if received.keys() >= set(names):
            return {name: received[name] for name in names}
        return {**self._personal(order), **received}

    def _begin(self, orders: Sequence[Order]) -> Iterator[Reply]:
        for order in orders:
            self.begun[self.slot(order)] = Begun(order.round, order.down, {})
            yield self._reply(order)

    def _idle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Make up personal training; with `keep` false the memory that it gives is a copy's."""
        keep, works, working = orders[0].keep, [], []
        for order in orders:
            slot = self.slot(order)
            begun = self.begun.pop(slot) if keep else self.begun[slot]
            if not order.steps and not begun.local:  # no step was made from the model that was sent: nothing changes
                yield self._reply(order, report={"loss": 0.0, "steps": 0.0})
                continue
            memory = {} if keep else self.store.get(slot)
            last = self.last.get(slot, 0)
            works.append(Work(slot, begun.down, memory, part="idle", local=begun.local, steps=order.steps, last=last))
            working.append(order)
        done_of = self.trainer.train(orders[0].round, works, self.store if keep else None)
        for order, done in zip(working, done_of, strict=True):
            self.copies.pop(done.client, None)
            if keep:
                self._trained(done.client, order.round)
            else:
                self.copies[done.client] = done.memory, order.round
            yield self._reply(order, report=_report(done))

    def idle_work(self, slot: int, steps: int = 0) -> Work:
        """Return the personal training that has begun at a client, of so many steps."""
        begun, memory = self.begun[slot], self.store.get(slot)
        return Work(slot, begun.down, memory, part="idle", local=begun.local, steps=steps, last=self.last.get(slot, 0))

    def keep(self, slot: int, done: Done | None) -> None:
        """Have personal training that had begun end with this result; None: it made nothing."""
        begun = self.begun.pop(slot)
        if done is not None:
            self.store.put(slot, done.memory)
            self._trained(slot, begun.round)

    # ---- scoring and models ------------------------------------------------------------------------------------------
    def _score(self, orders: Sequence[Order]) -> Iterator[Reply]:
        split = orders[0].split
        measures = self.trainer.bench.measures
        reports: list[dict[str, float]] = [{} for _ in orders]
        statistics: list[Tree] = [{} for _ in orders]
        for model, choose in (("personal", self._personals), ("generic", _generics)):
            rows = [i for i, order in enumerate(orders) if self._has(order, model)]
            chosen = [orders[i] for i in rows]
            models = list(zip(map(self.slot, chosen), choose(chosen), strict=True))
            if not measures.metrics:
                for i, score in zip(rows, self.trainer.score(split, models), strict=True):
                    reports[i][model] = float(score)
            else:
                for i, (score, found) in zip(rows, self.trainer.measure(split, models), strict=True):
                    own = {f"{model}_{name}": value for name, value in measures.values(found).items()}
                    reports[i] |= {model: float(score), **own}
                    statistics[i][model] = measures.sent(found)
            if split == "train":
                for i, loss in zip(rows, self.trainer.losses(split, models), strict=True):
                    reports[i][f"{model}_loss"] = loss
        sizes = self.trainer.bench.data.part(split).sizes
        for order, report, sent in zip(orders, reports, statistics, strict=True):
            yield self._reply(order, sent, {**report, "samples": float(sizes[self.slot(order)])})

    def _has(self, order: Order, model: str) -> bool:
        return "personal" in self.methods[order.run].scores if model == "personal" else order.generic is not None

    def _scores(self, split: str, orders: Sequence[Order], choose: Callable[[Order], Params]) -> list[float]:
        """Return the sum of the scores of each client's samples."""
        return self.trainer.score(split, [(self.slot(order), choose(order)) for order in orders])

    def _personal(self, order: Order) -> Params:
        """Return the client's own model, given what came down."""
        slot = self.slot(order)
        memory, last = self.memory(slot)
        method, task = self.methods[order.run], self.trainer.bench.home(order.round, slot, last, shared=True)
        with explained(method, task, stacked=False):
            return method.personal(task, order.down, tree.without(memory, KEPT))

    def _personals(self, orders: Sequence[Order]) -> list[Params]:
        """Return the clients' own models: one by one or, where that takes gradients and the engine can, all at once."""
        trainer = self.trainer
        if not orders or trainer.name != "stacked" or not trainer.bench.method.personal_gradients:
            return [self._personal(order) for order in orders]
        works = []
        for order in orders:
            memory, last = self.memory(self.slot(order))
            works.append(Work(self.slot(order), order.down, tree.without(memory, KEPT), last=last))
        return trainer.personals(orders[0].round, works)

    def served(self, order: Order) -> Params:
        """Return the model that serves the client: its personal one, else the generic one that came along."""
        if self._has(order, "personal"):
            return self._personal(order)
        assert order.generic is not None
        return order.generic

    def _model(self, orders: Sequence[Order]) -> Iterator[Reply]:
        for order in orders:
            yield self._reply(order, {"params": self.served(order)})

    def _tune(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Train clients' models further, on copies, and score them before and after."""
        first = orders[0]
        models = [self.served(order) for order in orders]
        slots = [self.slot(order) for order in orders]
        before = self.trainer.score(first.split, list(zip(slots, models, strict=True)))
        trainer = self._tuner(first)
        works = [Work(slot, {"params": model}) for slot, model in zip(slots, models, strict=True)]
        done_of = list(trainer.train(first.round + 1, works))  # the batches of the round after the last
        after = trainer.score(first.split, [(done.client, done.up["params"]) for done in done_of])
        sizes = self.trainer.bench.data.part(first.split).sizes
        for order, done, was, now in zip(orders, done_of, before, after, strict=True):
            report = {"before": float(was), "after": float(now), "samples": float(sizes[done.client])}
            yield self._reply(order, report={**_report(done), **report})

    def _tuner(self, order: Order) -> Trainer:
        key = order.run, order.epochs, order.subset
        if key not in self._tuners:
            method = FineTune(made_by=self.methods[order.run], epochs=order.epochs, subset=order.subset)
            method.phases(self.trainer.bench.task)  # refuses a head that the model does not have
            bench = self.trainer.bench  # what is tuned stays here, so it is trained without noise
            task = dataclasses.replace(bench.task, private=None)
            if not task.recipe.by_step:  # a schedule by rounds has ended with the federation
                task = dataclasses.replace(task, recipe=dataclasses.replace(task.recipe, schedule=None))
            self._tuners[key] = self.trainer.over(dataclasses.replace(bench, method=method, task=task))
        return self._tuners[key]

    # ---- what is kept ------------------------------------------------------------------------------------------------
    def _settle(self, order: Order) -> None:
        """Commit the client's last training, or roll its coupled entries back, once the server has decided."""
        slot = self.slot(order)
        open_ = self.undecided.get(slot)
        if open_ is None or order.decided < open_.round:
            return
        del self.undecided[slot]
        if order.taken != open_.round:
            self.store.put(slot, {**self.store.get(slot), **self.backup.get(slot)})
            self.last[slot] = open_.last
        self.backup.forget(slot)

    def _state(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Return all that is kept for each client, nothing for one that has not begun anything."""
        for order in orders:
            slot = self.slot(order)
            up: Tree = {"memory": self.store.read(slot)} if slot in self.changed else {}
            report = {"last": float(self.last.get(slot, 0))}
            if slot in self.undecided:
                open_ = self.undecided[slot]
                up["undecided"] = self.backup.read(slot)
                report |= {"undecided": float(open_.round), "undecided_last": float(open_.last)}
            if slot in self.begun:
                begun = self.begun[slot]
                up["begun"] = {"down": begun.down, "local": begun.local}
                report["begun"] = float(begun.round)
            yield self._reply(order, up, report)

    def _restore(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Put back what `state` returned, in place of all that is kept: its `up` as `down`, its numbers in `down["report"]`."""
        for order in orders:
            slot, down = self.slot(order), order.down
            self._forget(slot)
            numbers = {name: int(value) for name, value in down["report"].items()}
            if "memory" in down:
                self.store.put(slot, down["memory"])
                self.changed.add(slot)
            if numbers["last"]:
                self.last[slot] = numbers["last"]
            if "undecided" in numbers:
                self.backup.put(slot, down.get("undecided", {}))
                self.undecided[slot] = Undecided(numbers["undecided"], numbers["undecided_last"])
            if "begun" in numbers:
                begun = down.get("begun", {})
                self.begun[slot] = Begun(numbers["begun"], begun.get("down", {}), begun.get("local", {}))
            yield self._reply(order)

    def _forget(self, slot: int) -> None:
        """Make a client one that has not begun anything."""
        if slot in self.changed:
            self.store.forget(slot)
            self.changed.discard(slot)
        if self.undecided.pop(slot, None) is not None:
            self.backup.forget(slot)
        for kept in (self.last, self.begun, self.copies):
            kept.pop(slot, None)

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _refusal(self, order: Order) -> str | None:
        monitor = self.monitors[order.run] if order.kind == "train" else None
        return None if monitor is None else monitor.refusal(order.round, order.client)

    def _reply(
        self, order: Order, up: Tree | None = None, report: Mapping[str, float] | None = None, refusal: str = ""
    ) -> Reply:
        return Reply(order.kind, order.round, order.client, up or {}, dict(report or {}), order.run, refusal, order.id)

    _answers: ClassVar[dict[str, Callable[[Edge, Sequence[Order]], Iterator[Reply]]]] = {
        "train": _train,
        "begin": _begin,
        "idle": _idle,
        "score": _score,
        "model": _model,
        "tune": _tune,
        "state": _state,
        "restore": _restore,
    }


def _generics(orders: Sequence[Order]) -> list[Params]:
    return [order.generic for order in orders if order.generic is not None]


def _report(done: Done) -> dict[str, float]:
    return {"loss": done.loss, "steps": float(done.steps), "finite": float(done.finite)}


def _groups(orders: Sequence[Order]) -> list[list[Order]]:
    """Divide orders into those that can be carried out together, each group in the order of the orders."""
    groups: dict[tuple[object, ...], list[Order]] = {}
    for order in orders:
        key = (order.kind, order.round, order.work, order.watch, order.keep, order.split, order.epochs, order.subset)
        # A tuned model is trained by its own run's method.
        groups.setdefault((*key, order.run if order.kind == "tune" else 0), []).append(order)
    return list(groups.values())
