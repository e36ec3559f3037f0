"""How `benchmarks/peers.py` talks with a competitor: words come in on stdin, a line of JSON answers each.

round → one round is run, answered with its seconds and SGD steps; loss → the global model's loss; quit → the end. A competitor
that can be stepped calls `serve`; one that runs its own loop calls `done`, `answer` and `wait` in its hook between two rounds.
Needs nothing but the standard library, since it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


class Turn:
    """The competitor's end. `spec` is what it is asked to run; what libraries print goes to stderr."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = json.loads(sys.argv[1])
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def ready(self, *packages: str) -> None:
        self._say(versions={name: version(name).partition("+")[0] for name in packages})

    def wait(self, loss: Callable[[], float]) -> None:
        """Block until a round is asked for; its clock then runs."""
        while (word := sys.stdin.readline().strip()) not in ("", "quit"):
            if word == "round":
                self._began = time.perf_counter()
                return
            self._say(loss=float(loss()))
        os._exit(0)

    def restart(self) -> None:
        """Start the clock anew, where others had to be told first."""
        self._began = time.perf_counter()

    def done(self) -> float:
        """The round's seconds, until now."""
        return time.perf_counter() - self._began

    def answer(self, seconds: float, steps: float) -> None:
        self._say(seconds=seconds, steps=round(steps))

    def serve(self, one_round: Callable[[], Any], steps: Callable[[Any], float], loss: Callable[[], float]) -> None:
        """Run rounds as they are asked for; `steps` counts those of a round from what it gave, off the clock."""
        while True:
            self.wait(loss)
            given = one_round()
            seconds = self.done()
            self.answer(seconds, steps(given))

    def _say(self, **what: Any) -> None:
        self._answers.write(json.dumps(what) + "\n")
        self._answers.flush()
