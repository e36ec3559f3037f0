"""Compile the steps of runs that come next, in a process of their own, while those before them train on a GPU.

    python -m fedstill.reproduce.ahead < group.json       # what `Ahead.begin` runs

The process trains the first round of the group without a folder and ends: what it traced and compiled lies in the caches on disk
(inductor's and Triton's), where the group finds it. It measures no kernels, since the GPU is busy: shapes that were not measured
are left to the group itself. Whatever fails there is left to the group, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nn.kernels.autotune import Times
from ..run.experiment import Experiment
from ..run.session import start
from ..run.simulation import begin
from .scale import Scale
from .shelf import Shelf
from .store import values_of

PATIENCE = 180  # seconds that a group waits for what compiles its steps


class Ahead:
    """Keeps one process at most that compiles ahead."""

    def __init__(self, scale: Scale, root: str) -> None:
        self.scale, self.root = scale, root
        self._process: subprocess.Popen[str] | None = None

    def begin(self, experiments: Sequence[Experiment]) -> None:
        """Begin to compile the steps of runs that go side by side."""
        self.wait()
        given = {
            "experiments": [values_of(experiment) for experiment in experiments],
            "scale": self.scale.share,
            "root": self.root,
        }
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedstill.reproduce.ahead"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(given))

    def wait(self) -> None:
        """Wait until what was begun is over."""
        if self._process is None:
            return
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Unmeasured(Exception):
    """A kernel's shape was not measured before."""


def main() -> None:
    """Train the first round of the group that stdin describes."""
    given: dict[str, Any] = json.load(sys.stdin)
    shelf, scale = Shelf(), Scale(given["scale"])
    starts = []
    for values in given["experiments"]:
        experiment = Experiment.from_values({**values, "data_root": ""})
        starts.append(begin(experiment, federation=shelf.federation(experiment, scale, given["root"])))
    session = start(starts)
    session.trainer.choices.timer = _refuse
    next(session.rounds())


def _refuse(*_: object) -> Times:
    raise Unmeasured


if __name__ == "__main__":
    main()
