"""The Coordinator: runs rounds, in simulation and in deployment alike.

sample → send orders → collect replies until all or the deadline → merge → score → journal
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.method import Method
from ..core.plan import Plan
from ..core.task import Task
from ..core.tree import Tree
from ..run.evaluate import Scores, summary
from ..timing.flight import Flight
from ..timing.schedule import Schedule
from ..timing.wait_free import Background
from ..transport.messages import Order, Reply, Transport
from .aggregator import Aggregator
from .sampler import Memory, Sampler, uniform
from .traffic import each, split, traffic

Record: TypeAlias = dict[str, Any]
CommonScore: TypeAlias = Callable[[Tree], float | None]
Course: TypeAlias = Generator["list[Order] | tuple[Tree, Record]", "list[Reply] | None", None]


@dataclass(frozen=True)
class Coordinator:
    """One run's rounds. `per_round` clients are wanted each round; scores are taken every `eval_every` rounds and at the end."""

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
    samples: Sequence[int] = ()  # training samples of each client, where they are known
    candidates: int = 0  # d of the sampler power-of-choice
    memory: Memory = field(default_factory=Memory)  # what the sampler may go by
    background: Background | None = None  # wait-free: personal work until the next download
    schedule: Schedule | None = None  # simulated time; None: whoever answers is merged
    upload: Callable[[Sequence[Order]], float] = lambda orders: (
        0.0
    )  # bytes of a reply to these orders, before anybody trains

    def present(self) -> list[int]:
        """Clients that can be asked."""
        return [k for k in self.transport.alive() if k not in self.away]

    def rounds(self, server: Tree, first: int = 1) -> Iterator[tuple[Tree, Record]]:
        """Run rounds `first` … T from a server state; after each: the new state and the round's record."""
        course = self.course(server, first)
        at = next(course, None)
        while at is not None:
            if isinstance(at, list):
                self.transport.dispatch(at)
                training = at[0].kind == "train" if at else False
                replies = (self.aggregator if training else Aggregator()).collect(self.transport, at)
                at = course.send(replies)
            else:
                yield at
                at = next(course, None)

    def course(self, server: Tree, first: int = 1) -> Course:
        """The rounds as a conversation: gives orders and is sent the replies to them; after each round (server, record).

        So several runs can go side by side, their orders carried out together.
        """
        for t in range(first, self.task.rounds + 1):
            began = time.perf_counter()
            task = dataclasses.replace(self.task, round=t)
            cohort = self.cohort(t)
            work: Literal["all", "generic"] = "all" if self.background is None else "generic"
            orders = [Order("train", t, k, self.method.send(task, server, k), work=work) for k in cohort]
            carried, asked = self.transport.seconds, time.perf_counter()
            others, idle = yield from self._interrupted(task, server, orders)
            answers, replies, timed = yield from self._answered(task, server, orders)
            waited = time.perf_counter() - asked
            server = self._merged(task, server, replies)
            took = time.perf_counter() - began
            weights = [r.report["steps"] for r in replies]
            losses = [r.report["loss"] * w for r, w in zip(replies, weights, strict=True)]
            record: Record = {
                "round": t,
                "participants": [r.client for r in replies],
                "missing": sorted(set(cohort) - {r.client for r in replies if r.round == t} - self._under_way()),
                "loss": sum(losses) / max(1.0, sum(weights)),
                "steps": int(sum(weights)),
                **traffic([*orders, *others], answers),
                "train_seconds": took,
                **split(self.transport.seconds - carried, waited, took),
                **self.watch(answers),
                **timed,
                **idle,
                **self._remembered(cohort, replies),
            }
            self.memory.take(record)
            if t % self.eval_every == 0 or t == self.task.rounds:
                yield from self._so_far(record)
                record.update((yield from self.score(server, t)))
            record["seconds"] = time.perf_counter() - began
            yield server, record

    def cohort(self, round: int) -> list[int]:
        """Who is asked in a round, ascending."""
        alive = self.present()
        known = max([len(self.samples), *(k + 1 for k in alive)])
        samples = np.ones(known, dtype=np.int64)
        samples[: len(self.samples)] = self.samples
        availability, wanted = np.ones(known), self.per_round
        if self.schedule is not None:
            alive, wanted = self.schedule.present(round, alive), self.schedule.ask(wanted)
            availability = self.schedule.clock.devices.availability
        scene = self.memory.scene(self.plan, round, alive, samples, availability, self.candidates)
        return sorted(int(k) for k in self.sampler(scene, wanted)) if wanted else []

    def _answered(
        self, task: Task, server: Tree, orders: list[Order]
    ) -> Generator[list[Order], list[Reply] | None, tuple[list[Reply], Sequence[Reply], Record]]:
        """The answers to these orders (or, asynchronously, to those that are due), the replies to merge, and what of time."""
        if isinstance(self.schedule, Flight):
            return (yield from self._landed(self.schedule, task, server, orders))
        said = (yield self._carried_out(task.round, orders)) or []
        answers = [reply for reply in said if "refused" not in reply.report]
        refused = [reply.client for reply in said if "refused" in reply.report]
        return (answers, *self._in_time(task, orders, answers, refused))

    def _carried_out(self, round: int, orders: list[Order]) -> list[Order]:
        """The orders that anybody works on: in simulated time, who drops out is known beforehand and need not train."""
        if self.schedule is None:
            return orders
        workers = set(self.schedule.workers(round, [order.client for order in orders]))
        return [order for order in orders if order.client in workers]

    def _landed(
        self, flight: Flight, task: Task, server: Tree, orders: list[Order]
    ) -> Generator[list[Order], list[Reply] | None, tuple[list[Reply], Sequence[Reply], Record]]:
        """Send orders off; have those trained whose replies are due, round by round of their orders; renew what is stale."""
        at_work = self._carried_out(task.round, orders)
        gone = sorted({order.client for order in orders} - {order.client for order in at_work})
        down, up = (
            np.array(each(order.down for order in orders), float),
            self.upload(at_work or list(flight.orders.values())),
        )
        outcome, due = flight.land(task.round, orders, epochs(self.method, task), down, up, gone)
        answers: list[Reply] = []
        for t in sorted({order.round for order in due}):
            answers += (yield [order for order in due if order.round == t]) or []
        answers.sort(key=lambda reply: reply.client)
        self.aggregator.check(task, answers)
        began = {order.client: order for order in due}
        behind = {reply.client: task.round - reply.round for reply in answers}
        replies = [
            dataclasses.replace(
                reply,
                up=flight.asynchrony.renew(task, server, began[reply.client].down, reply.up, behind[reply.client]),
                report={**reply.report, "samples": 1.0},
            )
            for reply in answers
        ]
        staleness = {str(k): value for k, value in behind.items()}
        return answers, replies, {**outcome.record(), "staleness": staleness, "timeline": outcome.timeline()}

    def _merged(self, task: Task, server: Tree, replies: Sequence[Reply]) -> Tree:
        """The server's next state."""
        merged = self.aggregator.merge(self.method, task, server, replies)
        return self.schedule.asynchrony.step(task, server, merged) if isinstance(self.schedule, Flight) else merged

    def _under_way(self) -> set[int]:
        """Whose replies will still be merged."""
        return set(self.schedule.busy) if isinstance(self.schedule, Flight) else set()

    def _in_time(
        self, task: Task, orders: Sequence[Order], answers: Sequence[Reply], refused: list[int]
    ) -> tuple[Sequence[Reply], Record]:
        """The replies to merge, and what the record says of time."""
        if self.schedule is None:
            return answers, {"refused": refused} if refused else {}
        self.aggregator.check(task, answers)  # the late ones, too
        asked = [order.client for order in orders]
        sent = dict(zip([r.client for r in answers], each(r.up for r in answers), strict=True))
        gone = sorted(set(asked) - set(sent) - set(refused))
        down, up = np.array(each(o.down for o in orders), float), np.array([sent.get(k, 0) for k in asked], float)
        generic, personal = epochs(self.method, task)
        work = (generic, personal if self.background is None else 0.0)
        outcome = self.schedule.close(task.round, asked, self.per_round, work, down, up, gone, refused)
        if self.background is not None:
            outcome = self.background.note(outcome)
        replies = self.schedule.take(outcome, answers)
        abandoned = len(replies) < self.aggregator.minimum
        more = {} if self.background is None else self.background.record()
        return replies, {**outcome.record(), **more, "abandoned": abandoned, "timeline": outcome.timeline()}

    def _interrupted(
        self, task: Task, server: Tree, orders: Sequence[Order]
    ) -> Generator[list[Order], list[Reply] | None, tuple[list[Order], Record]]:
        """Wait-free: personal training ends where a download arrives; who is sent the model besides goes on from that."""
        behind, schedule = self.background, self.schedule
        if behind is None or schedule is None:
            return [], {}
        asked = {order.client for order in orders}
        rest = [k for k in schedule.present(task.round, self.present()) if k not in asked] if behind.everyone else []
        others = [Order("begin", task.round, k, self.method.send(task, server, k)) for k in rest]
        sent = [*orders, *others]
        when = behind.downloads([order.client for order in sent], each(order.down for order in sent))
        arrives = {order.client: schedule.now + seconds for order, seconds in zip(sent, when, strict=True)}
        replies = yield from self._idle({k: at for k, at in arrives.items() if k in behind.since}, keep=True)
        for k in arrives:
            behind.since.pop(k, None)
        if others:
            yield others
            behind.since.update({k: (task.round, arrives[k]) for k in rest})
        return others, {"personal_steps": int(sum(reply.report["steps"] for reply in replies))}

    def _so_far(self, record: Record) -> Generator[list[Order], list[Reply] | None, None]:
        """Wait-free, before scores: personal training up to the round's end. After the last round it is for good, and counts.

        Who is still at its download or its generic work then has made no personal step yet.
        """
        if self.background is None or self.schedule is None:
            return
        now, last = self.schedule.now, record["round"] == self.task.rounds
        at_it = [k for k, (_, when) in self.background.since.items() if when <= now]
        replies = yield from self._idle(dict.fromkeys(at_it, now), keep=last)
        if last:
            record["personal_steps"] += int(sum(reply.report["steps"] for reply in replies))

    def _idle(self, until: Mapping[int, float], keep: bool) -> Generator[list[Order], list[Reply] | None, list[Reply]]:
        """Personal training of these clients up to a moment of each."""
        behind = self.background
        assert behind is not None
        replies: list[Reply] = []
        for t in sorted({behind.since[k][0] for k in until}):
            orders = [
                Order("idle", t, k, {}, steps=behind.steps(k, at), keep=keep)
                for k, at in sorted(until.items())
                if behind.since[k][0] == t
            ]
            replies += (yield orders) or []
        self.aggregator.check(self.task, replies)
        return replies

    def _remembered(self, cohort: list[int], replies: Sequence[Reply]) -> Record:
        """What a sampler may go by later, where it is not the one that needs nothing."""
        if self.sampler is uniform:
            return {}
        return {"asked": cohort, "losses": {str(r.client): r.report["loss"] for r in replies if r.report["steps"]}}

    def score(self, server: Tree, round: int) -> Generator[list[Order], list[Reply] | None, Record]:
        """Every client's models on its own data, and the generic model on the common test set."""
        task = dataclasses.replace(self.task, round=round)
        generic = self.method.generic(task, server) if "generic" in self.method.scores else None
        found: Record = {}
        for part in self.parts:
            replies = yield [
                Order("score", round, k, self.method.send(task, server, k), generic, part) for k in self.present()
            ]
            scores = Scores.read(replies or [], self.method.scores)
            found.update(summary(scores, "" if part == self.parts[0] else f"{part}_"))
        common = self.common(generic) if generic is not None else None
        if common is not None:
            found["generic_common"] = common
        return found


def epochs(method: Method, task: Task) -> tuple[float, float]:
    """The epochs of a client's round: of the model that goes up (`params`), and of any other, which is its own."""
    found = [(phase.model, task.epochs if phase.epochs is None else phase.epochs) for phase in method.phases(task)]
    generic, personal = (float(sum(n for model, n in found if (model == "params") is side)) for side in (True, False))
    return generic, personal + generic * method.personal_passes
