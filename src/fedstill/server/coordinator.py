"""The Coordinator: runs one run's rounds, in simulation and in deployment alike.

sample → (count privacy) → send → replies → gate → merge → score → callbacks

It is a coroutine: it yields requests to carry orders and is sent the replies, so that one driver serves one run or several side
by side, on any transport. How a round passes in time is left to its `Rounds`; the strategies in `timing/` derive from it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ..core.errors import TrainingError
from ..core.method import Method, Upload
from ..core.metric import METRICS, NO_METRICS, Measures
from ..core.plan import Plan
from ..core.task import Average, Task
from ..core.tree import Tree
from ..engine.kept import initial_memory
from ..engine.step import explained
from ..transport.messages import Dialogue, Kind, Order, Reply, Request, Transport
from .attack import Attack
from .gate import (
    NEEDED,
    NEEDS,
    REPORTED,
    SMALL,
    TOO_LARGE,
    Gate,
    Spec,
    divergence,
    example_upload,
    in_a_line,
    misreported,
    model_of,
    spec_of,
    state_of,
)  # fmt: skip
from .optimizer import Rule
from .records import Scores, metrics, nbytes, split_seconds, summary, traffic, training_losses
from .sampler import Memory, Sampler, uniform

Record: TypeAlias = dict[str, Any]
NOBODY = "nobody answered"
UNSCORED = 3  # scorings in a row that nobody answers, as where all real sites are away, after which a run ends


@dataclass
class RunState:
    """What changes from round to round."""

    server: Tree
    history: list[Record] = field(default_factory=list)

    @property
    def round(self) -> int:
        """The last round that is over."""
        return len(self.history)


class Callback(Protocol):
    """Follows a run. `on_round` may ask clients: then it is a coroutine as the coordinator is."""

    def on_start(self, coordinator: Coordinator) -> None:
        """Called before the first round that is run."""

    def on_round(self, coordinator: Coordinator, record: Record) -> Dialogue[None] | None:
        """Called when a round is over and its record is in the history."""

    def on_end(self, coordinator: Coordinator) -> None:
        """Called after the last round."""


@dataclass(frozen=True)
class Exchange:
    """What came of a round's orders."""

    answers: Sequence[Reply] = ()  # uploads that arrived in this round, whether they are merged or not
    merged: Sequence[tuple[Reply, Upload]] = ()  # what is merged, by ascending client
    record: Mapping[str, Any] = field(default_factory=dict)
    besides: Sequence[Order] = ()  # orders that were sent besides
    pending: frozenset[int] = frozenset()  # clients whose replies may still be merged in a later round
    decided: Mapping[int, int] = field(default_factory=dict)
    """Clients whose earlier orders ended now, with the rounds of these orders."""
    working: frozenset[int] = frozenset()  # of these the ones that are not late: there are no rounds that end


