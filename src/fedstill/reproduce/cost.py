"""What a plan would cost on this machine: a few steps of each distinct kind of work are timed, and counted up to the whole.

Work is alike where method, model, settings of training, engine and the shape of a sample are. Clients that are trained one by
one are timed on a few of them with a few batches each; rounds of stacks, and rounds that are short, are timed as they are.
Rounds, clients, steps and test samples are those of the real partition.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core import settings, tree
from ..core.errors import InputError, TrainingError
from ..data import Federation
from ..data.federation import Client
from ..engine.flops import Only
from ..engine.step import explained
from ..report.costs import duration, scaled, short
from ..report.text import aligned
from ..run import accounting, prepare, together
from ..run.experiment import Experiment
from ..run.result import Run
from ..server.sampler import count
from .plan import Plan, Trial
from .runner import TOGETHER
from .shelf import Shelf, size_of
from .store import Store

CLIENTS, PARTICIPANTS, BATCHES, TESTS = 8, 4, 2, 64  # of what is timed in the place of larger rounds
ROUNDS = 3  # that are timed; the first, which warms up, counts as a beginning
SHORT = 1.0  # seconds: rounds below are timed as they are
CUT: dict[str, Any] = {
    "new": False, "averaged": False, "forgetting": False, "fine_tune": 0, "external": "", "train_scores": False,
    "further_every": 0, "data_root": "", "rounds": ROUNDS, "eval_every": 1,
}  # fmt: skip


OF_THE_WHOLE = {  # settings that change how many steps and tests there are, not how long one takes
    *CUT, "seed", "data", "partition", "clients", "participation", "pool", "split", "newcomers", "join_epochs",
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What was timed of one kind of work, on participants whose clients have `size` training samples in the mean."""

    start: float  # seconds before and in the first round beyond an ordinary round
    train: float  # seconds a step of one participant; of rounds timed as they are, a round
    test: float  # seconds a test sample; of rounds timed as they are, a scoring
    size: int = 0
    steps: float = 0.0  # of a participant's round
    flops: float | None = None  # of a participant's round

    def steps_of(self, size: int, experiment: Experiment) -> float:
        """Return the steps of a participant with so many samples: in proportion where they are counted in epochs."""
        batch = experiment.batch_size
        return self.steps if experiment.local_steps else self.steps * -(-size // batch) / -(-self.size // batch)


@dataclass(frozen=True)
class Estimate:
    """The cost of a trial with the seeds that are left to run."""

    trial: Trial
    left: int
    seconds: float = 0.0
    flops: float | None = 0.0
    memory: int = 0  # bytes at most
    problem: str = ""


def estimate(plan: Plan, store: Store, shelf: Shelf, root: str) -> list[Estimate]:
    """Return the cost of every trial of a plan; trials whose results are in the store cost nothing."""
    probes: dict[Any, Probe] = {}
    base = _resident()
    out = []
    for trial in plan.wanted:
        left = (
            [n for n in range(trial.seeds) if store.read(trial.seeded(n), plan.scale) is None] if trial.trains else []
        )
        if not left:
            out.append(Estimate(trial, 0))
            continue
        try:
            out.append(_estimate(trial, left, plan, shelf, root, probes, base))
        except (InputError, TrainingError) as error:
            out.append(Estimate(trial, len(left), problem=str(error)))
    return out


def _estimate(
    trial: Trial, left: Sequence[int], plan: Plan, shelf: Shelf, root: str, probes: dict[Any, Probe], base: int
) -> Estimate:
    """Return the cost of one trial."""
    experiment = dataclasses.replace(trial.seeded(left[0]), data_root="")
    began = time.perf_counter()
    federation = shelf.federation(trial.seeded(left[0]), plan.scale, root)
    ready, _ = prepare.from_experiment(experiment, federation)
    engine, reading = ready.trainer.name, time.perf_counter() - began
    with explained(ready.method, ready.task, stacked=False):
        memory = sum(leaf.nbytes for _, leaf in tree.leaves(ready.method.init_client(ready.task, ready.initial)))
    bytes_ = base + 2 * size_of(federation) + len(federation) * memory
    del ready
    e, side = experiment, len(left[:TOGETHER]) if engine == "stacked" else 1
    size = max(1, round(float(np.mean(federation.sizes("train")))))
    participants = count(len(federation) - e.newcomers, e.participation)
    scorings = -(-e.rounds // e.eval_every)
    method = (type(e.method).id, *settings.values_of(e.method).items())
    others = {name: value for name, value in settings.values_of(e).items() if name not in OF_THE_WHOLE}
    kind = repr((method, others, federation.shape, federation.classes))
    whole = repr((kind, e.data, e.partition, e.clients, e.participation, side))
    if engine != "stacked" and whole not in probes:
        if kind not in probes:
            probes[kind] = _probe_few(e, federation)
        probe = probes[kind]
        steps = probe.steps_of(size, e)
        if participants * steps * probe.train < SHORT:
            probes[whole] = _probe_whole([e], [federation], engine)
    elif whole not in probes:
        seeds = [trial.seeded(n) for n in left[:side]]
        probes[whole] = _probe_whole(seeds, [shelf.federation(s, plan.scale, root) for s in seeds], engine)
    probe = probes.get(whole) or probes[kind]
    if whole in probes:
        seconds = e.rounds * probe.train + scorings * probe.test
    else:
        tests = sum(federation.sizes("test")) + (0 if federation.test is None else len(federation.test[1]))
        seconds = e.rounds * participants * probe.steps_of(size, e) * probe.train + scorings * tests * probe.test
    share = 1.0 if e.local_steps else size / probe.size
    flops = None if probe.flops is None else probe.flops * share * participants * e.rounds * len(left)
    seconds = (seconds + probe.start) * len(left) / side + reading * len(left)
    return Estimate(trial, len(left), seconds, flops, int(bytes_))


def _probe_few(experiment: Experiment, federation: Federation) -> Probe:
    """Time some rounds of a few clients with a few batches each; return seconds a step and a test sample."""
    small = _reduced(federation, experiment)
    participants = min(PARTICIPANTS, count(len(federation) - experiment.newcomers, experiment.participation))
    few: dict[str, Any] = {
        "participation": participants / len(small),
        "newcomers": 0,
        "clients": 0,
        "buffer": 0,
        "engine": "one",
    }
    runs, wall = _timed([dataclasses.replace(experiment, **CUT, **few)], [small])
    probe, steps = _of_rounds(runs, wall)
    tests = sum(small.sizes("test")) + (0 if small.test is None else len(small.test[1]))
    each = dataclasses.replace(probe, train=probe.train / max(1, steps), test=probe.test / tests)
    return _counted(each, runs[0], experiment, federation)


def _probe_whole(experiments: Sequence[Experiment], federations: Sequence[Federation], engine: str) -> Probe:
    """Time some rounds as they are, of all experiments side by side."""
    cut = {**CUT, "engine": engine}
    runs, wall = _timed([dataclasses.replace(e, **cut) for e in experiments], federations)
    probe, _ = _of_rounds(runs, wall)
    return _counted(probe, runs[0], experiments[0], federations[0])


def _timed(experiments: Sequence[Experiment], federations: Sequence[Federation]) -> tuple[list[Run], float]:
    """Return the runs and how long they took in all."""
    began = time.perf_counter()
    outcomes = together.try_together(experiments, federations=federations)
    for outcome in outcomes:
        if isinstance(outcome, TrainingError):
            raise outcome
    return [run for run in outcomes if isinstance(run, Run)], time.perf_counter() - began


def _of_rounds(runs: Sequence[Run], wall: float) -> tuple[Probe, float]:
    """Return seconds of a round and of its scoring, all runs together, and the steps of one run's round."""
    later = [record for run in runs for record in run.history[1:]]
    rounds = ROUNDS - 1
    train = sum(record["train_seconds"] for record in later) / rounds
    test = sum(record["seconds"] - record["train_seconds"] for record in later) / rounds
    steps = sum(record["steps"] for record in later) / rounds / len(runs)
    return Probe(max(0.0, wall - ROUNDS * (train + test)), train, test), steps


def _counted(probe: Probe, run: Run, experiment: Experiment, federation: Federation) -> Probe:
    """Return the probe with the steps and FLOPs of a participant of the real federation's mean size."""
    bench = run.trainer.bench
    mean = max(1, round(float(np.mean(federation.sizes("train")))))
    sized = Only(dataclasses.replace(bench.data.train, sizes=(mean,) * len(bench.data.train.sizes)))
    counted = accounting.cost(run, dataclasses.replace(bench, data=sized))
    steps = counted.steps or experiment.epochs * -(-mean // experiment.batch_size)
    flops = None if counted.flops is None else counted.flops.total
    return dataclasses.replace(probe, size=mean, steps=steps, flops=flops)


def _reduced(federation: Federation, experiment: Experiment) -> Federation:
    """Return a few clients with a few batches each."""
    train, members = BATCHES * experiment.batch_size, []
    for client in federation.clients[:CLIENTS]:
        cut = {f: None if v is None else v[: train if "train" in f else TESTS] for f, v in vars(client).items()}
        members.append(Client(**cut))  # type: ignore[arg-type]
    test = None if federation.test is None else (federation.test[0][:TESTS], federation.test[1][:TESTS])
    return dataclasses.replace(federation, clients=tuple(members), test=test, external=None)


def _resident() -> int:
    """Return the bytes that this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def report(plan: Plan, store: Store, shelf: Shelf, root: str, width: int = 80) -> str:
    """Return the estimate as text."""
    estimates = estimate(plan, store, shelf, root)
    shown = [one for one in estimates if one.left]
    lines = []
    if shown:
        flops = scaled("FLOPs", [one.flops for one in shown])
        columns = [
            ("experiment", [_cut(one.trial.label, width - 40) for one in shown]),
            ("seeds", [str(one.left) for one in shown]),
            ("rounds", [str(one.trial.experiment.rounds) for one in shown]),
            flops,
            ("time", [(one.problem and "cannot") or duration(one.seconds) for one in shown]),
        ]
        lines += [*aligned(columns), ""]
        lines += [f"{one.trial.label}: {one.problem}" for one in shown if one.problem]
    done = sum(one.trial.seeds - one.left for one in estimates if one.trial.trains)
    total, most = sum(one.seconds for one in shown), max((one.memory for one in shown), default=0)
    known = [one.flops for one in shown if one.flops is not None]
    work = scaled("FLOPs", [sum(known)])
    lines += textwrap.wrap(
        f"in all: {duration(total)}, {short(most / 1e9)} GB of memory at most, {work[1][0]} {work[0]}; "
        f"{sum(one.left for one in shown)} runs{f', {done} more are done' if done else ''}",
        width,
    )
    if not plan.scale.whole:
        lines += textwrap.wrap(plan.scale.words(), width)
    lines += textwrap.wrap(
        "a few steps of each kind of work were timed here and now: on a quiet machine within a factor of 2", width
    )
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
