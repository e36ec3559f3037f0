"""A command's work: experiments that differ in their method or in one field, each for several seeds; checked first, then run."""

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
from ..report.local_work import without_effect
from ..report.text import Facts
from ..run import prepare, simulation, together
from ..run.callbacks import Progress
from ..run.experiment import Experiment
from ..run.result import Run
from ..server.sampler import BY_PLAN
from . import flags, keep
from .live import Watch, watch
from .screen import results, say

RULE = ("server_lr", "server_momentum", "server_beta2", "server_tau")
ASYNC, ALWAYS = ("fedasync", "fedbuff"), ("constant", "hinge", "polynomial")  # modes, and kinds of staleness
SWEEP = "sweep"  # the command whose experiments differ in one field
KEEPS = "nothing was written: --out FOLDER keeps the run (settings, metrics, checkpoints, picture)"


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to run, and where it is kept."""

    experiments: dict[str, Experiment]  # by method, or by the value of the field that is swept
    seeds: int
    out: Path | None
    compares: bool  # each experiment has a folder of its own
    command: str = "run"
    given: tuple[str, ...] = ()  # the fields that flags gave

    @property
    def replaces(self) -> bool:
        """Whether an earlier one in `out` goes."""
        return self.command == keep.DEMO

    @property
    def abreast(self) -> bool:
        """Whether the experiments may be one stack: they have the same method."""
        return self.command == SWEEP

    @property
    def first(self) -> Experiment:
        """The experiment that says what all share."""
        return next(iter(self.experiments.values()))

    def folder(self, label: str, seed: int) -> Path | None:
        """A run's folder: `out`, with a part for the method and one for the seed where there are several."""
        if self.out is None:
            return None
        return self.out / (label if self.compares else "") / (f"seed-{seed}" if self.seeds > 1 else "")


@dataclasses.dataclass
class Done:
    """What a job has given so far."""

    runs: dict[str, list[Run]] = dataclasses.field(default_factory=dict)
    folders: dict[str, list[Path]] = dataclasses.field(default_factory=dict)
    hashes: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def plan(methods: Sequence[Method], base: Experiment, given: Mapping[str, Any], command: str) -> Job:
    """The job that flags make of a base experiment; refuses a flag that none of the methods has."""
    owners: dict[str, list[str]] = {}
    for cls in METHODS.values():
        for field in settings.fields_of(cls):
            owners.setdefault(field.name, []).append(cls.id)
    chosen = [method.id for method in methods]
    common = {field.name for field in settings.fields_of(Experiment)}
    for name in given:
        if name in owners and name not in common and not set(owners[name]) & set(chosen):
            right = f"left out for {', '.join(chosen)}: it is a flag of {', '.join(owners[name])}"
            raise InputError("flag", Shown(flags.flag(name)), right)
    if given.get("out") == "":
        raise InputError("--out", "", "a folder")
    seeds = flags.whole(given, "seeds", 1)
    experiments = {}
    for method in methods:  # a flag that a method has as its own is the method's, elsewhere the experiment's
        mine = flags.take(type(method), given)
        values = flags.take(Experiment, {name: value for name, value in given.items() if name not in mine})
        experiments[method.id] = dataclasses.replace(base, **values, method=dataclasses.replace(method, **mine))
    out = Path(given["out"]) if "out" in given else None
    return Job(experiments, seeds, out, command != "run", command, tuple(given))


def _unused(job: Job) -> Iterator[tuple[str, str]]:
    """Flags of asynchronous and wait-free training that were given in vain, each with what it goes with."""
    mode, staleness = job.first.mode, job.first.staleness
    stale = {"staleness": ALWAYS, "staleness_a": ("hinge", "polynomial"), "staleness_b": ("hinge",)}
    until = job.first.wait_free == "until-download"
    yield from (
        (n, "--wait-free until-download") for n in ("personal_cap", "unselected") if n in job.given and not until
    )
    for name, modes in {"buffer": ("fedbuff",), "mixing": ("fedasync",), **dict.fromkeys(stale, ASYNC)}.items():
        if name in job.given and mode not in modes:
            yield name, f"--mode {' or '.join(modes)}"
        elif name in job.given and staleness not in stale.get(name, ALWAYS):
            yield name, f"--staleness {' or '.join(stale[name])}"


