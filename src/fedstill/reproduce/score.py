"""Read off a result what a cell's contract asks for: one number a seed, or a curve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import InputError
from ..papers import Contract
from ..run.evaluate import Evaluation
from ..server.records import SPLIT
from .scale import Scale
from .store import Result

Series: TypeAlias = list[tuple[float, float]]  # (round, value), ascending
LOWER = {"loss", "client-std", "rounds-to-target", "seconds", "megabytes", "flops"}  # metrics of which less is better
NEUTRAL = {"time-share"}  # metrics of which neither less nor more is better
AFTER = ("fine-tuned", "newcomers")  # models that there are only once the federation has ended
LAST = 10  # rounds of the mean "mean10"


class Unscored(ValueError):
    """A result has no such number; the message says why."""


def number(contract: Contract, result: Result, scale: Scale, reference: Result | None = None) -> float:
    """Return a contract's number of a result, in the contract's unit."""
    metric = contract.metric
    if metric == "accuracy":
        return 100 * accuracy(contract, result, scale)
    if metric == "improvement":
        return 100 * (accuracy(contract, result, scale) / accuracy(contract, _known(reference), scale) - 1)
    if metric == "client-std":
        return 100 * float(np.std(clients(contract, result)))
    if metric == "loss":
        return _at(loss_curve(contract, result), contract, scale)
    if metric in ("rounds-to-target", "rounds-speedup", "time-speedup"):
        return _speed(contract, result, scale, reference)
    return _cost(contract, result)


def accuracy(contract: Contract, result: Result, scale: Scale) -> float:
    """Return the accuracy of a contract, as a fraction."""
    if not isinstance(contract.round, int) and isinstance(contract.clients, str):
        at = contract.round
        after = result.after or {}
        if contract.model in AFTER and len(accuracies(contract, result)) <= 1 and after:
            at = "last"  # there is such a model once the federation has ended
        evaluation = _evaluation(contract, at)
        return _refused(lambda: evaluation.of(records(result)))
    return _at(accuracies(contract, result), contract, scale)


def accuracies(contract: Contract, result: Result) -> Series:
    """Return a contract's accuracy by round, as fractions, for the rounds that were scored."""
    if not isinstance(contract.clients, str):
        scored = [record for record in result.history if f"{contract.model}_clients" in record]
        rates = [(r["round"], r[f"{contract.model}_clients"].get(str(contract.clients))) for r in scored]
        if any(rate is None for _, rate in rates):
            raise Unscored(f"there is no client {contract.clients}")
        return [(round, float(rate)) for round, rate in rates]
    evaluation, series = _evaluation(contract, "last"), []
    for record in records(result):
        with contextlib.suppress(InputError):  # not scored in this round
            series.append((record["round"], evaluation.of([record])))
    return series


def records(result: Result) -> list[dict[str, Any]]:
    """Return the records of the rounds, the scores after the federation in the last one."""
    *before, last = result.history
    return [*before, {**last, **(result.after or {})}]


def _evaluation(contract: Contract, round: str) -> Evaluation:
    """Return the contract in the library's words."""
    return Evaluation(
        model=contract.model,
        clients=contract.clients,  # type: ignore[arg-type]
        mean=contract.mean,
        round=round,  # type: ignore[arg-type]
    )


def clients(contract: Contract, result: Result) -> list[float]:
    """Return every client's accuracy in the last round that was scored, as fractions."""
    key = "fine_tuned_clients" if contract.model == "fine-tuned" else f"{contract.model}_clients"
    records = [record[key] for record in (*result.history, result.after or {}) if key in record]
    if not records:
        raise Unscored(f"clients were not scored with the {contract.model} model")
    return [float(rate) for rate in records[-1].values()]


def curve(contract: Contract, result: Result) -> Series:
    """Return a contract's curve by round, in the contract's unit."""
    if contract.metric == "loss-curve":
        return loss_curve(contract, result)
    if contract.metric == "forgetting":
        return _forgetting(contract, result)
    return [(round, 100 * value) for round, value in accuracies(contract, result)]


def _forgetting(contract: Contract, result: Result) -> Series:
    """Return by round the accuracy of the model that a participant had trained when it last took part, or of the download.

    Both are means over the participants that had taken part before, so that their difference is the gap (`scores.forgetting`).
    """
    last: dict[str, float] = {}
    series = []
    for record in result.history:
        received = record.get("downloaded_clients") or {}
        rates = [last[k] if contract.part == "trained" else float(received[k]) for k in received if k in last]
        if rates:
            series.append((record["round"], 100 * float(np.mean(rates))))
        last.update(record.get("trained_clients") or {})
    return series


