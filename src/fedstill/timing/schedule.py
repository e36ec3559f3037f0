"""Decides when a round ends in simulated time, and whose replies it takes. `rehearse` computes this without training.

    all        the round ends with the last reply (over_select = 1)
    goal       ⌈over_select · goal⌉ are asked, the first `goal` replies are taken, by arrival
    deadline   the round ends after this many seconds at the latest

A client that drops out never replies: the server waits for it until the deadline; without a deadline it learns of the dropout at
once. A reply that is not taken is late. Its client is at work until the reply has arrived, and is not asked meanwhile. With
`late="drop"` the reply is only counted; with "fold" it is merged, at its own weight, with the replies of the round in which it
arrives.
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
from ..core.method import Method, Upload
from ..core.plan import Plan
from ..core.task import Task
from ..core.tree import Tree
from ..server.coordinator import Coordinator, Exchange, Rounds
from ..server.records import each
from ..server.sampler import Memory, Sampler, uniform
from ..transport.messages import Dialogue, Order, Reply, Request
from .clock import Clock, Epochs, Spans

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
MERGE = 1e10  # bytes a second at which the server merges
STATES = ("merged", "late", "dropped", "refused")


@dataclass(frozen=True)
class Trigger:
    """What ends a round; `deadline` in seconds (0: none)."""

    deadline: float = 0.0
    over_select: float = 1.0

    def ask(self, goal: int) -> int:
        """Return how many clients are asked so that `goal` answer."""
        return math.ceil(self.over_select * goal - 1e-9)

    def waits(self, goal: int, asked: int) -> int:
        """Return how many replies a round waits for: without over-selection all, also of more than `goal` asked by chance."""
        return goal if self.over_select > 1 else max(goal, asked)

    def fire(self, arrivals: Floats, goal: int, silent: bool = False) -> tuple[float, NDArray[np.intp]]:
        """Return when the round ends and the indices of the replies it takes. `silent`: some clients will never answer."""
        order = np.argsort(arrivals, kind="stable")[:goal]
        complete = len(order) == goal or not silent
        end = float(arrivals[order[-1]]) if len(order) else 0.0
        if self.deadline and (not complete or end > self.deadline):
            return self.deadline, order[arrivals[order] <= self.deadline]
        return end, order


@dataclass(frozen=True)
class Outcome:
    """A round in simulated time. Times are seconds since the start of the run; `spans` has an entry for each of `asked`."""

    round: int
    start: float
    closed: float  # when the trigger fired
    end: float  # when the server had merged
    asked: list[int]
    state: list[str]  # of each client asked: merged (in time), late, dropped, refused, rejected or under way
    spans: Spans
    folded: list[int]  # clients whose replies of earlier rounds arrived in this one and are merged with it
    busy: dict[int, float]  # clients still at work at the end, with the arrival of their reply
    free: dict[int, float] = field(
        default_factory=dict
    )  # end of personal work that continues after the round (wait-free)

    def of(self, state: str) -> list[int]:
        """Return the clients asked that ended the round in this state."""
        return [k for k, own in zip(self.asked, self.state, strict=True) if own == state]

    def record(self) -> dict[str, Any]:
        """Return the entries for the round's record."""
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
        """Return the line of timeline.jsonl: columns in seconds, with an entry for each client asked."""
        s = self.spans
        stages = {"download": s.download, "generic": s.generic, "personal": s.personal, "upload": s.upload}
        return {
            "round": self.round,
            "start": self.start,
            "closed": self.closed,
            "end": self.end,
            "clients": self.asked,
            "state": self.state,
            **{name: seconds.tolist() for name, seconds in stages.items()},
            "folded": self.folded,
            **({"hold": s.hold.tolist(), "ahead": True} if s.ahead else {}),
        }

    def rejecting(self, clients: set[int]) -> Outcome:
        """Return the outcome with the replies of these clients marked as rejected by the gate."""
        states = [
            "rejected" if k in clients and state in ("merged", "late") else state
            for k, state in zip(self.asked, self.state, strict=True)
        ]
        folded = [k for k in self.folded if k not in clients]
        return dataclasses.replace(self, state=states, folded=folded) if clients else self

    def with_personal(self, seconds: Floats) -> Outcome:
        """Return the outcome with these seconds of personal work."""
        return dataclasses.replace(self, spans=dataclasses.replace(self.spans, personal=seconds))


