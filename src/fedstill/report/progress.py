"""Progress of runs: an estimate of the time left, and a callback that shows it in a notebook or a terminal."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from ..core.metric import measure_of
from ..server.coordinator import Coordinator, Record
from .costs import duration

Clock: TypeAlias = Callable[[], float]

LINES = 5  # plain lines of a run where nothing can be updated in place


class Meter:
    """The progress of one method over its runs with all seeds, and an estimate of the time left.

    The estimate extrapolates rounds that are not the first of their run, since a first round also compiles and warms up, and
    leaves out what a record says was spent on compiling (`compile_seconds`). Until there is such a round, there is no estimate.
    """

    def __init__(self, total: int, clock: Clock = time.monotonic) -> None:
        self.total = total  # rounds of all seeds
        self.done = 0  # of these, those that are over; after a resume that includes rounds of an earlier process
        self.spent = 0.0  # seconds
        self.steps = 0  # how often rounds have finished in this process
        self.accuracy = ""
        self._clock, self._since = clock, clock()
        self._first = True  # whether the next round is the first of its run
        self._timed_rounds, self._timed_seconds = 0, 0.0  # what the estimate is made from

    def start(self) -> None:
        """Note that a run, or several that are trained together, begins."""
        self._since, self._first = self._clock(), True

    def step(self, record: dict[str, Any], done: int, finished: int = 1) -> None:
        """Note that `finished` rounds, of runs that are trained together, are over; `done` are over in all."""
        now = self._clock()
        seconds = now - self._since
        if not self._first:
            self._timed_rounds += finished
            self._timed_seconds += max(0.0, seconds - record.get("compile_seconds", 0.0))
        self._since, self._first = now, False
        self.spent += seconds
        self.steps += 1
        self.done = done
        if "personal" in record:
            self.accuracy = measure_of("", record).words(record["personal"], 1)

    def left(self) -> str:
        """Return the time left, or the time spent once all rounds are over."""
        if self.done >= self.total:
            return f"{duration(self.spent)} in all"
        if not self._timed_rounds:
            return ""
        return f"{duration(self._timed_seconds / self._timed_rounds * (self.total - self.done))} left"


class Progress:
    """Shows the rounds of a run as they end: a bar in a notebook, a line that changes in a terminal, a few lines elsewhere.

    fs.simulate(…, callbacks=[fs.Progress()])
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._meter = Meter(0, clock)
        self._shown: Any = None  # what a notebook updates
        self._label = ""

    def on_start(self, coordinator: Coordinator) -> None:
        """Show how many rounds there are."""
        self._meter = Meter(coordinator.task.rounds, self._clock)
        self._meter.done = coordinator.state.round
        self._label, self._shown = coordinator.method.id or type(coordinator.method).__name__, None
        if _in_notebook():
            from IPython.display import HTML, display

            self._shown = display(HTML(self._bar()), display_id=True)

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Show that a round is over."""
        meter, before = self._meter, self._meter.done
        meter.step(record, int(record["round"]))
        if record.get("stopped"):
            meter.total = meter.done
        if self._shown is not None:
            from IPython.display import HTML

            self._shown.update(HTML(self._bar()))
        elif sys.stderr.isatty():
            end = "\n" if meter.done >= meter.total else ""
            print(f"\r\x1b[K{self._line()}", end=end, file=sys.stderr, flush=True)
        elif meter.steps == 1 or meter.done * LINES // meter.total > before * LINES // meter.total:
            print(self._line(), file=sys.stderr, flush=True)

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing: the last round was shown."""

    def _line(self) -> str:
        meter = self._meter
        at = f"{self._label}  round {meter.done:>{len(str(meter.total))}}/{meter.total}"
        return f"{at}  {meter.accuracy:>7}  {meter.left()}".rstrip()

    def _bar(self) -> str:
        meter = self._meter
        bar = f'<progress value="{meter.done}" max="{meter.total}" style="width:16em"></progress>'
        return f"<div>{bar} {html.escape(self._line())}</div>"


def _in_notebook() -> bool:
    """Return whether the program runs in a notebook's kernel; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
