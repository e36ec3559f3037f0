"""Further scores (New, External, averaged, fine-tuned, newcomers) by round: a callback that adds them to the records."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from .. import scores
from ..server.coordinator import Coordinator, Record
from .driver import Driver
from .prepare import Simulation
from .result import Run


class FurtherCallback:
    """Computes the scores that the settings ask for every so many rounds, and after the last, as after the federation.

    It must come before the callback that writes records. Clients are asked on copies, so nothing of the training changes.
    """

    def __init__(self, simulation: Simulation, driver: Driver, engine: str) -> None:
        self.simulation, self.driver, self.engine = simulation, driver, engine
        self.results: dict[str, Any] | None = None  # after the last round

    def on_start(self, coordinator: Coordinator) -> None:
        """Do nothing."""

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Add the scores of this round's models to its record, where it has any."""
        round, began = record["round"], time.perf_counter()
        last = round == coordinator.task.rounds
        if round % self.simulation.training.further_every and not last:
            return
        run = Run.of(self.simulation, coordinator, self.driver, self.engine, 0.0)
        results = scores.after(dataclasses.replace(run, task=dataclasses.replace(run.task, round=round)))
        record |= results
        record["further_seconds"] = (time.perf_counter() - began) / coordinator.runs
        if last:
            self.results = results

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing."""


def latest(coordinator: Coordinator) -> dict[str, Any] | None:
    """Return the scores after the last round, where they were computed with its record."""
    found = [one.results for one in coordinator.callbacks if isinstance(one, FurtherCallback)]
    return found[0] if found else None
