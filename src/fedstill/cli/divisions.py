"""The federations of a job: one for each seed, and for each value where a sweep divides the data in several ways."""

from __future__ import annotations

import dataclasses

from ..data import Federation
from ..run import prepare
from ..run.experiment import Experiment
from ..run.session import Transports
from ..run.simulation import share_of
from .job import Job

DIVIDED_BY = (
    "data", "data_root", "label", "input", "owner", "ignore", "impute", "encode", "normalise", "clients", "partition", "split",
    "pool", "external", "seed", "objective", "memory_map",
)  # fmt: skip


class Divisions:
    """Reads and divides data when a run first asks for it; runs whose settings of it are alike share one federation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.transport: Transports | None = (
            None  # where clients are divided among processes: of each, this process's share
        )
        self._made: dict[tuple[object, ...], Federation] = {}

    def of(self, label: str, number: int = 0) -> Federation:
        """Return the federation of an experiment with the `number`-th seed after its own."""
        experiment = seeded(self.job.experiments[label], number)
        key = tuple(getattr(experiment, name) for name in DIVIDED_BY)
        if key not in self._made:
            self._made[key] = prepare.federation_of(experiment)
        federation = share_of(self._made[key], experiment, self.transport) or self._made[key]
        self._made[key] = federation
        return federation

    def each(self, number: int = 0) -> list[Federation]:
        """Return the different federations of a seed, in the order of the experiments."""
        return list({id(one): one for one in (self.of(label, number) for label in self.job.experiments)}.values())

    def clear(self) -> None:
        """Let go of all; what is asked for again is read anew."""
        self._made.clear()


def seeded(experiment: Experiment, number: int) -> Experiment:
    """Return the experiment with the `number`-th seed after its own."""
    return dataclasses.replace(experiment, seed=experiment.seed + number)
