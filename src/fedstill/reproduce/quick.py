"""About what a plan costs on this machine: by the time of a plain step of each model, where the data are here."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.nn import functional

from .. import models
from ..core.errors import InputError
from ..data.dataset import Dataset
from ..data.split import parse_split
from ..run.experiment import Experiment
from ..run.prepare import pick_device
from .plan import Plan
from .shelf import Shelf
from .sources import needs

STEPS, SECONDS = 4, 0.05  # of a model that are timed at least; the fastest step counts
MOST = 32  # samples of a timed batch: larger ones take in proportion


class Clock:
    """Times a plain step of each model once, and knows the sizes of the data."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._shelf = Shelf()
        self._steps: dict[Any, float] = {}

    def seconds(self, plan: Plan) -> float | None:
        """Return about how long a plan takes; None where data are not here."""
        if any(need.missing for need in needs((trial.experiment for trial in plan.trials), self.root)):
            return None
        try:
            return sum(trial.seeds * self._run(trial.experiment) for trial in plan.trials if trial.trains)
        except InputError:
            return None

    def _run(self, experiment: Experiment) -> float:
        """Return about how long one run takes: each participant's samples in every epoch, and everybody's tests."""
        e = experiment
        data = self._shelf.dataset(e.data, self.root)
        total = len(data) + (len(data.test_x) if data.test_x is not None and e.pool == "all" else 0)
        ratio = parse_split(e.split)
        tested = 0.2 if ratio.official else ratio.test / 100
        step = self._step(e, data)
        train = total * (1 - tested) * e.participation * e.epochs
        if e.local_steps and e.clients:
            train = e.clients * e.participation * e.local_steps * e.batch_size
        return e.rounds * (train + total * tested / 3 / e.eval_every) * step

    def _step(self, experiment: Experiment, data: Dataset) -> float:
        """Return the seconds of a sample in a plain SGD step of a model, on all cores or the GPU."""
        batch = min(experiment.batch_size, MOST)
        device = pick_device(experiment.device)
        key = (experiment.model, data.shape, data.classes, batch, str(device))
        if key not in self._steps:
            model = models.build(experiment.model, data.shape, data.classes, 0, experiment.model_args).to(device)
            x, y = data.tensor(data.x[:batch]).to(device), torch.from_numpy(data.y[:batch]).to(device)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as clients are trained: each on one core
            try:
                times: list[float] = []
                while len(times) < STEPS or sum(times) < SECONDS:
                    began = time.perf_counter()
                    functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    _wait(device)
                    times.append(time.perf_counter() - began)
            finally:
                torch.set_num_threads(threads)
            cores = (
                1 if device.type == "cuda" else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            )
            self._steps[key] = min(times) / len(y) / cores
        return self._steps[key]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
