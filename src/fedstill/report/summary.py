"""Results as one JSON record: what `summary.json` in a folder of runs holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import scores
from ..core import settings
from ..run.evaluate import Evaluation
from .text import GENERIC, Facts, Stat, rows, scored, seconds, stat_of

if TYPE_CHECKING:
    from ..run.experiment import Experiment
    from ..run.result import Run

FORMAT = 1


def summary(
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Sequence[tuple[str, Run]]],
    facts: Facts,
    failed: Mapping[str, str],
    command: str = "",
) -> dict[str, Any]:
    """All numbers of a comparison: each run with its folder, and means over seeds. Accuracies are fractions."""
    from ..core.version import __version__

    every = [settings.values_of(experiment) for experiment in experiments.values()]
    values = {name: value for name, value in every[0].items() if all(other[name] == value for other in every)}
    shared = {**values, "partition": facts.partition, "clients": facts.clients}  # as they were, where left to the data
    methods = {}
    for label, experiment in experiments.items():
        done = runs.get(label, [])
        own = {name: value for name, value in settings.values_of(experiment).items() if name not in values}
        methods[label] = {
            "settings": {"id": experiment.method.id, **settings.values_of(experiment.method)},
            **({"experiment": own} if own else {}),  # what is not shared
            "runs": [{"seed": run.training.seed, "folder": folder, **_numbers(run)} for folder, run in done],
            **_means([run for _, run in done]),
        }
    return {
        "format": FORMAT,
        "fedstill": __version__,
        "command": command,  # what made the folder
        "contract": str(Evaluation()),
        "scores": _said([run for done in runs.values() for _, run in done], facts),
        "experiment": shared,
        "partition_hashes": list(facts.hashes),
        "methods": methods,
        "failed": dict(failed),
        "finished": bool(runs) and not failed and all(label in runs for label in experiments),
    }


def ours(found: Any) -> bool:
    """Whether a JSON value is a summary that this library wrote."""
    return isinstance(found, dict) and found.get("format") == FORMAT and {"fedstill", "methods"} <= found.keys()


def _said(runs: Sequence[Run], facts: Facts) -> dict[str, str]:
    """In words, every score that some run has beside those of the contract."""
    said = {name: on for name, on in GENERIC.items() if any(name in _numbers(run) for run in runs)}
    for run in runs:
        words = scores.explanations(run.training)
        found = [name for name in _numbers(run) if name in words]
        said.update({name: words[name].replace("{external}", facts.external or "external data") for name in found})
        if run.newcomers:
            said["clients"] = f"the {len(run.clients)} that train; {len(run.newcomers)} join after the federation"
    return said


def _numbers(run: Run) -> dict[str, Any]:
    record = scored(run)
    names = (
        "personal", "personal_sample", "personal_std", "personal_worst", "generic", "generic_common", "loss",
    )  # fmt: skip
    found = {**{name: record[name] for name in names if name in record}, **scores.numbers(run.after, run.history)}
    joins = {"newcomers": list(run.newcomers)} if run.newcomers else {}
    return {**found, **joins, "seconds": seconds(run), "engine": run.engine, "round_cost": run.cost.said()}


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
        "generic": pair(_over(runs, "generic")),
        "generic_common": pair(_over(runs, "generic_common")),
        **{name: pair(stat) for name, stat in row.further.items()},
    }


def _over(runs: Sequence[Run], name: str) -> Stat | None:
    values = [scored(run).get(name) for run in runs]
    return stat_of([value for value in values if value is not None]) if None not in values else None
