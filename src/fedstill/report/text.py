"""Results as text. `rows` computes the numbers; `table` formats them plainly, the command line also in colour."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import scores
from ..core import own, settings
from ..core.errors import InputError
from ..core.metric import ACCURACY, Measure, measure_of, metrics_in
from ..data import Federation
from ..run.evaluate import Evaluation
from ..run.experiment import Experiment
from ..run.result import Run, register_table
from ..server import privacy
from ..server.optimizer import Rule
from ..server.sampler import count
from ..timing.asynchronous import Asynchrony
from . import costs
from .costs import NONE
from .fit import cells_of, cut, padded
from .local_work import recipe_lines, work_lines


@dataclass(frozen=True)
class Facts:
    """The data, partition and model of a table's results, as far as they are known."""

    data: str = ""
    clients: int = 0
    partition: str = ""
    hashes: tuple[str, ...] = ()  # one per seed
    model: str = ""
    external: str = ""

    @classmethod
    def of(cls, experiment: Experiment, federation: Federation, hashes: Sequence[str] = ()) -> Facts:
        """Return the facts of an experiment and its data."""
        return cls(
            data=experiment.data,
            clients=len(federation),
            partition=partition_of(federation),
            hashes=tuple(hashes) or (federation.hash,),
            model=own.short(experiment.model),
            external=experiment.external,
        )


UNKNOWN = Facts()
LONGEST = 60  # cells of a client's name in a line
NAMED = 5  # clients whose rejections a table names


def partition_of(federation: Federation) -> str:
    """Return a federation's partition as written after --partition."""
    kind, parameter = federation.partition_record["kind"], federation.partition_record.get("parameter")
    return str(kind) if parameter is None else f"{kind}:{parameter}"


@dataclass(frozen=True)
class Stat:
    """A number and its spread (over seeds where there are several, else over clients where that is known)."""

    value: float
    spread: float | None = None

    def text(self, measure: Measure = ACCURACY) -> str:
        """Format as the measure says, so that values align in a column."""
        spread = "" if self.spread is None else f" ± {measure.text(self.spread):>5}"
        return f"{measure.text(self.value)}{spread}"


@dataclass(frozen=True)
class ResultRow:
    """One method's results."""

    label: str
    seeds: int
    personal: Stat
    worst: Stat
    sample: Stat
    generic: Stat | None
    generic_on: str  # which test data, and whether it is the mean of personal models instead
    further: dict[str, Stat]  # further scores, by the names of `scores.words`
    seconds: float
    generic_only: bool  # it has no personal model: the generic one serves every client
    epsilon: float | None  # what its uploads revealed, at most; None: without privacy
    cost: dict[str, float | None]  # of a participant's round: steps, flops, bytes; None where it is not known
    best: bool = False
    score: Stat | None = None  # by the run's own evaluation contract, where that is not the default
    measure: Measure = ACCURACY  # what all but the own score are
    scored_by: Measure = ACCURACY  # what the own score is
    metrics: dict[str, tuple[Stat, Measure]] = field(default_factory=dict)
    """By the record's entry: personal models' mean over clients, the generic model's of all predictions together."""


def scored(run: Run) -> dict[str, Any]:
    """Return the record of the last round that was scored, of those that count."""
    return next(record for record in reversed(run.kept) if "personal_clients" in record)


