"""Attention in plain products, which `torch.func.vmap` and second derivatives take; it equals torch's own to rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return softmax(q·kᵀ·scale + mask)·v, with `drop` applied to the weights; 0 where a mask leaves nothing to attend to."""
    if grouped:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    closed = None
    if mask is not None and mask.dtype == torch.bool:
        closed = ~mask
    elif mask is not None:
        closed = mask == -torch.inf
        scores = scores + mask.masked_fill(closed, 0)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        closed = ahead if closed is None else closed | ahead
    if closed is not None:
        scores = scores.masked_fill(
            closed, torch.finfo(scores.dtype).min
        )  # not −∞, of which a whole row has no gradient
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    if closed is not None:
        weights = weights.masked_fill(closed.all(-1, keepdim=True), 0)
    return drop(weights) @ value
