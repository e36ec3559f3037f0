"""Metrics: what each is, which direction is better, and how it is computed from the statistics of samples.

A metric that is not defined on a client's samples (AUROC where all have one class, R² of one sample) is left out there: means
over clients are over the others, and records say how many were left out. Means over classes leave out classes for which a
number is not defined: F1 those that neither occur nor are given, recall and average precision those that do not occur, AUROC
those that none or all of the samples have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import statistics as stats
from .errors import InputError, first_line, nearest
from .objective import CLASSES, Objective
from .own import short
from .statistics import Family, Statistics
from .tree import Tree

ONE_LABEL, LABELS = ("classification", "tokens"), ("classification", "multilabel", "tokens")
LISTED = 200  # classes up to which numbers by class are kept
MOST = 20  # metrics of a run: what a client reports stays a short list of numbers
Function = Callable[[Any, Any], Any]  # (targets, predictions) → number


@dataclass(frozen=True)
class Measure:
    """How a number is to be read: its title, whether less is better, and whether it is a share, which is shown in per cent."""

    name: str
    title: str
    lower: bool = False
    share: bool = False

    @property
    def factor(self) -> float:
        """What a number is multiplied by where it is shown."""
        return 100.0 if self.share else 1.0

    @property
    def mark(self) -> str:
        """What follows a heading: the per cent sign, or the measure's title."""
        return "%" if self.share else self.title

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return "points" if self.share else self.title

    def text(self, value: float, places: int = 2) -> str:
        """Format a number: a share with so many places in per cent, any other with four digits."""
        return f"{100 * value:.{places}f}" if self.share else _four(value)

    def words(self, value: float, places: int = 2) -> str:
        """Format a number with its unit."""
        return f"{self.text(value, places)} %" if self.share else f"{self.title} {_four(value)}"

    @property
    def indefinite(self) -> str:
        """The title with its article: "an accuracy", "a macro F1", "an MAE"."""
        return f"{'an' if self.title[:1] in 'aeiouAEFHILMNORSX' else 'a'} {self.title}"

    @property
    def capital(self) -> str:
        """The title at the beginning of a sentence."""
        return self.title[:1].upper() + self.title[1:]

    def heading(self, what: str = "") -> str:
        """Return a column's heading: "personal %", "personal MAE", or for a metric by itself its title."""
        if what:
            return f"{what} {self.mark}"
        return f"{self.title} %" if self.share else self.title

    def better(self, a: float, b: float) -> bool:
        """Return whether a is better than b."""
        return a < b if self.lower else a > b

    def rank(self, value: float) -> float:
        """Return a number of which the largest is the best."""
        return -value if self.lower else value


def _four(value: float) -> str:
    return f"{value:.4f}" if 0.001 <= abs(value) < 10 or not value else f"{value:.4g}"


@dataclass(frozen=True)
class Metric:
    """A metric: its measure, the objectives that have it, and how it follows from the statistics of a family."""

    measure: Measure
    objectives: Collection[str]
    family: Family
    value: Callable[[Statistics], float]
    by_class: Callable[[Statistics], Tensor] | None = None

    @property
    def name(self) -> str:
        """The metric's name."""
        return self.measure.name


def _macro(
    name: str,
    title: str,
    by_class: Callable[[Statistics], Tensor],
    family: Family,
    of: Collection[str],
    share: bool = False,
) -> list[Metric]:
    """Return a metric that is a mean over classes, all alike, and the one by their samples."""
    plain = Metric(Measure(name, title, share=share), of, family, lambda s: stats.macro(by_class(s)), by_class)
    by_samples = Measure(f"{name}_weighted", f"weighted {title.removeprefix('macro ')}", share=share)
    return [plain, Metric(by_samples, of, family, lambda s: stats.weighted(by_class(s), stats.support(s)), by_class)]


def _plain(
    name: str,
    title: str,
    of: Collection[str],
    family: Family,
    value: Callable[[Statistics], float],
    lower: bool = True,
    share: bool = False,
) -> Metric:
    return Metric(Measure(name, title, lower, share), of, family, value)