def execute(job: Job) -> None:
    """Run a job and report on it. Every experiment is checked before the first is run or anything is written."""
    earlier = job.out is not None and job.replaces and keep.is_demo(job.out)
    if job.out is not None and not earlier:
        keep.check(job.out)
    federation = prepare.federation_of(job.first)
    ignored = [
        f"{flags.flag(name)} has no effect without {flags.flag(other)}"
        for name, other in (("join_epochs", "newcomers"), ("fine_tune_part", "fine_tune"))
        if name in job.given and not getattr(job.first, other)
    ]
    if "candidates" in job.given and job.first.sampler in BY_PLAN:
        ignored.append(f"--candidates has no effect on the sampler {job.first.sampler}")
    if "late" in job.given and not job.first.deadline and job.first.over_select == 1:
        ignored.append("--late has no effect without --deadline or --over-select: nobody is late")
    ignored += [f"{flags.flag(name)} has no effect without {needs}" for name, needs in _unused(job)]
    own = ("server_lr",) if job.first.mode == "fedbuff" else ()  # FedBuff's η
    rule = [name for name in RULE if name in job.given and name not in own]
    for label, experiment in job.experiments.items():
        idle = [n for n in rule if experiment.server == "mean" and n not in settings.values_of(experiment.method)]
        ignored += [f"{flags.flag(name)} has no effect on {label} without --server" for name in idle]
    stacks = set()
    for label, experiment in job.experiments.items():
        ready, _ = prepare.from_experiment(experiment, federation)
        stacks |= {label} if ready.trainer.name == "stacked" else set()
        ignored += without_effect(experiment.method, ready.trainer.bench.task, ready.training, job.given)
    facts = Facts.of(job.first, federation)
    if job.out is not None and earlier:
        keep.remove(job.out)
    if job.out is not None and (job.compares or job.seeds > 1):
        keep.save(job.out, job.experiments, {}, facts, command=job.command)  # marks the folder from the beginning
    sizes = [len(client.y_train) for client in federation.clients]
    held = f"{min(sizes):,} to {max(sizes):,} training samples each"
    say(f"{job.first.data}: {len(federation)} clients by {facts.partition}, {held}; model {job.first.model}")
    for line in ignored:
        say(line)
    done = Done()
    with watch(list(job.experiments), job.first.rounds, job.seeds) as shown:
        dealt = [federation]
        for number in range(job.seeds):
            if number:
                dealt.append(prepare.federation_of(dataclasses.replace(job.first, seed=job.first.seed + number)))
            done.hashes.append(dealt[-1].hash)
            _one_seed(job, number, dealt[-1], shown, done, [n for n in job.experiments if n not in stacks])
            dealt = dealt if stacks else []
        stacked = [n for n in job.experiments if n in stacks]
        for labels in [stacked] if job.abreast and stacked else [[label] for label in stacked]:
            _together(job, dealt, shown, done, labels)
    _report(job, done, dataclasses.replace(facts, hashes=tuple(done.hashes)))


def _together(job: Job, dealt: Sequence[Federation], shown: Watch, done: Done, labels: Sequence[str]) -> None:
    """All seeds of a method whose clients are stacked, or of several values of its field: one more axis of the stack."""
    pairs = [(label, job.first.seed + number) for label in labels for number in range(job.seeds)]
    folders = [job.folder(label, seed) for label, seed in pairs]
    going: list[int] = []  # the runs that began last, all together

    def begins(numbers: Sequence[int]) -> None:
        going[:] = numbers
        for label in dict.fromkeys(pairs[i][0] for i in numbers):
            shown.start(label)

    def told(number: int) -> Progress:
        label, seed = pairs[number]

        def tell(record: dict[str, Any]) -> None:
            beside = [i for i in going if pairs[i][0] == label]
            if len(beside) < job.seeds:
                shown.step(label, seed - job.first.seed, record)
            elif number == beside[-1]:
                shown.abreast(label, record)

        return tell

    with stoppable(folders[0]):
        found = together.try_together(
            [dataclasses.replace(job.experiments[label], seed=seed) for label, seed in pairs],
            outs=folders,
            federations=[*dealt] * len(labels),
            progress=[told(number) for number in range(len(pairs))],
            begins=begins,
        )
    for (label, seed), folder, run in zip(pairs, folders, found, strict=True):
        if isinstance(run, TrainingError):
            before = f"{done.failed[label]}; " if label in done.failed else ""
            done.failed[label] = f"{before}seed {seed}: {run}"
            continue
        done.runs.setdefault(label, []).append(run.without_data())
        if folder is not None:
            done.folders.setdefault(label, []).append(folder)


def _one_seed(job: Job, number: int, federation: Federation, shown: Watch, done: Done, labels: Sequence[str]) -> None:
    """Some methods for one seed, on the same data; in a comparison one that fails does not stop the others."""
    seed = job.first.seed + number
    for label in labels:
        experiment = job.experiments[label]
        if label in done.failed:
            continue
        folder = job.folder(label, seed)
        shown.start(label)

        def progress(record: dict[str, Any], label: str = label) -> None:
            shown.step(label, number, record)

        try:
            with stoppable(folder):
                run = simulation.run(
                    dataclasses.replace(experiment, seed=seed), out=folder, progress=progress, federation=federation
                )
        except TrainingError as error:
            done.failed[label] = f"seed {seed}: {error}"
            continue
        done.runs.setdefault(label, []).append(run.without_data())
        if folder is not None:
            done.folders.setdefault(label, []).append(folder)


def _report(job: Job, done: Done, facts: Facts) -> None:
    """The table, what was kept, and what failed."""
    if done.runs:
        results([run for same in done.runs.values() for run in same], facts)
        if job.abreast and len(done.runs) == 1:
            say(f"only {next(iter(done.runs))} came to its end")
        say()
    if job.out is not None:
        pairs = {label: list(zip(done.folders[label], runs, strict=True)) for label, runs in done.runs.items()}
        if done.runs or job.compares:
            keep.save(job.out, job.experiments, pairs, facts, done.failed, job.command)
        if done.runs:
            say(f"kept in {job.out}")
            say(keep.draw(job.out, done.runs, facts))
    elif done.runs:
        say(KEEPS)
    if done.failed:
        raise TrainingError("; ".join(f"{label}, {why}" for label, why in done.failed.items()))


@contextmanager
def stoppable(folder: Path | None) -> Iterator[None]:
    """Within, an interrupt says how to go on where the run is kept."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None and (folder / keep.RUN).is_file():
            raise KeyboardInterrupt(f"stopped; 'fedstill resume {folder}' goes on with this run") from None
        raise
