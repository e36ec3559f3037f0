"""Who owns a sample is unknown: all clients' models vote, or one model is made of them.

    New(x) = argmax_c  1/K · Σ_k softmax(f(v_k, x))_c          (CD²-pFed's New test; on another source: External)
    of labels  1/K · Σ_k σ(f(v_k, x)) > ½,     of numbers  1/K · Σ_k f(v_k, x)
    averaged:  v̄ = Σ p_k·v_k,  p_k = n_k / Σ n_j                (spectral co-distillation's GM of personal-only methods)

Only one block of [samples, outputs] is ever in memory, whatever the number of clients: votes are added up model by model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from ..core import tree
from ..core.errors import InputError
from ..core.task import CHUNK
from ..core.tree import Params
from ..data.federation import Pair
from ..data.samples import Rows, at, moved, together
from .score import Finished, Score, register

VOTES = 1 << 22  # samples × classes of one block
STACK = 8  # models in one pass of the stacked engine
On: TypeAlias = Literal["clients", "common"]


def new(run: Finished, on: On = "clients") -> float:
    """Return the score of the ensemble of all clients' personal models on the union of their tests, or the common test."""
    return _score(run, _ensemble, *_tests(run, on))


def on_external(run: Finished, data: Pair, model: Literal["ensemble", "generic"] = "ensemble") -> float:
    """Return the score of the ensemble, or of the generic model, on data that was read by `Samples.read`."""
    if model not in ("ensemble", "generic"):
        raise InputError("model", model, "'ensemble' or 'generic'")
    if model == "ensemble":
        return _score(run, _ensemble, *data)
    if "generic" not in run.method.scores:
        raise InputError("model", model, f"'ensemble': {run.method.id} trains no generic model")
    generic = run.generic_model()
    return _score(run, _of(generic), *data)


def averaged(run: Finished, on: On = "clients", mean: Literal["weighted", "uniform"] = "weighted") -> float:
    """Return the score of the mean of the personal models, by training samples or all alike, on the data of `new`."""
    if mean not in ("weighted", "uniform"):
        raise InputError("mean", mean, "'weighted' or 'uniform'")
    sizes = run.data.train.sizes
    weights = [sizes[k] if mean == "weighted" else 1 for k in run.clients]
    first = run.served(run.clients[0])
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in first.items()}
    for k, weight in zip(run.clients, weights, strict=True):
        for name, value in run.served(k).items():
            total[name] += value.double() * (weight / sum(weights))
    model = {
        name: (value if first[name].is_floating_point() else value.round()).to(first[name].dtype)
        for name, value in total.items()
    }
    return _score(run, _of(model), *_tests(run, on))


def _tests(run: Finished, on: str) -> Pair:
    """Return all samples of that test set."""
    if on == "common":
        if run.data.common is None:
            raise InputError("on", on, "'clients': this federation has no common test set")
        return run.data.common  # type: ignore[no-any-return]
    if on != "clients":
        raise InputError("on", on, "'clients' or 'common'")
    if len(run.clients) == len(run.data.test.sizes):
        return run.data.test.all()
    pairs = [run.data.test.of(k) for k in run.clients]
    return together([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _of(params: Params) -> Callable[[Finished, Rows], Tensor]:
    """Return the predictions of one model, in float64."""
    return lambda run, x: run.task.objective.predictions(run.task.predict(params, x).double())


def _score(run: Finished, predict: Callable[[Finished, Rows], Tensor], x: Rows, y: Tensor) -> float:
    """Return the mean score of the samples, such as the share whose prediction is right, block by block."""
    net, objective, total = run.task.net, run.task.objective, 0.0
    rows = max(1, VOTES // math.prod((*objective.output[:-1], net.outputs)))
    with torch.no_grad():
        for first in range(0, len(y), rows):
            block = moved(at(x, slice(first, first + rows)), net.device, net.example.dtype)
            scores = objective.score_predictions(predict(run, block), y[first : first + rows].to(net.device))
            total += float(scores.double().sum())
    return total / len(y)


def _ensemble(run: Finished, x: Rows) -> Tensor:
    """Return the mean of all models' predictions, in float64. Without personal models all would vote alike: one does."""
    net, objective = run.task.net, run.task.objective
    total = torch.zeros(len(x), *objective.output[:-1], net.outputs, dtype=torch.float64, device=net.device)
    voters = run.clients if "personal" in run.method.scores else run.clients[:1]
    for group in _groups(voters, STACK if run.engine == "stacked" else 1):
        models = [run.served(k) for k in group]
        if len(models) == 1:
            total += objective.predictions(run.task.predict(models[0], x).double())
            continue
        stacked: Params = tree.stack(models)
        forward = vmap(lambda params, chunk: net(params, chunk, train=False), in_dims=(0, None))
        for first in range(0, len(x), CHUNK):
            logits = forward(stacked, x[first : first + CHUNK])
            total[first : first + CHUNK] += objective.predictions(logits.double()).sum(0)
    return total / len(voters)


def _groups(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _with_common(run: Finished, name: str, score: Callable[[Finished, On], float]) -> dict[str, Any]:
    results = {name: score(run, "clients")}
    return results if run.data.common is None else {**results, f"{name}_common": score(run, "common")}


def _external(run: Finished) -> dict[str, Any]:
    results = {"external": on_external(run, run.external_data)}
    if "generic" in run.method.scores:
        results["external_generic"] = on_external(run, run.external_data, "generic")
    return results


VOTE = "the average of the predictions of all clients' personal models (probabilities, or values)"
WEIGHTS = "the mean of all clients' personal weights (by training samples)"
register(
    Score(
        "new",
        {"new": "new %", "new_common": "new, common %"},
        lambda training: {
            "new": f"{VOTE}, on all clients' test samples, owner unknown",
            "new_common": f"{VOTE}, on the common test set",
        },
        lambda run: bool(run.training.new),
        lambda run: _with_common(run, "new", new),
    )
)
register(
    Score(
        "external",
        {"external": "external %", "external_generic": "external, generic %"},
        lambda training: {
            "external": f"{VOTE}, on {{external}}, a source that no client had",
            "external_generic": "the generic model, on {external}, a source that no client had",
        },
        lambda run: run.external_data is not None,
        _external,
    )
)
register(
    Score(
        "averaged",
        {},
        lambda training: {
            "averaged": f"{WEIGHTS}, on all clients' test samples",
            "averaged_common": f"{WEIGHTS}, on the common test set",
        },
        lambda run: bool(run.training.averaged) and not ("generic" in run.method.scores and run.method.trains_generic),
        lambda run: _with_common(run, "averaged", averaged),
    )
)
