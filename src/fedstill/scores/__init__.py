"""Scores beside each client's own test: what a federation gives to those whom it was not made for.

    new          the owner of a sample is unknown: all clients' personal models vote                         ensemble.py
    external     the same, and the generic model, on a source that no client had                             ensemble.py
    averaged     one model from methods that train none for everybody: the mean of the personal weights      ensemble.py
    fine_tuned   each client trains its model for some more epochs after the federation                      further.py
    newcomers    clients that join after the federation, before and after some epochs of their own           further.py
    forgetting   what a client loses when the download takes the place of the model it had trained           forgetting.py
    backdoor     how often honest clients' models give the attackers' class to samples with the trigger      backdoor.py

`Run` has each as a method; the settings of the same names ask for them with the run, and `run.after` holds what was asked. A
score of one's own is a `Score` that is registered (score.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .backdoor import backdoor
from .ensemble import averaged, new, on_external
from .external import Samples
from .forgetting import forgetting
from .further import fine_tuned, joined, newcomers
from .score import SCORES, Finished, Score, headings, register

__all__ = [
    "SCORES",
    "Finished",
    "Samples",
    "Score",
    "after",
    "averaged",
    "backdoor",
    "explanations",
    "fine_tuned",
    "forgetting",
    "headings",
    "joined",
    "new",
    "newcomers",
    "numbers",
    "on_external",
    "register",
]


def after(run: Finished) -> dict[str, Any]:
    """Return the scores that the settings ask for once the federation has ended; accuracies as fractions."""
    results: dict[str, Any] = {}
    for score in SCORES:
        if score.wanted(run):
            results |= score.compute(run)
    return results


def numbers(after: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the further scores of a run that are one number each, by the names that `explanations` has."""
    results = {name: value for name, value in after.items() if isinstance(value, float)}
    gaps = [record["forgetting"] for record in history if "forgetting" in record]
    return {**results, "forgetting": float(np.mean(gaps[-10:]))} if gaps else results


def explanations(training: Any) -> dict[str, str]:
    """Return what each number is: which model, whose data, which mean."""
    return {name: text for score in SCORES for name, text in score.explain(training).items()}