@dataclass
class Schedule(Rounds):
    """Simulated time of one run: the time `now`, the clients still at work, and late replies that will be merged."""

    clock: Clock
    trigger: Trigger = field(default_factory=Trigger)
    late: Literal["drop", "fold"] = "drop"
    now: float = 0.0
    busy: dict[int, float] = field(default_factory=dict)  # arrival of late replies, by client
    folding: dict[int, tuple[Reply, Upload]] = field(default_factory=dict)  # late replies that will be merged
    ahead: bool = False  # whether uploads leave before personal work begins
    free: dict[int, float] = field(default_factory=dict)  # end of personal work, by client (wait-free)

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Restore the time from the run's records, and the late replies from a checkpoint."""
        if history:
            self.now = float(history[-1]["time"])
            self.busy = {int(k): float(arrival) for k, arrival in history[-1]["busy"].items()}
            self.free = {int(k): float(when) for k, when in history[-1].get("free", {}).items()}
        self.folding = {}
        for name, entry in state.items():
            k, report = int(name), {key: float(value) for key, value in entry["report"].items()}
            reply = Reply("train", int(entry["round"]), k, entry["up"], report)
            self.folding[k] = reply, Upload(entry["up"], float(entry["weight"]), k, entry.get("down", {}))

    def state_dict(self) -> Tree:
        """Return the late replies that will be merged."""
        number = functools.partial(torch.tensor, dtype=torch.float64)
        return {
            str(k): {
                "round": number(reply.round),
                "weight": number(upload.weight),
                "report": {name: number(value) for name, value in reply.report.items()},
                "up": reply.up,
                "down": upload.down,
            }
            for k, (reply, upload) in self.folding.items()
        }

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Train the clients that do not drop out, then end the round and select the replies that came in time."""
        workers = set(self.workers(task.round, [order.client for order in orders]))
        replies = yield Request([order for order in orders if order.client in workers])
        answers, record = coordinator.inspect(task, orders, replies)
        outcome = self.note(self.close(*self._arrivals(coordinator, task, orders, replies)))
        outcome = outcome.rejecting({int(k) for k in record.get("rejected", ())})
        uploads = coordinator.uploads(answers, orders)
        merged = self.take(outcome, list(zip(answers, uploads, strict=True)))
        abandoned = len(merged) < coordinator.aggregator.minimum
        timed = {**outcome.record(), **self.memo(), "abandoned": abandoned, "timeline": outcome.timeline()}
        return Exchange(answers, merged, {**record, **timed}, pending=frozenset(self.folding))

    def _arrivals(
        self, coordinator: Coordinator, task: Task, orders: Sequence[Order], replies: Sequence[Reply]
    ) -> tuple[int, list[int], int, Epochs, Floats, Floats, list[int], list[int]]:
        """Return the arguments of `close`."""
        asked = [order.client for order in orders]
        refused = [reply.client for reply in replies if reply.refusal]
        answers = [reply for reply in replies if not reply.refusal]
        sent = dict(zip([r.client for r in answers], each(r.up for r in answers), strict=True))
        gone = sorted(set(asked) - set(sent) - set(refused))
        down, up = np.array(each(o.down for o in orders), float), np.array([sent.get(k, 0) for k in asked], float)
        goal = self.trigger.waits(coordinator.per_round, len(asked))
        work = self.epochs(coordinator.method, task, asked, coordinator.plan.batch_size)
        return task.round, asked, goal, work, down, up, gone, refused

    def epochs(self, method: Method, task: Task, clients: Sequence[int], batch_size: int) -> Epochs:
        """Return the epochs that clients' rounds take before their end: of the model that goes up, and of personal ones."""
        return epochs(method, task, self.clock.samples[np.asarray(clients, dtype=np.int64)], batch_size)

    def note(self, outcome: Outcome) -> Outcome:
        """Complete a round's outcome."""
        return outcome

    def memo(self) -> dict[str, Any]:
        """Return further entries of the round's record that a resumed run needs."""
        return {}

    def take(self, outcome: Outcome, answers: Sequence[tuple[Reply, Upload]]) -> list[tuple[Reply, Upload]]:
        """Return the replies that a round merges, by ascending client; keep late ones for later if they are folded in."""
        merged, late = set(outcome.of("merged")), set(outcome.of("late"))
        taken = [pair for pair in answers if pair[0].client in merged]
        taken += [self.folding.pop(k) for k in outcome.folded if k in self.folding]
        if self.late == "fold":
            for reply, upload in answers:
                if reply.client in late:  # copies: an engine may use what it has sent again
                    up = tree.clone(reply.up)
                    copy = dataclasses.replace(upload, tree=up)
                    self.folding[reply.client] = dataclasses.replace(reply, up=up), copy
        return sorted(taken, key=lambda pair: pair[0].client)

    def ask(self, goal: int) -> int:
        """Return how many are asked so that `goal` answer."""
        return self.trigger.ask(goal)

    def availability(self, clients: int) -> Floats:
        """Return for each client the share of the rounds in which it can be asked."""
        return self.clock.devices.availability

    def available(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return the clients that can be asked: available in this round, and not at work for an earlier one."""
        ids = np.asarray(clients, dtype=np.int64)
        free = ids[~np.isin(ids, list(self.busy))]
        return as_numbers(free[self.clock.available(round, free)])

    def workers(self, round: int, asked: Sequence[int]) -> list[int]:
        """Return the clients that do not drop out. This is known in advance, so none of them is trained."""
        ids = np.asarray(asked, dtype=np.int64)
        return as_numbers(ids[~self.clock.drops(round, ids)])

    def close(
        self,
        round: int,
        asked: Sequence[int],
        goal: int,
        epochs: Epochs,
        down: Floats | float,
        up: Floats | float,
        gone: Sequence[int] = (),
        refused: Sequence[int] = (),
    ) -> Outcome:
        """End the round. `down` and `up` are bytes, in the order of `asked`; the clients in `gone` never answer."""
        ids = np.asarray(asked, dtype=np.int64)
        drops, refuses = np.isin(ids, list(gone)), np.isin(ids, list(refused))
        works = ~(drops | refuses)
        up = np.where(works, up, 0.0)
        undisturbed = self.clock.spans(ids, np.broadcast_to(down, ids.shape), up, epochs)
        upload = np.where(drops, 0.0, undisturbed.upload)  # a refusal is sent after the download
        spans = Spans(
            undisturbed.download,
            undisturbed.generic * works,
            undisturbed.personal * works,
            upload,
            self._hold(ids, undisturbed.download) * works,
            self.ahead,
        )
        places = np.flatnonzero(works)
        arrivals = spans.arrival[places]
        wait, taken = self.trigger.fire(arrivals, goal, bool(drops.any()))
        if not len(ids):  # nobody could be asked: time advances to the deadline or until a client is free again
            wait = self.trigger.deadline or max(0.0, min(self.busy.values(), default=self.now) - self.now)
        elif refuses.any() and not len(places):  # the round ends with the last refusal
            wait = min(max(wait, float(spans.arrival[refuses].max())), self.trigger.deadline or math.inf)
        closed = self.now + wait
        state = np.where(drops, 2, np.where(refuses, 3, 1))
        state[places[taken]] = 0
        folded = sorted(k for k, arrival in self.busy.items() if arrival <= closed) if self.late == "fold" else []
        end = closed + float(np.sum(up[places[taken]])) / MERGE
        late = np.flatnonzero(state == 1)
        pending = {**self.busy, **{int(ids[i]): self.now + float(spans.arrival[i]) for i in late}}
        free = set(folded) if self.late == "fold" else {k for k, arrival in pending.items() if arrival <= end}
        busy = {k: arrival for k, arrival in sorted(pending.items()) if k not in free}
        states, start = [STATES[i] for i in state], self.now
        self.now, self.busy = end, busy
        personal = places[spans.personal[places] > 0]
        self.free = self._free(start, ids[personal], spans, personal) if self.ahead else {}
        return Outcome(round, start, closed, end, as_numbers(ids), states, spans, folded, busy, self.free)

    def _hold(self, ids: Ints, download: Floats) -> Floats:
        """Return the seconds for which each client is still at its personal work when the download has arrived."""
        until = np.array([self.free.get(int(k), 0.0) for k in ids])
        return np.maximum(0.0, until - (self.now + download))

    def _free(self, start: float, ids: Ints, spans: Spans, places: NDArray[np.intp]) -> dict[int, float]:
        """Return the end of each client's personal work that continues after the round."""
        ends = start + (spans.download + spans.hold + spans.generic + spans.personal)[places]
        ends_of = {**self.free, **{int(k): float(end) for k, end in zip(ids, ends, strict=True)}}
        return {k: when for k, when in sorted(ends_of.items()) if when > self.now}


def epochs(method: Method, task: Task, samples: Sequence[int] | Ints, batch_size: int) -> Epochs:
    """Return the epochs of clients' rounds: those of the uploaded model (`params`), and those of personal models.

    A phase in steps is so many parts of an epoch, which a client with fewer samples makes in fewer steps.
    """
    phases = [(phase.model == "params", phase.length(task)) for phase in method.phases(task)]

    def total(uploaded: bool) -> Floats:
        lengths = [length for side, length in phases if side is uploaded]
        return np.array([float(sum(length.epochs_of(int(n), batch_size) for length in lengths)) for n in samples])

    generic, personal = total(True), total(False)
    return generic, personal + generic * method.personal_passes


def as_numbers(clients: Ints) -> list[int]:
    """Return the clients as Python integers."""
    return [int(k) for k in clients]


def rehearse(
    schedule: Schedule,
    plan: Plan,
    rounds: int,
    goal: int,
    *,
    epochs: Epochs = (1.0, 0.0),
    down: float = 0.0,
    up: float = 0.0,
    sampler: Sampler = uniform,
) -> Iterator[Outcome]:
    """Simulate rounds without training, with messages of `down` and `up` bytes; yield each round's outcome."""
    clock, memory = schedule.clock, Memory()
    everyone = range(len(clock.devices))
    for t in range(1, rounds + 1):
        scene = memory.scene(plan, t, schedule.available(t, everyone), clock.samples, clock.devices.availability)
        cohort = sorted(int(k) for k in sampler(scene, schedule.ask(goal)))
        gone = np.setdiff1d(cohort, schedule.workers(t, cohort)).tolist()
        outcome = schedule.close(t, cohort, schedule.trigger.waits(goal, len(cohort)), epochs, down, up, gone)
        memory.take({"asked": cohort})
        yield outcome
