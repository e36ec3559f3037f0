"""Evaluation as a contract: which model, whose test data, which mean, which round. Every result states all four.

| | |
|---|---|
| model | `personal`: each client's own; `generic`: the one for everybody |
| clients | `all` (of those that train), or the `participants` of the round, each on its own test data; or `common`: the
            common test set, which belongs to nobody (generic model only) |
| mean | `client`: every client counts alike; `sample`: every test sample does; `training`: every client by its number of
            training samples (the fifth paper's PM) |
| round | `last`; `mean10`: mean of the last ten scored; `best-val`: the best on validation data;
          `best-test`: the best on test data, which looks at the answer and is labelled so |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..core import settings
from ..core.errors import InputError
from ..core.settings import setting


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which number a result is."""

    model: Literal["personal", "generic"] = setting("personal", "which model is scored")
    clients: Literal["all", "participants", "common"] = setting("all", "whose test data counts")
    mean: Literal["client", "sample", "training"] = setting(
        "client",
        "what counts alike: clients, test samples, or training samples (a client's accuracy counts by their number)",
    )
    round: Literal["last", "mean10", "best-val", "best-test"] = setting("last", "which round counts")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.clients == "common" and self.model == "personal":
            raise InputError("model", self.model, "'generic' on the common test set, where no client is at home")

    def __str__(self) -> str:
        rounds = {
            "last": "last round",
            "mean10": "mean of the last 10 scored rounds",
            "best-val": "best round on validation data",
            "best-test": "best round ON TEST DATA",
        }
        if self.clients == "common":
            return f"{self.model} model, common test set, {rounds[self.round]}"
        mean = "mean by training size" if self.mean == "training" else f"mean per {self.mean}"
        return f"{self.model} model, {self.clients} clients, {mean}, {rounds[self.round]}"

    def of(self, history: Sequence[dict[str, Any]]) -> float:
        """Return the number, from a run's history."""
        scored = [record for record in history if f"{self.model}_clients" in record]
        if self.clients == "participants":
            scored = [record for record in scored if record["participants"]]  # a round may have had none
        if not scored:
            raise InputError("model", self.model, "a model that this run scored")
        if self.clients == "common" and "generic_common" not in scored[0]:
            raise InputError("clients", self.clients, "'all' or 'participants': this run has no common test set")
        at: Callable[[dict[str, Any], str], float] = self._at
        if self.round == "last":
            return at(scored[-1], "")
        if self.round == "mean10":
            return float(np.mean([at(record, "") for record in scored[-10:]]))
        if self.round == "best-test":
            return max(at(record, "") for record in scored)
        if "val_samples" not in scored[0]:
            raise InputError(
                "round", self.round, "another choice: this run has no validation data (split = '70/10/20')"
            )
        return at(max(scored, key=lambda record: at(record, "val_")), "")

    def _at(self, record: dict[str, Any], prefix: str) -> float:
        if self.clients == "common":  # validation data is the clients' own, every sample counting alike
            return float(record[f"{prefix}generic" if prefix else "generic_common"])
        rates, sizes = record[f"{prefix}{self.model}_clients"], record[f"{prefix}samples"]
        chosen = [str(k) for k in record["participants"]] if self.clients == "participants" else list(rates)
        values = [rates[k] for k in chosen if k in rates]
        if self.mean == "training":
            sizes = record.get("train_samples", {})
            if any(k not in sizes for k in chosen if k in rates):
                raise InputError("mean", self.mean, "'client' or 'sample': this run does not know its training samples")
        weights = [1.0 if self.mean == "client" else sizes[k] for k in chosen if k in rates]
        return float(np.average(values, weights=weights))
