"""Evaluation as a contract: which model, whose test data, which mean, which round. Every result states all four.

| | |
|---|---|
| model | `personal`: each client's own; `generic`: the one for everybody; and the further scores: `fine-tuned` (+FT), `new` (all
            personal models vote), `external` (the same on a source that no client had), `averaged` (the mean of the
            personal weights), `newcomers` (after their training) |
| clients | `all` (of those that train), or the `participants` of the round, each on its own test data; or `common`: the
            common test set, which belongs to nobody (generic model only) |
| mean | `client`: every client counts alike; `sample`: every test sample does; `training`: every client by its number of
            training samples (the fifth paper's PM). `new`, `external`, `averaged`: always by test sample, `newcomers`: by
            training sample |
| round | `last`; `mean10`: mean of the last ten scored; `best-val`: the best on validation data;
          `best-test`: the best on test data, which looks at the answer and is labelled so |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..core import settings
from ..core.errors import InputError
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
    mean: Literal["client", "sample", "training"] = setting(
        "client",
        "what counts alike: clients, test samples, or training samples (a client's accuracy counts by their number)",
    )
    round: Literal["last", "mean10", "best-val", "best-test"] = setting("last", "which round counts")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.clients == "common" and self.model in ("personal", "fine-tuned", "newcomers"):
            right = "'generic' on the common test set (or 'new', 'averaged'), where no client is at home"
            raise InputError("model", self.model, right)
        if self.model in FIXED and (self.clients not in FIXED[self.model]):
            right = " or ".join(repr(name) for name in FIXED[self.model])
            raise InputError("clients", self.clients, f"{right} with the model {self.model!r}")

    @classmethod
    def by(cls, scores: FurtherScores) -> Evaluation:
        """Return the contract that the settings of a run state."""
        return cls(
            model=scores.score_model, clients=scores.score_clients, mean=scores.score_mean, round=scores.score_round
        )

    def by_round(self, history: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
        """Return (round, number) for every scored round, each by itself."""
        each, name = replace(self, round="last"), self._name()
        scored = [record for record in history if name in record]
        if self.clients == "participants":
            scored = [record for record in scored if record["participants"]]
        return [(int(record["round"]), each.of([record])) for record in scored]

    def __str__(self) -> str:
        rounds = {
            "last": "last round",
            "mean10": "mean of the last 10 scored rounds",
            "best-val": "best round on validation data",
            "best-test": "best round ON TEST DATA",
        }
        if self.model in FIXED:
            return f"{WORDS[self.model]}{', common test set' if self.clients == 'common' else ''}, {rounds[self.round]}"
        if self.clients == "common":
            return f"{self.model} model, common test set, {rounds[self.round]}"
        mean = "mean by training size" if self.mean == "training" else f"mean per {self.mean}"
        return f"{self.model} model, {self.clients} clients, {mean}, {rounds[self.round]}"

    def of(self, history: Sequence[dict[str, Any]]) -> float:
        """Return the number, from a run's history."""
        name = self._name()
        scored = [record for record in history if name in record]
        if self.clients == "participants":
            scored = [record for record in scored if record["participants"]]  # a round may have had none
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
        if self.chooses(scored[0]) is None:
            right = "another choice: this run has no validation data (split = '70/10/20')"
            if self.model in FURTHER:
                right = f"another choice: {self.model} is not scored on validation data"
            raise InputError("round", self.round, right)
        return at(max(scored, key=self._chosen_by), "")  # the first of equals

    def chooses(self, record: dict[str, Any]) -> float | None:
        """Return the number by which best-val or best-test chooses a round; None where a record has none."""
        known = self._name() in record and (self.clients != "participants" or bool(record["participants"]))
        on_val = self.round == "best-val"
        return None if not known or (on_val and not self._validates(record)) else self._chosen_by(record)

    def _chosen_by(self, record: dict[str, Any]) -> float:
        return self._at(record, "val_" if self.round == "best-val" else "")

    def _validates(self, record: dict[str, Any]) -> bool:
        """Return whether a record has this model's score on validation data."""
        return self.model not in FURTHER and "val_samples" in record

    def of_clients(self, history: Sequence[dict[str, Any]]) -> dict[str, float] | None:
        """Return every client's accuracy by this contract's model and round; None where it is not one of each client.

        That is so of a common test set, of models whose mean is fixed, and where a run did not score this model.
        """
        name = self._name()
        scored = [record for record in history if name in record]
        if self.model in FIXED or self.clients != "all" or not scored:
            return None
        if self.round == "mean10":
            rates = [record[name] for record in scored[-10:]]
            return {k: float(np.mean([of[k] for of in rates if k in of])) for k in rates[-1]}
        if self.round in ("best-test", "best-val"):
            if self.chooses(scored[0]) is None:
                return None
            values = [self._chosen_by(record) for record in scored]
            return {k: float(rate) for k, rate in scored[int(np.argmax(values))][name].items()}
        return {k: float(rate) for k, rate in scored[-1][name].items()}

    def rounds_to(self, history: Sequence[dict[str, Any]], target: float) -> int | None:
        """Return the first scored round whose number is at least the target; None where no round reached it.

        The contract's `round` has no part in it: every scored round is looked at by itself.
        """
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 <= target <= 1:
            raise InputError("target", target, "an accuracy from 0 to 1")
        values = self.by_round(history)
        if not values:
            self.of(history)  # says why
        return next((round for round, value in values if value >= target), None)

    def _name(self) -> str:
        """Return the entry that a record has where this model was scored."""
        if self.model in FIXED:
            return FIXED[self.model][self.clients]
        return f"{self.model.replace('-', '_')}_clients"

    def _check_further(self, history: Sequence[dict[str, Any]], scored: Sequence[dict[str, Any]]) -> None:
        """Refuse to choose among rounds where a further score was taken after the last round alone."""
        if len(scored) == 1 < len([record for record in history if "samples" in record]):
            right = f"'last': {self.model} was scored once (further_every, or --further-every, scores it by round)"
            raise InputError("round", self.round, right)

    def _at(self, record: dict[str, Any], prefix: str) -> float:
        if self.model in FIXED:
            return float(record[self._name()])
        if self.clients == "common":  # validation data is the clients' own, every sample counting alike
            return float(record[f"{prefix}generic" if prefix else "generic_common"])
        rates, sizes = record[f"{prefix}{self._name()}"], record[f"{prefix}samples"]
        chosen = [str(k) for k in record["participants"]] if self.clients == "participants" else list(rates)
        values = [rates[k] for k in chosen if k in rates]
        if self.mean == "training":
            sizes = record.get("train_samples", {})
            if any(k not in sizes for k in chosen if k in rates):
                raise InputError("mean", self.mean, "'client' or 'sample': this run does not know its training samples")
        weights = [1.0 if self.mean == "client" else sizes[k] for k in chosen if k in rates]
        return float(np.average(values, weights=weights))
