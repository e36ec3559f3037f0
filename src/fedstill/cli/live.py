"""Progress while training: a line for each method that moves in a terminal, a handful of plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .screen import console, say

if TYPE_CHECKING:
    from rich.progress import Progress

LINES = 5  # plain lines a method


class Meter:
    """How far one method is; time left goes by the rounds that were run here, not by those before a resume."""

    def __init__(self, total: int, rounds: int) -> None:
        self.total, self.rounds = total, rounds
        self.done, self.ran, self.spent = 0, 0, 0.0
        self.accuracy = ""
        self._since = time.monotonic()

    def start(self) -> None:
        """The next run begins now."""
        self._since = time.monotonic()

    def step(self, record: dict[str, Any], before: int) -> None:
        """A round is over; `before` rounds belong to earlier seeds."""
        now = time.monotonic()
        self.spent, self._since = self.spent + now - self._since, now
        self.ran += 1
        self.done = before + int(record["round"])
        if "personal" in record:
            self.accuracy = f"{100 * record['personal']:.1f} %"

    def left(self) -> str:
        """The time left, or the time spent once all is done."""
        if self.done >= self.total:
            return f"{span(self.spent)} in all"
        return f"{span(self.spent / self.ran * (self.total - self.done))} left" if self.ran else ""


def span(seconds: float) -> str:
    """A length of time as one would say it.

    >>> span(4.2), span(200), span(4000)
    ('5 s', '3 min 20 s', '1 h 07 min')
    """
    whole = int(-(-seconds // 1))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = -(-whole // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Watch:
    """Shows several methods' progress."""

    def __init__(self, labels: Sequence[str], rounds: int, seeds: int, screen: Progress | None) -> None:
        self.meters = {label: Meter(rounds * seeds, rounds) for label in labels}
        self.rounds, self.seeds = rounds, seeds
        self.width = max(map(len, labels))
        self._screen = screen
        self._tasks = {}
        if screen is not None:
            for label in labels:
                task = screen.add_task(label, total=rounds * seeds, at=self._at(0, 0), accuracy="", left="")
                self._tasks[label] = task

    def start(self, label: str) -> None:
        """A run of this method begins."""
        self.meters[label].start()

    def abreast(self, label: str, record: dict[str, Any]) -> None:
        """All seeds' runs of this method have finished a round."""
        self._step(label, (self.seeds - 1) * int(record["round"]), self.seeds - 1, record)

    def step(self, label: str, number: int, record: dict[str, Any]) -> None:
        """The `number`-th seed's run of this method has finished a round."""
        self._step(label, number * self.rounds, number, record)

    def _step(self, label: str, before: int, number: int, record: dict[str, Any]) -> None:
        meter, round = self.meters[label], int(record["round"])
        meter.step(record, before)
        if self._screen is not None:
            self._screen.update(
                self._tasks[label],
                completed=meter.done,
                at=self._at(number, round),
                accuracy=meter.accuracy,
                left=meter.left(),
            )
        elif meter.done * LINES // meter.total > (meter.done - 1) * LINES // meter.total or meter.ran == 1:
            say(f"{label:<{self.width}}  {self._at(number, round)}  {meter.accuracy:>7}  {meter.left()}".rstrip())

    def whole(self, label: str, record: dict[str, Any]) -> None:
        """A resumed run has ended; if it had been whole before, that is shown."""
        meter = self.meters[label]
        if meter.ran:
            return
        if self._screen is not None:
            at = self._at(0, int(record["round"]))
            self._screen.update(self._tasks[label], completed=meter.total, at=at, left="done already")
        else:
            say(f"{label}  all {meter.total} rounds were done already")

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
        BarColumn(bar_width=28),
        TextColumn("{task.fields[at]}"),
        TextColumn("[cyan]{task.fields[accuracy]:>7}"),
        TextColumn("[dim]{task.fields[left]}"),
    )
    with Progress(*columns, console=screen, refresh_per_second=8) as progress:
        yield Watch(labels, rounds, seeds, progress)
