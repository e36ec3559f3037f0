"""Callbacks of a run: the journal, which keeps records and checkpoints, and progress."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from ..core import tree
from ..core.tree import Tree
from ..nn.kernels.autotune import Choices
from ..server.coordinator import Coordinator, Record, RunState
from ..transport.messages import Dialogue, Reply, Request
from .checkpoint import FILE_BYTES, Checkpoint, CheckpointWriter
from .journal import Journal
from .signals import Stop

SHARE = 50  # of the time, one in so many seconds may go into checkpoints,
PATIENCE, MOST = 300.0, 10  # or one in MOST, where a kill would otherwise cost more than so many seconds
Progress: TypeAlias = Callable[[Record], None]


class ProgressCallback:
    """Hands every record to a function."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_start(self, coordinator: Coordinator) -> None:
        """Do nothing."""

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Report the round."""
        self.progress(record)

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing."""


class Pace:
    """When runs keep their state where nothing says how often: after the first round, then as often as it costs little.

    Runs that go side by side keep theirs after the same rounds, so that they can go on together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.newest, self.now = 0, False  # the newest round that is over in any of the runs, and whether it is kept
        self.since, self.cost = clock(), 0.0  # when the last one was begun, and the seconds that it took in all runs

    def due(self, round: int) -> bool:
        """Return whether the state after this round, which is over, is kept."""
        if round > self.newest:
            now = self.clock()
            passed = now - self.since
            dear = passed >= PATIENCE and passed >= MOST * self.cost
            self.newest, self.now = round, dear or passed >= SHARE * self.cost
            if self.now:
                self.since, self.cost = now, 0.0
        return self.now

    def timed(self, dialogue: Dialogue[None]) -> Dialogue[None]:
        """Carry out what keeps a run's state, and note what it costs."""
        began = self.clock()
        yield from dialogue
        self.cost += self.clock() - began


class JournalCallback:
    """Writes every record, and a checkpoint every so many rounds, of the best and last, and where the run should stop."""

    def __init__(
        self,
        journal: Journal,
        checkpoint_every: int,
        choices: Choices,
        stop: Stop | None = None,
        pace: Pace | None = None,
        final: bool = True,
    ) -> None:
        """`checkpoint_every` is 0 where the pace decides; `final` says whether the state after the last round is kept."""
        self.journal, self.checkpoint_every, self.choices = journal, checkpoint_every, choices
        self.stop, self.pace, self.final = stop, pace or Pace(), final

    def on_start(self, coordinator: Coordinator) -> None:
        """Write what was chosen before the first round, on which its results may depend."""
        self.journal.write_choices(self.choices)

    def on_round(self, coordinator: Coordinator, record: Record) -> Dialogue[None] | None:
        """Append the record; where a checkpoint is due, ask the clients for their state."""
        self.journal.record(record)
        self.journal.write_choices(self.choices)
        round, stops = record["round"], self.stop is not None and self.stop.due(record["round"])
        due = round % self.checkpoint_every == 0 if self.checkpoint_every else self.pace.due(round)
        last = coordinator.over or round == coordinator.task.rounds
        self.journal.checkpoints.best = coordinator.best_round
        if last or stops:
            self.journal.write_table(coordinator.state.history)
        kept = self.final if last else due or stops
        if not kept and round != coordinator.best_round:
            return None
        return self.pace.timed(save(self._writer, coordinator))

    def _writer(self, round: int, state: Tree) -> CheckpointWriter:
        return self.journal.writer(round, state, self.choices)

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing: the last round was kept, where it is wanted."""


def save(write: Callable[[int, Tree], CheckpointWriter], coordinator: Coordinator) -> Dialogue[None]:
    """Write a checkpoint: the server's state, then the clients', a few at a time."""
    state, timing = coordinator.state, coordinator.rounds.state_dict()
    writer = write(state.round, {"server": state.server, **({"timing": timing} if timing else {})})
    clients, at_once = coordinator.rounds.idle(sorted(coordinator.touched)), 1
    task = dataclasses.replace(
        coordinator.task, round=state.round
    )  # a client that keeps its own state names it by the round
    while clients:
        orders = [coordinator.order("state", task, k, {}) for k in clients[:at_once]]
        clients = clients[at_once:]
        size = 1
        for reply in coordinator.sound(
            (yield Request(orders))
        ):  # without a client whose state cannot be, or that is away
            writer.add(reply.client, as_tree(reply))
            size = max(size, sum(leaf.nbytes for _, leaf in tree.leaves(reply.up)))
        at_once = max(1, min(FILE_BYTES // size, 256))
    writer.close()


def restore(checkpoint: Checkpoint, coordinator: Coordinator) -> Dialogue[None]:
    """Send the clients back what a checkpoint holds of them; nothing to those that had not begun then."""
    task = dataclasses.replace(coordinator.task, round=checkpoint.round)
    begun_since = set(coordinator.touched)
    for client, state in checkpoint.clients():
        coordinator.touched.add(client)
        begun_since.discard(client)
        yield Request([coordinator.order("restore", task, client, state)])
    nothing: Tree = {"report": {"last": torch.tensor(0.0, dtype=torch.float64)}}
    for client in sorted(begun_since):
        yield Request([coordinator.order("restore", task, client, nothing)])


def state_of(checkpoint: Checkpoint, history: list[Record]) -> tuple[RunState, Tree]:
    """Return the server's state and what the timing had in a checkpoint."""
    state = checkpoint.state()
    return RunState(state["server"], history), state.get("timing", {})


def as_tree(reply: Reply) -> Tree:
    """Return a client's state as one tree, its numbers as tensors."""
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in reply.report.items()}
    return {**reply.up, "report": numbers}
