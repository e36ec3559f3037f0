"""Results as text. `rows` computes the numbers once; `table` writes them plainly, the command line also in colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import scores
from ..core import settings
from ..data import Federation
from ..run.evaluate import Evaluation
from ..run.experiment import Experiment
from ..run.result import Run, register_table
from ..server.optimizer import Rule
from ..server.sampler import count
from ..timing.asynchronous import Asynchrony
from . import costs
from .costs import NONE
from .local_work import work_lines


@dataclass(frozen=True)
class Facts:
    """What a table is a result of, as far as it is known."""

    data: str = ""
    clients: int = 0
    partition: str = ""
    hashes: tuple[str, ...] = ()  # one a seed
    model: str = ""
    external: str = ""

    @classmethod
    def of(cls, experiment: Experiment, federation: Federation, hashes: Sequence[str] = ()) -> Facts:
        """From an experiment and its data."""
        return cls(
            data=experiment.data,
            clients=len(federation),
            partition=partition_of(federation),
            hashes=tuple(hashes) or (federation.hash,),
            model=experiment.model,
            external=experiment.external,
        )


UNKNOWN = Facts()


def partition_of(federation: Federation) -> str:
    """How a federation was divided, as one would write it after --partition."""
    kind, parameter = federation.partition_record["kind"], federation.partition_record.get("parameter")
    return str(kind) if parameter is None else f"{kind}:{parameter}"


@dataclass(frozen=True)
class Stat:
    """A number and its spread (over seeds where there are several, else over clients where that is known)."""

    value: float
    spread: float | None = None

    def percent(self) -> str:
        """In per cent, aligned when written under one another."""
        spread = "" if self.spread is None else f" ± {100 * self.spread:5.2f}"
        return f"{100 * self.value:.2f}{spread}"


@dataclass(frozen=True)
class Row:
    """One method's results."""

    label: str
    seeds: int
    personal: Stat
    worst: Stat
    sample: Stat
    generic: Stat | None
    generic_on: str  # which test data, and whether it is the mean of personal models instead
    further: dict[str, Stat]  # scores beside these, by the names of `scores.words`
    seconds: float
    serves: bool  # it has no personal model: the generic one serves every client
    cost: dict[str, float | None]  # of a participant's round: steps, flops, bytes; None where it is not known
    best: bool = False


def scored(run: Run) -> dict[str, Any]:
    """The record of the last round that was scored."""
    return next(record for record in reversed(run.history) if "personal_clients" in record)


def seconds(run: Run) -> float:
    """How long the rounds took, those before a resume included."""
    return float(sum(record["seconds"] for record in run.history))


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in their seed together, under a label that tells the groups apart."""
    together: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        together.setdefault((run.method.id, *_choices(run).items()), []).append(run)
    ids = [key[0] for key in together]
    groups: dict[str, list[Run]] = {}
    for key, same in together.items():
        label = str(key[0])
        if ids.count(key[0]) > 1:
            others = [_choices(g[0]) for k, g in together.items() if k[0] == key[0]]
            mine = _choices(same[0])
            told = [f"{name}={mine[name]}" for name in mine if len({other.get(name) for other in others}) > 1]
            label = " ".join([label, *told])
        groups[label] = same
    return groups


def _choices(run: Run) -> dict[str, Any]:
    values = {**settings.values_of(run.training), **settings.values_of(run.method)}
    return {name: value for name, value in values.items() if name != "seed"}


def rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each method, best personal accuracy first."""
    groups = grouped(runs)
    many = any(len(same) > 1 for same in groups.values())
    found = [_row(label, same, many) for label, same in groups.items()]
    found.sort(key=lambda row: -row.personal.value)
    if len(found) < 2:
        return found
    top = found[0].personal.value
    return [Row(**{**vars(row), "best": row.personal.value == top}) for row in found]


def _row(label: str, runs: Sequence[Run], many: bool) -> Row:
    """One row; the spread is that over clients where no row has several seeds."""
    records = [scored(run) for run in runs]
    contract = Evaluation()
    personal = stat_of([contract.of(run.history) for run in runs])
    if not many:
        personal = Stat(personal.value, float(records[0]["personal_std"]))
    further = [scores.numbers(run.after, run.history) for run in runs]
    generic, on = _generic([{**record, **found} for record, found in zip(records, further, strict=True)])
    return Row(
        label=label,
        seeds=len(runs),
        personal=personal,
        worst=stat_of([record["personal_worst"] for record in records]),
        sample=stat_of([record["personal_sample"] for record in records]),
        generic=generic,
        generic_on=on,
        further={name: stat_of([f[name] for f in further]) for name in further[0] if all(name in f for f in further)},
        seconds=float(np.mean([seconds(run) for run in runs])),
        serves="personal" not in runs[0].method.scores,
        cost=costs.means([run.cost for run in runs]),
    )


GENERIC = {  # the first that there is stands under "generic %": the common test set goes before the clients' own
    "generic_common": "the one model for everybody, on the common test set",
    "generic": "the one model for everybody, on all clients' test samples, each counting alike",
    "averaged_common": "no such model: the mean of the personal weights (by training samples), on the common test set",
    "averaged": "no such model: the mean of the personal weights (by training samples), on all clients' test samples",
}


def _generic(found: Sequence[dict[str, Any]]) -> tuple[Stat | None, str]:
    """The generic score and what it is on."""
    for name, on in GENERIC.items():
        if all(name in numbers for numbers in found):
            return stat_of([numbers[name] for numbers in found]), on
    return None, ""


