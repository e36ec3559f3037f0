"""Results as one JSON record: what `summary.json` in a folder of runs holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import settings
from ..evaluate import Evaluation
from .text import Facts, Stat, rows, scored, seconds

if TYPE_CHECKING:
    from ..experiment import Experiment
    from ..simulation import Run

FORMAT = 1


def summary(
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Sequence[tuple[str, Run]]],
    facts: Facts,
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """All numbers of a comparison: each run with its folder, and means over seeds. Accuracies are fractions."""
    from .. import __version__

    values = settings.values_of(next(iter(experiments.values())))
    shared = {**values, "partition": facts.partition, "clients": facts.clients}  # as they were, where left to the data
    methods = {}
    for label, experiment in experiments.items():
        done = runs.get(label, [])
        methods[label] = {
            "settings": {"id": experiment.method.id, **settings.values_of(experiment.method)},
            "runs": [{"seed": run.training.seed, "folder": folder, **_numbers(run)} for folder, run in done],
            **_means([run for _, run in done]),
        }
    return {
        "format": FORMAT,
        "fedstill": __version__,
        "contract": str(Evaluation()),
        "experiment": shared,
        "partition_hashes": list(facts.hashes),
        "methods": methods,
        "failed": dict(failed),
        "finished": bool(runs) and all(label in runs for label in experiments),
    }


def ours(found: Any) -> bool:
    """Whether a JSON value is a summary that this library wrote."""
    return isinstance(found, dict) and found.get("format") == FORMAT and {"fedstill", "methods"} <= found.keys()


def _numbers(run: Run) -> dict[str, Any]:
    record = scored(run)
    names = ("personal", "personal_sample", "personal_std", "personal_worst", "generic", "loss")
    return {**{name: record[name] for name in names if name in record}, "seconds": seconds(run), "engine": run.engine}


def _means(runs: Sequence[Run]) -> dict[str, Any]:
    """Means over seeds with their standard deviation (n − 1; null for one seed)."""
    if not runs:
        return {}
    row = rows(runs)[0]

    def pair(stat: Stat | None) -> dict[str, float | None] | None:
        spread = None if stat is None or row.seeds == 1 else stat.spread
        return None if stat is None else {"mean": stat.value, "std": spread}

    return {
        "personal": pair(row.personal),
        "personal_worst": pair(row.worst),
        "personal_sample": pair(row.sample),
        "generic": pair(row.generic),
    }
