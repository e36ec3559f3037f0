"""When a round ends in simulated time, and whose replies it takes. No training is needed to ask: see `rehearse`.

    all        the round ends with the last reply that comes (over_select = 1)
    goal       ⌈over_select · goal⌉ are asked, the first `goal` replies are taken, by arrival
    deadline   whatever the goal, the round ends after so many seconds

Whoever drops out is never heard of: with a deadline the server waits for it until then, without one it is told. A reply that is
not taken is late. Its client is at work until it has arrived, and is not asked meanwhile. Dropped, the reply is only counted;
folded, it is merged with the replies of the round in which it arrives, with its own weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..core import tree
from ..core.plan import Plan
from ..core.tree import Tree
from ..server.sampler import Memory, Sampler, uniform
from ..transport.messages import Reply
from .clock import Clock, Spans

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
MERGE = 1e10  # bytes a second that the server merges
STATES = ("merged", "late", "dropped", "refused")


@dataclass(frozen=True)
class Trigger:
    """What ends a round; `deadline` in seconds (0: none)."""

    deadline: float = 0.0
    over_select: float = 1.0

    def ask(self, goal: int) -> int:
        """How many are asked so that `goal` answer."""
        return math.ceil(self.over_select * goal - 1e-9)

    def fire(self, arrivals: Floats, goal: int, silent: bool = False) -> tuple[float, NDArray[np.intp]]:
        """When the round ends, and the places of the replies it takes. `silent`: some who were asked will never answer."""
        order = np.argsort(arrivals, kind="stable")[:goal]
        met = len(order) == goal or not silent
        end = float(arrivals[order[-1]]) if len(order) else 0.0
        if self.deadline and (not met or end > self.deadline):
            return self.deadline, order[arrivals[order] <= self.deadline]
        return end, order


@dataclass(frozen=True)
class Outcome:
    """A round in simulated time. Times count from the beginning of the run; `spans` are those of `asked`, in its order."""

    round: int
    start: float
    closed: float  # when the trigger fired
    end: float  # when the server had merged
    asked: list[int]
    state: list[str]  # of each that was asked: merged (in time), late, dropped, refused; or under way (see `flight`)
    spans: Spans
    folded: list[int]  # whose replies of earlier rounds arrived in this one and are merged with it
    busy: dict[int, float]  # who is still at work after it, and when its reply arrives
    free: dict[int, float] = field(default_factory=dict)  # when personal work ends that goes on after it (wait-free)

    def of(self, state: str) -> list[int]:
        """Those that were asked and came to this."""
        return [k for k, found in zip(self.asked, self.state, strict=True) if found == state]

    def record(self) -> dict[str, Any]:
        """What the round's record gets."""
        return {
            "time": self.end,
            "asked": self.asked,
            "late": self.of("late"),
            "dropped": self.of("dropped"),
            "refused": self.of("refused"),
            "folded": self.folded,
            "busy": {str(k): arrival for k, arrival in self.busy.items()},
            **({"ready": max([self.end, *self.free.values()])} if self.spans.ahead else {}),
            **({"free": {str(k): when for k, when in self.free.items()}} if self.free else {}),
        }

    def timeline(self) -> dict[str, Any]:
        """The line of timeline.jsonl: columns with an entry for each that was asked, in seconds."""
        s = self.spans
        parts = {"download": s.download, "generic": s.generic, "personal": s.personal, "upload": s.upload}
        return {
            "round": self.round,
            "start": self.start,
            "closed": self.closed,
            "end": self.end,
            "clients": self.asked,
            "state": self.state,
            **{name: part.tolist() for name, part in parts.items()},
            "folded": self.folded,
            **({"hold": s.hold.tolist(), "ahead": True} if s.ahead else {}),
        }

    def with_personal(self, seconds: Floats) -> Outcome:
        """The same with other seconds of personal work."""
        return dataclasses.replace(self, spans=dataclasses.replace(self.spans, personal=seconds))


