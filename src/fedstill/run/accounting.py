"""The cost of a round for a client (SGD steps, FLOPs, bytes) and the split of a round's time.

Bytes are those of the tensors that are sent, from the orders' `down` and the replies' `up`: numel × element size of every leaf,
each time it is sent. A message's header (names, shapes, plain numbers) and the messages of scoring are not counted. FLOPs are
counted in a client's round on the method's own hooks (`engine.flops`), once, outside the timed rounds. Times are wall-clock; on
a GPU the server's work may still be running when its time is taken.
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


AVERAGED_ROUNDS = 1000  # rounds over which epochs drawn by round are averaged
UNTIL = "personal steps until the next download are another number each time"


@dataclass(frozen=True)
class Cost:
    """The cost of a round for one participant, mean over participants and rounds; None where unknown."""

    steps: float | None = None
    bytes_down: float | None = None
    bytes_up: float | None = None
    numbers_down: int | None = None  # numbers (tensor elements) sent in the last round
    numbers_up: int | None = None
    samples: int | None = None  # training samples of the client whose work was counted: the mean over clients
    work: Work | None = None
    uncounted: str = ""  # the reason for which `work` is None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of a round, all participants together

    @property
    def flops(self) -> Flops | None:
        """FLOPs of all stages together."""
        return None if self.work is None else self.work.total

    @property
    def bytes(self) -> float | None:
        """Bytes down and up together."""
        return None if self.bytes_down is None or self.bytes_up is None else self.bytes_down + self.bytes_up

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as a dictionary of plain numbers."""
        work = {} if self.work is None else {"flops": _plain(self.work.total), **_stages(self.work)}
        return {
            "steps": self.steps,
            "samples": self.samples,
            **work,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            **{f"{name}_seconds": value for name, value in self.seconds.items()},
        }


class Accountable(Finished, Protocol):
    """The attributes of a finished run that its cost is computed from."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records, one for each round."""

    @property
    def server(self) -> Tree:
        """The server's state."""

    @property
    def trainer(self) -> Trainer:
        """The trainer of the clients."""

    @property
    def has_data(self) -> bool:
        """Whether the clients and their data are still loaded."""

    def memory(self, client: int) -> Tree:
        """Return a client's memory."""


def cost(run: Accountable, bench: Bench | None = None) -> Cost:
    """Return a run's cost. FLOPs are counted once, for a client of mean size, in the state after the last round.

    With a `bench` the steps and FLOPs are those of its clients; state and messages come from the run, which had fewer samples.
    """
    history = run.history
    measured = Cost(
        steps=_steps(history),
        bytes_down=_mean([r["bytes_down"] for r in history if "bytes_down" in r]),
        bytes_up=_mean([r["bytes_up"] for r in history if "bytes_up" in r]),
        seconds=seconds(history),
    )
    if not run.has_data or not history or not history[-1]["participants"]:
        return measured
    separate, bench, client = bench is not None, bench or run.trainer.bench, int(history[-1]["participants"][0])
    samples = max(1, round(float(np.mean([bench.data.train.sizes[k] for k in run.clients]))))
    try:
        down, memory = run.method.send(run.task, run.server, client), run.memory(client)
        counted = flops.count(bench, run.task.round, down, memory, samples, AVERAGED_ROUNDS if separate else 0)
    except Exception as error:  # a finished run must not be lost because its work cannot be counted
        return dataclasses.replace(
            measured, samples=samples, uncounted=f"{type(error).__name__}: {error}".split("\n")[0]
        )
    measured = dataclasses.replace(
        measured, samples=samples, numbers_down=numbers(down), numbers_up=numbers(counted.up)
    )
    if run.training.wait_free == "until-download":  # the method's phases do not determine the steps taken
        return dataclasses.replace(measured, uncounted=UNTIL, steps=None if separate else measured.steps)
    return dataclasses.replace(measured, work=counted.work, steps=counted.steps if separate else measured.steps)


def numbers(sent: Tree) -> int:
    """Return the number of tensor elements in a tree."""
    return sum(leaf.numel() for _, leaf in tree.leaves(sent))


def seconds(history: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of a round by stage. The first of several rounds, which includes warm-up, is left out."""
    records = [record for record in history if all(f"{name}_seconds" in record for name in SPLIT)]
    records = records[1:] or records
    return {name: float(np.mean([r[f"{name}_seconds"] for r in records])) for name in SPLIT} if records else {}


def _steps(history: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean steps of a participant, personal ones made while waiting included."""
    mean = _mean([r["steps"] / max(1, len(r["participants"])) for r in history if "steps" in r])
    personal, participants = (
        sum(r.get("personal_steps", 0) for r in history),
        sum(len(r["participants"]) for r in history),
    )
    return None if mean is None else mean + personal / max(1, participants)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _plain(count: Flops) -> dict[str, float]:
    """Return FLOPs as a dictionary of plain numbers."""
    return {"forward": count.forward, "backward": count.backward, "total": count.total}


def _stages(work: Work) -> dict[str, Any]:
    """Return the FLOPs of each stage of a round."""
    return {
        "flops_begin": _plain(work.begin),
        "flops_phases": [_plain(phase) for phase in work.phases],
        "flops_finish": _plain(work.finish),
    }