def seconds(run: Run) -> float:
    """Return the seconds that the rounds took, including those before a resume."""
    return float(sum(record["seconds"] for record in run.history))


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seed, under labels that distinguish the groups."""
    by_settings: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        by_settings.setdefault((run.method.id, *_settings(run).items()), []).append(run)
    ids = [key[0] for key in by_settings]
    groups: dict[str, list[Run]] = {}
    for key, seeds in by_settings.items():
        label = str(key[0])
        if ids.count(key[0]) > 1:
            candidates = [_settings(group[0]) for k, group in by_settings.items() if k[0] == key[0]]
            own = _settings(seeds[0])
            differing = [f"{name}={own[name]}" for name in own if len({other.get(name) for other in candidates}) > 1]
            label = " ".join([label, *differing])
        groups[label] = seeds
    return groups


def _settings(run: Run) -> dict[str, Any]:
    values = {**settings.values_of(run.training), **run.beside, **settings.values_of(run.method)}
    return {name: value for name, value in values.items() if name != "seed"}


def rows(runs: Sequence[Run]) -> list[ResultRow]:
    """Return a row for each method, best personal accuracy first."""
    groups = grouped(runs)
    several_seeds = any(len(seeds) > 1 for seeds in groups.values())
    results = [_row(label, seeds, several_seeds) for label, seeds in groups.items()]
    own = any(row.score is not None for row in results)

    def leading(row: ResultRow) -> float:
        if not own:
            return row.measure.rank(row.personal.value)
        return -math.inf if row.score is None else row.scored_by.rank(row.score.value)

    results.sort(key=lambda row: -leading(row))
    if len(results) < 2:
        return results
    best = leading(results[0])
    return [ResultRow(**{**vars(row), "best": leading(row) == best}) for row in results]


def own_score(run: Run) -> float | None:
    """Return the number of the run's own evaluation contract; None where that is the default, or the run has no such number."""
    contract = Evaluation.by(run.training)
    if contract == Evaluation():
        return None
    with contextlib.suppress(InputError):  # a method without such a model, beside others that have one
        return run.score(**settings.values_of(contract))
    return None


def _row(label: str, runs: Sequence[Run], several_seeds: bool) -> ResultRow:
    """Return one row; the spread is that over clients where no row has several seeds."""
    records = [scored(run) for run in runs]
    contract, first = Evaluation(), runs[0]
    personal = stat_of([contract.of(run.kept) for run in runs])
    metrics = [name for metric in metrics_in(records[0]) for name in (f"personal_{metric}", f"generic_{metric}")]
    if not several_seeds:
        personal = Stat(personal.value, float(records[0]["personal_std"]))
    further = [scores.numbers(run.after, run.history) for run in runs]
    generic, on = _generic([{**record, **values} for record, values in zip(records, further, strict=True)])
    return ResultRow(
        label=label,
        seeds=len(runs),
        personal=personal,
        worst=stat_of([record["personal_worst"] for record in records]),
        sample=stat_of([record["personal_sample"] for record in records]),
        generic=generic,
        generic_on=on,
        further={name: stat_of([f[name] for f in further]) for name in further[0] if all(name in f for f in further)},
        seconds=float(np.mean([seconds(run) for run in runs])),
        generic_only="personal" not in runs[0].method.scores,
        epsilon=max((float(run.history[-1].get("epsilon", math.inf)) for run in runs if protected(run)), default=None),
        cost=costs.means([run.cost for run in runs]),
        score=_own_stat(runs),
        measure=contract.measure(first.history),
        scored_by=Evaluation.by(first.training).measure(first.history),
        metrics={
            name: (stat_of([r[name] for r in records]), measure_of(name.partition("_")[2], records[0]))
            for name in metrics
            if all(name in r for r in records)
        },
    )


def _own_stat(runs: Sequence[Run]) -> Stat | None:
    values = [value for run in runs if (value := own_score(run)) is not None]
    return stat_of(values) if len(values) == len(runs) else None


GENERIC = {  # the first one present is the column "generic %": the common test set has precedence over the clients' own
    "generic_common": "the one model for everybody, on the common test set",
    "generic": "the one model for everybody, on all clients' test samples, each counting alike",
    "averaged_common": "no such model: the mean of the personal weights (by training samples), on the common test set",
    "averaged": "no such model: the mean of the personal weights (by training samples), on all clients' test samples",
}


def _generic(records: Sequence[dict[str, Any]]) -> tuple[Stat | None, str]:
    """Return the generic score and a description of its test data."""
    for name, on in GENERIC.items():
        if all(name in record for record in records):
            return stat_of([record[name] for record in records]), on
    return None, ""