ROWS = ("classification", "multilabel")
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _plain("accuracy", "accuracy", ONE_LABEL, stats.COUNTS, stats.accuracy, lower=False, share=True),
        Metric(
            Measure("balanced_accuracy", "balanced accuracy", share=True), ONE_LABEL, stats.COUNTS,
            lambda s: stats.macro(stats.recall_by_class(s)), stats.recall_by_class,
        ),
        _plain("subset_accuracy", "subset accuracy", ("multilabel",), stats.EXACT, stats.mean, lower=False, share=True),
        *_macro("f1", "macro F1", stats.f1_by_class, stats.COUNTS, LABELS, share=True),
        *_macro("auroc", "AUROC", stats.auroc_by_class, stats.SCORED, ROWS),
        *_macro("average_precision", "average precision", stats.precision_by_class, stats.SCORED, ROWS),
        _plain("ece", "ECE", LABELS, stats.CONFIDENCE, stats.ece),
        _plain("brier", "Brier score", LABELS, stats.SQUARES, stats.mean),
        _plain("log_loss", "log loss", LABELS, stats.LOG_LOSSES, stats.mean),
        _plain("perplexity", "perplexity", ("tokens",), stats.LOG_LOSSES, stats.perplexity),
        _plain("mae", "MAE", ("regression",), stats.ERRORS, stats.mae),
        _plain("rmse", "RMSE", ("regression",), stats.ERRORS, stats.rmse),
        _plain("r2", "R²", ("regression",), stats.SPREAD, stats.r2, lower=False),
    )
}  # fmt: skip
ACCURACY = METRICS["accuracy"].measure


def measure_of(name: str, record: Mapping[str, Any] | None = None) -> Measure:
    """Return how a metric's number is read; "" is the run's own, which a record names where it is not accuracy."""
    record = record or {}
    name = name or str(record.get("metric", "accuracy"))
    if name in METRICS:
        return METRICS[name].measure
    return Measure(name, name, lower=name in record.get("lower", ()))


