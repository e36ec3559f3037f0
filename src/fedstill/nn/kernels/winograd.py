"""A 5×5 convolution by Winograd's minimal filtering F(4×4, 5×5): 64 products for 16 results where the sum itself takes 400.

    Y = Aᵀ·[ (G·w·Gᵀ) ⊙ (Bᵀ·d·B) ]·A        d: a tile of 8×8 pixels, Y: 4×4 results, ⊙ summed over input channels

Aᵀ, G and Bᵀ come from interpolation at 0, ±1, ±2, ±½ and ∞ (Toom and Cook's product of polynomials, transposed): with V_k the
powers 0 … k−1 of the points, Aᵀ = V_4ᵀ, G = V_5, Bᵀ = V_8⁻ᵀ, and each row of G divided by its largest entry, by which that of
Bᵀ is multiplied.

The transforms would move more memory than they save in products. So the image is taken in strips of four rows of results, whose
transforms stay in the cache, one dimension after the other; and it lies in memory by columns modulo 4, so that tiles, which
overlap by half, are two slices of it and never copied.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016. In float32 the result is off by about 3e-6 of
its size, where torch's own sum is off by 4e-7. It serves clients that train one by one on a CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Matrix: TypeAlias = list[list[Fraction]]
M, R, N = 4, 5, 8  # results, taps and pixels of a tile, in one dimension
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))  # and ∞
ONE = N + 1  # the product at the point (1, 1), which adds as it is to every result of its tile


@dataclass(frozen=True)
class Limits:
    """From where on it pays: measured on one core for 6 to 192 channels, images of 4 to 28 and batches of 1 to 64
    (docs/performance.md). A tile that is not full costs as much as a full one.
    """

    channels: int = 16  # in and out, at least
    planes: int = 250  # input times output channels, times the square of how full the tiles are
    work: int = 60_000  # that, times the tiles of a batch
    strip: int = 4  # tiles in a strip, with all images of a batch


LIMITS = Limits()


def takes(
    x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, limits: Limits = LIMITS
) -> int | None:
    """Return the padding of a convolution that is faster this way, None for any other."""
    if x.ndim != 4 or w.shape[2:] != (R, R) or groups != 1 or x.device.type != "cpu" or x.dtype != w.dtype:
        return None
    if x.dtype not in (torch.float32, torch.float64) or min(w.shape[:2]) < limits.channels:
        return None
    if _both(stride) != (1, 1) or _both(dilation) != (1, 1):
        return None
    down, right = _both({"valid": 0, "same": R // 2}[padding] if isinstance(padding, str) else padding)
    height, width = (size + 2 * down - R + 1 for size in x.shape[2:])
    if down != right or min(height, width) < M:
        return None
    down_tiles, across = -(-height // M), -(-width // M)
    full = height * width / (M * M * down_tiles * across)
    planes = w.shape[0] * w.shape[1] * full**2
    pays = planes >= limits.planes and len(x) * across >= limits.strip
    pays = pays and len(x) * down_tiles * across * planes >= limits.work
    return down if pays else None


def worth(layer: nn.Module, limits: Limits = LIMITS) -> bool:
    """Return whether `takes` may accept a layer's convolutions."""
    wide = isinstance(layer, nn.Conv2d) and min(layer.weight.shape[:2]) >= limits.channels
    return isinstance(layer, nn.Conv2d) and wide and layer.kernel_size == (R, R)


