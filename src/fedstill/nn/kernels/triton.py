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
            ih, iw = top[:, None] + ((tap // KW) * DH)[None, :], left[:, None] + ((tap % KW) * DW)[None, :]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < M)[:, None] & (k < K)[None, :]
            patch = tl.load(x + ((b[:, None] * H + ih) * W + iw) * C + c[None, :], mask=inside, other=0.0)
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
    acc = tl.zeros((BM, BN), tl.float32)
    for m0 in range(0, SHARE, BK):
        m = part * SHARE + m0 + tl.arange(0, BK)
        b, oh, ow = m // (OH * OW), (m // OW) % OH, m % OW
        ih, iw = (oh * SH)[:, None] + below[None, :], (ow * SW)[:, None] + beside[None, :]
        inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < M)[:, None] & (k < K)[None, :]
        patch = tl.load(x + ((b[:, None] * H + ih) * W + iw) * C + c[None, :], mask=inside, other=0.0)
        grad = tl.load(g + m[None, :] * O + o[:, None], mask=(m < M)[None, :] & (o < O)[:, None], other=0.0)
        acc = tl.dot(grad, patch, acc, input_precision=PRECISION)
    tl.store(d + o[:, None] * K + k[None, :], acc.to(d.dtype.element_ty), mask=(o < O)[:, None] & (k < K)[None, :])


def launch(
    what: str, a: Tensor, b: Tensor, bias: Tensor | None, s: dict[str, int], tile: tuple[int, ...], exact: bool
) -> Tensor:
    """Run one of the three kernels on contiguous tensors; the forward pass may add a bias [n, O].

    `tile` is (BM, BN, BK, warps, stages, parts); parts divide the sum of a weight's gradient, for more programs at a time.
    """
    BM, BN, BK, warps, stages, parts = tile
    n = a.shape[0]
    pixels, entries = s["B"] * s["OH"] * s["OW"], s["KH"] * s["KW"] * s["C"]
    dtype = a.dtype
    options: dict[str, Any] = {"dtype": dtype, "device": a.device}
    kernel: Any
    if what == "forward":
        out = torch.empty((n, s["B"], s["OH"], s["OW"], s["O"]), **options)
        kernel, grid = _forward, (triton.cdiv(pixels, BM), triton.cdiv(s["O"], BN), n)
    elif what == "input_grad":
        out = torch.empty((n, s["B"], s["H"], s["W"], s["C"]), **options)
        kernel, grid = _input_grad, (triton.cdiv(s["B"] * s["H"] * s["W"], BM), triton.cdiv(s["C"], BN), n)
    else:
        options["dtype"] = dtype if parts == 1 else torch.float32
        out = torch.empty((n * parts, s["O"], s["KH"], s["KW"], s["C"]), **options)
        kernel, grid = _weight_grad, (triton.cdiv(entries, BN), triton.cdiv(s["O"], BM), n * parts)
    precision = "ieee" if exact else "tf32"
    bias_arguments = {"bias": a if bias is None else bias, "BIASED": bias is not None} if what == "forward" else {}
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        kernel[grid](
            a,
            b,
            out,
            **bias_arguments,
            **s,
            BM=BM,
            BN=BN,
            BK=BK,
            PARTS=parts,
            PRECISION=precision,
            num_warps=warps,
            num_stages=stages,
        )
    if what == "weight_grad" and parts > 1:
        return out.reshape(n, parts, *out.shape[1:]).sum(1).to(dtype)
    return out
