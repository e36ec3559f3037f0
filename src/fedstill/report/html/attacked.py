"""What attackers cost and what a rule keeps: the runs of a folder clean, attacked and defended, side by side."""

from __future__ import annotations

from ...core.metric import ACCURACY, Measure
from ...server.attack import STRENGTH
from ..robustness import Case, columns_of, compared, notes_of
from .read import Result, Study
from .tables import Column, Table


def attacked(study: Study) -> Table | None:
    """Return the table; None where no run has simulated attackers, or none stands beside another attack or rule."""
    cases = [_case(run) for label in study.runs for run in study.runs[label]]
    if not compared(cases) or _unknown(cases):
        return None
    (heading, rows), *others = columns_of(cases)
    columns = [Column(heading, rows, left=True), *(Column(name, texts) for name, texts in others)]
    return Table("attacked", "Clean, attacked, defended", columns, notes=notes_of(cases))


def sentence(table: Table, measure: Measure = ACCURACY) -> str:
    """Return what the attack does to the model that is best without it, and what the best rule keeps; "" without a clean run."""
    (first, *others), names = (
        table.columns,
        [column.heading.removesuffix(f" {measure.mark}") for column in table.columns[1:]],
    )
    shares = [[_share(column.cells[i]) for column in others] for i in range(len(first.cells))]
    rows = [i for i, row in enumerate(shares) if row[0] is not None and "backdoor" not in first.cells[i]]
    if names[0] != "clean, mean" or not rows:
        return ""
    best = max(rows, key=lambda i: measure.rank(shares[i][0] or 0.0))
    clean, *attacked = [(name, value) for name, value in zip(names, shares[best], strict=True) if value is not None]
    texts = [
        f"{_words(value, measure)} under {name.removesuffix(', mean')}"
        for name, value in attacked
        if name.endswith(", mean")
    ]
    rules = [(value, name.rpartition(", ")[2]) for name, value in attacked if not name.endswith(", mean")]
    if rules:
        value, rule = max(rules, key=lambda pair: (measure.rank(pair[0]), pair[1]))
        texts.append(f"{_words(value, measure)} under attack with the rule {rule}")
    method, _, model = first.cells[best].partition(", ")
    return f"{', '.join([f'The {model} model of {method} has {_words(clean[1], measure)} without attackers', *texts])}."


def _words(value: float, measure: Measure) -> str:
    """Return a number of the table, where shares are in per cent already."""
    return f"{value:.1f} %" if measure.share else measure.words(value)


def _share(text: str) -> float | None:
    """Return a table's number; None where the cell has none."""
    try:
        return float(text.split()[0])
    except ValueError:
        return None


def _unknown(cases: list[Case]) -> bool:
    """Return whether a seed has no attacked run, so that nobody knows who is honest in it."""
    return {case.seed for case in cases} != {case.seed for case in cases if case.attackers}


def _case(run: Result) -> Case:
    settings = run.settings
    attack = str(settings.get("attack", "none"))
    models = [name for name in ("generic", "personal") if f"{name}_clients" in run.last]
    return Case(
        run.method,
        ["generic"] if run.generic_only else models,
        run.seed,
        attack,
        str(settings.get("average", "mean")),
        float(settings.get("attack_strength", 0.0)) or STRENGTH.get(attack),
        int(settings.get("backdoor_target", 0)),
        run.attackers if attack != "none" else 0,
        run.last,
        run.after,
    )
