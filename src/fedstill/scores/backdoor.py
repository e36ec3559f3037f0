"""The success rate of a simulated backdoor: how often models give the attackers' class to samples that bear the trigger.

    rate = mean over honest clients of  |{x of its tests, y ≠ c : argmax f(trigger(x)) = c}| / |{x of its tests, y ≠ c}|

for each client's personal model, and for the generic one. c is the attackers' class, `backdoor_target`. A client all of whose
tests are of class c is left out. A model without a backdoor gives c to some of these samples as well: `Run.backdoor` of a clean
run says to how many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..core.errors import InputError
from ..core.tree import Params
from ..data.poison import stamped, trigger_value
from ..data.samples import pieces
from .score import Finished, Score, register


def backdoor(run: Finished, target: int) -> dict[str, float]:
    """Return the success rate in the personal models (or the generic one in their place), and in the generic one."""
    if run.task.objective.name != "classification":
        raise InputError(
            "target", target, f"asked of a classification: samples of {run.task.objective.name} have no class"
        )
    train = run.data.train
    value = trigger_value(piece for k in range(len(train.sizes)) for piece in pieces(train.of(k)[0]))
    generic = run.generic_model() if "generic" in run.method.scores else None
    rates: dict[str, list[float]] = {"backdoor": [], "backdoor_generic": []}

    def rate(params: Params, x: torch.Tensor) -> float:
        return float((run.task.predict(params, x).argmax(-1) == target).double().mean())

    for k in run.clients:
        x, y = run.data.test.of(k)
        if bool((y == target).all()):
            continue
        x = stamped(x[y != target], value)
        rates["backdoor"].append(rate(run.served(k), x))
        if generic is not None:
            rates["backdoor_generic"].append(rate(generic, x))
    return {name: float(np.mean(values)) for name, values in rates.items() if values}


def _explain(training: Any) -> dict[str, str]:
    tests = f"honest clients' test samples of other classes with the trigger, given class {training.backdoor_target}"
    return {
        "backdoor": f"each client's model: {tests}; mean per client",
        "backdoor_generic": f"the generic model: {tests}; mean per client",
    }


register(
    Score(
        "backdoor",
        {"backdoor": "backdoor %", "backdoor_generic": "backdoor, generic %"},
        _explain,
        lambda run: run.training.attack == "backdoor",
        lambda run: backdoor(run, run.training.backdoor_target),
    )
)
