"""answers.json: which of its own test samples each client's model gets right after the last round, or how far off it is.

Two runs on the same data can then be compared sample by sample, which tells a client more than two accuracies do. Where samples
are not simply right or wrong, it has each one's score: the share of labels or tokens that are right, or the absolute error. The
file also has how many samples of each class every client has. Nobody is asked for anything: clients whose samples are with other
processes or at real sites are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core import files
from ..core.errors import TrainingError
from ..core.files import Damaged, write
from ..core.reading import Unreadable
from ..core.reading import field as entry
from ..data.federation import class_counts
from ..engine.bench import threads
from .result import Run

ANSWERS = "answers.json"
Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """By client, for each of its test samples whether its model got it right, or its score; and all its samples by class."""

    round: int
    right: Mapping[int, Bits | Floats]
    classes: Mapping[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Answers:
        """Ask every model that serves a client in this process about the client's test samples."""
        splits = [part for part in (run.data.train, run.data.val, run.data.test) if part is not None]
        held = [k for k in run.clients if all(part.held is None or k in part.held for part in splits)]
        right, classes, objective = {}, {}, run.task.objective
        with torch.no_grad(), threads(run.trainer.training_threads):
            for k in held:
                targets = torch.cat([part.of(k)[1] for part in splits])
                classes[k] = class_counts(objective.name, targets, run.task.net.outputs).tolist()
                x, y = run.data.test.of(k)
                try:
                    served = run.served(k)
                except TrainingError:  # its model cannot be
                    continue
                right[k] = objective.score(run.task.predict(served, x), y).cpu().numpy()
        return cls(run.task.round, right, classes)

    def write(self, folder: Path) -> None:
        """Write the file into a run's folder; nothing where no client's answers are known."""
        if not self.right:
            return
        clients = {str(k): {"tests": len(of), **_packed(of)} for k, of in self.right.items()}
        classes = {str(k): counts for k, counts in self.classes.items()}
        write(folder / ANSWERS, files.seal({"round": self.round, "clients": clients, "classes": classes}))

    @classmethod
    def read(cls, folder: Path, round: int) -> Answers | None:
        """Return the answers after this round; None where there are none, or not as they were written."""
        try:
            record = files.unseal(folder / ANSWERS)
            right = {int(k): _bits(client) for k, client in entry(record, "clients", dict).items()}
            classes = {int(k): [int(n) for n in counts] for k, counts in entry(record, "classes", dict).items()}
            return cls(round, right, classes) if entry(record, "round", int) == round else None
        except (Damaged, Unreadable, ValueError, TypeError):
            return None


def _packed(of: Bits | Floats) -> dict[str, str]:
    """Return one client's answers as the file has them."""
    if of.dtype == np.bool_:
        return {"right": np.packbits(of.astype(bool)).tobytes().hex()}
    return {"scores": of.astype("<f8").tobytes().hex()}


def _bits(client: dict[str, Any]) -> Bits | Floats:
    """Return one client's answers; raise `ValueError` where there are fewer than tests."""
    tests = entry(client, "tests", int, least=1)
    if "scores" in client:
        scores = np.frombuffer(bytes.fromhex(entry(client, "scores", str)), "<f8").astype(np.float64)
        if len(scores) != tests or not np.isfinite(scores).all():
            raise ValueError(f"{len(scores)} scores of {tests} tests")
        return scores
    packed = bytes.fromhex(entry(client, "right", str))
    if len(packed) != -(-tests // 8):
        raise ValueError(f"{tests} answers in {len(packed)} bytes")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=tests).astype(bool)