@dataclass(frozen=True)
class Aggregator:
    """Has the method merge a round's uploads, then takes the server optimizer's step.

    With fewer than `minimum` uploads the round is abandoned: the server's state stays.
    """

    minimum: int = 1
    rule: Rule | None = None  # the server optimizer; None: the clients' mean itself

    def merge(self, method: Method, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Return the server's next state."""
        if len(uploads) < self.minimum:
            return server
        merged = method.merge(task, server, uploads)
        return merged if self.rule is None else self.rule.follow(server, merged)


class Rounds:
    """The timing of rounds. This base class merges the clients that answer within `deadline` seconds."""

    deadline: float | None = None  # of wall-clock time
    work: Literal["all", "generic"] = "all"  # what clients are asked to train

    def available(self, round: int, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that can be asked."""
        return clients

    def ask(self, goal: int) -> int:
        """Return how many clients are asked so that `goal` answer."""
        return goal

    def availability(self, clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return for each client the share of the rounds in which it can be asked."""
        return np.ones(clients)

    def idle(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that are not at work across rounds: those that can be scored, and say what they keep."""
        return list(clients)

    def exchange(self, coordinator: Coordinator, task: Task, orders: list[Order]) -> Dialogue[Exchange]:
        """Carry out a round's orders."""
        replies = yield Request(orders, self.deadline)
        answers, record = coordinator.inspect(task, orders, replies)
        uploads = coordinator.uploads(answers, orders)
        return Exchange(answers, list(zip(answers, uploads, strict=True)), record)

    def step(self, task: Task, before: Tree, merged: Tree) -> Tree:
        """Return the server's next state, given the merged one."""
        return merged

    def before_scores(self, coordinator: Coordinator, record: Record) -> Dialogue[None]:
        """Have clients do what must be done before they are scored."""
        yield from ()

    def state_dict(self) -> Tree:
        """Return the tensors that a checkpoint must hold."""
        return {}

    def load_state(self, history: Sequence[Mapping[str, Any]], state: Tree) -> None:
        """Continue after these records, with what `state_dict` returned."""


@dataclass
class Coordinator:
    """One run. Each round should merge `per_round` clients; scores are computed every `eval_every` rounds and at the end."""

    method: Method
    task: Task
    plan: Plan
    state: RunState
    transport: Transport  # which clients it reaches, and how long it takes; the driver carries the orders
    per_round: int
    rounds: Rounds = field(default_factory=Rounds)
    callbacks: Sequence[Callback] = ()
    eval_every: int = 1
    splits: tuple[str, ...] = (
        "test",
    )  # the first is the one reported; besides "val" where there is such data, "train" if asked
    sampler: Sampler = uniform
    gate: Gate = field(default_factory=Gate)
    aggregator: Aggregator = field(default_factory=Aggregator)
    average: Callable[[Task, Tree], Average] | None = None
    """Return what stands behind `task.average` in a round's merge, given the server's state: for noise and trusted updates."""
    spend: Callable[[Sequence[Record], Sequence[int], float], Record] | None = None
    """Return what the record says of privacy if these clients are asked, given the history and the share of the clients that a
    round asks; raises where that must not be."""
    common: Callable[[Tree], Record] | None = None  # the generic model's score on a test set that belongs to no client
    measures: Measures = NO_METRICS  # the run's metrics beside the objective's score
    away: frozenset[int] = frozenset()  # clients that are neither trained nor scored
    watch: Callable[[Sequence[Reply], Sequence[Record]], Record] | None = None
    """Have training watched, and return what the record says of the replies, given the history (forgetting)."""
    tests: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by split, where they are known
    samples: Sequence[int] = ()  # training samples of each client, where they are known
    candidates: int = 0  # d of the sampler power-of-choice
    attack: Attack | None = None  # simulated attackers, who are not scored
    run: int = 0  # number among the runs that go side by side, which share the seconds
    runs: int = 1
    bytes: int = field(init=False)  # of the server's state before the first round, and of a model
    memory: Memory = field(init=False)  # what the sampler may use
    noted: dict[str, str] = field(default_factory=dict, init=False)
    """Clients whose other replies in this round were refused, with the reasons, for its record."""
    settled: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    """By client the round up to which its replies are decided, and the round of the last one that was taken."""
    touched: set[int] = field(default_factory=set, init=False)  # clients that may have something to keep
    over: bool = field(default=False, init=False)  # whether the run ends although rounds are left (a callback says so)
    best_round: int = field(default=0, init=False)  # whose models the run keeps (a callback says so); 0: the last one's

    def __post_init__(self) -> None:
        self.memory = Memory.of(self.state.history)
        self.bytes = nbytes(self.state.server) + nbytes(self.task.net.initial())

    def load_state(self, state: RunState, timing: Tree) -> None:
        """Continue from a checkpoint: the run's state, and what its timing had."""
        self.state, self.memory = state, Memory.of(state.history)
        self.rounds.load_state(state.history, timing)

    def go_back(self, round: int, server: Tree, timing: Tree) -> None:
        """Return to the state after an earlier round; the records of later ones stay."""
        self.state.server, self.settled = server, {}
        self.rounds.load_state(self.state.history[:round], timing)

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def talk(self) -> Dialogue[None]:
        """Run the rounds that are left."""
        for callback in self.callbacks:
            callback.on_start(self)
        for t in range(self.state.round + 1, self.task.rounds + 1):
            if self.over:
                break
            yield from self.round(dataclasses.replace(self.task, round=t))
        for callback in self.callbacks:
            callback.on_end(self)

    def round(self, task: Task) -> Dialogue[None]:
        """Sample, send, collect, merge, score, and tell the callbacks."""
        began, state = time.perf_counter(), self.state
        cohort = self.sample(task.round)
        share = self.per_round / max(1, len(self.present()))
        spent = {} if self.spend is None else self.spend(state.history, cohort, share)
        with explained(self.method, task, stacked=False):
            options: dict[str, Any] = {"work": self.rounds.work, "watch": self.watch is not None}
            orders = [self.order("train", task, k, **options) for k in cohort]
        asked, carried = time.perf_counter(), self.transport.seconds
        exchange = yield from self.rounds.exchange(self, task, orders)
        waited, carried = time.perf_counter() - asked, self.transport.seconds - carried
        merging = task if self.average is None else dataclasses.replace(task, average=self.average(task, state.server))
        with explained(self.method, task, stacked=False):
            uploads = [upload for _, upload in exchange.merged]
            merged = self.aggregator.merge(self.method, merging, state.server, uploads)
        state.server = self.rounds.step(task, state.server, merged)
        self.settle(task.round, cohort, exchange)
        took = time.perf_counter() - began
        record = {
            **self.summary(task.round, cohort, exchange),
            **traffic([*orders, *exchange.besides], exchange.answers),
            "train_seconds": took / self.runs,
            **split_seconds(carried / self.runs, waited / self.runs, took / self.runs),
            **(self.watch(self.of_honest(exchange.answers), state.history) if self.watch else {}),
            **exchange.record,
            **self.remembered(cohort, exchange),
            **spent,
        }
        if cohort and len(exchange.merged) < self.aggregator.minimum:
            record["abandoned"] = True
        self.memory.take(record)
        if task.round % self.eval_every == 0 or task.round == task.rounds:
            yield from self.rounds.before_scores(self, record)
            record |= yield from self.score(task)
        if self.noted:
            record["rejected"], self.noted = {**self.noted, **record.get("rejected", {})}, {}
        record["seconds"] = (time.perf_counter() - began) / self.runs
        state.history.append(record)
        for callback in self.callbacks:
            dialogue = callback.on_round(self, record)
            if dialogue is not None:
                yield from dialogue

    def sample(self, round: int) -> list[int]:
        """Return the clients to ask in a round, ascending."""
        known = max([len(self.samples), *(k + 1 for k in self.present())])
        samples = np.ones(known, dtype=np.int64)
        samples[: len(self.samples)] = self.samples
        available, number = self.rounds.available(round, self.present()), self.rounds.ask(self.per_round)
        scene = self.memory.scene(
            self.plan, round, available, samples, self.rounds.availability(known), self.candidates
        )
        return sorted(int(k) for k in self.sampler(scene, number)) if number else []

    def score(self, task: Task) -> Dialogue[Record]:
        """Score every client's models on its own data, and the generic model on the common test set."""
        with explained(self.method, task, stacked=False):
            generic = self.method.generic(task, self.state.server) if "generic" in self.method.scores else None
        record: Record = {}
        last = task.round == task.rounds  # every client's, also of those at work across rounds
        clients = self.honest() if last else self.rounds.idle(self.honest())
        for split in self.splits:
            orders = [self.order("score", task, k, generic=generic, split=split) for k in clients]
            replies = yield Request(orders)
            sound = self.sound(replies, split)
            claimed = self.gate.shares(sound, self.tests.get(split, ()))
            self.note(claimed)
            counted = [reply for reply in sound if reply.client not in claimed]
            scores = Scores.read(counted, self.method.scores)
            if not scores.clients and len(orders) < len(self.honest()):
                continue  # the few that are not at work are away
            if orders and not scores.clients:
                if not replies and not record and not last and not self.unscored():
                    return {"unscored": NOBODY}
                refused = {reply.client: reply.refusal for reply in replies if reply.refusal}
                told = [(int(k), why) for k, why in self.noted.items()] + list(refused.items())
                reason = "".join(f"{self.gate.who(k)}: {why}" for k, why in told[:1])
                raise TrainingError(f"round {task.round}: no client sent scores that can be; {reason or NOBODY}")
            prefix = "" if split == self.splits[0] else f"{split}_"
            record |= summary(scores, prefix, self.task.objective.lower)
            if self.measures.metrics:
                record |= metrics(counted, self.method.scores, self.measures, prefix, self.method.scores[0])
            if split == "train":
                record |= training_losses(counted)
        if len(self.samples):
            record["train_samples"] = {str(k): int(self.samples[k]) for k in self.honest()}
        if self.common is not None and generic is not None:
            record |= self.common(generic)
        return {**record, **self.described()}

    def described(self) -> Record:
        """Return what a record says of its metrics: which the score is where it is not accuracy, and own ones that fall."""
        own = [metric.name for metric in self.measures.metrics if metric.measure.lower and metric.name not in METRICS]
        objective = self.task.objective
        named = {} if objective.name == "classification" else {"objective": objective.name, "metric": objective.metric}
        return {**named, **({"lower": own} if own else {})}

    def unscored(self) -> bool:
        """Return whether so many scorings before this one had no answer that one more ends the run."""
        scored = [record for record in self.state.history if record["round"] % self.eval_every == 0]
        return len(scored) >= UNSCORED - 1 and all("unscored" in record for record in scored[1 - UNSCORED :])

    # ---- what strategies and callbacks use ---------------------------------------------------------------------------
    def present(self) -> list[int]:
        """Return the clients that take part and can be reached."""
        return [k for k in self.transport.alive() if k not in self.away]

    def order(self, kind: Kind, task: Task, client: int, down: Tree | None = None, **options: Any) -> Order:
        """Return an order; without `down` the client is sent what the method sends."""
        if kind in ("train", "begin"):
            self.touched.add(client)
        if down is None:
            down = self.method.send(task, self.state.server, client)
        decided, taken = self.settled.get(client, (0, 0))
        most = self.room(kind)
        return Order(kind, task.round, client, down, run=self.run, decided=decided, taken=taken, most=most, **options)

    def room(self, kind: Kind) -> int:
        """Return the bytes that a reply may have on the wire; 0: any.

        Uploads are bounded by the first right one or, before it and where their form varies, by the server's state and a
        model; replies of numbers by what these may need. What a client keeps (`state`) is sent where clients are ours.
        """
        if kind == "score" and self.measures.metrics:
            return SMALL + self.measures.bytes(max(map(max, self.tests.values()), default=0)) * len(self.method.scores)
        if kind not in ("train", "model"):
            return 0 if kind == "state" else SMALL
        gate = self.gate
        known = kind == "train" and gate.size and not gate.varies
        return gate.most_bytes or SMALL + 2 * (gate.size if known else self.bytes)

    def inspect(
        self, task: Task, orders: Iterable[Order], replies: Sequence[Reply]
    ) -> tuple[list[Reply], dict[str, Any]]:
        """Pass replies through the gate: return those that may be merged, and what the record says of the others.

        Simulated attackers forge their uploads before.
        """
        if self.attack is not None:
            replies = self.forged(self.attack, task, orders, replies)
        refused = [reply.client for reply in replies if reply.refusal]
        faulty = {reply.client: reply.fault for reply in replies if reply.fault}
        answers = [reply for reply in replies if not reply.refusal and not reply.fault]
        down = {order.client: order.down for order in orders}
        misread = self.gate.reports(answers, NEEDED if self.watch else REPORTED, self.most_steps(task, answers))
        answers = [reply for reply in answers if reply.client not in misread]
        diverged, arrived = self.gate.diverged(task, answers), len(answers)
        answers = [reply for reply in answers if reply.client not in diverged]

        def example(reply: Reply) -> Tree:
            at = dataclasses.replace(task, round=reply.round)
            return self.example(at, down[reply.client])

        accepted, reasons = self.gate.inspect(answers, example)
        hopeless = self.gate.hopeless({**faulty, **misread}, len(self.present()))
        if hopeless:
            raise TrainingError(f"round {task.round}: no upload has ever had the right form; {hopeless}")
        grown = {k: reason for k, reason in reasons.items() if reason.startswith(TOO_LARGE)}
        self.gate.go_on(task, {**diverged, **grown}, arrived, len(self.present()))
        record: dict[str, Any] = {"refused": refused} if refused else {}
        if self.attack is not None:
            record["attackers"] = [reply.client for reply in replies if reply.client in self.attack.clients]
        if self.gate.max_norm:
            accepted, far, clipped = self.gate.bounded(accepted, down, self.task.net.parameters)
            reasons |= far
            if clipped:
                record["clipped"] = {str(k): norm for k, norm in clipped.items()}
        reasons = dict(sorted({**faulty, **misread, **diverged, **reasons}.items()))
        if reasons:
            record["rejected"] = {str(client): in_a_line(reason) for client, reason in reasons.items()}
        return accepted, record

    def most_steps(self, task: Task, replies: Iterable[Reply]) -> dict[int, int]:
        """Return how many steps the work of clients has, by their registered samples."""
        lengths = [phase.length(task) for phase in self.method.phases(task)]
        known = [reply.client for reply in replies if reply.client < len(self.samples)]
        return {k: sum(self.plan.steps(int(self.samples[k]), length) for length in lengths) for k in known}

    def note(self, reasons: Mapping[int, str]) -> None:
        """Have the round's record name these clients, whose replies to other orders than `train` are refused."""
        self.noted |= {str(client): in_a_line(reason) for client, reason in reasons.items()}

    def forged(self, attack: Attack, task: Task, orders: Iterable[Order], replies: Sequence[Reply]) -> list[Reply]:
        """Return replies with the attackers' uploads forged."""
        down = {order.client: order.down for order in orders}

        def untrained(reply: Reply) -> Tree:
            return self.example(dataclasses.replace(task, round=reply.round), down[reply.client])

        return attack.forge(replies, task.net.parameters, untrained)

    def honest(self) -> list[int]:
        """Return the clients that are scored: those present but for simulated attackers."""
        return [k for k in self.present() if self.attack is None or k not in self.attack.clients]

    def of_honest(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        """Return the replies of clients that are no simulated attackers."""
        attack = self.attack
        return replies if attack is None else [reply for reply in replies if reply.client not in attack.clients]

    @functools.cached_property
    def forms(self) -> tuple[Spec, Spec]:
        """The forms of a model that a client returns, and of a client's memory."""
        model = self.task.net.initial()
        return spec_of({"params": model}), spec_of(initial_memory(self.method, self.task, model))

    def sound(self, replies: Iterable[Reply], split: str = "test") -> list[Reply]:
        """Return the replies to other orders than `train` that can be; the round's record names the other clients."""
        reasons = {reply.client: reason for reply in replies if (reason := self.unsound(reply, split))}
        self.note(reasons)
        return [reply for reply in replies if reply.client not in reasons and not reply.refusal]

    def unsound(self, reply: Reply, split: str = "test") -> str:
        """Return why a reply to another order than `train` cannot be; else ""."""
        if reply.fault or reply.refusal:
            return reply.fault
        tests, needed = self.tests.get(split, ()), NEEDS.get(reply.kind, ())
        registered = {"samples": int(tests[reply.client])} if reply.client < len(tests) else {}
        models = self.method.scores if reply.kind == "score" else ()
        registered = registered if "samples" in needed else {}
        wrong = misreported(reply.report, (*needed, *models), registered, self.task.objective.counted)
        if not wrong and reply.kind == "score" and self.measures.metrics:
            sent = (self.measures.wrong(reply.up.get(model), int(reply.report["samples"])) for model in models)
            wrong = next(filter(None, sent), "")
        if not wrong and reply.kind == "model":
            wrong = model_of(reply.up, self.forms[0])
        if not wrong and reply.kind == "state":
            wrong = state_of(reply.up, self.forms[1], self.method.per_sample)
        diverged = reply.kind in ("tune", "idle") and self.gate.refuse_diverged and not wrong
        return divergence(reply) if diverged else wrong

    def example(self, task: Task, down: Tree) -> Tree:
        """Return what a client that was sent `down` would upload, as far as names, shapes and dtypes go."""
        return example_upload(self.method, task, down)

    def uploads(self, replies: Iterable[Reply], orders: Iterable[Order]) -> list[Upload]:
        """Return replies as `merge` sees them."""
        down = {order.client: order.down for order in orders}
        return [Upload(reply.up, self.weight(reply), reply.client, down.get(reply.client, {})) for reply in replies]

    def weight(self, reply: Reply) -> float:
        """Return a client's number of samples: the registered one where it is known, else what it reports."""
        known = reply.client < len(self.samples)
        return float(self.samples[reply.client]) if known else reply.report["samples"]

    # ---- the record --------------------------------------------------------------------------------------------------
    def summary(self, round: int, cohort: Sequence[int], exchange: Exchange) -> Record:
        """Return who took part, and the mean loss of their steps."""
        replies = [reply for reply, _ in exchange.merged]
        steps = [reply.report["steps"] for reply in replies]
        losses = [reply.report["loss"] * n for reply, n in zip(replies, steps, strict=True)]
        now = {reply.client for reply in replies if reply.round == round}
        return {
            "round": round,
            "participants": [reply.client for reply in replies],
            "missing": sorted(set(cohort) - now - exchange.working),
            "loss": sum(losses) / max(1.0, sum(steps)),
            "steps": int(sum(steps)),
        }

    def settle(self, round: int, cohort: Sequence[int], exchange: Exchange) -> None:
        """Note for each client which of its replies was taken, so that its next order can say so."""
        enough = len(exchange.merged) >= self.aggregator.minimum
        taken = {reply.client: reply.round for reply, _ in exchange.merged}
        ended = {**exchange.decided, **taken, **dict.fromkeys((k for k in cohort if k not in exchange.pending), round)}
        for k, last in ended.items():
            before = self.settled.get(k, (0, 0))[1]
            self.settled[k] = last, taken[k] if enough and k in taken else before

    def remembered(self, cohort: list[int], exchange: Exchange) -> Record:
        """Return what samplers other than `uniform` use later."""
        if self.sampler is uniform:
            return {}
        losses = {str(r.client): r.report["loss"] for r, _ in exchange.merged if r.report["steps"]}
        return {"asked": cohort, "losses": losses}
