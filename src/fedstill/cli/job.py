"""What a command runs: experiments that differ in their method or in one field, each with several seeds.

`plan` makes the job from flags; `execute` checks all of it, runs it and reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core import settings
from ..core.errors import InputError, Shown, TrainingError
from ..core.method import Method
from ..data import Federation
from ..methods import METHODS
from ..report import local_work
from ..report.text import Facts
from ..run import prepare, simulation, together
from ..run.callbacks import Progress
from ..run.experiment import Experiment
from ..run.legal import check_out
from ..run.result import Run
from . import flags, folders
from .live import Watch, watch
from .screen import results, say

SWEEP = "sweep"  # the command whose experiments differ in one field
NOT_SAVED = "nothing was written: --out FOLDER saves the run (settings, metrics, checkpoints, picture)"


@dataclasses.dataclass(frozen=True)
class Job:
    """The experiments of a command, and the folder for their results."""

    experiments: dict[str, Experiment]  # by method, or by the value of the field that is swept
    seeds: int
    out: Path | None
    command: str = "run"
    explicit: tuple[str, ...] = ()  # the fields that flags set

    @property
    def first(self) -> Experiment:
        """The first experiment; data, partition and model are the same in all."""
        return next(iter(self.experiments.values()))

    @property
    def compares(self) -> bool:
        """Whether each experiment has a folder of its own in `out`."""
        return self.command != "run"

    def folder(self, label: str, number: int) -> Path | None:
        """Return a run's folder in `out`: one for each method, and in it one for each seed, where there are several."""
        if self.out is None:
            return None
        seed = f"seed-{self.first.seed + number}" if self.seeds > 1 else ""
        return self.out / (label if self.compares else "") / seed


@dataclasses.dataclass
class Results:
    """The results of a job so far, by label."""

    runs: dict[str, list[Run]] = dataclasses.field(default_factory=dict)
    folders: dict[str, list[Path]] = dataclasses.field(default_factory=dict)
    hashes: list[str] = dataclasses.field(default_factory=list)  # of the partitions, by seed
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, label: str, seed: int, result: Run | TrainingError, folder: Path | None) -> None:
        """Add a run, or the reason why it failed."""
        if isinstance(result, TrainingError):
            before = f"{self.failed[label]}; " if label in self.failed else ""
            self.failed[label] = f"{before}seed {seed}: {result}"
            return
        self.runs.setdefault(label, []).append(result.without_data())
        if folder is not None:
            self.folders.setdefault(label, []).append(folder)


def plan(methods: Sequence[Method], base: Experiment, flag_values: Mapping[str, Any], command: str) -> Job:
    """Return the job that flags make of a base experiment; refuse a flag that none of the methods has."""
    owners: dict[str, list[str]] = {}
    for cls in METHODS.values():
        for field in settings.fields_of(cls):
            owners.setdefault(field.name, []).append(cls.id)
    chosen = [method.id for method in methods]
    common = {field.name for field in settings.fields_of(Experiment)}
    for name in flag_values:
        if name in owners and name not in common and not set(owners[name]) & set(chosen):
            right = f"left out for {', '.join(chosen)}: it is a flag of {', '.join(owners[name])}"
            raise InputError("flag", Shown(flags.flag(name)), right)
    if flag_values.get("out") == "":
        raise InputError("--out", "", "a folder")
    seeds = flags.whole_number(flag_values, "seeds", 1)
    experiments = {}
    for method in methods:  # a flag that a method has as its own is the method's, elsewhere the experiment's
        own = flags.take(type(method), flag_values)
        values = flags.take(Experiment, {name: value for name, value in flag_values.items() if name not in own})
        experiments[method.id] = dataclasses.replace(base, **values, method=dataclasses.replace(method, **own))
    out = Path(flag_values["out"]) if "out" in flag_values else None
    return Job(experiments, seeds, out, command, tuple(flag_values))


def execute(job: Job) -> None:
    """Run a job and report on it. Every experiment is checked before the first is run or anything is written."""
    replaces_demo = job.command == folders.DEMO and job.out is not None and folders.is_demo(job.out)
    if job.out is not None and not replaces_demo:
        check_out(job.out)
    federation = prepare.federation_of(job.first)
    stacked, notes = _check(job, federation)
    facts = Facts.of(job.first, federation)
    if job.out is not None and replaces_demo:
        folders.remove(job.out)
    if job.out is not None and (job.compares or job.seeds > 1):
        folders.save(job.out, job.experiments, {}, facts, command=job.command)  # marks the folder from the beginning
    sizes = [len(client.y_train) for client in federation.clients]
    samples = f"{min(sizes):,} to {max(sizes):,} training samples each"
    say(f"{job.first.data}: {len(federation)} clients by {facts.partition}, {samples}; model {job.first.model}")
    for line in notes:
        say(line)
    done = _run_all(job, federation, stacked)
    _report(job, done, dataclasses.replace(facts, hashes=tuple(done.hashes)))