def loss_curve(contract: Contract, result: Result) -> Series:
    """Return the cross-entropy on the clients' training data by round, where it was taken."""
    name = "generic_train_loss" if contract.model == "generic" else "train_loss"
    return [(r["round"], float(r[name])) for r in result.history if name in r]


def _at(series: Series, contract: Contract, scale: Scale) -> float:
    """Return the value of the round that a contract names."""
    if not series:
        raise Unscored(f"no {contract.metric} was recorded")
    values = [value for _, value in series]
    if contract.round == "mean10":
        return float(np.mean(values[-LAST:]))
    if contract.round == "best-test":
        return min(values) if contract.metric in LOWER else max(values)
    if isinstance(contract.round, int):
        wanted = scale.rounds(contract.round)
        upto = [value for round, value in series if round <= wanted]
        if not upto or series[-1][0] < wanted:
            raise Unscored(f"there is no round {wanted}")
        return upto[-1]
    return values[-1]


def _speed(contract: Contract, result: Result, scale: Scale, reference: Result | None) -> float:
    """Return the rounds to a target, or by how much fewer rounds or simulated seconds they are than the reference's.

    Where the target is the accuracy that the reference has in the end, the reference takes all of its rounds to it, as the
    first paper counts: "the same accuracy as running FedPer for 100 rounds".
    """
    if contract.target is None:
        whole = _known(reference)
        target, other = accuracy(contract, whole, scale), _last_round(contract, whole)
        rounds = other if result.folder == whole.folder else _reached(contract, result, target)
    else:
        target = contract.target / 100
        rounds = _reached(contract, result, target)
        other = 0.0 if contract.metric == "rounds-to-target" else _reached(contract, _known(reference), target)
    if contract.metric == "rounds-to-target":
        return rounds
    if contract.metric == "rounds-speedup":
        return other / rounds
    return _time(_known(reference), other) / _time(result, rounds)


def _last_round(contract: Contract, result: Result) -> float:
    """Return the last round in which a contract's accuracy was scored."""
    series = accuracies(contract, result)
    if not series:
        raise Unscored(f"clients were not scored with the {contract.model} model")
    return series[-1][0]


def _reached(contract: Contract, result: Result, target: float) -> float:
    series = accuracies(contract, result)
    for round, value in series:
        if value >= target:
            return round
    best = f", best {100 * max(v for _, v in series):.2f} %" if series else ""
    raise Unscored(f"{100 * target:.2f} % not reached in {len(result.history)} rounds{best}")


def _time(result: Result, round: float) -> float:
    times = {record["round"]: record["time"] for record in result.history if "time" in record}
    if round not in times:
        raise Unscored("the run has no simulated time")
    return float(times[round])


def _cost(contract: Contract, result: Result) -> float:
    """Return seconds, or amounts as the first paper counts them: 10⁶ numbers, and 10⁹ multiply-adds, three passes a step."""
    cost: dict[str, Any] = result.cost or {}
    seconds = {name: cost.get(f"{name}_seconds") for name in SPLIT}
    if contract.metric in ("seconds", "time-share"):
        if None in seconds.values():
            raise Unscored("no times were taken")
        total = sum(float(value) for value in seconds.values() if value is not None)
        return total if contract.metric == "seconds" else 100 * float(seconds[contract.part] or 0) / total
    if contract.metric == "megabytes":
        if cost.get("bytes_down") is None or cost.get("bytes_up") is None:
            raise Unscored("no bytes were counted")
        width = 8 if cost.get("dtype") == "float64" else 4
        return float(cost["bytes_down"] + cost["bytes_up"]) / width / 1e6
    if "flops_phases" not in cost:
        raise Unscored("FLOPs could not be counted")
    outside = cost["flops_begin"]["forward"] + cost["flops_finish"]["forward"]
    return float(3 * sum(phase["forward"] for phase in cost["flops_phases"]) + outside) / 2e9


def _known(reference: Result | None) -> Result:
    if reference is None:
        raise Unscored("what it compares with was not run")
    return reference


def _refused(take: Callable[[], float]) -> float:
    try:
        return take()
    except InputError as error:
        raise Unscored(str(error)) from None


def mean_curve(curves: Sequence[Series]) -> list[tuple[float, float, float | None]]:
    """Return (round, mean, standard deviation over seeds) for the rounds that all curves have."""
    common = sorted(set.intersection(*({round for round, _ in one} for one in curves))) if curves else []
    tables = [dict(one) for one in curves]
    out = []
    for round in common:
        values = [table[round] for table in tables]
        out.append((round, float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None))
    return out
