"""Who owns a sample is unknown: all clients' models vote, or one model is made of them.

    New(x) = argmax_c  1/K · Σ_k softmax(f(v_k, x))_c          (CD²-pFed's New test; on another source: External)
    averaged:  v̄ = Σ p_k·v_k,  p_k = n_k / Σ n_j                (spectral co-distillation's GM of personal-only methods)

Only one block of [samples, classes] is ever held, whatever the number of clients: votes are added up model by model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from ..core import tree
from ..core.errors import InputError
from ..core.task import CHUNK
from ..core.tree import Params
from ..data.federation import Pair

if TYPE_CHECKING:
    from ..run.result import Run

VOTES = 1 << 22  # samples × classes of one block
STACK = 8  # models in one pass of the stacked engine
On: TypeAlias = Literal["clients", "common"]


def new(run: Run, on: On = "clients") -> float:
    """Accuracy of the ensemble of all clients' personal models on the union of their tests, or on the common test set."""
    return _accuracy(run, _ensemble, *_tests(run, on))


def on_external(run: Run, data: Pair, model: Literal["ensemble", "generic"] = "ensemble") -> float:
    """Accuracy of the ensemble, or of the generic model, on data that was read by `Samples.read`."""
    if model not in ("ensemble", "generic"):
        raise InputError("model", model, "'ensemble' or 'generic'")
    if model == "ensemble":
        return _accuracy(run, _ensemble, *data)
    if "generic" not in run.method.scores:
        raise InputError("model", model, f"'ensemble': {run.method.id} trains no generic model")
    generic = run.method.generic(run.task, run._server)
    return _accuracy(run, lambda run, x: run.task.predict(generic, x), *data)


def averaged(run: Run, on: On = "clients", mean: Literal["weighted", "uniform"] = "weighted") -> float:
    """Accuracy of the mean of the personal models, by training samples or all alike, on the same data as `new`."""
    if mean not in ("weighted", "uniform"):
        raise InputError("mean", mean, "'weighted' or 'uniform'")
    sizes = run.trainer.bench.data.train.sizes
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
    return _accuracy(run, lambda run, x: run.task.predict(model, x), *_tests(run, on))


def _tests(run: Run, on: str) -> Pair:
    """All samples of that test set."""
    data = run.trainer.data
    if on == "common":
        if data.common is None:
            raise InputError("on", on, "'clients': this federation has no common test set")
        return data.common
    if on != "clients":
        raise InputError("on", on, "'clients' or 'common'")
    if not run.newcomers:
        return data.test.x[:], data.test.y
    parts = [data.test.of(k) for k in run.clients]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _accuracy(run: Run, votes: Callable[[Run, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """The share of samples whose highest vote is right, block by block."""
    net, like = run.task.net, run.trainer.bench.data.train.x
    rows, hits = max(1, VOTES // net.outputs), 0
    with torch.no_grad():
        for first in range(0, len(y), rows):
            block = x[first : first + rows].to(net.device, like.dtype)
            hits += int((votes(run, block).argmax(-1) == y[first : first + rows].to(net.device)).sum())
    return hits / len(y)


def _ensemble(run: Run, x: Tensor) -> Tensor:
    """Σ_k softmax(f(v_k, x)), in float64. Where there are no personal models all would vote alike: one does."""
    net = run.task.net
    total = torch.zeros(len(x), net.outputs, dtype=torch.float64, device=net.device)
    voters = run.clients if "personal" in run.method.scores else run.clients[:1]
    for group in _groups(voters, STACK if run.engine == "stacked" else 1):
        models = [run.served(k) for k in group]
        if len(models) == 1:
            total += run.task.predict(models[0], x).double().softmax(-1)
            continue
        together: Params = tree.stack(models)
        forward = vmap(lambda params, part: net(params, part, train=False), in_dims=(0, None))
        for first in range(0, len(x), CHUNK):
            logits = forward(together, x[first : first + CHUNK])
            total[first : first + CHUNK] += logits.double().softmax(-1).sum(0)
    return total


def _groups(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
