"""Progress while training: one line per method that is updated in a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..report.progress import LINES, Clock, Meter
from .screen import console, say

if TYPE_CHECKING:
    from rich.progress import Progress

WORDS = 50  # columns that the words beside a bar may take: seed and round, accuracy, time left


class Watch:
    """Shows the progress of several methods, each with `rounds` rounds for each of `seeds` seeds."""

    def __init__(
        self, labels: Sequence[str], rounds: int, seeds: int, bar: Progress | None, clock: Clock = time.monotonic
    ) -> None:
        self.meters = {label: Meter(rounds * seeds, clock) for label in labels}
        self.rounds, self.seeds = rounds, seeds
        self.width = max(map(len, labels))
        self._bar = bar
        self._tasks = {}
        if bar is not None:
            for label in labels:
                self._tasks[label] = bar.add_task(label, total=rounds * seeds, at=self._at(0, 0), accuracy="", left="")

    def where(self) -> str:
        """Return how much is over, where there are several runs; "" for one, whose round says it."""
        if len(self.meters) * self.seeds == 1:
            return ""
        meters = self.meters.values()
        return f"{sum(meter.done for meter in meters):,} of {sum(meter.total for meter in meters):,} rounds in all"

    def start(self, label: str) -> None:
        """Note that a run of this method, or all its runs together, begins."""
        self.meters[label].start()

    def step(self, label: str, number: int, record: dict[str, Any]) -> None:
        """Show that the run with the `number`-th seed has finished a round; seeds are run one after another."""
        done = number * self.rounds + int(record["round"])
        self._step(label, number, record, done, finished=1)

    def step_together(self, label: str, record: dict[str, Any]) -> None:
        """Show that the runs with all seeds, which are trained together, have finished a round.

        Each run reports its own record; the first of a round is shown.
        """
        done = self.seeds * int(record["round"])
        if done > self.meters[label].done:
            self._step(label, self.seeds - 1, record, done, finished=self.seeds)

    def _step(self, label: str, number: int, record: dict[str, Any], done: int, finished: int) -> None:
        meter, round = self.meters[label], int(record["round"])
        meter.step(record, done, finished)
        if self._bar is not None:
            self._bar.update(
                self._tasks[label],
                completed=done,
                at=self._at(number, round),
                accuracy=meter.accuracy,
                left=meter.left(),
            )
        elif meter.steps == 1 or done * LINES // meter.total > (done - finished) * LINES // meter.total:
            say(f"{label:<{self.width}}  {self._at(number, round)}  {meter.accuracy:>7}  {meter.left()}".rstrip())

    def resumed(self, label: str, number: int, record: dict[str, Any]) -> None:
        """Show that a run with the `number`-th seed is over, where it has stopped early or was over before this process began."""
        meter, done = self.meters[label], (number + 1) * self.rounds
        stopped = bool(record.get("stopped"))
        if meter.done >= done and not stopped:
            return
        meter.done = max(done, meter.done)
        at = self._at(number, int(record["round"]))
        left = f"stopped: round {record['best_round']} kept" if stopped else "done already"
        if self._bar is not None:
            self._bar.update(self._tasks[label], completed=meter.done, at=at, left=left)
        elif stopped:
            say(
                f"{label:<{self.width}}  {at}  stopped: no better score since round {record['best_round']}, which is kept"
            )
        else:
            say(f"{label:<{self.width}}  {at}  all {self.rounds} rounds were done already")

    def _at(self, number: int, round: int) -> str:
        seed = f"seed {number + 1}/{self.seeds}, " if self.seeds > 1 else ""
        return f"{seed}round {round:>{len(str(self.rounds))}}/{self.rounds}"


@contextmanager
def watch(labels: Sequence[str], rounds: int, seeds: int = 1) -> Iterator[Watch]:
    """Show progress within."""
    screen = console()
    if screen is None:
        yield Watch(labels, rounds, seeds, None)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=max(4, min(28, screen.width - max(map(len, labels)) - WORDS))),
        TextColumn("{task.fields[at]}"),
        TextColumn("[cyan]{task.fields[accuracy]:>7}"),
        TextColumn("[dim]{task.fields[left]}"),
    )
    with Progress(*columns, console=screen, refresh_per_second=8) as bar:
        yield Watch(labels, rounds, seeds, bar)