def metrics_in(record: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a record has beside the run's own score.

    >>> metrics_in({"personal_clients": {}, "personal_f1_clients": {}, "personal_f1": 0.5})
    ['f1']
    """
    first, last = "personal_", "_clients"
    names = [name[len(first) : -len(last)] for name in record if name.startswith(first) and name.endswith(last)]
    return [name for name in names if name and name != record.get("metric")]


def own(name: str, function: Function) -> Metric:
    """Return a metric that somebody's own function computes, as `function(targets, predictions)` on arrays.

    Predictions are probabilities, of regression the values. NaN or None: not defined. Less is better where the function has
    `lower = True`.
    """

    def rows(objective: Objective, outputs: Tensor, y: Tensor) -> Statistics:
        target = y.double() if y.is_floating_point() else y
        return {"predicted": objective.predictions(outputs.double()), "target": target}

    def value(of: Statistics) -> float:
        try:
            number = function(of["target"].cpu().numpy(), of["predicted"].cpu().numpy())
            return math.nan if number is None else float(number)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            right = f"a function (targets, predictions) → number, NaN where it is not defined ({why})"
            raise InputError("metrics", name, right) from error

    family = Family(f"own {name}", rows, stats.concatenate, rows=True)
    measure = Measure(name, name, lower=bool(getattr(function, "lower", False)))
    return Metric(measure, ("classification", "multilabel", "regression"), family, value)


@dataclass(frozen=True)
class Measures:
    """The metrics of a run. `rows`: statistics with a row for each sample may leave a client, so that they can be pooled."""

    objective: Objective
    metrics: tuple[Metric, ...] = ()
    labels: tuple[str, ...] = ()  # the classes' names, where they are known
    rows: bool = True
    outputs: int = 0  # of the model, which may have more than there are classes

    @classmethod
    def of(
        cls,
        objective: Objective,
        names: Sequence[str] = (),
        functions: Mapping[str, Function] | None = None,
        labels: tuple[str, ...] = (),
        outputs: int = 0,
    ) -> Measures:
        """Return the metrics with these names, or the objective's usual ones; refuse those that it does not have."""
        found = []
        known = {name: metric for name, metric in METRICS.items() if objective.name in metric.objectives}
        for name in functions or ():
            if short(name) in METRICS or not short(name).isidentifier():
                right = "a function with a name of its own, and none of a metric that comes with fedstill"
                raise InputError("metrics", short(name), right)
        for name in dict.fromkeys(names or objective.beside):
            metric = own(short(name), functions[name]) if functions and name in functions else known.get(name)
            if metric is None or objective.name not in metric.objectives:
                right = f"one that {objective.name} has: {nearest(name, known)}"
                raise InputError("metrics", name, right)
            found.append(metric)
        if len(found) > MOST:
            raise InputError("metrics", ",".join(names), f"at most {MOST} metrics")
        return cls(objective, tuple(found), labels, outputs=outputs)

    @property
    def families(self) -> tuple[Family, ...]:
        """The statistics that the metrics need."""
        return tuple({metric.family.name: metric.family for metric in self.metrics}.values())

    def reduce(self, outputs: Tensor, y: Tensor) -> Tree:
        """Return the statistics of some samples."""
        return {family.name: family.reduce(self.objective, outputs, y) for family in self.families}

    def merge(self, parts: Sequence[Tree]) -> Tree:
        """Return the statistics of several groups of samples together, as far as all have them."""
        shared = [family for family in self.families if all(family.name in part for part in parts)]
        return {family.name: stats.merged(family, [part[family.name] for part in parts]) for family in shared}

    def values(self, of: Tree) -> dict[str, float]:
        """Return the metrics that are defined on these statistics."""
        numbers = {m.name: m.value(of[m.family.name]) for m in self.metrics if m.family.name in of}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def by_class(self, of: Tree) -> dict[str, dict[str, float]]:
        """Return by metric that is a mean over classes each class's number, where it is defined."""
        found: dict[str, dict[str, float]] = {}
        for metric in self.metrics if self.objective.size <= LISTED else ():
            if metric.by_class is not None and metric.family.name in of and not metric.name.endswith("_weighted"):
                numbers = metric.by_class(of[metric.family.name]).tolist()
                first = 1 if self.objective.name == "classification" and len(numbers) == 1 else 0  # of two the second
                named = {self.label(c): value for c, value in enumerate(numbers, first) if c < self.objective.size}
                found[metric.name] = {label: value for label, value in named.items() if math.isfinite(value)}
        return found

    def label(self, c: int) -> str:
        """Return a class's name, or its number."""
        return self.labels[c] if c < len(self.labels) else str(c)

    def sent(self, of: Tree) -> Tree:
        """Return what of a client's statistics may leave it."""
        return {family.name: of[family.name] for family in self.families if self.rows or not family.rows}

    @functools.cached_property
    def form(self) -> dict[str, dict[str, Tensor]]:
        """What may leave a client, as of one sample."""
        like = torch.zeros((), dtype=torch.float64)
        outputs = like.new_zeros((1, *self.objective.output[:-1], self.outputs or self.objective.size))
        return self.sent(self.reduce(outputs, self.objective.example(1, like)))

    def bytes(self, samples: int) -> int:
        """Return how many bytes the statistics of so many samples have at most."""
        return sum(value.nbytes * max(1, samples) for of in self.form.values() for value in of.values())

    def wrong(self, sent: Any, samples: int) -> str:
        """Return what is wrong with statistics that a client sent of so many samples; "" where they can be."""
        rows = {family.name for family in self.families if family.rows}
        if not isinstance(sent, dict) or sent.keys() != self.form.keys():
            return "its statistics are not those of the run's metrics"
        for family, expected in self.form.items():
            have = sent[family]
            if not isinstance(have, dict) or have.keys() != expected.keys():
                return f"its statistics {family} are not whole"
            for name, one in expected.items():
                own, shape = have[name], (samples, *one.shape[1:]) if family in rows else tuple(one.shape)
                if not isinstance(own, Tensor) or own.dtype != one.dtype or tuple(own.shape) != shape:
                    return f"its statistics {family} have another form"
                if own.is_floating_point() and not bool(own.isfinite().all()):
                    return f"its statistics {family} hold numbers that are not finite"
        return ""


NO_METRICS = Measures(CLASSES)


@dataclass
class Tally:
    """Collects the scores and statistics of one client's samples, block by block."""

    measures: Measures
    scores: list[Tensor] = field(default_factory=list)
    parts: list[Tree] = field(default_factory=list)

    def add(self, outputs: Tensor, y: Tensor) -> None:
        """Take in some samples."""
        if len(y):
            self.scores.append(self.measures.objective.score(outputs, y).sum())
            self.parts.append(self.measures.reduce(outputs, y))

    def done(self) -> tuple[float, Tree]:
        """Return the sum of the scores, and the statistics; sums are moved to the CPU."""
        whole = self.measures.merge(self.parts)
        for family in self.measures.families:
            if not family.rows:
                whole[family.name] = {name: value.cpu() for name, value in whole[family.name].items()}
        return sum(torch.stack(self.scores).tolist()), whole
