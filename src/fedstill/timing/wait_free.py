"""Wait-free training: the upload leaves before the personal model trains, which then trains while the server waits and merges.

    fixed            as many personal steps as the method says. The weights are those of compute-and-wait, to the bit; only
                     time is another: a round does not wait for personal work. A client that is still at it when the next
                     download has arrived ends it first.
    until-download   personal steps until the next download has arrived, at most `personal_cap` of them

Chen et al., "Spectral Co-Distillation for Personalized Federated Learning", NeurIPS 2023: Sec. 3.4, Algorithm 1 (until the next
model is received), and App. F for clients that are not asked: `unselected="broadcast"`, where the server sends everybody its
model in every round and personal training goes on from it, or "cap", where it ends after so many steps.

How many steps fit is known when the next download arrives, so that is when they are made; who is scored before gets as many as
have fit until the end of the round, on a copy. A step takes its share of a pass: samples / speed / steps of a pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..core.errors import InputError
from ..core.method import Method
from ..core.plan import Plan
from ..core.task import Task
from ..core.training import Timing
from ..core.tree import Tree
from ..server.coordinator import Coordinator, Exchange
from ..server.gate import check_converging
from ..server.records import each
from ..transport.messages import Dialogue, Order, Reply, Request
from .clock import Clock
from .schedule import Outcome, Schedule


def check(method: Method, task: Task, training: Timing) -> None:
    """Refuse what cannot train without waiting, with the reason."""
    kind = training.wait_free
    if kind == "off":
        return
    beside = [phase for phase in method.phases(task) if phase.model != "params"]
    if not ((method.wait_free and beside) or (kind == "fixed" and method.personal_passes)):
        why = "its personal model takes its steps together with the one that goes up" if method.personal_passes else (
            "it has no personal work that its upload does not depend on"
        )  # fmt: skip
        raise InputError("wait_free", kind, f"'off' for {method.id}: {why}")
    if kind == "until-download" and method.coupled:
        reason = f"{', '.join(sorted(method.coupled))} must agree with the server when its upload leaves"
        raise InputError("wait_free", kind, f"'off' or 'fixed' for {method.id}: {reason}")


@dataclass
class Background:
    """Personal work under way: for each client the round of its download, and since when it trains."""

    clock: Clock
    plan: Plan
    cap: int = 0  # steps; 0: none
    everyone: bool = False  # whether clients that are not asked get the model, too
    since: dict[int, tuple[int, float]] = field(default_factory=dict)

    def steps(self, client: int, until: float) -> int:
        """Personal steps that a client has made by then."""
        fit = max(0, math.floor((until - self.since[client][1]) / self._step(client) + 1e-9))
        return min(fit, self.cap) if self.cap else fit

    def spent(self, client: int, until: float) -> float:
        """Seconds of personal work by then."""
        longest = self.cap * self._step(client) if self.cap else math.inf
        return max(0.0, min(until - self.since[client][1], longest))

    def _step(self, client: int) -> float:
        samples = int(self.clock.samples[client])
        return samples / float(self.clock.devices.speed[client]) / self.plan.steps(samples, 1)

    def downloads(self, clients: Sequence[int], down: Sequence[float]) -> list[float]:
        """Seconds until each has what it is sent, so many bytes."""
        who = np.asarray(clients, dtype=np.int64)
        found = self.clock.spans(who, np.asarray(down, dtype=np.float64), 0.0, (0.0, 0.0)).download
        return [float(seconds) for seconds in found]

    def note(self, outcome: Outcome) -> Outcome:
        """After a round: personal training of those who worked began when their upload left. With what they did of it so far."""
        s, personal = outcome.spans, np.zeros(len(outcome.asked))
        for i, (k, state) in enumerate(zip(outcome.asked, outcome.state, strict=True)):
            if state in ("merged", "late"):
                self.since[k] = (outcome.round, outcome.start + float(s.download[i] + s.hold[i] + s.generic[i]))
                personal[i] = self.spent(k, outcome.end)
        return outcome.with_personal(personal)

    def memo(self) -> dict[str, Any]:
        """Return what a round's record must hold for a resumed run."""
        return {"background": {str(k): [round, when] for k, (round, when) in sorted(self.since.items())}}

    def load_state(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Continue after these records."""
        background = history[-1]["background"] if history else {}
        self.since = {int(k): (int(round), float(when)) for k, (round, when) in background.items()}


@dataclass(kw_only=True)
class WaitFree(Schedule):
    """Rounds whose clients upload before their personal training, which goes on until their next download arrives."""

    background: Background
    work: Literal["all", "generic"] = "generic"

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """End personal training where a download arrives, then carry out the round."""
        besides, steps = yield from self._interrupt(coordinator, task, orders)
        exchange = yield from super().exchange(coordinator, task, orders)
        record = {**exchange.record, "personal_steps": steps}
        return dataclasses.replace(exchange, record=record, besides=besides)

    def epochs(self, method: Method, task: Task) -> tuple[float, float]:
        """Return the epochs that a round takes before its end: personal ones come after the upload."""
        return super().epochs(method, task)[0], 0.0

    def note(self, outcome: Outcome) -> Outcome:
        """Note whose personal training began in this round."""
        return self.background.note(outcome)

    def memo(self) -> dict[str, Any]:
        """Return what a record must hold for a resumed run."""
        return self.background.memo()

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Continue after these records."""
        super().load_state(history, state)
        self.background.load_state(history)

    def before_scores(self, coordinator: Coordinator, record: dict[str, Any]) -> Dialogue[None]:
        """Make up personal training until the round's end. After the last round it is for good, and counts.

        Who is still at its download or its generic work then has made no personal step yet.
        """
        last = record["round"] == coordinator.task.rounds
        at_it = [k for k, (_, when) in self.background.since.items() if when <= self.now]
        replies = yield from self._idle(coordinator, dict.fromkeys(at_it, self.now), keep=last)
        if last:
            record["personal_steps"] += int(sum(reply.report["steps"] for reply in replies))

    def _interrupt(
        self, coordinator: Coordinator, task: Task, orders: Sequence[Order]
    ) -> Dialogue[tuple[list[Order], int]]:
        """End personal training where a download arrives; clients that are sent the model besides go on from that."""
        behind, asked = self.background, {order.client for order in orders}
        present = self.available(task.round, coordinator.present()) if behind.everyone else []
        others = [coordinator.order("begin", task, k) for k in present if k not in asked]
        sent = [*orders, *others]
        seconds = behind.downloads([order.client for order in sent], each(order.down for order in sent))
        arrives = {order.client: self.now + after for order, after in zip(sent, seconds, strict=True)}
        until = {k: at for k, at in arrives.items() if k in behind.since}
        replies = yield from self._idle(coordinator, until, keep=True)
        for k in arrives:
            behind.since.pop(k, None)
        if others:
            yield Request(others)
            behind.since.update({order.client: (task.round, arrives[order.client]) for order in others})
        return others, int(sum(reply.report["steps"] for reply in replies))

    def _idle(self, coordinator: Coordinator, until: Mapping[int, float], keep: bool) -> Dialogue[list[Reply]]:
        """Have these clients make their personal steps up to a moment of each."""
        behind = self.background
        replies: list[Reply] = []
        for t in sorted({behind.since[k][0] for k in until}):
            task = dataclasses.replace(coordinator.task, round=t)
            orders = [
                coordinator.order("idle", task, k, {}, steps=behind.steps(k, at), keep=keep)
                for k, at in sorted(until.items())
                if behind.since[k][0] == t
            ]
            replies += yield Request(orders)
        check_converging(coordinator.task, replies)
        return replies
