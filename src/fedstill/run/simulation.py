"""Run a federation in this process: `simulate` from Python, `run` for a whole experiment, `resume` for a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import settings
from ..core.errors import InputError, TrainingError, check_callable, check_path
from ..core.method import Method
from ..data import Federation
from ..server.coordinator import Callback
from ..timing import clock
from . import legal
from .callbacks import Progress
from .experiment import Experiment, Training, check_format, to_toml
from .journal import Journal
from .prepare import PYTHON, from_experiment, prepare
from .result import Run
from .session import Start, Transports, start


def simulate(
    method: Method,
    *,
    model: nn.Module | Callable[[], nn.Module],
    data: Federation,
    head: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    transport: Transports | None = None,
    **training: Any,
) -> Run:
    """Train `data`'s clients by `method`, starting from the weights that `model` has.

    `model` is any `nn.Module` (it is not changed) or a function that makes one; `head` names its head where the module does
    not. The other keywords are the fields of `Training`. With `out` the run leaves a folder behind; the same call with
    `resume=True` continues from that folder's newest checkpoint. `callbacks` follow the run
    (`on_start`, `on_round`, `on_end`); `transport` makes what carries orders, given an edge.
    """
    if isinstance(training.get("dtype"), torch.dtype):
        training["dtype"] = str(training["dtype"]).removeprefix("torch.")
    if isinstance(training.get("device"), torch.device):
        training["device"] = str(training["device"])
    config = settings.build(Training, training)
    legal.check_simulate(method, model, data, out, resume, progress)
    simulation = prepare(method, model, data, head, config)
    journal = None
    if out is not None:
        journal = Journal(out)
        about = {"data": PYTHON, "model": PYTHON, "head": simulation.task.head_modules()}
        text, before = to_toml(simulation.training, method, **about), journal.folder / "experiment.toml"
        partition = partition_record(data, simulation.training.profile)
        if not resume or not before.is_file():
            journal.begin(text, partition, simulation.device, simulation.trainer.training_threads)
            resume = False
        elif before.read_text(encoding="utf-8") != text:
            raise InputError("out", str(out), "the folder of the same call: its settings or method were others")
        else:
            journal.check_partition(partition)
    return finish(Start(simulation, journal, progress=progress, resume=resume, callbacks=callbacks), transport)


def run(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
    transport: Transports | None = None,
) -> Run:
    """Run a whole experiment: read and divide the data, build the model, train. `federation` saves reading it again."""
    legal.check_run(experiment, out, progress, federation)
    return finish(begin(experiment, out=out, progress=progress, federation=federation), transport)


def begin(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
) -> Start:
    """Return a whole experiment as it is before its first round, its folder made."""
    journal = Journal(out) if out is not None else None
    if journal:
        journal.check_free()
    simulation, federation = from_experiment(experiment, federation)
    if journal:
        kind = federation.partition_record.get("kind")
        complete = experiment.dealt(kind if kind in ("owner", "domain") else None)
        data = PYTHON if kind == "arrays" else complete.data
        complete = dataclasses.replace(complete, clients=len(federation), data=data)
        record, threads = partition_record(federation, experiment.profile), simulation.trainer.training_threads
        journal.begin(complete.to_toml(), record, simulation.device, threads)
    return Start(simulation, journal, experiment.checkpoint_every, progress)


def resume(folder: str | Path, *, progress: Progress | None = None, transport: Transports | None = None) -> Run:
    """Continue a run from its newest checkpoint, to the same bits as if it had never stopped."""
    check_path("folder", folder)
    check_callable("progress", progress)
    check_format(folder)
    journal = Journal(folder)
    experiment = Experiment.from_toml(journal.folder / "experiment.toml")
    simulation, federation = from_experiment(experiment)
    journal.check_partition(partition_record(federation, experiment.profile))
    return finish(Start(simulation, journal, experiment.checkpoint_every, progress, resume=True), transport)


def partition_record(federation: Federation, profile: str) -> dict[str, Any]:
    """Return what identifies the data, its division and the simulated devices."""
    return {**federation.partition_record, "contents": federation.checksum(), **clock.record(profile)}


def finish(one: Start, transport: Transports | None = None) -> Run:
    """Run one run to its end."""
    (run,) = start([one], transport).run()
    if isinstance(run, TrainingError):
        raise run
    return run
