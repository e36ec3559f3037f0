# ruff: noqa: E741
"""Triton kernels for convolution with a weight for each client: implicit matrix products, no patches in memory.

Channels last, clients first: x [n, B, H, W, C], w [n, O, KH, KW, C], y [n, B, OH, OW, O]. One program makes one tile of one
client's result; sizes and strides are constants of the compiled kernel. Sums run in a fixed order, so the same input gives the
same bits. Imported only where Triton is installed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(
    x, w, y, bias,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """y[m, o] = bias[o] + Σ_k x[pixel(m, k)]·w[o, k] with m = (b, oh, ow) and k = (kh, kw, c)."""
    M: tl.constexpr = B * OH * OW
    K: tl.constexpr = KH * KW * C
    client = tl.program_id(2).to(tl.int64)
    x += client * (B * H * W * C)
    w += client * (O * K)
    y += client * (M * O)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    b, oh, ow = m // (OH * OW), (m // OW) % OH, m % OW
    top, left = oh * SH - PH, ow * SW - PW
    acc = tl.zeros((BM, BN), tl.float32)
    if C >= 16:  # tap by tap: a tile of channels lies together in memory
        for tap in range(KH * KW):
            ih, iw = top + (tap // KW) * DH, left + (tap % KW) * DW
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < M)
            start = ((b * H + ih) * W + iw) * C
            for c0 in range(0, C, BK):
                c = c0 + tl.arange(0, BK)
                k = tap * C + c
                if C % BK == 0:
                    patch = tl.load(x + start[:, None] + c[None, :], mask=inside[:, None], other=0.0)
                    weight = tl.load(w + o[None, :] * K + k[:, None], mask=(o < O)[None, :], other=0.0)
                else:
                    patch = tl.load(x + start[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
                    both = (o < O)[None, :] & (c < C)[:, None]
                    weight = tl.load(w + o[None, :] * K + k[:, None], mask=both, other=0.0)
                acc = tl.dot(patch, weight, acc, input_precision=PRECISION)
    else:
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            tap, c = k // C, k % C
            inside = (m < M)[:, None] & (k < K)[None, :]
            if PH + PW > 0:
                ih, iw = top[:, None] + ((tap // KW) * DH)[None, :], left[:, None] + ((tap % KW) * DW)[None, :]
                inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            corner, entry = ((b * H + top) * W + left) * C, ((tap // KW) * DH * W + (tap % KW) * DW) * C + c
            patch = tl.load(x + corner[:, None] + entry[None, :], mask=inside, other=0.0)
            both = (o < O)[None, :] & (k < K)[:, None]
            weight = tl.load(w + o[None, :] * K + k[:, None], mask=both, other=0.0)
            acc = tl.dot(patch, weight, acc, input_precision=PRECISION)
    if BIASED:
        acc += tl.load(bias + client * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None] * O + o[None, :], acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _input_grad(
    g, w, d,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d[m, c] = Σ_(tap, o) g[pixel(m, tap), o]·w[o, tap, c] with m = (b, h, w): the pixels whose patch holds m."""
    M: tl.constexpr = B * H * W
    client = tl.program_id(2).to(tl.int64)
    g += client * (B * OH * OW * O)
    w += client * (O * KH * KW * C)
    d += client * (M * C)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    b, h, v = m // (H * W), (m // W) % H, m % W
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in range(KH * KW):
        down, right = h + PH - (tap // KW) * DH, v + PW - (tap % KW) * DW
        oh, ow = down // SH, right // SW
        inside = (down >= 0) & (right >= 0) & (oh < OH) & (ow < OW) & (m < M)
        if SH * SW > 1:
            inside = inside & (down % SH == 0) & (right % SW == 0)
        start = ((b * OH + oh) * OW + ow) * O
        for o0 in range(0, O, BK):
            o = o0 + tl.arange(0, BK)
            grad = tl.load(g + start[:, None] + o[None, :], mask=inside[:, None] & (o < O)[None, :], other=0.0)
            row = (o * (KH * KW) + tap) * C
            weight = tl.load(w + row[:, None] + c[None, :], mask=(o < O)[:, None] & (c < C)[None, :], other=0.0)
            acc = tl.dot(grad, weight, acc, input_precision=PRECISION)
    tl.store(d + m[:, None] * C + c[None, :], acc.to(d.dtype.element_ty), mask=(m < M)[:, None] & (c < C)[None, :])


@triton.jit
def _weight_grad(
    x, g, d,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d[part, o, k] = Σ_m g[m, o]·x[pixel(m, k)] over this part's pixels: BM outputs × BN entries, BK pixels a step."""
    M: tl.constexpr = B * OH * OW
    K: tl.constexpr = KH * KW * C
    SHARE: tl.constexpr = (M + PARTS * BK - 1) // (PARTS * BK) * BK
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    x += client * (B * H * W * C)
    g += client * (M * O)
    d += tl.program_id(2).to(tl.int64) * (O * K)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    tap, c = k // C, k % C
    below, beside = (tap // KW) * DH - PH, (tap % KW) * DW - PW
    entry = (below * W + beside) * C + c
    acc = tl.zeros((BM, BN), tl.float32)
    for m0 in range(0, SHARE, BK):
        m = part * SHARE + m0 + tl.arange(0, BK)
        b, oh, ow = m // (OH * OW), (m // OW) % OH, m % OW
        inside = (m < M)[:, None] & (k < K)[None, :]
        if PH + PW > 0:
            ih, iw = (oh * SH)[:, None] + below[None, :], (ow * SW)[:, None] + beside[None, :]
            inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        corner = ((b * H + oh * SH) * W + ow * SW) * C
        patch = tl.load(x + corner[:, None] + entry[None, :], mask=inside, other=0.0)
        grad = tl.load(g + m[None, :] * O + o[:, None], mask=(m < M)[None, :] & (o < O)[:, None], other=0.0)
        acc = tl.dot(grad, patch, acc, input_precision=PRECISION)
    tl.store(d + o[:, None] * K + k[None, :], acc.to(d.dtype.element_ty), mask=(o < O)[:, None] & (k < K)[None, :])


@triton.jit
def _weight_grad_rows(
    x, g, d,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the same as `_weight_grad` from x [n, C, B, H, W] and g [n, O, B, OH, OW], where pixels lie together.

    Hopper's TF32 products read both factors along the sum, here along pixels; with channels together every number would be
    copied by itself. d is [n·PARTS, O, C, KH, KW], so that the taps of a tile read the same pixels from the cache.
    """
    M: tl.constexpr = B * OH * OW
    K: tl.constexpr = KH * KW * C
    SHARE: tl.constexpr = (M + PARTS * BK - 1) // (PARTS * BK) * BK
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    x += client * (B * H * W * C)
    g += client * (M * O)
    d += tl.program_id(2).to(tl.int64) * (O * K)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    c, tap = k // (KH * KW), k % (KH * KW)
    below, beside = (tap // KW) * DH - PH, (tap % KW) * DW - PW
    entry = (c * (B * H) + below) * W + beside
    acc = tl.zeros((BM, BN), tl.float32)
    for m0 in range(0, SHARE, BK):
        m = part * SHARE + m0 + tl.arange(0, BK)
        b, oh, ow = m // (OH * OW), (m // OW) % OH, m % OW
        inside = (m < M)[:, None] & (k < K)[None, :]
        if PH + PW > 0:
            ih, iw = (oh * SH)[:, None] + below[None, :], (ow * SW)[:, None] + beside[None, :]
            inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        corner = (b * H + oh * SH) * W + ow * SW
        patch = tl.load(x + corner[:, None] + entry[None, :], mask=inside, other=0.0)
        grad = tl.load(g + o[:, None] * M + m[None, :], mask=(m < M)[None, :] & (o < O)[:, None], other=0.0)
        acc = tl.dot(grad, patch, acc, input_precision=PRECISION)
    tl.store(d + o[:, None] * K + k[None, :], acc.to(d.dtype.element_ty), mask=(o < O)[:, None] & (k < K)[None, :])


def launch(
    what: str, a: Tensor, b: Tensor, bias: Tensor | None, s: dict[str, int], tile: tuple[int, ...], exact: bool
) -> Tensor:
    """Run one of the kernels on contiguous tensors; the forward pass may add a bias [n, O].

    `tile` is (BM, BN, BK, warps, stages, parts); parts divide the sum of a weight's gradient, for more programs at a time.
    """
    n, parts, dtype = a.shape[0], tile[5], a.dtype
    kernel, shape, grid = _plan(what, n, s, tile)
    out = torch.empty(shape, dtype=torch.float32 if parts > 1 and what in SUMS else dtype, device=a.device)
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        kernel[grid](a, b, out, *([a if bias is None else bias] if what == "forward" else []),
                     **_constants(what, s, tile, exact, bias is not None))  # fmt: skip
    if what in SUMS and parts > 1:
        return out.reshape(n, parts, *out.shape[1:]).sum(1).to(dtype)
    return out


def warm(what: str, dtype: torch.dtype, s: dict[str, int], tile: tuple[int, ...], exact: bool, biased: bool) -> None:
    """Compile a kernel for the present GPU into Triton's cache, without running it."""
    kernel, _, grid = _plan(what, 1, s, tile)
    out = torch.float32 if tile[5] > 1 and what in SUMS else dtype
    biases = [dtype] if what == "forward" else []
    kernel.warmup(dtype, dtype, out, *biases, grid=grid, **_constants(what, s, tile, exact, biased))


SUMS = ("weight_grad", "weight_grad_rows")  # whose sum over pixels may be made in parts


def _plan(
    what: str, n: int, s: dict[str, int], tile: tuple[int, ...]
) -> tuple[Any, tuple[int, ...], tuple[int, int, int]]:
    """Return the kernel, the shape of its result, and its grid."""
    BM, BN, _, _, _, parts = tile
    pixels, entries = s["B"] * s["OH"] * s["OW"], s["KH"] * s["KW"] * s["C"]
    if what == "forward":
        shape = (n, s["B"], s["OH"], s["OW"], s["O"])
        return _forward, shape, (triton.cdiv(pixels, BM), triton.cdiv(s["O"], BN), n)
    if what == "input_grad":
        rows = s["B"] * s["H"] * s["W"]
        return _input_grad, (n, s["B"], s["H"], s["W"], s["C"]), (triton.cdiv(rows, BM), triton.cdiv(s["C"], BN), n)
    grid = (triton.cdiv(entries, BN), triton.cdiv(s["O"], BM), n * parts)
    if what == "weight_grad":
        return _weight_grad, (n * parts, s["O"], s["KH"], s["KW"], s["C"]), grid
    return _weight_grad_rows, (n * parts, s["O"], s["C"], s["KH"], s["KW"]), grid


def _constants(what: str, s: dict[str, int], tile: tuple[int, ...], exact: bool, biased: bool) -> dict[str, Any]:
    """Return a kernel's constants and options."""
    BM, BN, BK, warps, stages, parts = tile
    more = {"BIASED": biased} if what == "forward" else {}
    precision = "ieee" if exact else "tf32"
    sizes = dict(BM=BM, BN=BN, BK=BK, PARTS=parts, PRECISION=precision)
    return {**s, **sizes, **more, "num_warps": warps, "num_stages": stages}
