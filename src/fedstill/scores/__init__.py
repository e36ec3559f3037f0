"""Scores beside each client's own test: what a federation gives to those whom it was not made for.

    new          the owner of a sample is unknown: all clients' personal models vote                         ensemble.py
    external     the same, and the generic model, on a source that no client had                  ensemble.py, external.py
    averaged     one model from methods that train none for everybody: the mean of the personal weights      ensemble.py
    fine_tuned   each client trains its model for some more epochs after the federation                      further.py
    newcomers    clients that join after the federation, before and after some epochs of their own           further.py
    forgetting   what a client loses when the download takes the place of the model it had trained           forgetting.py

`Run` has each as a method; the settings of the same names ask for them with the run, and `run.after` holds what was asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.federation import Pair
from ..run.experiment import Training
from .ensemble import averaged, new, on_external
from .external import Samples, with_external
from .forgetting import Forgetting, Watching
from .further import fine_tuned, joined, newcomers

if TYPE_CHECKING:
    from ..run.result import Run

__all__ = [
    "Forgetting",
    "Samples",
    "Watching",
    "after",
    "averaged",
    "fine_tuned",
    "joined",
    "new",
    "newcomers",
    "numbers",
    "on_external",
    "with_external",
    "words",
]


def after(run: Run, external: Pair | None = None) -> dict[str, Any]:
    """The scores that the settings ask for once the federation has ended; accuracies as fractions."""
    asked, common = run.training, run.has_common
    found: dict[str, Any] = {}
    if asked.new:
        found["new"] = new(run)
        if common:
            found["new_common"] = new(run, "common")
    if external is not None:
        found["external"] = on_external(run, external)
        if "generic" in run.method.scores:
            found["external_generic"] = on_external(run, external, "generic")
    if asked.averaged and "generic" not in run.method.scores:
        found["averaged"] = averaged(run)
        if common:
            found["averaged_common"] = averaged(run, "common")
    if asked.fine_tune:
        found.update(fine_tuned(run, asked.fine_tune, asked.fine_tune_part))
    if asked.newcomers:
        found.update(joined(run, asked.join_epochs))
    return found


def numbers(run: Run) -> dict[str, float]:
    """The further scores of a run that are one number each, by the names that `words` explains."""
    found = {name: value for name, value in run.after.items() if isinstance(value, float)}
    gaps = [record["forgetting"] for record in run.history if "forgetting" in record]
    return {**found, "forgetting": float(np.mean(gaps[-10:]))} if gaps else found


def words(training: Training) -> dict[str, str]:
    """What each further score is: which model, whose data, which mean."""
    joins = f"the {training.newcomers} clients that did not take part in training, each on its own test data"
    part = "all of it" if training.fine_tune_part == "all" else "its head"
    served = f"each client's model after {training.fine_tune} more epochs on its own data ({part})"
    votes = "the average of the softmax predictions of all clients' personal models"
    weights = "the mean of all clients' personal weights (by training samples)"
    return {
        "new": f"{votes}, on all clients' test samples, owner unknown",
        "new_common": f"{votes}, on the common test set",
        "external": f"{votes}, on {{external}}, a source that no client had",
        "external_generic": "the generic model, on {external}, a source that no client had",
        "averaged": f"{weights}, on all clients' test samples",
        "averaged_common": f"{weights}, on the common test set",
        "fine_tuned": f"{served}, on its own test data, mean per client",
        "fine_tuned_sample": f"{served}, on its own test data, mean per sample",
        "fine_tuned_std": "standard deviation of fine_tuned over clients",
        "fine_tuned_worst": "mean of the worst tenth of clients of fine_tuned",
        "newcomers_before": f"{joins}, mean per client, with the model that the method gives a newcomer",
        "newcomers_after": f"{joins}, mean per client, after {training.join_epochs} epochs on its own data",
        "forgetting": "accuracy of the model that a participant had trained in its last round minus that of the downloaded "
        "one, on its own test data; mean over participants, then over the last 10 rounds that have one",
    }
