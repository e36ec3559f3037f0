"""Which entries dropout keeps: on a GPU by one kernel instead of as a part of the compiled step.

A hash uses each of its intermediate values twice. Inductor follows both uses, so a step with many masks (attention's) took it
minutes to compile. The kernel computes the same bits as `plan.uniform_bits` and writes one byte an entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.plan import uniform_bits
from .autotune import has_triton


def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel can be run on a device."""
    return device.type == "cuda" and has_triton()


def keeps(key: Tensor, draw: int, shape: Sequence[int], least: int) -> Tensor:
    """Return whether the 32 random bits of every entry are at least `least`, for one key or, under `vmap`, for several."""
    if has_kernel(key.device):
        kept: Tensor = _keeps(key, draw, math.prod(shape), least)
        return kept.reshape(*key.shape, *shape)
    return uniform_bits(key, draw, shape) >= least


@torch.library.custom_op("fedstill::keeps", mutates_args=())
def _keeps(key: Tensor, draw: int, count: int, least: int) -> Tensor:
    if not key.is_cuda:
        return uniform_bits(key, draw, (count,)) >= least
    from . import triton_masks  # needs Triton, which is not everywhere

    return triton_masks.launch(key.contiguous(), draw, count, least)


@_keeps.register_fake
def _(key: Tensor, draw: int, count: int, least: int) -> Tensor:
    return key.new_empty((*key.shape, count), dtype=torch.bool)


@torch.library.register_vmap("fedstill::keeps")  # type: ignore[untyped-decorator]
def _vmapped(info: Any, in_dims: tuple[int | None, ...], key: Tensor, draw: int, count: int, least: int) -> Any:
    assert in_dims[0] is not None
    return _keeps(key.movedim(in_dims[0], 0), draw, count, least), 0
