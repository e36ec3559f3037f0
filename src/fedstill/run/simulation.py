"""Run a federation in this process: `simulate` from Python, `run` for a whole experiment, `resume` for a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import settings
from ..core.errors import InputError, TrainingError, check_callable, check_path
from ..core.method import Method
from ..core.metric import Function
from ..core.training import REAL, Timing
from ..data import Federation
from ..data.outline import Outline
from ..server.coordinator import Callback
from ..timing import clock
from . import legal
from .callbacks import Progress
from .experiment import Experiment, Training, check_format, to_toml
from .journal import Journal
from .lock import check_free
from .prepare import PYTHON, Simulation, federation_of, from_experiment, prepare
from .result import Run
from .session import Elsewhere, Start, Transports, start
from .signals import listening

AMENDABLE = ("rounds", "patience")  # what a run can go on with another value of


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
    metrics: Sequence[str | Function] = (),
    **training: Any,
) -> Run:
    """Train `data`'s clients by `method`, starting from the weights that `model` has.

    `model` is any `nn.Module` (it is not changed) or a function that makes one; `head` names its head where the module does
    not. `metrics` are names of metrics, or functions (targets, predictions) → number of your own. The other keywords are the
    fields of `Training`. With `out` the run leaves a folder behind; the same call with `resume=True` continues from that folder's
    newest checkpoint. `callbacks` follow the run (`on_start`, `on_round`, `on_end`); `transport` makes what carries orders, given
    an edge.
    """
    if isinstance(training.get("dtype"), torch.dtype):
        training["dtype"] = str(training["dtype"]).removeprefix("torch.")
    if isinstance(training.get("device"), torch.device):
        training["device"] = str(training["device"])
    asked = [metrics] if isinstance(metrics, str) or callable(metrics) else metrics
    own = {getattr(metric, "__name__", "own"): metric for metric in asked if callable(metric)}
    names = [metric if isinstance(metric, str) else getattr(metric, "__name__", "own") for metric in asked]
    if len(own) < sum(map(callable, asked)):
        raise InputError("metrics", ",".join(names), "functions with different names")
    config = settings.build(Training, {**training, "metrics": names})
    legal.check_simulate(method, model, data, out, resume, progress)
    check_clock(config, transport)
    simulation = prepare(method, model, data, head, config, functions=own)
    journal = None if out is None else Journal(out)
    if journal is not None:
        about = {"data": PYTHON, "model": PYTHON, "head": simulation.task.head_modules()}
        text, before = to_toml(simulation.training, method, **about), journal.folder / "experiment.toml"
        partition = partition_record(data, simulation.training.profile)
        with journal.entered():
            if not resume or not journal.begun:
                _begin(journal, text, partition, simulation, data)
                resume = False
            else:
                journal.check_settings()
                if before.read_text(encoding="utf-8") != text:
                    raise InputError("out", str(out), "the folder of the same call: its settings or method were others")
                journal.check_partition(partition)
                journal.check_constants(simulation.net.fixed)
                journal.note_changes(simulation.device)
    return finish(Start(simulation, journal, progress=progress, resume=resume, callbacks=callbacks), transport)


def run(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
    callbacks: Sequence[Callback] = (),
    transport: Transports | None = None,
) -> Run:
    """Run a whole experiment: read and divide the data, build the model, train. `federation` saves reading it again.

    `callbacks` follow the run, as those of `simulate`.
    """
    legal.check_run(experiment, out, progress, federation)
    one = begin(experiment, out=out, progress=progress, federation=federation, callbacks=callbacks, transport=transport)
    return finish(one, transport)


def begin(
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
    resume: bool = False,
    transport: Transports | None = None,
    callbacks: Sequence[Callback] = (),
) -> Start:
    """Return a whole experiment as it is before its first round, its folder made.

    With `resume` a folder that holds the experiment is continued, if need be with the other number of rounds.
    """
    journal = Journal(out) if out is not None else None
    if journal and resume and journal.begun:
        return continued(
            journal.folder,
            progress=progress,
            federation=federation,
            experiment=experiment,
            transport=transport,
            callbacks=callbacks,
        )
    if journal:
        check_free(journal.folder, resume)
    federation = share_of(federation, experiment, transport)
    simulation, federation = from_experiment(experiment, federation)
    if journal:
        record = partition_record(federation, experiment.profile)
        with journal.entered():
            _begin(journal, complete(experiment, federation).to_toml(), record, simulation, federation)
    return Start(simulation, journal, experiment.checkpoint_every, progress, callbacks=callbacks)


def _begin(
    journal: Journal, text: str, partition: dict[str, Any], simulation: Simulation, federation: Federation
) -> None:
    """Have a journal write what determines a run."""
    threads, engine = simulation.trainer.training_threads, simulation.trainer.name
    journal.begin(text, partition, simulation.device, threads, engine, Outline.of(federation), simulation.net.fixed)


def complete(experiment: Experiment, federation: Federation) -> Experiment:
    """Return the experiment with what its data decided filled in."""
    kind = federation.partition_record.get("kind")
    dealt = experiment.dealt(kind if kind in ("owner", "domain", "iid") else None)
    data = PYTHON if kind == "arrays" else dealt.data
    objective = dealt.objective if federation.objective == "classification" else federation.objective
    return dataclasses.replace(dealt, clients=len(federation), data=data, objective=objective)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    patience: int | None = None,
    progress: Progress | None = None,
    transport: Transports | None = None,
) -> Run:
    """Continue a run from its newest checkpoint, to the same bits as if it had never stopped.

    With `rounds` it goes on to that many, with `patience` one that has stopped early has more (0: it goes on to the end); the
    folder's experiment.toml then says so.
    """
    check_path("folder", folder)
    check_callable("progress", progress)
    changes = {name: value for name, value in (("rounds", rounds), ("patience", patience)) if value is not None}
    return finish(continued(folder, changes=changes, progress=progress, transport=transport), transport)


def continued(
    folder: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    federation: Federation | None = None,
    experiment: Experiment | None = None,
    transport: Transports | None = None,
    callbacks: Sequence[Callback] = (),
) -> Start:
    """Return the run that a folder holds as it goes on after its newest checkpoint.

    `experiment` is what it should hold; only the fields `AMENDABLE` may have other values, which else `changes` gives.
    `federation` saves reading the data again.
    """
    check_format(folder)
    journal = Journal(folder)
    with journal.entered():
        journal.check_settings()
        held = Experiment.from_toml(journal.folder / "experiment.toml")
        wanted = dataclasses.replace(held, **(changes or {}))
        whole = wanted if experiment is None else experiment
        federation = share_of(federation, whole, transport)
        simulation, federation = from_experiment(whole, federation)
        if experiment is not None:
            wanted = complete(experiment, federation)
            check_same(held, wanted, journal.folder)
        journal.check_partition(partition_record(federation, wanted.profile))
        journal.check_constants(simulation.net.fixed)
        changed, done = any(getattr(wanted, n) != getattr(held, n) for n in AMENDABLE), len(journal.history())
        if wanted.rounds != held.rounds and wanted.rounds < done:
            raise InputError("rounds", wanted.rounds, f"at least {done}: so many are over")
        journal.note_changes(simulation.device)
    amended = wanted.to_toml() if changed else ""
    return Start(
        simulation, journal, wanted.checkpoint_every, progress, resume=True, amended=amended, callbacks=callbacks
    )


def check_same(held: Experiment, wanted: Experiment, folder: Path) -> None:
    """Refuse a folder that holds another run than the one that should go on in it."""
    (one, other) = ({**settings.values_of(e), "method": e.method} for e in (held, wanted))
    for name, value in other.items():
        if name not in AMENDABLE and one[name] != value:
            raise InputError(name, value, f"{one[name]}, as in {folder / 'experiment.toml'}")


def partition_record(federation: Federation, profile: str) -> dict[str, Any]:
    """Return what identifies the data, its division and the simulated devices."""
    named = {name: list(of) for name, of in (("names", federation.names), ("labels", federation.labels)) if of}
    return {**named, **federation.partition_record, "contents": federation.checksum(), **clock.record(profile)}


def check_clock(training: Timing, transport: Transports | None) -> None:
    """Refuse real seconds where clients are simulated."""
    live = transport.live if isinstance(transport, Elsewhere) else transport is not None
    if training.profile == REAL and not live:
        right = f"{clock.KINDS} in a simulation: the seconds of real sites are a deployment's (fedstill hub run)"
        raise InputError("profile", REAL, right)


def share_of(federation: Federation | None, experiment: Experiment, transport: Transports | None) -> Federation | None:
    """Return what this process holds of a federation: all, or the share that a transport to other processes leaves it."""
    check_clock(experiment, transport)
    if not isinstance(transport, Elsewhere) or (federation is not None and federation.whole is not None):
        return federation
    federation = federation or federation_of(experiment)
    everybodys = experiment.new or experiment.averaged  # scores on the union of all tests
    return federation.only(transport.share(len(federation)), tests=everybodys)


def finish(one: Start, transport: Transports | None = None) -> Run:
    """Run one run to its end."""
    try:
        with listening(one.journal is not None) as stop:
            (run,) = start([one], transport, stop).run()
    finally:
        if one.journal is not None:
            one.journal.release()
    if isinstance(run, TrainingError):
        raise run
    return run
