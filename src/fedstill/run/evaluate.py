"""Evaluation as a contract: which metric of which model, whose test data, which mean, which round. Every result states all five.

| | |
|---|---|
| metric | accuracy, or what the objective has in its place (regression: MAE); or one of `metrics`, such as `f1` |
| model | `personal`: each client's own; `generic`: the one for everybody; and the further scores: `fine-tuned` (+FT), `new` (all
            personal models vote), `external` (the same on a source that no client had), `averaged` (the mean of the
            personal weights), `newcomers` (after their training) |
| clients | `all` (of those that train), or the `participants` of the round, each on its own test data; or `common`: the
            common test set, which belongs to nobody (generic model only) |
| mean | `client`: every client counts alike; `sample`: every test sample does; `training`: every client by its number of
            training samples (the fifth paper's PM); `pooled`: the metric of all clients' predictions together. Clients
            for which a metric is not defined are left out. `new`, `external`, `averaged`: always by test sample, `newcomers`: by
            training sample |
| round | `last`; `mean10`: mean of the last ten scored; `best-val`: the best on validation data;
          `best-test`: the best on test data, which looks at the answer and is labelled so; of errors the lowest |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..core import settings
from ..core.errors import InputError
from ..core.metric import Measure, measure_of
from ..core.settings import setting
from ..core.training import FurtherScores

FIXED = {  # of models whose mean is fixed: by whose data, the entry of a record
    "new": {"all": "new", "common": "new_common"},
    "external": {"all": "external"},
    "averaged": {"all": "averaged", "common": "averaged_common"},
    "newcomers": {"all": "newcomers_after"},
}
FURTHER = ("fine-tuned", *FIXED)  # models that are scored where a run is asked to
WORDS = {
    "new": "all personal models' vote (New), mean per sample",
    "external": "all personal models' vote on another source (External), mean per sample",
    "averaged": "mean of the personal models' weights, mean per sample",
    "newcomers": "newcomers' models after their training, mean by training size",
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which number a result is."""

    model: Literal["personal", "generic", "fine-tuned", "new", "external", "averaged", "newcomers"] = setting(
        "personal", "which model is scored"
    )
    clients: Literal["all", "participants", "common"] = setting("all", "whose test data counts")
    mean: Literal["client", "sample", "training", "pooled"] = setting(
        "client",
        "what counts alike: clients, test samples, or training samples (a client's accuracy counts by their number); "
        "pooled: the metric of all predictions together",
    )
    round: Literal["last", "mean10", "best-val", "best-test"] = setting("last", "which round counts")
    metric: str = setting("", "which metric; empty: accuracy, or what the objective has in its place")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.clients == "common" and self.model in ("personal", "fine-tuned", "newcomers"):
            right = "'generic' on the common test set (or 'new', 'averaged'), where no client is at home"
            raise InputError("model", self.model, right)
        if self.model in FIXED and (self.clients not in FIXED[self.model]):
            right = " or ".join(repr(name) for name in FIXED[self.model])
            raise InputError("clients", self.clients, f"{right} with the model {self.model!r}")
        if self.metric and self.model in FURTHER:
            raise InputError(
                "metric", self.metric, f"empty with the model {self.model!r}, which has the usual one alone"
            )
        if self.mean == "pooled" and (self.model in FURTHER or self.clients != "all"):
            raise InputError(
                "mean", self.mean, "another with this model or these clients: all clients' predictions are pooled"
            )

    @classmethod
    def by(cls, scores: FurtherScores) -> Evaluation:
        """Return the contract that the settings of a run state."""
        return cls(
            model=scores.score_model,
            clients=scores.score_clients,
            mean=scores.score_mean,
            round=scores.score_round,
            metric=scores.score_metric,
        )

    @property
    def usual(self) -> bool:
        """Whether this is the default contract."""
        return self == Evaluation()

    def measure(self, history: Sequence[Mapping[str, Any]]) -> Measure:
        """Return how the number is read, by what records say of their metrics."""
        return measure_of(self.metric, next((record for record in history if "personal_clients" in record), None))

    def better(self, a: float, b: float, history: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether one number of this contract is better than another."""
        return self.measure(history).better(a, b)

    def by_round(self, history: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
        """Return (round, number) for every scored round, each by itself."""
        each = replace(self, round="last")
        scored = [record for record in history if self._counts(record)]
        return [(int(record["round"]), each.of([record])) for record in scored]

    def __str__(self) -> str:
        rounds = {
            "last": "last round",
            "mean10": "mean of the last 10 scored rounds",
            "best-val": "best round on validation data",
            "best-test": "best round ON TEST DATA",
        }
        metric = f"{measure_of(self.metric).title}, " if self.metric else ""
        if self.model in FIXED:
            return f"{WORDS[self.model]}{', common test set' if self.clients == 'common' else ''}, {rounds[self.round]}"
        if self.clients == "common":
            return f"{metric}{self.model} model, common test set, {rounds[self.round]}"
        mean = {"training": "mean by training size", "pooled": "pooled"}.get(self.mean, f"mean per {self.mean}")
        return f"{metric}{self.model} model, {self.clients} clients, {mean}, {rounds[self.round]}"

    def of(self, history: Sequence[dict[str, Any]]) -> float:
        """Return the number, from a run's history."""
        scored = [record for record in history if self._counts(record)]
        if not scored and self.metric and any(self._has_model(record) for record in history):
            raise InputError(
                "metric", self.metric, "a metric that this run computed (metrics) and that is defined for a client"
            )
        if not scored:
            raise InputError("model", self.model, "a model that this run scored")
        if self.model in FURTHER and self.round != "last":
            self._check_further(history, scored)
        if self.clients == "common" and self.model == "generic" and "generic_common" not in scored[0]:
            raise InputError("clients", self.clients, "'all' or 'participants': this run has no common test set")
        at: Callable[[dict[str, Any], str], float] = self._at
        if self.round == "last":
            return at(scored[-1], "")
        if self.round == "mean10":
            return float(np.mean([at(record, "") for record in scored[-10:]]))
        known = [record for record in scored if self.chooses(record) is not None]
        if not known:
            right = "another choice: this run has no validation data (split = '70/10/20')"
            if self.model in FURTHER:
                right = f"another choice: {self.model} is not scored on validation data"
            raise InputError("round", self.round, right)
        return at(max(known, key=self._chosen_by), "")  # the first of equals

    def chooses(self, record: dict[str, Any]) -> float | None:
        """Return the number by which best-val or best-test chooses a round, the largest; None where a record has none.

        Of errors it is the number with its sign turned.
        """
        prefix = "val_" if self.round == "best-val" else ""
        known = self._counts(record) and (not prefix or (self._validates(record) and self._counts(record, prefix)))
        return self._chosen_by(record) if known else None

    def _chosen_by(self, record: dict[str, Any]) -> float:
        return self.measure([record]).rank(self._at(record, "val_" if self.round == "best-val" else ""))

    def _validates(self, record: dict[str, Any]) -> bool:
        """Return whether a record has this model's score on validation data."""
        return self.model not in FURTHER and bool(record.get(f"val_{self._name(record)}"))

    def of_clients(self, history: Sequence[dict[str, Any]]) -> dict[str, float] | None:
        """Return every client's accuracy by this contract's model and round; None where it is not one of each client.

        That is so of a common test set, of models whose mean is fixed, and where a run did not score this model.
        """
        scored = [record for record in history if self._scored(record)]
        if self.model in FIXED or self.clients != "all" or not scored:
            return None
        name = self._name(scored[0])
        if self.round == "mean10":
            rates = [record[name] for record in scored[-10:]]
            return {k: float(np.mean([of[k] for of in rates if k in of])) for k in rates[-1]}
        if self.round in ("best-test", "best-val"):
            known = [record for record in scored if self.chooses(record) is not None]
            if not known:
                return None
            return {k: float(rate) for k, rate in max(known, key=self._chosen_by)[name].items()}
        return {k: float(rate) for k, rate in scored[-1][name].items()}

    def rounds_to(self, history: Sequence[dict[str, Any]], target: float) -> int | None:
        """Return the first scored round whose number is at least the target, of errors at most; None where no round reached it.

        The contract's `round` has no part in it: every scored round is looked at by itself.
        """
        measure = self.measure(history)
        number = isinstance(target, int | float) and not isinstance(target, bool) and math.isfinite(target)
        if not number or (measure.share and not 0 <= target <= 1):
            right = f"{measure.indefinite} from 0 to 1" if measure.share else f"a finite number ({measure.title})"
            raise InputError("target", target, right)
        values = self.by_round(history)
        if not values:
            self.of(history)  # says why
        return next((round for round, value in values if not measure.better(target, value)), None)

    def _best(self, values: Sequence[float], history: Sequence[Mapping[str, Any]]) -> float:
        return min(values) if self.measure(history).lower else max(values)

    def _has_model(self, record: Mapping[str, Any]) -> bool:
        return replace(self, metric="", mean="client")._name(record) in record

    def _scored(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record has this contract's number."""
        return bool(record.get(self._name(record))) or (self.model in FIXED and self._name(record) in record)

    def _counts(self, record: Mapping[str, Any], prefix: str = "") -> bool:
        """Return whether a record's number is defined: of participants, whether one of them has it, as a round may have none."""
        if self.clients != "participants" or not self._scored(record):
            return self._scored(record)
        known = record[f"{prefix}{self._name(record)}"]
        return any(str(k) in known for k in record["participants"])

    def _name(self, record: Mapping[str, Any]) -> str:
        """Return the entry that a record has where this model was scored by this metric."""
        if self.model in FIXED:
            return FIXED[self.model][self.clients]
        model = self.model.replace("-", "_")
        return f"{model}_{self.metric}_clients" if self._named(record, model) else f"{model}_clients"

    def _named(self, record: Mapping[str, Any], model: str) -> bool:
        """Return whether the metric has entries of its own: the objective's score has the model's name alone."""
        own = bool(self.metric) and f"{model}_{self.metric}_clients" in record
        return own or (bool(self.metric) and self.metric != measure_of("", record).name)

    def _check_further(self, history: Sequence[dict[str, Any]], scored: Sequence[dict[str, Any]]) -> None:
        """Refuse to choose among rounds where a further score was taken after the last round alone."""
        if len(scored) == 1 < len([record for record in history if "samples" in record]):
            right = f"'last': {self.model} was scored once (further_every, or --further-every, scores it by round)"
            raise InputError("round", self.round, right)

    def _at(self, record: dict[str, Any], prefix: str) -> float:
        name = self._name(record)
        if self.model in FIXED:
            return float(record[name])
        of = name.removesuffix("_clients")
        if self.clients == "common":  # validation data is the clients' own, every sample counting alike
            return self._number(record, f"{prefix}{of}" if prefix else f"{of}_common")
        pooled = self.mean == "pooled" and (self.metric or f"{prefix}{of}_pooled" in record)
        if pooled:
            return self._number(record, f"{prefix}{of}" if self.model == "generic" else f"{prefix}{of}_pooled")
        rates, sizes = record[f"{prefix}{name}"], record[f"{prefix}samples"]
        chosen = [str(k) for k in record["participants"]] if self.clients == "participants" else list(rates)
        values = [rates[k] for k in chosen if k in rates]
        if self.mean == "training":
            sizes = record.get("train_samples", {})
            if any(k not in sizes for k in chosen if k in rates):
                raise InputError("mean", self.mean, "'client' or 'sample': this run does not know its training samples")
        weights = [1.0 if self.mean == "client" else sizes[k] for k in chosen if k in rates]
        if not values:
            raise InputError("metric", self.metric, f"one that is defined for a client in round {record['round']}")
        return float(np.average(values, weights=weights))

    def _number(self, record: Mapping[str, Any], name: str) -> float:
        if name not in record:
            right = "another mean or metric: this one could not be computed of all clients' predictions together"
            raise InputError("metric", self.metric or "(the usual one)", right)
        return float(record[name])
