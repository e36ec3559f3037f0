"""What metrics are computed from: statistics of some samples, those of several clients together, and numbers made of them.

Most are sums, which a client can send without telling of single samples: counts by class, bins of confidence, sums of errors;
mean and variance of targets are merged by Chan's formula. Metrics that rank need a row for every sample. All are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .objective import IGNORED, Objective

Statistics: TypeAlias = dict[str, Tensor]
BINS = 15  # of the expected calibration error
NAN = math.nan


@dataclass(frozen=True)
class Family:
    """Statistics that several metrics share. `rows`: they have a row for every sample, and do not leave a real site."""

    name: str
    reduce: Callable[[Objective, Tensor, Tensor], Statistics]  # of outputs and targets
    merge: Callable[[Statistics, Statistics], Statistics]
    rows: bool = False


def add(a: Statistics, b: Statistics) -> Statistics:
    """Return the sums of two groups of samples together."""
    return {name: a[name] + b[name] for name in a}


def concatenate(a: Statistics, b: Statistics) -> Statistics:
    """Return the rows of two groups of samples."""
    return {name: torch.cat([a[name], b[name]]) for name in a}


def _tokens(objective: Objective, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets as of one-label samples: of sequences one for each token that counts."""
    if objective.name != "tokens":
        return outputs, y
    real = y != IGNORED
    return outputs[real], y[real]


