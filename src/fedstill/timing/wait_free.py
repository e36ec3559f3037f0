"""Wait-free training: the upload leaves before the personal model trains, which then trains while the server waits and merges.

    fixed            as many personal steps as the method defines. The weights are those of compute-and-wait, to the bit; only
                     the time differs: a round does not wait for personal work. A client that is still at it when the next
                     download has arrived finishes it first.
    until-download   personal steps until the next download has arrived, at most `personal_cap` of them

Chen et al., "Spectral Co-Distillation for Personalized Federated Learning", NeurIPS 2023: Sec. 3.4, Algorithm 1 (until the next
model is received), and App. F for clients that are not asked: `unselected="broadcast"`, where the server sends all clients its
model in every round and personal training continues from it, or "cap", where it ends after `personal_cap` steps.

The number of steps that fit is known when the next download arrives, so they are computed then. A client that is scored earlier
takes the steps that fit until the end of the round, on a copy. A step lasts samples / speed / (steps per epoch).
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
from ..server.records import each
from ..transport.messages import Dialogue, Order, Reply, Request
from .clock import Clock, Epochs
from .schedule import Outcome, Schedule


def check(method: Method, task: Task, training: Timing) -> None:
    """Refuse a method that cannot train without waiting."""
    kind = training.wait_free
    if kind == "off":
        return
    personal = [phase for phase in method.phases(task) if phase.model != "params"]
    if not ((method.wait_free and personal) or (kind == "fixed" and method.personal_passes)):
        why = "its personal model takes its steps together with the one that goes up" if method.personal_passes else (
            "it has no personal work that its upload does not depend on"
        )  # fmt: skip
        raise InputError("wait_free", kind, f"'off' for {method.id}: {why}")
    if kind == "until-download" and method.coupled:
        reason = f"{', '.join(sorted(method.coupled))} must agree with the server when its upload leaves"
        raise InputError("wait_free", kind, f"'off' or 'fixed' for {method.id}: {reason}")


@dataclass
class Background:
    """Personal work under way: for each client the round of its download, and the time at which it started to train."""

    clock: Clock
    plan: Plan
    cap: int = 0  # most steps of a client; 0: no limit
    everyone: bool = False  # whether clients that are not asked get the model as well
    since: dict[int, tuple[int, float]] = field(default_factory=dict)

    def steps(self, client: int, until: float) -> int:
        """Return the number of personal steps that a client has made by a time."""
        steps = max(0, math.floor((until - self.since[client][1]) / self._step(client) + 1e-9))
        return min(steps, self.cap) if self.cap else steps

    def spent(self, client: int, until: float) -> float:
        """Return the seconds of personal work that a client has done by a time."""
        longest = self.cap * self._step(client) if self.cap else math.inf
        return max(0.0, min(until - self.since[client][1], longest))

    def _step(self, client: int) -> float:
        """Return the seconds of one personal step."""
        samples = int(self.clock.samples[client])
        return samples / float(self.clock.devices.speed[client]) / self.plan.steps(samples, 1)

    def downloads(self, clients: Sequence[int], down: Sequence[float]) -> list[float]:
        """Return the seconds that each client's download of `down` bytes takes."""
        ids = np.asarray(clients, dtype=np.int64)
        durations = self.clock.spans(ids, np.asarray(down, dtype=np.float64), 0.0, (0.0, 0.0)).download
        return [float(seconds) for seconds in durations]

    def note(self, outcome: Outcome) -> Outcome:
        """Note that the personal training of clients that worked began with their upload; add its seconds to the outcome."""
        s, personal = outcome.spans, np.zeros(len(outcome.asked))
        for i, (k, state) in enumerate(zip(outcome.asked, outcome.state, strict=True)):
            if state in ("merged", "late"):
                self.since[k] = (outcome.round, outcome.start + float(s.download[i] + s.hold[i] + s.generic[i]))
                personal[i] = self.spent(k, outcome.end)
        return outcome.with_personal(personal)

    def memo(self) -> dict[str, Any]:
        """Return the entries of a round's record that a resumed run needs."""
        return {"background": {str(k): [round, when] for k, (round, when) in sorted(self.since.items())}}

    def load_state(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Restore the personal work under way from the run's records."""
        background = history[-1]["background"] if history else {}
        self.since = {int(k): (int(round), float(when)) for k, (round, when) in background.items()}


@dataclass(kw_only=True)
class WaitFree(Schedule):
    """Rounds whose clients upload before their personal training, which continues until their next download arrives."""

    background: Background
    work: Literal["all", "generic"] = "generic"

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """End the personal training of clients whose download arrives, then carry out the round."""
        besides, steps = yield from self._interrupt(coordinator, task, orders)
        exchange = yield from super().exchange(coordinator, task, orders)
        record = {**exchange.record, "personal_steps": steps}
        return dataclasses.replace(exchange, record=record, besides=besides)

    def epochs(self, method: Method, task: Task, clients: Sequence[int], batch_size: int) -> Epochs:
        """Return the epochs that a round waits for: personal ones come after the upload and count as none."""
        return super().epochs(method, task, clients, batch_size)[0], 0.0

    def note(self, outcome: Outcome) -> Outcome:
        """Note the clients whose personal training began in this round."""
        return self.background.note(outcome)

    def memo(self) -> dict[str, Any]:
        """Return the entries of a round's record that a resumed run needs."""
        return self.background.memo()

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Restore the time and the personal work under way from the run's records."""
        super().load_state(history, state)
        self.background.load_state(history)

    def before_scores(self, coordinator: Coordinator, record: dict[str, Any]) -> Dialogue[None]:
        """Run the personal training until the round's end, on a copy; after the last round, keep and count it.

        Clients that are still at their download or their generic work have made no personal step yet.
        """
        last = record["round"] == coordinator.task.rounds
        training = [k for k, (_, when) in self.background.since.items() if when <= self.now]
        replies = yield from self._idle(coordinator, dict.fromkeys(training, self.now), keep=last)
        if last:
            record["personal_steps"] += int(sum(reply.report["steps"] for reply in replies))

    def _interrupt(
        self, coordinator: Coordinator, task: Task, orders: Sequence[Order]
    ) -> Dialogue[tuple[list[Order], int]]:
        """End the personal training of clients whose download arrives; those not asked continue from the model they are sent.

        Return (orders to clients that are not asked, number of personal steps)."""
        background, asked = self.background, {order.client for order in orders}
        present = self.available(task.round, coordinator.present()) if background.everyone else []
        others = [coordinator.order("begin", task, k) for k in present if k not in asked]
        sent = [*orders, *others]
        seconds = background.downloads([order.client for order in sent], each(order.down for order in sent))
        arrivals = {order.client: self.now + delay for order, delay in zip(sent, seconds, strict=True)}
        until = {k: time for k, time in arrivals.items() if k in background.since}
        replies = yield from self._idle(coordinator, until, keep=True)
        for k in arrivals:
            background.since.pop(k, None)
        if others:
            coordinator.sound((yield Request(others)))
            background.since.update({order.client: (task.round, arrivals[order.client]) for order in others})
        return others, int(sum(reply.report["steps"] for reply in replies))

    def _idle(self, coordinator: Coordinator, until: Mapping[int, float], keep: bool) -> Dialogue[list[Reply]]:
        """Run the personal steps of these clients up to the time given for each; `keep` false: on a copy, for a score only."""
        background = self.background
        replies: list[Reply] = []
        for t in sorted({background.since[k][0] for k in until}):
            task = dataclasses.replace(coordinator.task, round=t)
            orders = [
                coordinator.order("idle", task, k, {}, steps=background.steps(k, time), keep=keep)
                for k, time in sorted(until.items())
                if background.since[k][0] == t
            ]
            replies += yield Request(orders)
        replies = coordinator.sound(replies)
        coordinator.gate.diverged(coordinator.task, replies)
        return replies
