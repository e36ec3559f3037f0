"""What attackers cost, and what a rule keeps: a comparison's runs side by side, on the honest clients alone.

    method and model | clean, mean | attacked, mean | attacked, each rule

All columns are of the same clients: those who are honest in the attacked runs of the seed, in the clean run as well.
Personal is the mean over clients, generic counts their test samples alike, as in the table of results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..run.result import Run
from ..server.attack import STRENGTH
from .costs import NONE
from .text import aligned, scored, stat_of

MODELS = ("generic", "personal")
Key = tuple[str, str]  # attack and rule


def compares(runs: Sequence[Run]) -> bool:
    """Return whether these are runs with and without simulated attackers, or under several rules."""
    return any(run.attackers for run in runs) and len({_key(run) for run in runs}) > 1


def columns(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the table's columns: a heading and a text for each row."""
    keys = list(dict.fromkeys(_key(run) for run in runs))
    keys.sort(key=lambda key: (key[0] != "none", key[1] != "mean"))
    honest = {run.training.seed: set(run.clients) for run in runs if run.attackers}
    rows: list[str] = []
    cells: dict[Key, list[str]] = {key: [] for key in keys}
    for method in dict.fromkeys(run.method.id for run in runs):
        groups = {key: [run for run in runs if run.method.id == method and _key(run) == key] for key in keys}
        own = next(run for run in runs if run.method.id == method).method.scores
        for model in (name for name in MODELS if name in own):
            rows.append(f"{method}, {model}")
            for key, group in groups.items():
                cells[key].append(_percent([accuracy(run, model, honest[run.training.seed]) for run in group]))
        for model, name in (("generic", "backdoor_generic"), ("personal", "backdoor")):
            if model in own and any(name in run.after for group in groups.values() for run in group):
                rows.append(f"{method}, backdoor in {model}")
                for key, group in groups.items():
                    cells[key].append(_percent([run.after[name] for run in group if name in run.after]))
    return [("method, model", rows), *((_heading(key), texts) for key, texts in cells.items())]


def _key(run: Run) -> Key:
    return run.training.attack, run.training.average


def _heading(key: Key) -> str:
    attack, rule = key
    return f"{'clean' if attack == 'none' else attack}, {rule} %"


def _percent(values: Sequence[float]) -> str:
    return stat_of(values).percent() if values else NONE


def accuracy(run: Run, model: str, clients: set[int]) -> float:
    """Return a model's accuracy on some clients' tests, in the last round that was scored."""
    record = scored(run)
    rates: Mapping[str, float] = record[f"{model}_clients"]
    of = [k for k in rates if int(k) in clients]
    weights = [record["samples"][k] if model == "generic" else 1 for k in of]
    return float(np.average([rates[k] for k in of], weights=weights))


def notes(runs: Sequence[Run]) -> list[str]:
    """Return the lines below the table."""
    one = next(run for run in runs if run.attackers)
    training = one.training
    strength = training.attack_strength or STRENGTH.get(training.attack)
    number, others = len(one.attackers), len(one.clients)
    who = f"{number} of {number + others} clients attack ({training.attack}, strength {strength or 'z_max'})"
    lines = [
        f"{who}; accuracies are those of the other {others}, in the clean run too",
        "generic: per test sample, personal: mean per client, both of the last round",
    ]
    if training.attack == "backdoor":
        target = training.backdoor_target
        lines.append(f"backdoor in a model: test samples of other classes with the trigger that get class {target}")
    return lines


def table(runs: Sequence[Run]) -> str:
    """Format the comparison as plain, aligned text."""
    return "\n".join([*aligned(columns(runs)), "", *notes(runs)])