def stat_of(values: Sequence[float]) -> Stat:
    """Return the mean; with several values also the sample standard deviation (n − 1)."""
    return Stat(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def columns(results: Sequence[ResultRow]) -> list[tuple[str, list[str]]]:
    """Return the table's columns: a heading and a text for each row."""
    several_seeds = any(row.seeds > 1 for row in results)
    private = any(row.epsilon is not None for row in results)
    own = any(row.score is not None for row in results)
    measure, score = results[0].measure, results[0].scored_by

    def column(heading: str, cell: Callable[[ResultRow], str]) -> tuple[str, list[str]]:
        return heading, [cell(row) for row in results]

    out = [
        column("method", lambda row: row.label + (" *" if row.best else "")),
        *([column(score.heading("score"), lambda row: row.score.text(score) if row.score else NONE)] if own else []),
        column(measure.heading("personal"), lambda row: row.personal.text(measure)),
        column("worst 10 %", lambda row: row.worst.text(measure)),
        column(measure.heading("per sample"), lambda row: row.sample.text(measure)),
        column(measure.heading("generic"), lambda row: row.generic.text(measure) if row.generic else NONE),
        *([column("ε", lambda row: NONE if row.epsilon is None else f"{row.epsilon:.3g}")] if private else []),
        *costs.columns([row.cost for row in results]),
        column("seconds", lambda row: f"{row.seconds:.1f}"),
    ]
    last = next(i for i, (heading, _) in enumerate(out) if heading == measure.heading("generic"))
    for name, heading in scores.headings().items():
        if any(name in row.further for row in results):
            last += 1
            cells = [row.further[name].text(measure) if name in row.further else NONE for row in results]
            out.insert(last, (heading.replace("%", measure.mark), cells))
    for name, heading, by in metric_columns(results):
        last += 1
        cells = [row.metrics[name][0].text(by) if name in row.metrics else NONE for row in results]
        out.insert(last, (heading, cells))
    return [*out, column("seeds", lambda row: str(row.seeds))] if several_seeds else out


def metric_columns(results: Sequence[ResultRow]) -> list[tuple[str, str, Measure]]:
    """Return (entry, heading, measure) of the metrics' columns."""
    measures = {name: measure for row in results for name, (_, measure) in row.metrics.items()}
    whose = {name: "" if name.startswith("personal") else "generic " for name in measures}
    return [(name, whose[name] + measure.heading(), measure) for name, measure in measures.items()]


def metric_notes(runs: Sequence[Run], results: Sequence[ResultRow]) -> list[str]:
    """Explain the metrics' columns: what they are a mean of, and how many clients are left out."""
    lines = []
    for name, heading, measure in metric_columns(results):
        less = ", less is better" if measure.lower else ""
        model = name.partition("_")[0]
        what = (
            "personal model, mean per client"
            if model == "personal"
            else "the one model, all clients' predictions together"
        )
        left = {int(scored(run).get(f"{name}_left_out", 0)) for run in runs} if model == "personal" else {0}
        without = f"; not defined for {max(left)} of {len(runs[0].clients)} clients" if max(left) else ""
        lines.append(f"{heading}: {what}{less}{without}")
    return lines


def notes(runs: Sequence[Run], results: Sequence[ResultRow], facts: Facts = UNKNOWN) -> list[str]:
    """Return the lines below a table: the evaluation contract, the meaning of ±, and the data, model and settings."""
    training, newcomers = runs[0].training, runs[0].newcomers
    several_seeds = any(row.seeds > 1 for row in results)
    spread = "± standard deviation over " + ("seeds (n − 1); seconds per seed" if several_seeds else "clients")
    contract = Evaluation.by(training)
    measure, score = results[0].measure, results[0].scored_by
    lines = [f"{score.heading('score')}: {contract}"] if contract != Evaluation() else []
    lines += [f"{measure.heading('personal')}: {measured(runs[0].history)}{Evaluation()}; {spread}"]
    lines += ["worst 10 %: mean of the worst tenth of clients"]
    if newcomers:
        listed = len(newcomers) <= 10 and not several_seeds
        names = ", ".join(map(str, newcomers)) if listed else f"{len(newcomers)}, by the seed,"
        lines.append(f"all clients: the {len(runs[0].clients)} that train; {names} join after the federation")
    if any(run.attackers for run in runs):
        lines.append("rows with an attack: the attackers are not counted")
    kinds = {on: [row.label for row in results if row.generic_on == on] for on in GENERIC.values()}
    kinds = {on: labels for on, labels in kinds.items() if labels}
    for on, labels in kinds.items():
        whose = f" of {', '.join(labels)}" if len(kinds) > 1 else ""
        lines.append(f"{measure.heading('generic')}{whose}: {on}")
    explanations = scores.explanations(training)
    for name, heading in scores.headings().items():
        if any(name in row.further for row in results):
            words = explanations[name].replace("{external}", facts.external or "external data")
            words = words if measure.share else words.replace("accuracy", measure.title)
            lines.append(f"{heading.replace('%', measure.mark)}: {words}")
    lines += metric_notes(runs, results)
    generic_only = [row.label for row in results if row.generic_only]
    if generic_only:
        lines.append(f"{', '.join(generic_only)}: no personal model, so the generic one serves every client")
    if any(row.best for row in results):
        lines.append(f"* best personal {measure.title}" if contract == Evaluation() else "* best score")
    first_costs = {label: seeds[0].cost for label, seeds in grouped(runs).items()}
    lines += costs.notes(first_costs, [row.cost for row in results])
    lines += [facts_line(facts)] if facts.data or facts.model else []
    epochs, differing = work_lines(grouped(runs))
    engines = " or ".join(sorted({run.engine for run in runs}))
    rounds = f"{training.rounds} rounds, participation {training.participation:g}, {epochs}"
    batch, lr = (_values(runs, name) for name in ("batch_size", "lr"))
    lines.append(f"{rounds}, batch {batch}, lr {lr}; engine {engines}")
    return [
        *lines,
        *differing,
        *stopped_lines(grouped(runs)),
        *recipe_lines(grouped(runs)),
        *server_lines(grouped(runs)),
        *time_lines(grouped(runs)),
        *privacy_lines(grouped(runs)),
        *rejection_lines(grouped(runs)),
    ]


MEANT = {  # what the score is, where it is not the share of right answers
    "multilabel": "share of the labels that are right, ",
    "regression": "mean absolute error (less is better), ",
    "tokens": "share of the tokens that are right, ",
}


def measured(history: Sequence[Mapping[str, Any]]) -> str:
    """Return in words what the score is, where it is not accuracy; with a comma."""
    record = next((record for record in history if "personal_clients" in record), {})
    return MEANT.get(str(record.get("objective", "")), "")


def _values(runs: Sequence[Run], name: str) -> str:
    """Format the distinct values of a field in the runs."""
    values = dict.fromkeys(getattr(run.training, name) for run in runs)
    return " or ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def stopped_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Say of runs with patience after which round each ended and which one's models and numbers it keeps."""
    lines = []
    for label, runs in groups.items():
        training = runs[0].training
        if not training.patience:
            continue
        ends = [len(run.history) for run in runs]
        kept = [run.task.round for run in runs]
        stopped = any(run.stopped for run in runs)
        lines.append(
            stopped_line(
                label, ends, kept, training.rounds if stopped else 0, training.patience, Evaluation.by(training)
            )
        )
    return lines


def stopped_line(
    label: str, ends: Sequence[int], kept: Sequence[int], of: int, patience: int, contract: Evaluation
) -> str:
    """Say after which of `of` rounds each seed's run has stopped (0: none stopped early), and which round's results these are."""
    ended = f"stopped after round {_listed(ends)} of {of}" if of else f"ran all {max(ends)} rounds"
    which = f"models and numbers are those of round {_listed(kept)}"
    return f"{label}: {ended}; {which} ({contract}, patience {patience})"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def server_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a line for each server optimizer other than the plain mean."""
    methods: dict[str, list[str]] = {}
    for label, (run, *_) in groups.items():
        rule = Rule.of(run.method, run.training)
        if rule is not None:
            methods.setdefault(rule.words(), []).append(label)
    return [f"server {words}: {', '.join(labels)}" for words, labels in methods.items()]


def time_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Describe runs in simulated time: their duration, the devices, how replies are merged, when personal models train."""
    lines = []
    for label, runs in groups.items():
        training = runs[0].training
        if not training.simulates_time:
            continue
        mode = Asynchrony.of(runs[0].method, training, training, count(runs[0].task.clients, training.participation))
        modes = [mode.words()] if mode is not None else []
        modes += [f"wait-free ({training.wait_free})"] if training.wait_free != "off" else []
        seconds = [run.history[-1]["time"] for run in runs]
        duration = f"{sum(seconds) / len(seconds):,.4g} simulated s on {training.profile}"
        lines.append(f"time of {label}: {duration}{', ' if modes else ''}{'; '.join(modes)}")
    return lines


def rejection_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a line for each client whose replies were refused, with the causes; of many clients for the first."""
    lines = []
    for label, runs in groups.items():
        causes: dict[int, list[str]] = {}
        for run in runs:
            for client, reasons in run.rejected.items():
                causes.setdefault(client, []).extend(reasons)
        of = f" of {label}" if len(groups) > 1 else ""
        for client, reasons in sorted(causes.items())[:NAMED]:
            first, *others = {re.sub(r"[\d.e+-]+", "#", reason): reason for reason in reversed(reasons)}.values()
            more = f"; and {len(others)} other causes" if len(others) > 1 else "; and another cause" if others else ""
            uploads = "1 reply" if len(reasons) == 1 else f"{len(reasons)} replies"
            lines.append(f"client {named(runs[0], client)}{of}: {uploads} rejected ({first}{more})")
        if len(causes) > NAMED:
            count = sum(map(len, causes.values()))
            lines.append(f"{count} replies of {len(causes)} clients{of} rejected in all")
    return lines


def named(run: Run, client: int) -> str:
    """Return a client's number, and its name where it has one."""
    names = () if run.outline is None else run.outline.names
    return f"{client} ({cut(names[client], LONGEST)})" if client < len(names) else str(client)


def protected(run: Run) -> bool:
    """Return whether a run had differential privacy."""
    return run.training.privacy != "off"


def privacy_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Say what ε covers, and what publishing the rest would mean."""
    runs = {label: seeds[0] for label, seeds in groups.items() if protected(seeds[0])}
    lines = [f"ε of {label}: {privacy.words(run.method, run.task, run.training)}" for label, run in runs.items()]
    return (
        [*lines, "ε: of one run's uploads; accuracies, losses and choosing among runs are not covered"] if lines else []
    )


def facts_line(facts: Facts) -> str:
    """Format data, partition and model in one line."""
    phrases = [
        f"data {facts.data}" if facts.data else "",
        f"{facts.clients} clients" if facts.clients else "",
        f"partition {facts.partition}" if facts.partition else "",
        f"model {facts.model}" if facts.model else "",
    ]
    hashes = ", ".join(digest[:12] for digest in facts.hashes)
    return ", ".join(phrase for phrase in phrases if phrase) + (f"; partition hash {hashes}" if hashes else "")


def table(runs: Sequence[Run], facts: Facts = UNKNOWN) -> str:
    """Format the results as plain, aligned text."""
    results = rows(runs)
    return "\n".join([*aligned(columns(results)), "", *notes(runs, results, facts)])


def aligned(cells: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Format columns, each with its heading, as lines."""
    widths = [max(cells_of(heading), *map(cells_of, texts)) for heading, texts in cells]
    lines = [_line([heading for heading, _ in cells], widths), "  ".join("─" * width for width in widths)]
    lines += [_line([texts[i] for _, texts in cells], widths) for i in range(len(cells[0][1]))]
    return [line.rstrip() for line in lines]


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Align the first column to the left and the others to the right."""
    first, *rest = zip(texts, widths, strict=True)
    return "  ".join([padded(*first, left=True), *(padded(text, width) for text, width in rest)])


register_table(table)
