"""The numbers that a round's record gets: what was sent, where the time went, and how clients scored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.metric import Measure, Measures
from ..core.tree import Tree
from ..transport.messages import Order, Reply

SPLIT = ("communication", "client", "server")  # where a round's time goes


def nbytes(sent: Tree, seen: dict[int, int] | None = None) -> int:
    """Return the bytes of a tree's tensors, every leaf as often as it is sent; nothing waits for a device.

    `seen` remembers branches by identity: what all clients are sent is looked at once.
    """
    if not isinstance(sent, dict):
        return 0  # what the gate has refused
    if seen is not None and id(sent) in seen:
        return seen[id(sent)]
    total = sum(nbytes(leaf, seen) if isinstance(leaf, dict) else getattr(leaf, "nbytes", 0) for leaf in sent.values())
    if seen is not None:
        seen[id(sent)] = total
    return total


def traffic(orders: Sequence[Order], replies: Sequence[Reply]) -> dict[str, float]:
    """Return the mean bytes down to a client that was asked and up from one that answered, and the round's total."""
    down, up = _all(order.down for order in orders), _all(reply.up for reply in replies)
    return {
        "bytes_down": down / max(1, len(orders)),
        "bytes_up": up / max(1, len(replies)),
        "bytes_total": down + up,
    }


def each(trees: Iterable[Tree]) -> list[int]:
    """Return the bytes of each of several trees, which may share branches."""
    alive = list(trees)  # while identities are compared
    seen: dict[int, int] = {}
    return [nbytes(sent, seen) for sent in alive]


def _all(trees: Iterable[Tree]) -> int:
    return sum(each(trees))


def split_seconds(carrying: float, waited: float, total: float) -> dict[str, Any]:
    """Return a round's seconds: what the transport spent on carrying messages, the rest of the wait for replies, the rest."""
    parts = (carrying, max(0.0, waited - carrying), max(0.0, total - waited))
    return {f"{name}_seconds": value for name, value in zip(SPLIT, parts, strict=True)}


@dataclass(frozen=True)
class Scores:
    """Right answers (or sums of shares or errors) and test sizes, by client, for each model that was scored."""

    clients: list[int]
    samples: list[int]
    hits: dict[str, list[float]]

    @classmethod
    def read(cls, replies: Sequence[Reply], models: Sequence[str]) -> Scores:
        """Read the clients' replies. Where a method has only a generic model, that is also what serves each client."""
        hits = {model: [float(r.report[model]) for r in replies] for model in models}
        hits.setdefault("personal", hits.get("generic", []))
        return cls([r.client for r in replies], [int(r.report["samples"]) for r in replies], hits)


def summary(scores: Scores, prefix: str = "", lower: bool = False) -> dict[str, Any]:
    """Return the numbers of one round's record.

    `personal` is the mean over clients, `personal_sample` over samples, `personal_std` the spread over clients and
    `personal_worst` the mean of the worst tenth of clients; `generic` counts every client's test samples alike (the common
    test set, where there is one, has a number of its own: `generic_common`); `generic_client` is its mean over clients.
    `lower` says that less is better.
    """
    sizes = np.array(scores.samples, dtype=float)
    record: dict[str, Any] = {}
    for model, hits in scores.hits.items():
        rates = np.array(hits, dtype=float) / sizes
        record[f"{prefix}{model}_clients"] = {str(k): float(r) for k, r in zip(scores.clients, rates, strict=True)}
        per_sample = float(np.sum(hits) / sizes.sum())
        if model == "generic":
            record[f"{prefix}generic"], record[f"{prefix}generic_client"] = per_sample, float(rates.mean())
        else:
            record[f"{prefix}personal"], record[f"{prefix}personal_sample"] = float(rates.mean()), per_sample
            record[f"{prefix}personal_std"], record[f"{prefix}personal_worst"] = (
                float(rates.std()),
                worst_tenth(rates, lower),
            )
    record[f"{prefix}samples"] = {str(k): n for k, n in zip(scores.clients, scores.samples, strict=True)}
    return record


def metrics(
    replies: Sequence[Reply], models: Sequence[str], measures: Measures, prefix: str = "", served: str = "personal"
) -> dict[str, Any]:
    """Return what a record says of the run's metrics, by model (`personal_f1`, `generic_f1`, …).

    Like `personal`, `personal_f1` is the mean over clients, with `_sample`, `_std`, `_worst` and `_clients`; `_pooled` is the
    metric of all clients' predictions together, which `generic_f1` is for the generic model. Clients for which a metric is not
    defined are left out, `_left_out` of them.
    """
    record: dict[str, Any] = {}
    known = [model for model in ("personal", "generic") if model in models or model == "personal"]
    for model in known:
        source = model if model in models else served
        parts = [reply.up[source] for reply in replies]
        whole = measures.merge(parts) if parts else {}
        pooled, by_class = measures.values(whole), measures.by_class(whole)
        for measure in (metric.measure for metric in measures.metrics):
            own = {r.client: r.report.get(f"{source}_{measure.name}") for r in replies}
            sizes = {reply.client: reply.report["samples"] for reply in replies}
            name = f"{prefix}{model}_{measure.name}"
            record |= _metric(name, model == "generic", measure, own, sizes, pooled.get(measure.name))
            if measure.name in by_class and not prefix:
                record[f"{name}_by_class"] = by_class[measure.name]
    return record


def _metric(
    name: str,
    generic: bool,
    measure: Measure,
    own: dict[int, float | None],
    sizes: dict[int, float],
    pooled: float | None,
) -> dict[str, Any]:
    known = {k: float(value) for k, value in own.items() if value is not None}
    values, weights = np.array([*known.values()]), np.array([sizes[k] for k in known])
    record: dict[str, Any] = {f"{name}_clients": {str(k): value for k, value in known.items()}}
    if len(known) < len(own):
        record[f"{name}_left_out"] = len(own) - len(known)
    if pooled is not None:
        record[name if generic else f"{name}_pooled"] = pooled
    if not known:
        return record
    if generic:
        return {**record, f"{name}_client": float(values.mean())}
    return {
        **record,
        name: float(values.mean()),
        f"{name}_sample": float(np.average(values, weights=weights)),
        f"{name}_std": float(values.std()),
        f"{name}_worst": worst_tenth(values, measure.lower),
    }


def training_losses(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the loss on the clients' training data: of the models that serve them, and of the generic one.

    Both are means over all samples; `train_loss_clients` has each client's own mean. What is not finite is left out.
    """
    losses: dict[str, Any] = {}
    sizes = [reply.report["samples"] for reply in replies]
    serving = [reply.report.get("personal_loss", reply.report.get("generic_loss", math.nan)) for reply in replies]
    generic = [reply.report.get("generic_loss", math.nan) for reply in replies]
    if replies and all(map(math.isfinite, serving)):
        losses["train_loss"] = float(np.average(serving, weights=sizes))
        losses["train_loss_clients"] = {str(r.client): loss for r, loss in zip(replies, serving, strict=True)}
    if replies and all(map(math.isfinite, generic)):
        losses["generic_train_loss"] = float(np.average(generic, weights=sizes))
    return losses


def worst_tenth(rates: Any, lower: bool = False) -> float:
    """Return the mean of the worst 10 % of clients (at least one client); `lower`: less is better."""
    ordered = np.sort(np.asarray(rates, dtype=float))
    ordered = ordered[::-1] if lower else ordered
    return float(ordered[: max(1, len(ordered) // 10)].mean())
