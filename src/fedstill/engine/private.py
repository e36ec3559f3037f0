"""DP-SGD: a step whose gradient reveals little of any one sample.

    g = (Σ_{i ∈ B} ∇ℓ_i · min(1, C/‖∇ℓ_i‖) + N(0, σ²C²)) / b

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. B is drawn sample by sample (`Plan.private`), b is how many
it has on average, the norm is over all weights that move. ℓ_i is the method's objective on a batch of sample i alone, so terms
that do not depend on samples are part of it. Gradients of single samples are taken by `vmap` over the batch, inside the one over
clients where these are stacked; the noise follows from the step's key, so it has the same bits in both engines.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core import plan
from ..core.batch import Batch
from ..core.task import SampleNoise, Task
from ..core.tree import Params

LossOf = Callable[[Params, Batch], Tensor]


def clipped(loss: LossOf, clip: float, weights: Params, batch: Batch) -> tuple[Params, Tensor]:
    """Return each sample's clipped gradient, along a new first axis, and its loss; samples out of `batch.mask` give zero."""

    def alone(weights: Params, x: Tensor, y: Tensor, index: Tensor, key: Tensor) -> Tensor:
        return loss(weights, Batch(x.unsqueeze(0), y.unsqueeze(0), index.unsqueeze(0), key))

    keys = plan.row_keys(batch.key, batch.index)
    each = vmap(grad_and_value(alone), in_dims=(None, 0, 0, 0, 0))
    grads, losses = each(weights, batch.x, batch.y, batch.index, keys)
    squares = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()])
    factor = clip / squares.sum(0).sqrt().clamp(min=clip)
    if batch.mask is not None:
        factor, losses = (torch.where(batch.mask > 0, t, torch.zeros_like(t)) for t in (factor, losses))
    return {n: g * factor.reshape(-1, *[1] * (g.ndim - 1)) for n, g in grads.items()}, losses


def gradient(noise: SampleNoise, task: Task, loss: LossOf, weights: Params, batch: Batch) -> tuple[Params, Tensor]:
    """Return the noisy gradient, and the mean of the samples' losses (which is not private)."""
    weights = {name: value.detach() for name, value in weights.items()}
    grads, losses = clipped(loss, noise.clip, weights, batch)
    expected = task.here().samples.clamp(max=noise.batch_size)
    sizes = [value.numel() for value in weights.values()]
    drawn = torch.split(noise.normals(batch.key, sum(sizes)), sizes)
    noisy = {
        name: (g.sum(0) + noise.noise * noise.clip * z.reshape(g.shape[1:]).to(g.dtype)) / expected.to(g.dtype)
        for (name, g), z in zip(grads.items(), drawn, strict=True)
    }
    taken = len(losses) if batch.mask is None else batch.mask.sum().clamp(min=1)
    return noisy, losses.sum() / taken
