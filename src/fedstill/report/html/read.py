"""What folders of results hold, read without the data and without the methods' code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...core import own
from ...core.errors import InputError
from ...core.metric import Measure
from ...core.reading import Unreadable, read_json, read_toml
from ...core.settings import build
from ...run.answers import Answers
from ...run.evaluate import Evaluation
from ...run.journal import ENVIRONMENT, EXPERIMENT, PARTITION, Journal
from ..significance import Unit
from ..summary import is_summary
from ..text import Stat, stat_of

SUMMARY = "summary.json"
LARGEST = 1 << 30  # bytes of a partition.json
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """One run, as its folder holds it."""

    folder: Path
    settings: Record  # experiment.toml; the method's own are in the table "method"
    where: str  # its experiment.toml, seen from the folder of all results
    history: Sequence[Record]
    partition: Record  # without the lists of samples
    environment: Record
    cost: Record = field(default_factory=dict)  # of a round, as summary.json has it
    further: Record = field(default_factory=dict)  # scores.json
    after: Record = field(default_factory=dict)  # its plain numbers
    attackers: int = 0  # simulated

    @property
    def method(self) -> str:
        """The method's id."""
        return own.short(str(self.settings["method"]["id"]))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings["seed"])

    @cached_property
    def scored(self) -> Sequence[Record]:
        """The records of the rounds that were scored."""
        return [record for record in self.history if "personal_clients" in record]

    @property
    def last(self) -> Record:
        """The last record that was scored, of those that count."""
        return next(record for record in reversed(self.scored) if int(record["round"]) <= self.round)

    @property
    def stopped(self) -> bool:
        """Whether it has ended early, after so many rounds without a better score."""
        return bool(self.history) and bool(self.history[-1].get("stopped"))

    @property
    def round(self) -> int:
        """The round whose models it keeps: the last, or with patience the best."""
        patient = bool(self.settings.get("patience")) and bool(self.history)
        return int(self.history[-1].get("best_round", 0) if patient else 0) or len(self.history)

    @property
    def finished(self) -> bool:
        """Whether all its rounds are over, or it has stopped early."""
        return self.stopped or len(self.history) >= int(self.settings["rounds"])

    @cached_property
    def answers(self) -> Answers | None:
        """Which test samples the clients' models get right."""
        return Answers.read(self.folder, self.round)

    @cached_property
    def timeline(self) -> Sequence[Record]:
        """What each client did when, in simulated time."""
        return Journal(self.folder).timelines()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records that count, the last one with the scores that were taken after the federation, as a contract reads them."""
        *before, last = self.history[: self.round]
        return [*map(dict, before), {**last, **self.further}]

    @cached_property
    def contract(self) -> Evaluation:
        """The evaluation contract that its settings state."""
        names = ("model", "clients", "mean", "round", "metric")
        stated = {name: self.settings[f"score_{name}"] for name in names if f"score_{name}" in self.settings}
        return build(Evaluation, stated)

    def score(self, contract: Evaluation) -> float | None:
        """Return the number of a contract; None where the run has no such number."""
        try:
            return contract.of(self.records)
        except InputError:
            return None

    @property
    def generic_only(self) -> bool:
        """Whether clients are served by the generic model: the two have the same accuracies."""
        return "generic" in self.last and self.last.get("generic_clients") == self.last["personal_clients"]

    @property
    def seconds(self) -> float:
        """The seconds that its rounds took."""
        return float(sum(record["seconds"] for record in self.history))

    def client(self, number: str) -> str:
        """Return a client's name, where the data has names, else its number."""
        names = self.partition.get("names")
        return str(names[int(number)]) if isinstance(names, list) and int(number) < len(names) else number

    @property
    def divided(self) -> tuple[object, object]:
        """What is equal in two runs whose clients have the same samples."""
        return self.partition.get("hash"), self.partition.get("contents")

    @property
    def own_clients(self) -> bool:
        """Whether client k is the same whatever the seed: the data says whose each sample is."""
        return self.partition.get("kind") in ("owner", "sites", "arrays", "file", "domain")


