"""What a round costs a client: SGD steps, FLOPs, bytes; and where a round's time goes.

Bytes are those of the tensors that really travel, from the orders' `down` and the replies' `up`: numel × element size of
every leaf, as often as it is sent. A message's header (names, shapes, plain numbers) is not counted, nor is what scoring
sends. FLOPs are counted in a client's round on the method's own hooks (`edge.flops`), once, outside the rounds that are
timed. Times are wall-clock; on a GPU the server's work may still be under way when its time is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core import tree
from ..core.tree import Tree
from ..engine import flops
from ..engine.bench import Bench
from ..engine.flops import Flops
from ..engine.flops import RoundFlops as Work
from ..engine.trainer import Trainer
from ..scores.score import Finished
from ..server.records import SPLIT, nbytes

__all__ = ["Cost", "Flops", "Work", "cost", "nbytes", "numbers", "seconds"]


MANY = 1000  # rounds over which epochs that are drawn by round have about their mean
UNTIL = "personal steps until the next download are another number each time"


@dataclass(frozen=True)
class Cost:
    """A round of one participant, mean over participants and rounds; None where it is not known."""

    steps: float | None = None
    bytes_down: float | None = None
    bytes_up: float | None = None
    numbers_down: int | None = None  # how many numbers the bytes hold, in the last round
    numbers_up: int | None = None
    samples: int | None = None  # of the client of mean size whose work was counted
    work: Work | None = None
    uncounted: str = ""  # why there is no `work`
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of a whole round: all participants together

    @property
    def flops(self) -> Flops | None:
        """All of the work."""
        return None if self.work is None else self.work.total

    @property
    def bytes(self) -> float | None:
        """Down and up."""
        return None if self.bytes_down is None or self.bytes_up is None else self.bytes_down + self.bytes_up

    def said(self) -> dict[str, Any]:
        """As plain numbers."""
        work = {} if self.work is None else {"flops": _plain(self.work.total), **_parts(self.work)}
        return {
            "steps": self.steps,
            "samples": self.samples,
            **work,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            **{f"{name}_seconds": value for name, value in self.seconds.items()},
        }


class Accountable(Finished, Protocol):
    """A finished run, as far as its cost needs it."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record a round."""

    @property
    def server(self) -> Tree:
        """The server's state."""

    @property
    def trainer(self) -> Trainer:
        """What trained the clients."""

    @property
    def has_data(self) -> bool:
        """Whether the clients are still there."""

    def memory(self, client: int) -> Tree:
        """Return what a client keeps."""


def cost(run: Accountable, bench: Bench | None = None) -> Cost:
    """A run's cost. FLOPs are those of a client of mean size, counted once, in the state after the last round.

    With a `bench` the steps and FLOPs are those of its clients; the run, on fewer samples, gave the state and the messages.
    """
    history = run.history
    found = Cost(
        steps=_steps(history),
        bytes_down=_mean([r["bytes_down"] for r in history if "bytes_down" in r]),
        bytes_up=_mean([r["bytes_up"] for r in history if "bytes_up" in r]),
        seconds=seconds(history),
    )
    if not run.has_data or not history or not history[-1]["participants"]:
        return found
    other, bench, client = bench is not None, bench or run.trainer.bench, int(history[-1]["participants"][0])
    samples = max(1, round(float(np.mean([bench.data.train.sizes[k] for k in run.clients]))))
    try:
        down, memory = run.method.send(run.task, run.server, client), run.memory(client)
        counted = flops.count(bench, run.task.round, down, memory, samples, MANY if other else 0)
    except Exception as error:  # a finished run must not be lost because its work cannot be counted
        return dataclasses.replace(found, samples=samples, uncounted=f"{type(error).__name__}: {error}".split("\n")[0])
    found = dataclasses.replace(found, samples=samples, numbers_down=numbers(down), numbers_up=numbers(counted.up))
    if run.training.wait_free == "until-download":  # what the method says is not what was done
        return dataclasses.replace(found, uncounted=UNTIL, steps=None if other else found.steps)
    return dataclasses.replace(found, work=counted.work, steps=counted.steps if other else found.steps)


def numbers(sent: Tree) -> int:
    """How many numbers a tree holds."""
    return sum(leaf.numel() for _, leaf in tree.leaves(sent))


def seconds(history: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of a round by where they go. Of several rounds the first, which also warms up, is left out."""
    records = [record for record in history if all(f"{name}_seconds" in record for name in SPLIT)]
    records = records[1:] or records
    return {name: float(np.mean([r[f"{name}_seconds"] for r in records])) for name in SPLIT} if records else {}


def _steps(history: Sequence[dict[str, Any]]) -> float | None:
    """Mean steps of a participant; personal ones that were made while waiting are the participants', too."""
    mean = _mean([r["steps"] / max(1, len(r["participants"])) for r in history if "steps" in r])
    own, took_part = sum(r.get("personal_steps", 0) for r in history), sum(len(r["participants"]) for r in history)
    return None if mean is None else mean + own / max(1, took_part)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _plain(found: Flops) -> dict[str, float]:
    return {"forward": found.forward, "backward": found.backward, "total": found.total}


def _parts(work: Work) -> dict[str, Any]:
    return {
        "flops_begin": _plain(work.begin),
        "flops_phases": [_plain(phase) for phase in work.phases],
        "flops_finish": _plain(work.finish),
    }
