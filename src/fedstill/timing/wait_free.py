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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import InputError
from ..core.plan import Plan
from .clock import Clock

if TYPE_CHECKING:
    from ..core.method import Method
    from ..core.task import Task
    from ..run.experiment import Training
    from .schedule import Outcome


def check(method: Method, task: Task, training: Training) -> None:
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
    if kind == "until-download" and training.forgetting:
        raise InputError("forgetting", True, "false with wait_free 'until-download': nobody knows when training ends")


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

    def record(self) -> dict[str, Any]:
        """What a round's record keeps for a resumed run."""
        return {"background": {str(k): [round, when] for k, (round, when) in sorted(self.since.items())}}

    def go_on(self, history: Sequence[Mapping[str, Any]]) -> None:
        """As it was after these records."""
        kept = history[-1]["background"] if history else {}
        self.since = {int(k): (int(round), float(when)) for k, (round, when) in kept.items()}