def stat_of(values: Sequence[float]) -> Stat:
    """The mean; with several values also the sample standard deviation (n − 1)."""
    return Stat(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def columns(found: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The table's columns: a heading and a text for each row."""
    many = any(row.seeds > 1 for row in found)

    def column(heading: str, cell: Callable[[Row], str]) -> tuple[str, list[str]]:
        return heading, [cell(row) for row in found]

    out = [
        column("method", lambda row: row.label + (" *" if row.best else "")),
        column("personal %", lambda row: row.personal.percent()),
        column("worst 10 %", lambda row: row.worst.percent()),
        column("per sample %", lambda row: row.sample.percent()),
        column("generic %", lambda row: row.generic.percent() if row.generic else NONE),
        *costs.columns([row.cost for row in found]),
        column("seconds", lambda row: f"{row.seconds:.1f}"),
    ]
    last = next(i for i, (heading, _) in enumerate(out) if heading == "generic %")
    for name, heading in scores.headings().items():
        if any(name in row.further for row in found):
            last += 1
            cells = [row.further[name].percent() if name in row.further else NONE for row in found]
            out.insert(last, (heading, cells))
    return [*out, column("seeds", lambda row: str(row.seeds))] if many else out


def notes(runs: Sequence[Run], found: Sequence[Row], facts: Facts = UNKNOWN) -> list[str]:
    """What stands below a table: the evaluation contract, what ± is, and what the result is a result of."""
    training, newcomers = runs[0].training, runs[0].newcomers
    many = any(row.seeds > 1 for row in found)
    spread = "± standard deviation over " + ("seeds (n − 1); seconds per seed" if many else "clients")
    lines = [f"personal %: {Evaluation()}; {spread}", "worst 10 %: mean of the worst tenth of clients"]
    if newcomers:
        those = (
            ", ".join(map(str, newcomers)) if len(newcomers) <= 10 and not many else f"{len(newcomers)}, by the seed,"
        )
        lines.append(f"all clients: the {len(runs[0].clients)} that train; {those} join after the federation")
    kinds = {on: [row.label for row in found if row.generic_on == on] for on in GENERIC.values()}
    kinds = {on: labels for on, labels in kinds.items() if labels}
    for on, labels in kinds.items():
        whose = f" of {', '.join(labels)}" if len(kinds) > 1 else ""
        lines.append(f"generic %{whose}: {on}")
    said = scores.explanations(training)
    for name, heading in scores.headings().items():
        if any(name in row.further for row in found):
            lines.append(f"{heading}: {said[name].replace('{external}', facts.external or 'external data')}")
    serving = [row.label for row in found if row.serves]
    if serving:
        lines.append(f"{', '.join(serving)}: no personal model, so the generic one serves every client")
    if any(row.best for row in found):
        lines.append("* best personal accuracy")
    lines += costs.notes({label: same[0].cost for label, same in grouped(runs).items()}, [row.cost for row in found])
    lines += [facts_line(facts)] if facts.data or facts.model else []
    epochs, differing = work_lines(grouped(runs))
    engines = " or ".join(sorted({run.engine for run in runs}))
    rounds = f"{training.rounds} rounds, participation {training.participation:g}, {epochs}"
    batch, lr = (_values(runs, name) for name in ("batch_size", "lr"))
    lines.append(f"{rounds}, batch {batch}, lr {lr}; engine {engines}")
    return [*lines, *differing, *server_lines(grouped(runs)), *time_lines(grouped(runs))]


def _values(runs: Sequence[Run], name: str) -> str:
    """The values of a field that the runs have, each once."""
    found = dict.fromkeys(getattr(run.training, name) for run in runs)
    return " or ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in found)


def server_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """A line for each rule of the server, where it is not the plain mean."""
    found: dict[str, list[str]] = {}
    for label, (run, *_) in groups.items():
        rule = Rule.of(run.method, run.training)
        if rule is not None:
            found.setdefault(rule.words(), []).append(label)
    return [f"server {words}: {', '.join(labels)}" for words, labels in found.items()]


def time_lines(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """Of runs in simulated time: the devices, how replies are merged and when personal models train, and how long it took."""
    lines = []
    for label, runs in groups.items():
        how = runs[0].training
        if not how.profile:
            continue
        mode = Asynchrony.of(runs[0].method, how, how, count(runs[0].task.clients, how.participation))
        said = [mode.words()] if mode is not None else []
        said += [f"wait-free ({how.wait_free})"] if how.wait_free != "off" else []
        seconds = [run.history[-1]["time"] for run in runs]
        took = f"{sum(seconds) / len(seconds):,.4g} simulated s on {how.profile}"
        lines.append(f"time of {label}: {took}{', ' if said else ''}{'; '.join(said)}")
    return lines


def facts_line(facts: Facts) -> str:
    """Data, partition and model in one line."""
    known = [
        f"data {facts.data}" if facts.data else "",
        f"{facts.clients} clients" if facts.clients else "",
        f"partition {facts.partition}" if facts.partition else "",
        f"model {facts.model}" if facts.model else "",
    ]
    hashes = ", ".join(found[:12] for found in facts.hashes)
    return ", ".join(part for part in known if part) + (f"; partition hash {hashes}" if hashes else "")


def table(runs: Sequence[Run], facts: Facts = UNKNOWN) -> str:
    """The results as plain, aligned text."""
    found = rows(runs)
    return "\n".join([*aligned(columns(found)), "", *notes(runs, found, facts)])


def aligned(cells: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Columns, each with its heading, as lines."""
    widths = [max(len(heading), *map(len, texts)) for heading, texts in cells]
    lines = [_line([heading for heading, _ in cells], widths), "  ".join("─" * width for width in widths)]
    lines += [_line([texts[i] for _, texts in cells], widths) for i in range(len(cells[0][1]))]
    return [line.rstrip() for line in lines]


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    """The first column to the left, numbers to the right."""
    first, *rest = zip(texts, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)])


register_table(table)
