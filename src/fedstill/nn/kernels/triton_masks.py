"""The Triton kernel of `masks`: the hash of `plan.uniform_bits` in 32-bit arithmetic. Imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
GOLDEN = 0x9E3779B9  # by which draws are told apart, as in `plan.uniform_bits`


@triton.jit
def _avalanche(h):
    """Hash 32-bit integers as `plan._avalanche` does; products wrap around."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D).to(tl.uint32)
    h = ((h ^ (h >> 15)) * 0x846CA68B).to(tl.uint32)
    return h ^ (h >> 16)


@triton.jit(do_not_specialize=["shift", "least"])
def _kept(keys, out, shift, count, least, BLOCK: tl.constexpr):
    """out[row, i] = whether the word of entry i under the row's key is at least `least`."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _avalanche((tl.load(keys + row) + shift).to(tl.uint32))
    word = _avalanche((_avalanche(i.to(tl.uint32) ^ key) + key).to(tl.uint32))
    tl.store(out + row * count + i, tl.where(word.to(tl.int64) >= least, 1, 0).to(tl.int8), mask=i < count)


def launch(keys: Tensor, draw: int, count: int, least: int) -> Tensor:
    """Return for each key and each of `count` entries whether its bits are at least `least`."""
    out = torch.empty((*keys.shape, count), dtype=torch.bool, device=keys.device)
    if out.numel():
        grid = (triton.cdiv(count, BLOCK), keys.numel())
        _kept[grid](keys, out.view(torch.int8), draw * GOLDEN, count, least, BLOCK=BLOCK)
    return out
