"""The table of results, ranked, with what differs from the best; and the table of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import scores
from ...core.metric import Measure, measure_of, metrics_in
from ...run.evaluate import Evaluation
from ..costs import NONE, scaled
from ..significance import Differences
from ..text import GENERIC, Stat, measured, stat_of, stopped_line
from ..verdict import Verdict, counts
from .read import Study
from .tables import Column, Table

ALIKE = "†"  # not shown to differ from the best


def results(study: Study, tested: Differences | None, found: Mapping[str, list[Verdict]]) -> Table:
    """Return the table of results."""
    labels, best, default = study.labels, study.best, study.contract == Evaluation()
    plain, measure, by = study.plain, study.measure, study.tested_by
    alike = [label for label in labels if tested and label != best and not tested.between(best, label).significant]
    names = [f"{label} {ALIKE}" if label in alike else label for label in labels]
    columns = [
        Column(rows_are(study), names, left=True),
        *(
            []
            if default
            else [Column(measure.heading("score"), [_text(study.score(label), measure) for label in labels])]
        ),
        Column(plain.heading("personal"), [study.personal(label).text(plain) for label in labels]),
    ]
    if tested:
        form = "+.2f" if by.share else "+.4g"
        gaps = [NONE if k == best else f"{-by.factor * tested.between(best, k).gain:{form}}" for k in labels]
        columns.append(Column(f"vs best ({by.points})", [gap.replace("-", "−") for gap in gaps]))
        columns.append(Column("p", [NONE if label == best else _p(tested.between(best, label).p) for label in labels]))
    for name, heading in (("personal_worst", "worst 10 %"), ("personal_sample", plain.heading("per sample"))):
        columns.append(Column(heading, [_text(study.mean(label, name), plain) for label in labels]))
    generic = {label: next((name for name in GENERIC if study.mean(label, name)), None) for label in labels}
    if any(generic.values()):
        columns.append(
            Column(
                plain.heading("generic"),
                [_text(study.mean(k, name) if name else None, plain) for k, name in generic.items()],
            )
        )
    headings = scores.headings()
    further = {name: [study.mean(label, name) for label in labels] for name in headings}
    columns += [
        Column(headings[name].replace("%", plain.mark), [_text(stat, plain) for stat in stats])
        for name, stats in further.items()
        if any(stats)
    ]
    asked, asked_notes = _metrics(study)
    columns += asked
    if any("epsilon" in run.history[-1] for runs in study.runs.values() for run in runs):
        columns.append(Column("ε", [_epsilon(study, label) for label in labels]))
    if found:
        cells = [counts(found[label]) if label in found else None for label in labels]
        columns.append(Column("join", [NONE if c is None else str(c["join"]) for c in cells]))
        columns.append(Column("undecided", [NONE if c is None else str(c["undecided"]) for c in cells]))
        columns.append(Column("stay local", [NONE if c is None else str(c["stay local"]) for c in cells]))
    if len({len(runs) for runs in study.runs.values()}) > 1:
        columns.append(Column("seeds", [str(len(study.runs[label])) for label in labels]))
    notes: list[object] = [] if default else [f"{measure.heading('score')}: {study.contract}"]
    over = "seeds (n − 1)" if study.seeds > 1 else "clients"
    said = measured([study.first.last])
    notes += [f"{plain.heading('personal')}: {said}{Evaluation()}; ± standard deviation over {over}"]
    notes += _stopped(study)
    if tested:
        if len({difference.units for difference in tested.pairs.values()}) > 1:
            notes.append("vs best: on the clients that both have, which are not all where some were not scored")
        notes.append(
            f"vs best, p and {ALIKE}: {study.compared}; {tested.words()}. {ALIKE} not shown to differ from {best}."
        )
    notes.append("worst 10 %: mean of the worst tenth of clients")
    notes += [f"{plain.heading('generic')}: {GENERIC[name]}" for name in dict.fromkeys(generic.values()) if name]
    notes += [
        f"{headings[name].replace('%', plain.mark)}: {study.notes[name]}"
        for name in further
        if any(further[name]) and name in study.notes
    ]
    notes += asked_notes
    served = [label for label in labels if study.runs[label][0].generic_only]
    if served:
        whose = "all" if len(served) == len(labels) else ", ".join(served)
        notes.append(f"{whose}: no personal model, so the generic one serves every client")
    if found:
        notes.append(
            "join, undecided, stay local: clients, by the verdicts below (the models that serve them after the last round)"
        )
    strong = frozenset([0]) if len(labels) > 1 else frozenset()
    return Table("results", "Results", columns, strong, notes)


def rows_are(study: Study) -> str:
    """Return what the labels are: methods, or values of the fields that a sweep has."""
    methods = {runs[0].method for runs in study.runs.values()}
    fields = [name.removeprefix("method.") for name in study.varying]
    return ", ".join(fields) if len(methods) == 1 and 0 < len(fields) <= 2 else "method"


def costs(study: Study) -> Table:
    """Return what the runs cost."""
    labels = study.labels
    columns = [Column(rows_are(study), labels, left=True)]
    for heading, values, plain in (
        ("steps", [_cost(study, label, "steps") for label in labels], True),
        ("FLOPs", [_cost(study, label, "flops") for label in labels], False),
        ("B", [_cost(study, label, "bytes") for label in labels], False),
        ("B in all", [_sum(study, label, "bytes_total") for label in labels], False),
    ):
        if any(value is not None for value in values):
            columns.append(Column(*scaled(heading, values, plain=plain)))
    columns.append(Column("seconds", [f"{_sum(study, label, 'seconds') or 0.0:,.1f}" for label in labels]))
    if all("time" in run.history[-1] for runs in study.runs.values() for run in runs):
        times = [
            sum(float(run.history[-1]["time"]) for run in study.runs[label]) / len(study.runs[label])
            for label in labels
        ]
        columns.append(Column("simulated s", [f"{time:,.4g}" for time in times]))
    notes = [
        "steps, FLOPs, B: one participant in a round, down + up; FLOPs of products and convolutions, client of mean size",
        "B in all: all clients, all rounds; seconds: of the rounds, as this machine took them"
        + ("; means over seeds" if study.seeds > 1 else ""),
    ]
    return Table("costs", "What it cost", columns, notes=notes)


def _metrics(study: Study) -> tuple[list[Column], list[str]]:
    """Return the columns of the metrics beside the usual number, and what they are."""
    columns: list[Column] = []
    notes: list[str] = []
    last = study.first.last
    for name in metrics_in(last):
        measure = measure_of(name, last)
        kinds = {f"personal_{name}": "", f"personal_{name}_pooled": "pooled ", f"generic_{name}": "generic "}
        for entry, kind in kinds.items():
            stats = [study.mean(label, entry) for label in study.labels]
            if any(stats):
                columns.append(Column(f"{kind}{measure.heading()}", [_text(stat, measure) for stat in stats]))
        left = [int(run.last.get(f"personal_{name}_left_out", 0)) for runs in study.runs.values() for run in runs]
        less = "; less is better" if measure.lower else ""
        without = f"; not defined for up to {max(left)} clients, who are left out" if any(left) else ""
        notes.append(
            f"{measure.heading()}: personal model, mean per client; pooled and generic: all clients' predictions "
            f"together{less}{without}"
        )
    return columns, notes


def by_class(study: Study) -> list[Table]:
    """Return a table for each metric that is a mean over classes, with a row for each class and a column for each method."""
    tables = []
    for name in metrics_in(study.first.last):
        measure = measure_of(name, study.first.last)
        entry = f"personal_{name}_by_class"
        found = {label: [run.last.get(entry, {}) for run in study.runs[label]] for label in study.labels}
        classes = list(dict.fromkeys(c for runs in found.values() for of in runs for c in of))
        if not classes:
            continue

        def cell(runs: Sequence[Mapping[str, float]], c: str, measure: Measure = measure) -> str:
            known = [float(of[c]) for of in runs if c in of]
            return _text(stat_of(known), measure) if known else NONE

        columns = [Column("class", classes, left=True)]
        columns += [Column(label, [cell(runs, c) for c in classes]) for label, runs in found.items()]
        title = f"{measure.title.removeprefix('macro ')[:1].upper()}{measure.title.removeprefix('macro ')[1:]} by class"
        notes = ["personal models, all clients' predictions together" + ("; per cent" if measure.share else "")]
        tables.append(Table(f"by-class-{name}", title, columns, notes=notes))
    return tables


def _text(stat: Stat | None, measure: Measure) -> str:
    return NONE if stat is None else stat.text(measure)


def _stopped(study: Study) -> list[str]:
    """Return a line for each label whose runs had patience."""
    lines = []
    for label in study.labels:
        runs = study.runs[label]
        settings = runs[0].settings
        if settings.get("patience"):
            of = int(settings["rounds"]) if any(run.stopped for run in runs) else 0
            ends, kept = [len(run.history) for run in runs], [run.round for run in runs]
            lines.append(stopped_line(label, ends, kept, of, int(settings["patience"]), runs[0].contract))
    return lines


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _epsilon(study: Study, label: str) -> str:
    values = [run.history[-1].get("epsilon") for run in study.runs[label]]
    known = [float(value) for value in values if value is not None]
    return f"{max(known):.3g}" if known else NONE


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _cost(study: Study, label: str, name: str) -> float | None:
    """Return a cost of a participant's round, from the summary, else from the records."""
    found: list[float | None] = []
    for run in study.runs[label]:
        records = [record for record in run.history if record.get("participants")]
        if name == "flops":
            flops = run.cost.get("flops")
            found.append(float(flops["total"]) if isinstance(flops, dict) and "total" in flops else None)
        elif name == "steps":
            found.append(
                _mean([record["steps"] / len(record["participants"]) for record in records if "steps" in record])
            )
        else:
            found.append(
                _mean([record["bytes_down"] + record["bytes_up"] for record in run.history if "bytes_up" in record])
            )
    return _mean(found)


def _sum(study: Study, label: str, name: str) -> float | None:
    """Return the mean over seeds of a sum over rounds."""
    return _mean([float(sum(record.get(name, 0.0) for record in run.history)) for run in study.runs[label]])