def conv2d(x: Tensor, w: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolve with stride 1, NCHW; fastest where the channels lie last in memory."""
    if torch._C._functorch.maybe_current_level() is not None:  # inside of a transform (a gradient's gradient, say)
        return F.conv2d(x, w, bias, padding=padding)
    out: Tensor = _Winograd.apply(x, w, bias, padding)  # type: ignore[no-untyped-call]
    return out


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


# ---- the three matrices --------------------------------------------------------------------------------------------------
def matrices() -> tuple[Matrix, Matrix, Matrix]:
    """Return Aᵀ [4×8], G [8×5] and Bᵀ [8×8], exactly."""

    def powers(k: int) -> Matrix:
        return [[p**j for j in range(k)] for p in POINTS] + [[Fraction(int(j == k - 1)) for j in range(k)]]

    a, g, b = _transposed(powers(M)), powers(R), _transposed(_inverse(powers(N)))
    largest = [max(map(abs, row)) for row in g]
    g = [[v / s for v in row] for row, s in zip(g, largest, strict=True)]
    return a, g, [[v * s for v in row] for row, s in zip(b, largest, strict=True)]


def _transposed(rows: Matrix) -> Matrix:
    return [list(column) for column in zip(*rows, strict=True)]


def _inverse(rows: Matrix) -> Matrix:
    """Invert by elimination, each pivot brought up from below."""
    n = len(rows)
    both = [row + [Fraction(int(i == j)) for j in range(n)] for i, row in enumerate(rows)]
    for c in range(n):
        pivot = next(i for i in range(c, n) if both[i][c])
        both[c], both[pivot] = both[pivot], both[c]
        both[c] = [v / both[c][c] for v in both[c]]
        for i in range(n):
            if i != c:
                both[i] = [v - both[i][c] * u for v, u in zip(both[i], both[c], strict=True)]
    return [row[n:] for row in both]


@functools.cache
def _transforms(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    a, g, b = (torch.tensor([[float(v) for v in row] for row in rows], dtype=dtype) for rows in matrices())
    return a, g, b


# ---- the convolution -----------------------------------------------------------------------------------------------------
class _Winograd(torch.autograd.Function):
    """The convolution and its gradient: each step is linear, so the gradient runs the transposed steps in reverse.

    A strip of tiles is [8 (down), 8 (across), tiles · batch, channels]; images are [rows, 4, columns / 4, batch, channels].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        a, g, b = _transforms(x.dtype)
        (batch, channels, h, width), outputs = x.shape, w.shape[0]
        oh, ow = (size + 2 * padding - R + 1 for size in (h, width))
        down, across = -(-oh // M), -(-ow // M)
        image = _by_columns(x, padding, M * down + M, M * across + M)
        u = torch.matmul(g, (g @ w.permute(2, 3, 1, 0).reshape(R, -1)).view(N, R, -1)).view(N * N, channels, outputs)
        tiles, one = across * batch, batch * channels
        d, y = x.new_empty(down, N * N, tiles, channels), x.new_empty(down, M, M * tiles * outputs)
        rows, m = x.new_empty(N, M, one + tiles * channels), x.new_empty(N * N, tiles, outputs)
        half = x.new_empty(N, M, tiles * outputs)
        left, right, back = b[:, :M].expand(N, N, M), b[:, M:].expand(N, N, M), a.expand(N, M, N)
        for strip in range(down):
            torch.mm(b, image[M * strip : M * strip + N].view(N, -1), out=rows.view(N, -1))
            both = d[strip].view(N, N, -1)
            torch.bmm(left, rows[:, :, :-one], out=both).baddbmm_(right, rows[:, :, one:])
            torch.bmm(d[strip], u, out=m)
            if bias is not None:
                m[ONE].add_(bias)
            torch.bmm(back, m.view(N, N, -1), out=half)
            torch.mm(a, half.view(N, -1), out=y[strip])
        ctx.save_for_backward(x, w, d, u)
        ctx.padding, ctx.biased = padding, bias is not None
        return _by_rows(y.view(M * down, M, across, batch, outputs))[:, :, :oh, :ow].contiguous(
            memory_format=torch.channels_last
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w, d, u = ctx.saved_tensors
        by_x, by_w, by_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient will be differentiated: by torch's own, which can be
            pads, mask = [ctx.padding] * 2, [by_x, by_w, by_bias]
            tensors = (grad, x, w, [w.shape[0]] if ctx.biased else None)
            slopes = torch.ops.aten.convolution_backward(*tensors, [1, 1], pads, [1, 1], False, [0, 0], 1, mask)
            return slopes[0], slopes[1], slopes[2], None
        a, g, b = _transforms(grad.dtype)
        (batch, channels, h, width), (_, outputs, oh, ow), p = x.shape, grad.shape, ctx.padding
        down, across = -(-oh // M), -(-ow // M)
        slope = _by_columns(grad, 0, M * down, M * across)
        tiles, one = across * batch, batch * channels
        half, m = grad.new_empty(N, M, tiles * outputs), grad.new_empty(N * N, tiles, outputs)
        weight = grad.new_zeros(N * N, channels, outputs) if by_w else None
        image = grad.new_zeros(M * down + M, M, across + 1, batch, channels) if by_x else None
        products, rows = grad.new_empty(N, N, tiles * channels), grad.new_zeros(N, M, one + tiles * channels)
        left, right, back = b[:, :M].T.expand(N, M, N), b[:, M:].T.expand(N, M, N), a.T.expand(N, N, M)
        for strip in range(down):
            torch.mm(a.T, slope[M * strip : M * strip + M].view(M, -1), out=half.view(N, -1))
            torch.bmm(back, half, out=m.view(N, N, -1))
            if weight is not None:
                weight.baddbmm_(d[strip].mT, m)
            if image is not None:  # a pixel is in the left half of one tile and in the right half of the one before
                torch.bmm(m, u.mT, out=products.view(N * N, tiles, channels))
                rows[:, :, :-one] = torch.bmm(left, products)
                rows[:, :, -one:] = 0
                rows[:, :, one:] += torch.bmm(right, products)
                image[M * strip : M * strip + N].view(N, -1).addmm_(b.T, rows.view(N, -1))
        if weight is not None:
            taps = g.T @ torch.matmul(g.T, weight.view(N, N, -1)).view(N, -1)
            weight = taps.view(R, R, channels, outputs).permute(3, 2, 0, 1)
        if image is not None:
            image = _by_rows(image)[:, :, p : p + h, p : p + width]
        return image, weight, grad.sum((0, 2, 3)) if by_bias else None, None


def _by_columns(x: Tensor, padding: int, rows: int, columns: int) -> Tensor:
    """Return an image [batch, channels, …, …], padded to a size, as [rows, 4, columns / 4, batch, channels]."""
    right, below = columns - padding - x.shape[3], rows - padding - x.shape[2]
    image = x.permute(0, 2, 3, 1)
    if padding or right or below:
        image = F.pad(image, (0, 0, padding, right, padding, below))
    return image.reshape(len(x), rows, columns // M, M, -1).permute(1, 3, 2, 0, 4).contiguous()


def _by_rows(image: Tensor) -> Tensor:
    """Invert `_by_columns`: [batch, channels, rows, columns], channels last in memory."""
    rows, _, columns, batch, channels = image.shape
    return image.permute(3, 0, 2, 1, 4).reshape(batch, rows, M * columns, channels).permute(0, 3, 1, 2)
