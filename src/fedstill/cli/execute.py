"""Runs a job: checks all of it, trains, reports; `resume` goes on with one whose folder holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import own, settings
from ..core.errors import Stopped, TrainingError
from ..data import Federation
from ..data.samples import pieces
from ..report import local_work
from ..report.text import Facts, partition_of
from ..run import prepare, simulation, together
from ..run.callbacks import Progress
from ..run.experiment import check_format
from ..run.groups import Groups
from ..run.journal import Journal
from ..run.legal import check_out
from ..run.lock import FolderLock, check_free
from ..run.result import Run
from ..run.session import Transports
from ..run.track import trackers
from . import flags, folders, saved
from .divisions import Divisions, seeded
from .job import SWEEP, Job
from .live import Watch, watch
from .screen import results, say

FAR = 10.0  # root mean square of a column above which it is said that it is not scaled
NOT_SAVED = "nothing was written: --out FOLDER saves the run (settings, metrics, checkpoints, picture)"


@dataclasses.dataclass
class Results:
    """The results of a job so far, by label."""

    runs: dict[str, list[Run]] = dataclasses.field(default_factory=dict)
    folders: dict[str, list[Path]] = dataclasses.field(default_factory=dict)
    hashes: list[str] = dataclasses.field(default_factory=list)  # of the partitions, by seed
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # how data differ, each by label

    def add(self, label: str, seed: int, result: Run | TrainingError, folder: Path | None) -> None:
        """Add a run, or the reason why it failed."""
        if isinstance(result, TrainingError):
            before = f"{self.failed[label]}; " if label in self.failed else ""
            self.failed[label] = f"{before}seed {seed}: {result}"
            return
        beside = {name: column[label] for name, column in self.beside.items()}
        self.runs.setdefault(label, []).append(dataclasses.replace(result.without_data(), beside=beside))
        if folder is not None:
            self.folders.setdefault(label, []).append(folder)


def execute(job: Job, resume: bool = False, transport: Transports | None = None) -> None:
    """Run a job and report on it. Every experiment is checked before the first is run or anything is written.

    With `resume` the runs that its folder holds go on, and those that are finished are not run again.
    """
    with contextlib.ExitStack() as stack:
        if resume and job.out is not None:
            stack.enter_context(FolderLock(job.out))
        _execute(job, resume, stack, transport)


def _execute(job: Job, resume: bool, stack: contextlib.ExitStack, transport: Transports | None) -> None:
    """Run a job; what must be let go of at its end, such as the lock of its folder, goes onto the stack."""
    replaces_demo = job.command == folders.DEMO and job.out is not None and not resume and folders.is_demo(job.out)
    if job.out is not None and not replaces_demo and not resume:
        check_out(job.out)
    divisions = Divisions(job)
    stacked, notes = _check(job, divisions)
    if resume:
        _check_folders(job)
    divided = divisions.each()
    facts = Facts.of(job.first, divided[0])
    if job.command == SWEEP:  # each row names what it was given
        swept = {"partition": "", "clients": 0}
        facts = dataclasses.replace(facts, **{name: swept[name] for name in swept if name in job.varied})  # type: ignore[arg-type]
    if job.out is not None and replaces_demo:
        with FolderLock(job.out):
            folders.remove(job.out)
    if job.out is not None and job.several:
        if not resume:
            stack.enter_context(FolderLock(job.out))
            check_free(job.out)
        saved.write_job(job)
        folders.save(
            job.out, job.experiments, {}, facts, command=job.command, line=job.line
        )  # marks the folder from the beginning
    if job.dated and job.out is not None:
        say(f"results: {job.out}/ (--out FOLDER names another, --no-out writes nothing)")
    for federation in divided:
        sizes = [len(client.y_train) for client in federation.clients]
        samples = f"{min(sizes):,} to {max(sizes):,} training samples each"
        dealt = f"{len(federation)} clients by {partition_of(federation)}"
        learns = "" if federation.objective == "classification" else f"; {_learns(federation, job.first.objective)}"
        say(f"{job.first.data}: {dealt}, {samples}; model {own.short(job.first.model)}{learns}")
    for line in [*notes, *divided[0].notes, *_unscaled(divided[0])]:
        say(line)
    divisions.transport = transport
    with stoppable(job.out if job.several else job.folder(next(iter(job.experiments)), 0)):
        done = _run_all(job, divisions, stacked, resume, transport)
    _report(job, done, dataclasses.replace(facts, hashes=tuple(done.hashes)))


def _learns(federation: Federation, said: str) -> str:
    """Say what is learned, and that it was taken from the targets where nobody has said it."""
    by = " (as the targets are; --objective says otherwise)" if said == "auto" else ""
    return f"{federation.objective} of {federation.classes} {federation.unit}{by}"


def _check(job: Job, divisions: Divisions) -> tuple[list[str], list[str]]:
    """Refuse what cannot run. Return the labels whose clients are stacked, and a line for each flag without effect."""
    stacked: list[str] = []
    unused: dict[tuple[str, str], list[str]] = {}  # labels by (field, reason)
    for label, experiment in job.experiments.items():
        ready, _ = prepare.from_experiment(experiment, divisions.of(label))
        if ready.trainer.name == "stacked":
            stacked.append(label)
        method, task = experiment.method, ready.trainer.bench.task
        names = [name for name in job.explicit if name not in settings.values_of(method)]
        for pair in experiment.without_effect(names):
            unused.setdefault(pair, []).append(label)
        for name, reason in local_work.without_effect(method, task, ready.training, job.explicit):
            unused[name, reason] = list(job.experiments)  # the reason names the method
    lines = []
    for (name, reason), labels in unused.items():
        on = "" if len(labels) == len(job.experiments) else f" on {', '.join(labels)}"
        lines.append(f"{flags.flag(name)} has no effect{on} {flags.in_words(reason)}")
    return stacked, lines


def _unscaled(federation: Federation) -> list[str]:
    """Return a line where columns of numbers are far from 0, from which models learn badly; none for images and texts."""
    if len(federation.shape) != 1 or not federation.clients[0].x_train.is_floating_point():
        return []
    squares = [piece.double().square().sum(0) for client in federation.clients for piece in pieces(client.x_train)]
    size = (torch.stack(squares).sum(0) / sum(federation.sizes("train"))).sqrt()
    far = [i for i, value in enumerate(size.tolist()) if value > FAR]
    if not far:
        return []
    columns = None if federation.preparation is None else federation.preparation.columns
    known = columns.features if columns is not None and columns.named else [f"column {i + 1}" for i in range(len(size))]
    shown = ", ".join(f"{known[i]} (about {size[i]:,.3g})" for i in far[:5])
    more = f" and {len(far) - 5} more" if len(far) > 5 else ""
    return [f"not scaled: {shown}{more}; models may learn nothing from such columns: --normalise federated scales them"]


def _check_folders(job: Job) -> None:
    """Refuse, before any run goes on, a folder that one of them could not go on in."""
    for label in job.experiments:
        for number in range(job.seeds):
            folder = job.folder(label, number)
            if folder is not None and Journal(folder).begun:
                check_format(folder)
                Journal(folder).check_settings()
            elif folder is not None:
                check_free(folder, resume=True)


def _run_all(
    job: Job, divisions: Divisions, stacked: Sequence[str], resume: bool, transport: Transports | None
) -> Results:
    """Run every experiment with every seed."""
    done = Results(beside={name: column for name, column in job.varied.items() if name in ("partition", "clients")})
    groups = Groups.read(job.out if job.several else None)
    with watch(list(job.experiments), job.first.rounds, job.seeds) as progress, placed(progress):
        for number in range(job.seeds):
            if number and not stacked:
                divisions.clear()
            done.hashes += [federation.hash for federation in divisions.each(number)]
            for label in job.experiments:
                if label not in stacked and label not in done.failed:
                    _run_one(job, label, number, divisions.of(label, number), progress, done, resume, transport)
        for labels in [stacked] if job.command == SWEEP else [[label] for label in stacked]:
            if labels:
                _run_stacked(job, labels, divisions, progress, done, groups, resume, transport)
    return done


def _run_one(
    job: Job,
    label: str,
    number: int,
    federation: Federation,
    progress: Watch,
    done: Results,
    resume: bool,
    transport: Transports | None,
) -> None:
    """Run an experiment with one seed. A failure is noted and leaves the others alone."""
    experiment, folder = seeded(job.experiments[label], number), job.folder(label, number)
    progress.start(label)

    def step(record: dict[str, Any]) -> None:
        progress.step(label, number, record)

    result: Run | TrainingError
    try:
        _check_failed(folder, resume)
        start = simulation.begin(
            experiment,
            out=folder,
            progress=step,
            federation=federation,
            resume=resume,
            transport=transport,
            callbacks=trackers(job.track, folder, job.name(label, number)),
        )
        result = simulation.finish(start, transport)
        progress.resumed(label, number, result.history[-1])
    except TrainingError as error:
        result = error
    done.add(label, experiment.seed, result, folder)


def _run_stacked(
    job: Job,
    labels: Sequence[str],
    divisions: Divisions,
    progress: Watch,
    done: Results,
    groups: Groups,
    resume: bool,
    transport: Transports | None,
) -> None:
    """Run all seeds of some experiments, whose clients are stacked, together where that is possible.

    With `resume`, those go on together that were together before.
    """
    runs = {job.name(label, number): (label, number) for label in labels for number in range(job.seeds)}
    outcomes: dict[str, Run | TrainingError] = {}
    for name, run in runs.items():
        try:
            _check_failed(job.folder(*run), resume)
        except TrainingError as error:
            outcomes[name] = error
    left = [name for name in runs if name not in outcomes]
    if resume:
        groups.check([name for name in left if (folder := job.folder(*runs[name])) and Journal(folder).history()])
    for names in groups.divide(left) if resume else [left]:
        members = [runs[name] for name in names]
        outcomes |= zip(names, _run_group(job, members, divisions, progress, groups, resume, transport), strict=True)
    for name, (label, number) in runs.items():
        outcome = outcomes[name]
        if not isinstance(outcome, TrainingError):
            progress.resumed(label, number, outcome.history[-1])
        done.add(label, job.experiments[label].seed + number, outcome, job.folder(label, number))


def _run_group(
    job: Job,
    runs: Sequence[tuple[str, int]],
    divisions: Divisions,
    progress: Watch,
    groups: Groups,
    resume: bool,
    transport: Transports | None,
) -> list[Run | TrainingError]:
    """Run several experiments, each with the number of its seed, together where that is possible."""
    side_by_side: list[int] = []  # the runs that are trained together now

    def begin(indices: Sequence[int]) -> None:
        groups.begin([job.name(*runs[i]) for i in indices])
        side_by_side[:] = indices
        for label in dict.fromkeys(runs[i][0] for i in indices):
            progress.start(label)

    def step_of(index: int) -> Progress:
        label, number = runs[index]

        def step(record: dict[str, Any]) -> None:
            if sum(runs[i][0] == label for i in side_by_side) == job.seeds:
                progress.step_together(label, record)
            else:
                progress.step(label, number, record)

        return step

    return together.try_together(
        [seeded(job.experiments[label], number) for label, number in runs],
        outs=[job.folder(label, number) for label, number in runs],
        federations=[divisions.of(label, number) for label, number in runs],
        progress=[step_of(index) for index in range(len(runs))],
        begins=begin,
        transport=transport,
        resume=resume,
        callbacks=[trackers(job.track, job.folder(*run), job.name(*run)) for run in runs],
    )


def _check_failed(folder: Path | None, resume: bool) -> None:
    """Raise the error that ended a run before, which nothing but other settings would change."""
    reason = Journal(folder).failure() if resume and folder is not None else ""
    if reason:
        raise TrainingError(reason)


def _report(job: Job, done: Results, facts: Facts) -> None:
    """Print the table, save summary and picture, and raise an error that names what failed."""
    if done.runs:
        results([run for runs in done.runs.values() for run in runs], facts, job.wide)
        if job.command == SWEEP and len(done.runs) == 1:
            say(f"only {next(iter(done.runs))} finished")
        say()
    if job.out is not None:
        pairs = {label: list(zip(done.folders[label], runs, strict=True)) for label, runs in done.runs.items()}
        if done.runs or job.compares:
            folders.save(job.out, job.experiments, pairs, facts, done.failed, job.command, job.line)
        if done.runs:
            say(f"saved in {job.out}")
            say(folders.draw(job.out, done.runs, facts))
        if done.runs and job.command == SWEEP:
            say(folders.draw_sweep(job.out, job.varied, done.runs, facts))
        if done.runs:
            say(folders.report(job.out))
    elif done.runs:
        say(NOT_SAVED)
    if done.failed:
        raise TrainingError("; ".join(f"{label}, {reason}" for label, reason in done.failed.items()))


@contextlib.contextmanager
def placed(progress: Watch) -> Iterator[None]:
    """Within, an interrupt says how much of a job of several runs is over."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        where = progress.where()
        if not where:
            raise
        number = getattr(stopped, "signal", signal.SIGINT)
        raise Stopped(f"{str(stopped) or 'stopped'}, {where}", number) from None


@contextlib.contextmanager
def stoppable(folder: Path | None) -> Iterator[None]:
    """Within, an interrupt, or a full disk, says how to resume the run in a folder."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if folder is not None and ((folder / folders.RUN).is_file() or (folder / saved.JOB).is_file()):
            number = getattr(stopped, "signal", signal.SIGINT)
            raise Stopped(f"{str(stopped) or 'stopped'}; 'fedstill resume {folder}' goes on", number) from None
        raise
    except OSError as error:
        if folder is None or not folder.is_dir() or not Path(str(error.filename)).is_relative_to(folder):
            raise
        goes_on = f"its checkpoints are whole, and 'fedstill resume {folder}' goes on when it can be written"
        raise TrainingError(f"{error.filename}: {error.strerror}; {goes_on}") from None
