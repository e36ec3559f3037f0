"""What attackers cost and what a rule keeps: the runs of a folder clean, attacked and defended, side by side."""

from __future__ import annotations

from ...server.attack import STRENGTH
from ..robustness import Case, columns_of, compared, notes_of
from .read import Result, Study
from .tables import Column, Table


def attacked(study: Study) -> Table | None:
    """Return the table; None where no run has simulated attackers, or none stands beside another attack or rule."""
    cases = [_case(run) for label in study.runs for run in study.runs[label]]
    if not compared(cases) or (any(case.attackers for case in cases) and _unknown(cases)):
        return None
    (heading, rows), *others = columns_of(cases)
    columns = [Column(heading, rows, left=True), *(Column(name, texts) for name, texts in others)]
    return Table("attacked", "Clean, attacked, defended", columns, notes=notes_of(cases))


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
