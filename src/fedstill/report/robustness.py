"""What attackers cost, and what a rule keeps: a comparison's runs side by side, on the honest clients alone.

    method and model | clean, mean | attacked, mean | attacked, each rule

All columns are of the same clients: those who are honest in the attacked runs of the seed, in the clean run as well.
Personal is the mean over clients, generic counts their test samples alike, as in the table of results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.metric import Measure, measure_of
from ..run.result import Run
from ..server.attack import STRENGTH
from .costs import NONE
from .text import aligned, scored, stat_of

MODELS = ("generic", "personal")
Key = tuple[str, str]  # attack and rule


@dataclass(frozen=True)
class Case:
    """A run as this table needs it, whether it has just ended or is read from its folder."""

    method: str
    models: Sequence[str]  # that the method trains
    seed: int
    attack: str  # "none" in a clean run
    rule: str
    strength: float | None
    target: int  # of a backdoor
    attackers: int
    record: Mapping[str, Any]  # of the last round that was scored
    after: Mapping[str, Any]

    @classmethod
    def of(cls, run: Run) -> Case:
        """Return the case of a run."""
        training = run.training
        strength = training.attack_strength or STRENGTH.get(training.attack)
        return cls(
            run.method.id, run.method.scores, training.seed, training.attack, training.average, strength,
            training.backdoor_target, len(run.attackers), scored(run), run.after,
        )  # fmt: skip

    @property
    def key(self) -> Key:
        """The attack and the rule."""
        return self.attack, self.rule


def compares(runs: Sequence[Run]) -> bool:
    """Return whether these are runs with and without simulated attackers, or under several rules."""
    return compared([Case.of(run) for run in runs])


def compared(cases: Sequence[Case]) -> bool:
    """Return whether these are cases with and without simulated attackers, or under several rules."""
    return any(case.attackers for case in cases) and len({case.key for case in cases}) > 1


def columns(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the table's columns: a heading and a text for each row."""
    return columns_of([Case.of(run) for run in runs])


def columns_of(cases: Sequence[Case]) -> list[tuple[str, list[str]]]:
    """Return the table's columns: a heading and a text for each row."""
    keys, measure = list(dict.fromkeys(case.key for case in cases)), measure_of("", cases[0].record)
    keys.sort(key=lambda key: (key[0] != "none", key[1] != "mean"))
    honest = {
        case.seed: set(case.record["personal_clients"]) for case in cases if case.attackers
    }  # others are not scored
    rows: list[str] = []
    cells: dict[Key, list[str]] = {key: [] for key in keys}
    for method in dict.fromkeys(case.method for case in cases):
        groups = {key: [case for case in cases if case.method == method and case.key == key] for key in keys}
        own = next(case for case in cases if case.method == method).models
        for model in (name for name in MODELS if name in own):
            rows.append(f"{method}, {model}")
            for key, group in groups.items():
                cells[key].append(_text([score(case.record, model, honest[case.seed]) for case in group], measure))
        for model, name in (("generic", "backdoor_generic"), ("personal", "backdoor")):
            if model in own and any(name in case.after for group in groups.values() for case in group):
                rows.append(f"{method}, backdoor in {model}")
                for key, group in groups.items():
                    cells[key].append(_text([case.after[name] for case in group if name in case.after], measure))
    return [("method, model", rows), *((_heading(key, measure), texts) for key, texts in cells.items())]


def _heading(key: Key, measure: Measure) -> str:
    attack, rule = key
    return measure.heading(f"{'clean' if attack == 'none' else attack}, {rule}")


def _text(values: Sequence[float], measure: Measure) -> str:
    return stat_of(values).text(measure) if values else NONE


def score(record: Mapping[str, Any], model: str, clients: set[str]) -> float:
    """Return a model's accuracy (or error) on some clients' tests, from a record."""
    rates: Mapping[str, float] = record[f"{model}_clients"]
    of = [k for k in rates if k in clients]
    weights = [record["samples"][k] if model == "generic" else 1 for k in of]
    return float(np.average([rates[k] for k in of], weights=weights))


def notes(runs: Sequence[Run]) -> list[str]:
    """Return the lines below the table."""
    return notes_of([Case.of(run) for run in runs])


def notes_of(cases: Sequence[Case]) -> list[str]:
    """Return the lines below the table."""
    one = next(case for case in cases if case.attackers)
    number, others = one.attackers, len(one.record["personal_clients"])
    who = f"{number} of {number + others} clients attack ({one.attack}, strength {one.strength or 'z_max'})"
    lines = [
        f"{who}; numbers are those of the other {others}, in the clean run too",
        "generic: per test sample, personal: mean per client, both of the last round",
    ]
    if one.attack == "backdoor":
        lines.append(f"backdoor in a model: test samples of other classes with the trigger that get class {one.target}")
    return lines


def table(runs: Sequence[Run]) -> str:
    """Format the comparison as plain, aligned text."""
    return "\n".join([*aligned(columns(runs)), "", *notes(runs)])