@dataclass
class Schedule:
    """A run's simulated time: `now`, who is still at work, and the replies under way that will be merged. One for each run."""

    clock: Clock
    trigger: Trigger = field(default_factory=Trigger)
    late: Literal["drop", "fold"] = "drop"
    now: float = 0.0
    busy: dict[int, float] = field(default_factory=dict)  # when the reply of a client that came too late arrives
    held: dict[int, Reply] = field(default_factory=dict)  # these replies, where they are to be folded in
    ahead: bool = False  # uploads leave before personal work begins
    free: dict[int, float] = field(default_factory=dict)  # when a client's personal work ends (wait-free)

    def go_on(self, history: Sequence[Mapping[str, Any]], held: Tree) -> None:
        """As it was after these records, with the replies that a checkpoint kept."""
        if history:
            self.now = float(history[-1]["time"])
            self.busy = {int(k): float(arrival) for k, arrival in history[-1]["busy"].items()}
            self.free = {int(k): float(when) for k, when in history[-1].get("free", {}).items()}
        for k, kept in held.items():
            report = {name: float(value) for name, value in kept["report"].items()}
            self.held[int(k)] = Reply("train", int(kept["round"]), int(k), kept["up"], report)

    def kept(self) -> Tree:
        """What a checkpoint must hold: the replies under way."""
        number = functools.partial(torch.tensor, dtype=torch.float64)
        return {
            str(k): {"round": number(r.round), "report": {n: number(v) for n, v in r.report.items()}, "up": r.up}
            for k, r in self.held.items()
        }

    def take(self, outcome: Outcome, answers: Sequence[Reply]) -> list[Reply]:
        """The replies that a round merges, by ascending client; late ones are put aside where they are to be folded in."""
        merged, late = set(outcome.of("merged")), set(outcome.of("late"))
        taken = [reply for reply in answers if reply.client in merged] + [self.held.pop(k) for k in outcome.folded]
        if self.late == "fold":  # copies: an engine may use what it has sent again
            self.held |= {r.client: dataclasses.replace(r, up=tree.clone(r.up)) for r in answers if r.client in late}
        return sorted(taken, key=lambda reply: reply.client)

    def ask(self, goal: int) -> int:
        """How many are asked so that `goal` answer."""
        return self.trigger.ask(goal)

    def present(self, round: int, alive: Sequence[int]) -> list[int]:
        """Who can be asked: available in this round, and not still at work for an earlier one."""
        who = np.asarray(alive, dtype=np.int64)
        free = who[~np.isin(who, list(self.busy))]
        return _numbers(free[self.clock.available(round, free)])

    def workers(self, round: int, asked: Sequence[int]) -> list[int]:
        """Those that do not drop out. It is known before any of them trains, so nobody trains in vain."""
        who = np.asarray(asked, dtype=np.int64)
        return _numbers(who[~self.clock.drops(round, who)])

    def close(
        self,
        round: int,
        asked: Sequence[int],
        goal: int,
        epochs: tuple[float, float],
        down: Floats | float,
        up: Floats | float,
        gone: Sequence[int] = (),
        refused: Sequence[int] = (),
    ) -> Outcome:
        """End the round. `down` and `up` are bytes by client, in the order of `asked`; `gone` are those who never answer."""
        who = np.asarray(asked, dtype=np.int64)
        drops, refuses = np.isin(who, list(gone)), np.isin(who, list(refused))
        works = ~(drops | refuses)
        up = np.where(works, up, 0.0)
        whole = self.clock.spans(who, np.broadcast_to(down, who.shape), up, epochs)
        upload = np.where(drops, 0.0, whole.upload)  # who refuses says so after the download
        spans = Spans(
            whole.download,
            whole.generic * works,
            whole.personal * works,
            upload,
            self._hold(who, whole.download) * works,
            self.ahead,
        )
        places = np.flatnonzero(works)
        arrivals = spans.arrival[places]
        wait, first = self.trigger.fire(arrivals, goal, bool(drops.any()))
        if not len(who):  # nobody could be asked: time goes on, to the deadline or until somebody is free again
            wait = self.trigger.deadline or max(0.0, min(self.busy.values(), default=self.now) - self.now)
        elif refuses.any() and not len(places):  # with the last refusal, then
            wait = min(max(wait, float(spans.arrival[refuses].max())), self.trigger.deadline or math.inf)
        closed = self.now + wait
        state = np.where(drops, 2, np.where(refuses, 3, 1))
        state[places[first]] = 0
        folded = sorted(k for k, arrival in self.busy.items() if arrival <= closed) if self.late == "fold" else []
        end = closed + float(np.sum(up[places[first]])) / MERGE
        late = np.flatnonzero(state == 1)
        pending = {**self.busy, **{int(who[i]): self.now + float(spans.arrival[i]) for i in late}}
        free = set(folded) if self.late == "fold" else {k for k, arrival in pending.items() if arrival <= end}
        busy = {k: arrival for k, arrival in sorted(pending.items()) if k not in free}
        states, start = [STATES[i] for i in state], self.now
        self.now, self.busy = end, busy
        own = places[spans.personal[places] > 0]
        self.free = self._free(start, who[own], spans, own) if self.ahead else {}
        return Outcome(round, start, closed, end, _numbers(who), states, spans, folded, busy, self.free)

    def _hold(self, who: Ints, download: Floats) -> Floats:
        """How long each is still at its personal work when the download has arrived."""
        until = np.array([self.free.get(int(k), 0.0) for k in who])
        return np.maximum(0.0, until - (self.now + download))

    def _free(self, start: float, who: Ints, spans: Spans, places: NDArray[np.intp]) -> dict[int, float]:
        """When the personal work of each ends, where it goes on after the round."""
        ends = start + (spans.download + spans.hold + spans.generic + spans.personal)[places]
        every = {**self.free, **{int(k): float(end) for k, end in zip(who, ends, strict=True)}}
        return {k: when for k, when in sorted(every.items()) if when > self.now}


def _numbers(clients: Ints) -> list[int]:
    return [int(k) for k in clients]


def rehearse(
    schedule: Schedule,
    plan: Plan,
    rounds: int,
    goal: int,
    *,
    epochs: tuple[float, float] = (1.0, 0.0),
    down: float = 0.0,
    up: float = 0.0,
    sampler: Sampler = uniform,
) -> Iterator[Outcome]:
    """Rounds without training: who is asked, who answers when, and when each round ends, for messages of so many bytes."""
    clock, memory = schedule.clock, Memory()
    everyone = range(len(clock.devices))
    for t in range(1, rounds + 1):
        scene = memory.scene(plan, t, schedule.present(t, everyone), clock.samples, clock.devices.availability)
        cohort = sorted(int(k) for k in sampler(scene, schedule.ask(goal)))
        gone = np.setdiff1d(cohort, schedule.workers(t, cohort)).tolist()
        outcome = schedule.close(t, cohort, goal, epochs, down, up, gone)
        memory.take({"asked": cohort})
        yield outcome
