"""The content of `summary.json`: the results of a folder of runs as one JSON record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import scores
from ..core import settings
from ..core.metric import metrics_in
from ..core.version import __version__
from ..run.evaluate import Evaluation
from ..server import privacy
from .text import GENERIC, Facts, Stat, own_score, rows, scored, seconds, stat_of

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
    line: str = "",
) -> dict[str, Any]:
    """Return all numbers of a comparison: each run with its folder, and means over seeds.

    Accuracies are fractions, errors in the units of the targets.
    """
    first, *others = (settings.values_of(experiment) for experiment in experiments.values())
    common = {name: value for name, value in first.items() if all(other[name] == value for other in others)}
    contract = Evaluation.by(next(iter(experiments.values())))
    shared = {**common, "partition": facts.partition, "clients": facts.clients}  # resolved, where left to the data
    methods = {}
    for label, experiment in experiments.items():
        done = runs.get(label, [])
        own = {name: value for name, value in settings.values_of(experiment).items() if name not in common}
        methods[label] = {
            "settings": {"id": experiment.method.id, **settings.values_of(experiment.method)},
            **({"experiment": own} if own else {}),  # the settings that are not shared
            "runs": [{"seed": run.training.seed, "folder": folder, **_numbers(run)} for folder, run in done],
            **_means([run for _, run in done]),
        }
    return {
        "format": FORMAT,
        "fedstill": __version__,
        "command": command,  # the one that made the folder
        "line": line,  # as it was typed
        "contract": str(contract),
        "scores": _explanations([run for done in runs.values() for _, run in done], facts),
        "experiment": shared,
        "partition_hashes": list(facts.hashes),
        **_names([run for done in runs.values() for _, run in done]),
        "methods": methods,
        "failed": dict(failed),
        "finished": bool(runs) and not failed and all(label in runs for label in experiments),
    }


def _names(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the clients' and classes' names, by number, where all runs have the same."""
    outlines = [run.outline for run in runs if run.outline is not None]
    found = {"clients": [o.names for o in outlines], "classes": [o.labels for o in outlines]}
    return {f"{kind}_named": list(of[0]) for kind, of in found.items() if len(set(of)) == 1 and of[0]}


def is_summary(value: Any) -> bool:
    """Return whether a JSON value is a summary that this library wrote."""
    ours = isinstance(value, dict) and value.get("format") == FORMAT and {"fedstill", "methods"} <= value.keys()
    return ours and isinstance(value["methods"], dict)


def _explanations(runs: Sequence[Run], facts: Facts) -> dict[str, str]:
    """Explain every score that some run has beside those of the contract."""
    explanations = {name: on for name, on in GENERIC.items() if any(name in _numbers(run) for run in runs)}
    for run in runs:
        words = scores.explanations(run.training)
        for name in _numbers(run):
            if name in words:
                explanations[name] = words[name].replace("{external}", facts.external or "external data")
        if "epsilon" in _numbers(run):
            explanations["epsilon"] = privacy.words(run.method, run.task, run.training)
        if "score" in _numbers(run):
            explanations["score"] = str(Evaluation.by(run.training))
        if run.newcomers:
            newcomers = f"{len(run.newcomers)} join after the federation"
            explanations["clients"] = f"the {len(run.clients)} that train; {newcomers}"
    return explanations


def _numbers(run: Run) -> dict[str, Any]:
    record = scored(run)
    names: tuple[str, ...] = (
        "personal", "personal_sample", "personal_std", "personal_worst", "generic", "generic_common", "loss", "epsilon",
    )  # fmt: skip
    asked = [f"{model}_{metric}" for metric in metrics_in(record) for model in ("personal", "generic")]
    names += tuple(n for a in asked for n in record if n.startswith(a) and isinstance(record[n], int | float))
    names += ("objective", "metric") if "objective" in record else ()
    values = {**{name: record[name] for name in names if name in record}, **scores.numbers(run.after, run.history)}
    own = own_score(run)
    values |= {} if own is None else {"score": own}
    newcomers = {"newcomers": list(run.newcomers)} if run.newcomers else {}
    attackers = {"attackers": list(run.attackers)} if run.attackers else {}
    rejected = {"rejected": {str(k): len(reasons) for k, reasons in run.rejected.items()}} if run.rejected else {}
    kept = {"kept": run.task.round, "rounds": len(run.history)} if run.training.patience else {}
    return {
        **values,
        **kept,
        **newcomers,
        **attackers,
        **rejected,
        "seconds": seconds(run),
        "engine": run.engine,
        "round_cost": run.cost.to_dict(),
    }


def _means(runs: Sequence[Run]) -> dict[str, Any]:
    """Return means over seeds with their standard deviation (n − 1; null for one seed)."""
    if not runs:
        return {}
    row = rows(runs)[0]

    def pair(stat: Stat | None) -> dict[str, float | None] | None:
        std = None if stat is None or row.seeds == 1 else stat.spread
        return None if stat is None else {"mean": stat.value, "std": std}

    return {
        **({} if row.score is None else {"score": pair(row.score)}),
        "personal": pair(row.personal),
        "personal_worst": pair(row.worst),
        "personal_sample": pair(row.sample),
        "generic": pair(_mean(runs, "generic")),
        "generic_common": pair(_mean(runs, "generic_common")),
        **{name: pair(stat) for name, stat in row.further.items()},
        **{name: pair(stat) for name, (stat, _) in row.metrics.items()},
    }


def _mean(runs: Sequence[Run], name: str) -> Stat | None:
    values = [scored(run).get(name) for run in runs]
    return stat_of([value for value in values if value is not None]) if None not in values else None
