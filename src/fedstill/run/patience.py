"""Early stopping: a run ends after so many scored rounds without a better score, and keeps the models of its best round.

The score is that of the run's own evaluation contract, whose `round` says which data choose: best-val or, labelled as such,
best-test. What is best follows from the records alone, so a run that was stopped and goes on decides as if it had not been.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import TrainingError
from ..core.training import FurtherScores
from ..server.coordinator import Coordinator, Record
from ..transport.messages import Dialogue
from .callbacks import restore, save
from .checkpoint import Bound, Checkpoint, Checkpoints, CheckpointWriter
from .evaluate import Evaluation
from .journal import Journal

ALONE = Bound("", {})  # what the checkpoint of a run without a folder belongs to


@dataclass
class Patience:
    """The best round so far, and how many rounds were scored since."""

    contract: Evaluation
    patience: int
    best: int = 0  # 0: none was scored
    value: float = -math.inf
    since: int = 0

    @classmethod
    def of(cls, scores: FurtherScores, history: Iterable[Record] = ()) -> Patience | None:
        """Return the state after these records; None where the run does not stop early."""
        if not scores.patience:
            return None
        patience = cls(Evaluation.by(scores), scores.patience)
        for record in history:
            patience.take(record)
        return patience

    @property
    def over(self) -> bool:
        """Whether the run ends."""
        return self.since >= self.patience

    def take(self, record: Record) -> None:
        """Note a round; one that was not scored changes nothing, an equal score is no better one."""
        value = self.contract.chooses(record)
        if value is None:
            return
        if value > self.value:
            self.best, self.value, self.since = int(record["round"]), value, 0
        else:
            self.since += 1


class PatienceCallback:
    """Ends a run whose score gets no better, and keeps what its best round's models are made of.

    It must come before the callback that writes records. With a journal the best round's checkpoint is the journal's, else it is
    in a temporary folder.
    """

    def __init__(self, scores: FurtherScores, journal: Journal | None) -> None:
        self.scores, self.journal = scores, journal
        self.state = Patience.of(scores)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._checkpoints: Checkpoints | None = None

    def on_start(self, coordinator: Coordinator) -> None:
        """Look at the rounds of an earlier process."""
        self.state = Patience.of(self.scores, coordinator.state.history)
        self._tell(coordinator)

    def on_round(self, coordinator: Coordinator, record: Record) -> Dialogue[None] | None:
        """Note in the record which round is the best so far, and whether the run stops here; keep the best round's state."""
        assert self.state is not None
        self.state.take(record)
        self._tell(coordinator)
        if self.state.best:
            record["best_round"] = self.state.best
        if self.state.over and record["round"] < coordinator.task.rounds:
            record["stopped"] = True
        if self.journal is not None or self.state.best != record["round"]:
            return None
        return save(self._writer, coordinator)

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing: `go_back` is called where the models are asked for."""

    def go_back(self, coordinator: Coordinator) -> Dialogue[None]:
        """Return server and clients to their states after the best round."""
        best = coordinator.best_round
        if best not in (0, coordinator.state.round):
            checkpoint = self._checkpoint(best, coordinator)
            if checkpoint is None:
                raise TrainingError(
                    f"the checkpoint of round {best}, the best, is missing or damaged: its models are lost"
                )
            state = checkpoint.state()
            coordinator.go_back(best, state["server"], state.get("timing", {}))
            yield from restore(checkpoint, coordinator)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _tell(self, coordinator: Coordinator) -> None:
        if self.state is not None:
            coordinator.best_round, coordinator.over = self.state.best, self.state.over

    def _writer(self, round: int, state: dict[str, object]) -> CheckpointWriter:
        """Return what writes the state after the best round into the temporary folder, in place of the one before."""
        if self._checkpoints is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedstill-best-")
            self._checkpoints = Checkpoints(Path(self._temporary.name), keep=1)
        return CheckpointWriter(self._checkpoints, round, state, ALONE, {})

    def _checkpoint(self, round: int, coordinator: Coordinator) -> Checkpoint | None:
        device = coordinator.task.net.device
        if self.journal is not None:
            return self.journal.survey(device).whole.get(round)
        return None if self._checkpoints is None else self._checkpoints.load(round, ALONE, device)
