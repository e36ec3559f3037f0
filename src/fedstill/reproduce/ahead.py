"""Compile the steps of runs that come later, in a process of its own, while others train on a GPU.

    python -m fedstill.reproduce.ahead        # what `Ahead.begin` runs: the groups on stdin, then how far the runner is

The process trains the first round of each group without a folder: what it traced and compiled lies in the caches on disk
(inductor's and Triton's), where the group finds it. It measures no kernels, since the GPU is busy: it comes back to shapes that
were not measured when the runner has gone on. Nobody waits for it, and what fails there is left to the group itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..nn.kernels.autotune import Times
from ..run.experiment import Experiment
from ..run.session import start
from ..run.simulation import begin
from .scale import Scale
from .shelf import Shelf
from .store import values_of


class Ahead:
    """Keeps the process that compiles ahead."""

    def __init__(self, scale: Scale, root: str) -> None:
        self.scale, self.root = scale, root
        self._process: subprocess.Popen[str] | None = None

    def begin(self, groups: Sequence[Sequence[Experiment]], at: int) -> None:
        """Begin to compile the steps of groups of runs, in this order, of which the one of number `at` has begun."""
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedstill.reproduce.ahead"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        listed = [[values_of(experiment) for experiment in group] for group in groups]
        self._tell({"groups": listed, "scale": self.scale.share, "root": self.root})
        self.reach(at)

    def reach(self, number: int) -> None:
        """Tell that the group of this number has begun: it and those before are left out."""
        self._tell(number)

    def _tell(self, what: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(json.dumps(what) + "\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Unmeasured(BaseException):
    """A kernel's shape was not measured before. No `Exception`: the engine would go on step by step."""


def compile_groups(
    groups: Sequence[Any], compile_group: Callable[[Any], None], reached: queue.SimpleQueue[int | None]
) -> None:
    """Compile each group that the runner has not begun; `reached` gives how far it is, and None when it has ended."""
    at: int | None = -1
    for number, group in enumerate(groups):
        while at is not None:
            while not reached.empty():
                at = reached.get()
            if at is None or number <= at:
                break
            try:
                compile_group(group)
                break
            except Unmeasured:
                at = reached.get()
            except Exception as error:  # the group itself will say it
                print(error, file=sys.stderr)
                break


def main() -> None:
    """Train the first rounds of the groups that stdin lists."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    shelf, scale = Shelf(), Scale(given["scale"])
    reached: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            reached.put(int(line))
        reached.put(None)

    threading.Thread(target=listen, daemon=True).start()

    def compile_group(values: Sequence[dict[str, Any]]) -> None:
        experiments = [Experiment.from_values({**own, "data_root": ""}) for own in values]
        starts = [begin(e, federation=shelf.federation(e, scale, given["root"])) for e in experiments]
        session = start(starts)
        session.trainer.choices.timer = _refuse
        try:
            next(session.rounds())
        finally:
            session.close()

    compile_groups(given["groups"], compile_group, reached)


def _refuse(*_: object) -> Times:
    raise Unmeasured


if __name__ == "__main__":
    main()