def _check(job: Job, federation: Federation) -> tuple[list[str], list[str]]:
    """Refuse what cannot run. Return the labels whose clients are stacked, and a line for each flag without effect."""
    stacked: list[str] = []
    unused: dict[tuple[str, str], list[str]] = {}  # labels by (field, reason)
    for label, experiment in job.experiments.items():
        ready, _ = prepare.from_experiment(experiment, federation)
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


def _run_all(job: Job, federation: Federation, stacked: Sequence[str]) -> Results:
    """Run every experiment with every seed; `federation` is the data of the first seed."""
    done = Results()
    federations = []
    with watch(list(job.experiments), job.first.rounds, job.seeds) as progress:
        for number in range(job.seeds):
            if number:
                federation = prepare.federation_of(_seeded(job.first, number))
            done.hashes.append(federation.hash)
            if stacked:
                federations.append(federation)
            for label in job.experiments:
                if label not in stacked and label not in done.failed:
                    _run_one(job, label, number, federation, progress, done)
        for labels in [stacked] if job.command == SWEEP else [[label] for label in stacked]:
            if labels:
                _run_stacked(job, labels, federations, progress, done)
    return done


def _seeded(experiment: Experiment, number: int) -> Experiment:
    """Return the experiment with the `number`-th seed after its own."""
    return dataclasses.replace(experiment, seed=experiment.seed + number)


def _run_one(job: Job, label: str, number: int, federation: Federation, progress: Watch, done: Results) -> None:
    """Run an experiment with one seed. A failure is noted and leaves the others alone."""
    experiment, folder = _seeded(job.experiments[label], number), job.folder(label, number)
    progress.start(label)

    def step(record: dict[str, Any]) -> None:
        progress.step(label, number, record)

    result: Run | TrainingError
    try:
        with stoppable(folder):
            result = simulation.run(experiment, out=folder, progress=step, federation=federation)
    except TrainingError as error:
        result = error
    done.add(label, experiment.seed, result, folder)


def _run_stacked(
    job: Job, labels: Sequence[str], federations: Sequence[Federation], progress: Watch, done: Results
) -> None:
    """Run all seeds of some experiments, whose clients are stacked, together where that is possible."""
    runs = [(label, number) for label in labels for number in range(job.seeds)]
    experiments = [_seeded(job.experiments[label], number) for label, number in runs]
    out = [job.folder(label, number) for label, number in runs]
    side_by_side: list[int] = []  # the runs that are trained together now

    def begin(indices: Sequence[int]) -> None:
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

    with stoppable(out[0]):
        outcomes = together.try_together(
            experiments,
            outs=out,
            federations=[*federations] * len(labels),
            progress=[step_of(index) for index in range(len(runs))],
            begins=begin,
        )
    for (label, _), experiment, outcome, folder in zip(runs, experiments, outcomes, out, strict=True):
        done.add(label, experiment.seed, outcome, folder)


def _report(job: Job, done: Results, facts: Facts) -> None:
    """Print the table, save summary and picture, and raise an error that names what failed."""
    if done.runs:
        results([run for runs in done.runs.values() for run in runs], facts)
        if job.command == SWEEP and len(done.runs) == 1:
            say(f"only {next(iter(done.runs))} finished")
        say()
    if job.out is not None:
        pairs = {label: list(zip(done.folders[label], runs, strict=True)) for label, runs in done.runs.items()}
        if done.runs or job.compares:
            folders.save(job.out, job.experiments, pairs, facts, done.failed, job.command)
        if done.runs:
            say(f"saved in {job.out}")
            say(folders.draw(job.out, done.runs, facts))
    elif done.runs:
        say(NOT_SAVED)
    if done.failed:
        raise TrainingError("; ".join(f"{label}, {reason}" for label, reason in done.failed.items()))


@contextmanager
def stoppable(folder: Path | None) -> Iterator[None]:
    """Within, an interrupt says how to resume the run in a folder."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None and (folder / folders.RUN).is_file():
            raise KeyboardInterrupt(f"stopped; 'fedstill resume {folder}' continues this run") from None
        raise
