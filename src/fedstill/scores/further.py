"""Training after the federation: fine-tuning of every client's model (+FT), and clients that join late.

Clients train with the run's own engine, optimiser and batch size, from the model that the method serves: the personal one, else
the generic. The batches are those of round T+1. Newcomers' accuracies are weighted by their training samples, as the fifth
paper's are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ..core.errors import InputError, TrainingError
from ..core.plan import Plan, key, permutation
from ..server.records import worst_tenth
from ..server.sampler import count
from ..transport.messages import Reply
from .score import Finished, Score, register

Subset: TypeAlias = Literal["head", "all"]
JOIN = 5  # what the draw is for; plan.py has 1 to 4


def newcomers(plan: Plan, clients: int, number: int) -> tuple[int, ...]:
    """Return which clients join only after the federation: the last of a random order that the seed alone makes."""
    if number >= clients:
        raise InputError("newcomers", number, f"at most {clients - 1}: one of the {clients} clients must train")
    return tuple(sorted(int(k) for k in permutation(key(plan.seed, JOIN), clients)[clients - number :]))


def fine_tuned(run: Finished, epochs: int, subset: Subset = "head") -> dict[str, Any]:
    """Return the clients' accuracies on their own tests after `epochs` more, named as a record names the personal ones."""
    replies = _tune(run, run.clients, epochs, subset)
    rates, sizes = _rates(replies, "after"), [reply.report["samples"] for reply in replies]
    lower = run.task.objective.lower
    return {
        "fine_tuned": float(np.mean(rates)),
        "fine_tuned_sample": float(np.average(rates, weights=sizes)),
        "fine_tuned_std": float(np.std(rates)),
        "fine_tuned_worst": worst_tenth(rates, lower),
        "fine_tuned_clients": _by_client(replies, rates),
    }


def joined(run: Finished, epochs: int) -> dict[str, Any]:
    """Return the newcomers' accuracies with what the method gives them, and after `epochs` of training all of it."""
    if not run.newcomers:
        raise InputError("newcomers", 0, "at least 1 when the federation is trained: all clients of this run took part")
    replies = _tune(run, run.newcomers, epochs, "all")
    before, after = _rates(replies, "before"), _rates(replies, "after")
    weights = [run.data.train.sizes[reply.client] for reply in replies]
    return {
        "newcomers_before": float(np.average(before, weights=weights)),
        "newcomers_after": float(np.average(after, weights=weights)),
        "newcomers_before_clients": _by_client(replies, before),
        "newcomers_after_clients": _by_client(replies, after),
    }


def _tune(run: Finished, clients: Sequence[int], epochs: int, subset: Subset) -> list[Reply]:
    """Have clients train on, as many at a time as a round has; the models themselves are not kept."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError("epochs", epochs, "a whole number at least 1")
    if subset not in ("head", "all"):
        raise InputError("part", subset, "'head' or 'all'")
    if subset == "head":
        run.task.need_split()
    together = run.training.cohort or count(run.task.clients, run.training.participation)
    generic = run.generic_model() if "personal" not in run.method.scores else None
    replies: list[Reply] = []
    for first in range(0, len(clients), together):
        options = {"epochs": epochs, "subset": subset, "generic": generic}
        replies += run.ask("tune", clients[first : first + together], **options)
    if not replies:
        raise TrainingError("training after the federation: no client sent a reply that can be")
    for reply in replies:
        if not math.isfinite(reply.report["loss"]):
            raise TrainingError(
                f"training after the federation, client {reply.client}: the loss is {reply.report['loss']}; "
                f"a smaller lr (now {run.task.lr:g}) usually helps"
            )
    return replies


def _rates(replies: Sequence[Reply], name: str) -> list[float]:
    return [reply.report[name] / reply.report["samples"] for reply in replies]


def _by_client(replies: Sequence[Reply], rates: Sequence[float]) -> dict[str, float]:
    return {str(reply.client): rate for reply, rate in zip(replies, rates, strict=True)}


def _explain_tuning(training: Any) -> dict[str, str]:
    subset = "all of it" if training.fine_tune_part == "all" else "its head"
    model = f"each client's model after {training.fine_tune} more epochs on its own data ({subset})"
    return {
        "fine_tuned": f"{model}, on its own test data, mean per client",
        "fine_tuned_sample": f"{model}, on its own test data, mean per sample",
        "fine_tuned_std": "standard deviation of fine_tuned over clients",
        "fine_tuned_worst": "mean of the worst tenth of clients of fine_tuned",
    }


def _explain_joining(training: Any) -> dict[str, str]:
    who = f"the {training.newcomers} clients that did not take part in training, each on its own test data"
    mean = "mean by training samples"
    return {
        "newcomers_before": f"{who}, {mean}, with the model that the method gives a newcomer",
        "newcomers_after": f"{who}, {mean}, after {training.join_epochs} epochs on its own data",
    }


register(
    Score(
        "fine_tuned",
        {"fine_tuned": "fine-tuned %"},
        _explain_tuning,
        lambda run: bool(run.training.fine_tune),
        lambda run: fine_tuned(run, run.training.fine_tune, run.training.fine_tune_part),
    )
)
register(
    Score(
        "newcomers",
        {"newcomers_before": "newcomers %", "newcomers_after": "newcomers, trained %"},
        _explain_joining,
        lambda run: bool(run.training.newcomers),
        lambda run: joined(run, run.training.join_epochs),
    )
)