@dataclass(frozen=True)
class Study:
    """Results side by side: by label the runs that differ only in their seed, best mean first."""

    name: str
    runs: Mapping[str, Sequence[Result]]
    command: str = ""  # as it was typed
    failed: Mapping[str, str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # what further scores are

    @cached_property
    def labels(self) -> list[str]:
        """The labels, best score first; those that have none by the contract come last."""
        scores = {label: self.score(label) for label in self.runs}
        rank = self.measure.rank
        return sorted(self.runs, key=lambda label: math.inf if (stat := scores[label]) is None else -rank(stat.value))

    @cached_property
    def contract(self) -> Evaluation:
        """The evaluation contract that all runs state; the default one where they state different ones, or none has it."""
        stated = {run.contract for runs in self.runs.values() for run in runs}
        contract = stated.pop()
        known = any(all(run.score(contract) is not None for run in runs) for runs in self.runs.values())
        return Evaluation() if stated or not known else contract

    @cached_property
    def tested(self) -> Evaluation:
        """Whose accuracies by client are compared: the contract's where every run has them, else the personal models'."""
        runs = [run for of in self.runs.values() for run in of]
        alike = all(self.contract.of_clients(run.records) is not None for run in runs)
        return self.contract if alike else Evaluation()

    @cached_property
    def measure(self) -> Measure:
        """What the contract's number is."""
        return self._measure(self.contract)

    @cached_property
    def plain(self) -> Measure:
        """What the runs' usual number is."""
        return self._measure(Evaluation())

    @cached_property
    def tested_by(self) -> Measure:
        """What is compared client by client."""
        return self._measure(self.tested)

    def _measure(self, contract: Evaluation) -> Measure:
        return contract.measure([dict(run.last) for runs in self.runs.values() for run in runs])

    @property
    def best(self) -> str:
        """The label with the best score."""
        return self.labels[0]

    @property
    def first(self) -> Result:
        """One of the runs; data, partition and model are the same in all of a command's."""
        return self.runs[self.best][0]

    @property
    def seeds(self) -> int:
        """The most seeds that a method has."""
        return max(map(len, self.runs.values()))

    def score(self, label: str) -> Stat | None:
        """Return the number of the contract; None where not every seed has it."""
        if self.contract == Evaluation():
            return self.personal(label)
        values = [run.score(self.contract) for run in self.runs[label]]
        return None if None in values else stat_of([value for value in values if value is not None])

    def personal(self, label: str) -> Stat:
        """Return the accuracy by the default contract; ± over seeds, or over clients where all have one seed."""
        stat = stat_of([Evaluation().of(run.records) for run in self.runs[label]])
        return stat if self.seeds > 1 else Stat(stat.value, float(self.runs[label][0].last["personal_std"]))

    def mean(self, label: str, name: str) -> Stat | None:
        """Return a number of the last scored record, or a further score; None where not every seed has it."""
        values = [{**run.last, **run.after}.get(name) for run in self.runs[label]]
        return None if None in values else stat_of([float(value) for value in values if value is not None])

    @cached_property
    def local(self) -> str | None:
        """The label of the runs in which every client trains alone; None where there are none, or several kinds."""
        found = [label for label, runs in self.runs.items() if runs[0].method == "local"]
        return found[0] if len(found) == 1 else None

    def rates(self) -> dict[str, dict[Unit, float]]:
        """Return every client's accuracy as `tested` has it, by method, seed and client."""
        return {
            label: {(run.seed, k): rate for run in self.runs[label] for k, rate in self._of_clients(run).items()}
            for label in self.labels
        }

    @property
    def compared(self) -> str:
        """What is compared between methods, client by client."""
        rounds = {"last": "after the last round", "mean10": "mean of the last 10 scored rounds"}
        best = f"in the {str(self.tested).rpartition(', ')[2]}"
        return f"each client's {self.tested_by.title} with its {self.tested.model} model, {rounds.get(self.tested.round, best)}"

    def _of_clients(self, run: Result) -> Mapping[str, float]:
        return self.tested.of_clients(run.records) or {}

    @cached_property
    def varying(self) -> dict[str, list[Any]]:
        """The settings in which the labels differ, each with its values by label (in the order of `runs`)."""
        flat = [_flat(runs[0].settings) for runs in self.runs.values()]
        names = [name for name in dict.fromkeys(name for one in flat for name in one) if name != "seed"]
        columns = {name: [one.get(name) for one in flat] for name in names}
        return {name: values for name, values in columns.items() if any(value != values[0] for value in values)}


def read(folders: Sequence[Path], command: str = "") -> Study:
    """Return the results of folders that `--out` made; refuse one without a round that was scored."""
    runs: dict[str, list[Result]] = {}
    failed: dict[str, str] = {}
    notes: dict[str, str] = {}
    unfinished = []
    for root in folders:
        summary = _summary(root)
        found = [*_runs_in(root)]
        if not found:
            raise InputError("folder", str(root), "one that --out made, with a run in it")
        failed |= {label: str(reason) for label, reason in summary.get("failed", {}).items()}
        notes |= {name: str(words) for name, words in summary.get("scores", {}).items()}
        command = command or str(summary.get("line", ""))
        for folder in found:
            one = _run(root, folder, _numbers(summary, folder.relative_to(root).as_posix() if folder != root else ""))
            label = _label(root, folder, one)
            label = f"{root.name}: {label}" if len(folders) > 1 and label in _labels_of(folders, root) else label
            if not one.scored:
                unfinished.append(f"{label}, seed {one.seed}: no round was scored")
                continue
            if not one.finished:
                unfinished.append(f"{label}, seed {one.seed}: {len(one.history)} of {one.settings['rounds']} rounds")
            runs.setdefault(label, []).append(one)
    if not runs:
        raise InputError("folder", str(folders[0]), "one with a run of which a round was scored")
    ordered = {label: sorted(seeds, key=lambda one: one.seed) for label, seeds in runs.items()}
    return Study(", ".join(folder.absolute().name for folder in folders), ordered, command, failed, unfinished, notes)


def _runs_in(root: Path) -> Iterator[Path]:
    if (root / EXPERIMENT).is_file():
        yield root
    for pattern in (f"*/{EXPERIMENT}", f"*/*/{EXPERIMENT}"):
        yield from sorted(file.parent for file in root.glob(pattern))


def _run(root: Path, folder: Path, numbers: Record) -> Result:
    """Read one run's folder."""
    try:
        settings = read_toml(folder / EXPERIMENT)
        for name in ("seed", "rounds"):
            int(settings[name])
        str(settings["method"]["id"])
    except (Unreadable, KeyError, TypeError, ValueError) as error:
        raise InputError("folder", str(folder), f"one whose {EXPERIMENT} is as fedstill wrote it ({error})") from None
    journal = Journal(folder)
    partition = {name: value for name, value in _optional(folder / PARTITION, LARGEST).items() if name != "indices"}
    further = journal.scores() or {}
    after = {name: value for name, value in further.items() if isinstance(value, float)}
    history = journal.history()
    gaps = [record["forgetting"] for record in history if "forgetting" in record]
    after |= {"forgetting": float(np.mean(gaps[-10:]))} if gaps else {}
    where = (folder / EXPERIMENT).relative_to(root).as_posix()
    return Result(
        folder,
        settings,
        where,
        history,
        partition,
        _optional(folder / ENVIRONMENT),
        numbers.get("round_cost", {}),
        further,
        after,
        len(numbers.get("attackers") or {k for record in history for k in record.get("attackers", ())}),
    )


def _label(root: Path, folder: Path, one: Result) -> str:
    parts = [part for part in folder.relative_to(root).parts if not part.startswith("seed-")]
    return "/".join(parts) or one.method


def _labels_of(folders: Sequence[Path], besides: Path) -> set[str]:
    """Return the labels that other folders have."""
    others = [(root, folder) for root in folders if root != besides for folder in _runs_in(root)]
    return {_label(root, folder, _run(root, folder, {})) for root, folder in others}


def _summary(root: Path) -> dict[str, Any]:
    record = _optional(root / SUMMARY)
    return record if is_summary(record) else {}


def _numbers(summary: Record, folder: str) -> Record:
    """Return what the summary says of a run."""
    runs = [run for method in summary.get("methods", {}).values() for run in method.get("runs", [])]
    return next((run for run in runs if run.get("folder") in (folder, folder or ".")), {})


def _optional(path: Path, limit: int = 16 << 20) -> dict[str, Any]:
    try:
        return read_json(path, limit)
    except Unreadable:
        return {}


def _flat(settings: Record) -> dict[str, Any]:
    own = {f"method.{name}": value for name, value in settings["method"].items()}
    return {**{name: value for name, value in settings.items() if name != "method"}, **own}
