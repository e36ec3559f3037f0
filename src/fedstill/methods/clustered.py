"""Models in clusters: which models belong together, by the distance of their weights. Runs at the server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Params

PASSES = 100  # most passes of Lloyd's algorithm; each one shortens the distances, so it ends far earlier


def nearest(models: Sequence[Params], centres: Sequence[Params]) -> list[int]:
    """Return for each model the centre with the smallest ‖model − centre‖², the first among equals."""
    return [int(torch.stack([_squared(model, centre) for centre in centres]).argmin()) for model in models]


def divide(models: Sequence[Params], number: int) -> list[int]:
    """Return each model's cluster, by Lloyd's algorithm on the weights; there are at least `number` models.

    The first centre is the model farthest from the mean, each next one that farthest from the centres so far. Nothing is drawn.
    """
    mean = tree.mean(models, [1.0] * len(models))
    gaps = torch.stack([_squared(model, mean) for model in models])
    chosen = [int(gaps.argmax())]
    while len(chosen) < number:
        gaps = torch.stack([torch.stack([_squared(model, models[c]) for c in chosen]).min() for model in models])
        chosen.append(int(gaps.argmax()))
    centres = [models[c] for c in chosen]
    of = nearest(models, centres)
    for _ in range(PASSES):
        for c in range(number):
            own = [model for model, cluster in zip(models, of, strict=True) if cluster == c]
            centres[c] = tree.mean(own, [1.0] * len(own)) if own else centres[c]
        before, of = of, nearest(models, centres)
        if of == before:
            break
    return of


def _squared(a: Params, b: Params) -> Tensor:
    """Return ‖a − b‖²."""
    return tree.square_norm({name: value - b[name] for name, value in a.items()})