# ---- counts by class ----------------------------------------------------------------------------------------------------
def _counts(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    """Return by class how many samples are rightly given it, are given it, and have it."""
    if objective.name == "multilabel":
        given, has = (outputs > 0).double(), (y > 0.5).double()
        return {"right": (given * has).sum(0), "given": given.sum(0), "has": has.sum(0)}
    outputs, y = _tokens(objective, outputs, y)
    classes, given = outputs.shape[-1], outputs.argmax(-1)
    found = {"right": y[given == y], "given": given, "has": y}
    return {name: torch.bincount(of, minlength=classes).double() for name, of in found.items()}


COUNTS = Family("counts", _counts, add)


def f1_by_class(of: Statistics) -> Tensor:
    """2·right / (given + has); NaN for a class that neither occurs nor is given."""
    return 2 * of["right"] / (of["given"] + of["has"])


def recall_by_class(of: Statistics) -> Tensor:
    """right / has; NaN for a class that does not occur."""
    return of["right"] / of["has"]


def accuracy(of: Statistics) -> float:
    """Return the share of samples, or of tokens, that are right."""
    return _ratio(of["right"].sum(), of["has"].sum())


def _exact(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    right = ((outputs > 0) == (y > 0.5)).all(-1).double()
    return {"sum": right.sum(), "n": right.new_tensor(float(len(y)))}


EXACT = Family("exact", _exact, add)


# ---- calibration --------------------------------------------------------------------------------------------------------
def _confidence(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    """Return by bin of confidence: how many decisions, the sum of their confidence, and how many are right."""
    if objective.name == "multilabel":
        p = outputs.double().sigmoid()
        sure, right = torch.maximum(p, 1 - p).flatten(), ((outputs > 0) == (y > 0.5)).flatten()
    else:
        outputs, y = _tokens(objective, outputs, y)
        sure, given = outputs.double().softmax(-1).max(-1)
        right = given == y
    where = (sure * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    inside = (where == torch.arange(BINS, device=sure.device).unsqueeze(1)).double()
    return {"n": inside.sum(1), "sure": inside @ sure, "right": inside @ right.double()}


CONFIDENCE = Family("confidence", _confidence, add)


def ece(of: Statistics) -> float:
    """Σ_bins |Σ confidence − right| / n: the expected calibration error."""
    return _ratio((of["sure"] - of["right"]).abs().sum(), of["n"].sum())


def _squares(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    """Return the sum over samples of Σ_c (p_c − [c = y])²; of two classes half of it, of labels the mean over labels."""
    if objective.name == "multilabel":
        each = (outputs.double().sigmoid() - y.double()).square().mean(-1)
    else:
        outputs, y = _tokens(objective, outputs, y)
        p = outputs.double().softmax(-1)
        p_y = p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        each = p.square().sum(-1) - 2 * p_y + 1
        each = each / 2 if outputs.shape[-1] == 2 else each
    return _sum(each)


SQUARES = Family("squares", _squares, add)


def _log_losses(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    if objective.name == "multilabel":
        return _sum(F.binary_cross_entropy_with_logits(outputs.double(), y.double(), reduction="none").mean(-1))
    outputs, y = _tokens(objective, outputs, y)
    return _sum(F.cross_entropy(outputs.double(), y, reduction="none"))


LOG_LOSSES = Family("log_losses", _log_losses, add)


def mean(of: Statistics) -> float:
    """Σ / n."""
    return _ratio(of["sum"], of["n"])


def perplexity(of: Statistics) -> float:
    """exp of the mean cross-entropy; infinity where that is beyond what a float holds."""
    value = mean(of)
    return math.exp(value) if value < 709 else math.inf if value == value else NAN


# ---- errors -------------------------------------------------------------------------------------------------------------
def _errors(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    off = outputs.double() - y.double()
    return {"absolute": off.abs().sum(0), "squared": off.square().sum(0), "n": off.new_tensor(float(len(y)))}


ERRORS = Family("errors", _errors, add)


def mae(of: Statistics) -> float:
    """Mean absolute error, mean over outputs."""
    return _ratio(of["absolute"].mean(), of["n"])


def rmse(of: Statistics) -> float:
    """Root of the mean squared error, mean over outputs."""
    return float((of["squared"] / of["n"]).sqrt().mean())


def _spread(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    """Return the sum of squared errors, and number, mean and squared deviations of the targets."""
    y = y.double()
    centre = y.mean(0) if len(y) else y.new_zeros(y.shape[1:])
    off = (outputs.double() - y).square().sum(0)
    return {
        "squared": off, "n": off.new_tensor(float(len(y))), "mean": centre, "deviation": (y - centre).square().sum(0)
    }  # fmt: skip


def _merge_spread(a: Statistics, b: Statistics) -> Statistics:
    n = a["n"] + b["n"]
    gap, share = b["mean"] - a["mean"], b["n"] / n.clamp(min=1)
    deviation = a["deviation"] + b["deviation"] + gap.square() * a["n"] * share
    return {"squared": a["squared"] + b["squared"], "n": n, "mean": a["mean"] + gap * share, "deviation": deviation}


SPREAD = Family("spread", _spread, _merge_spread)


def r2(of: Statistics) -> float:
    """1 − Σ(f − y)² / Σ(y − ȳ)², mean over outputs; NaN of fewer than two samples, or where an output's targets are all equal."""
    if float(of["n"]) < 2 or bool((of["deviation"] == 0).any()):
        return NAN
    return float((1 - of["squared"] / of["deviation"]).mean())


# ---- ranks --------------------------------------------------------------------------------------------------------------
def _scored(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
    """Return the rows: for each class the score of every sample, and whether the sample has it; of two classes the second."""
    if objective.name == "multilabel":
        return {"score": outputs.double().sigmoid(), "has": y > 0.5}
    score, has = outputs.double().softmax(-1), F.one_hot(y, outputs.shape[-1]).bool()
    return {"score": score[:, 1:], "has": has[:, 1:]} if outputs.shape[-1] == 2 else {"score": score, "has": has}


SCORED = Family("scored", _scored, concatenate, rows=True)


def auroc_by_class(of: Statistics) -> Tensor:
    """P(score of one that has the class > of one that has it not) + ½ P(equal); NaN where there is only one of the two kinds."""
    return _by_column(of, _auroc)


def precision_by_class(of: Statistics) -> Tensor:
    """Average precision: Σ (R_i − R_{i−1})·P_i over the thresholds; NaN where no sample has the class."""
    return _by_column(of, _average_precision)


def _by_column(of: Statistics, number: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    columns = []
    for score, has in zip(of["score"].T, of["has"].T, strict=True):
        order = score.argsort()
        score = score[order]
        last = torch.ones_like(score, dtype=torch.bool)  # where a group of equal scores ends
        last[:-1] = score[1:] != score[:-1]
        columns.append(number(has[order].double(), last, score))
    return torch.stack(columns)


def _auroc(has: Tensor, last: Tensor, score: Tensor) -> Tensor:
    """Return AUROC from the mean ranks of ascending scores (Mann and Whitney)."""
    ends = torch.nonzero(last).squeeze(1).double()
    starts = torch.cat([ends.new_full((1,), -1.0), ends[:-1]]) + 1
    group = last.long().cumsum(0) - last.long()
    ranks = ((starts + ends) / 2 + 1)[group]
    ones = has.sum()
    zeros = len(has) - ones
    return ((ranks * has).sum() - ones * (ones + 1) / 2) / (ones * zeros)


def _average_precision(has: Tensor, last: Tensor, score: Tensor) -> Tensor:
    first = torch.ones_like(last)
    first[1:] = last[:-1]  # where a group begins, ascending: there it ends, descending
    begins = first.flip(0)
    found = has.flip(0).cumsum(0)
    places = torch.arange(1, len(has) + 1, device=has.device, dtype=torch.float64)
    precision, found = (found / places)[begins], found[begins]
    gained = torch.diff(found, prepend=found.new_zeros(1))
    return (gained * precision).sum() / has.sum()


def support(of: Statistics) -> Tensor:
    """Return how many samples have each class."""
    return of["has"].double().sum(0) if of["has"].ndim == 2 else of["has"]


# ---- means over classes -------------------------------------------------------------------------------------------------
def macro(values: Tensor) -> float:
    """Return the mean over the classes for which the number is defined; NaN where it is for none."""
    known = values[values.isfinite()]
    return float(known.mean()) if len(known) else NAN


def weighted(values: Tensor, weights: Tensor) -> float:
    """Return the mean over the classes for which the number is defined, by their samples."""
    known = values.isfinite() & (weights > 0)
    return float((values[known] * weights[known]).sum() / weights[known].sum()) if bool(known.any()) else NAN


def merged(family: Family, parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of several groups of samples together."""
    if family.rows:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    whole = parts[0]
    for part in parts[1:]:
        whole = family.merge(whole, part)
    return whole


def _sum(each: Tensor) -> Statistics:
    return {"sum": each.sum(), "n": each.new_tensor(float(len(each)))}


def _ratio(a: Tensor, b: Tensor) -> float:
    return float(a / b) if float(b) else NAN
