"""A 5×5 convolution by Winograd's minimal filtering along the rows, F(4, 5): 8 products for 4 results where the sum takes 20.

    y = Aᵀ·Σ_r (G·w_r) ⊙ (Bᵀ·d_r)        d_r: 8 pixels of row r, w_r: the 5 taps of row r, y: 4 results; ⊙ summed over channels

Aᵀ, G and Bᵀ come from interpolation at 0, ±1, ±2, ±½ and ∞ (Toom and Cook's product of polynomials, transposed): with V_k the
powers 0 … k−1 of the points, Aᵀ = V_4ᵀ, G = V_5, Bᵀ = V_8⁻ᵀ, and each row of G divided by its largest entry, by which that of
Bᵀ is multiplied. Down the columns the sum is made tap by tap: in both dimensions the algorithm has fewer products still, but
moves so much more memory that it is slower (for 14×14 pixels slower than torch's own), and is less exact.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016. In float32 the result is off by about 1e-6 of
its size, where torch's own sum is off by 4e-7. For clients that train one by one on a CPU.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Matrix: TypeAlias = list[list[Fraction]]
M, R, N = 4, 5, 8  # results, taps and pixels of a tile
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))  # and ∞
# Where it pays, measured on one core for 16 to 128 channels, 4 to 28 results across and batches of 1 to 64 (docs/performance.md):
PLANES = 1024  # input times output channels, of at least CHANNELS each
CHANNELS = 16
WORK = 200_000  # tiles of a batch, times planes


def takes(x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> int | None:
    """The padding of a convolution that is done faster so, None for any other."""
    if x.ndim != 4 or w.shape[2:] != (R, R) or groups != 1 or x.device.type != "cpu" or x.dtype != w.dtype:
        return None
    if x.dtype not in (torch.float32, torch.float64) or not _wide(w):
        return None
    if _both(stride) != (1, 1) or _both(dilation) != (1, 1):
        return None
    down, right = _both({"valid": 0, "same": R // 2}[padding] if isinstance(padding, str) else padding)
    height, width = (size + 2 * down - R + 1 for size in x.shape[2:])
    if down != right or min(height, width) < M:
        return None
    tiles, planes = -(-width // M), w.shape[0] * w.shape[1]
    filled = 4 * width >= 3 * M * tiles  # else too much of a row's last tile is thrown away
    return down if filled and len(x) * height * tiles * planes >= WORK else None


def worth(layer: nn.Module) -> bool:
    """Whether a layer's convolutions may be among these."""
    return isinstance(layer, nn.Conv2d) and layer.kernel_size == (R, R) and _wide(layer.weight)


def conv2d(x: Tensor, w: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """The convolution of stride 1, NCHW; fastest where the channels lie last in memory."""
    if torch._C._functorch.maybe_current_level() is not None:  # inside of a transform (a gradient's gradient, say)
        return F.conv2d(x, w, bias, padding=padding)
    out: Tensor = _Winograd.apply(x, w, bias, padding)  # type: ignore[no-untyped-call]
    return out


def _wide(w: Tensor) -> bool:
    return min(w.shape[:2]) >= CHANNELS and w.shape[0] * w.shape[1] >= PLANES


def _padded(t: Tensor, pads: tuple[int, ...]) -> Tensor:
    return F.pad(t, pads) if any(pads) else t


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


# ---- the three matrices --------------------------------------------------------------------------------------------------
def matrices() -> tuple[Matrix, Matrix, Matrix]:
    """Aᵀ [4×8], G [8×5] and Bᵀ [8×8], exactly."""

    def powers(k: int) -> Matrix:
        return [[p**j for j in range(k)] for p in POINTS] + [[Fraction(int(j == k - 1)) for j in range(k)]]

    a, g, b = _transposed(powers(M)), powers(R), _transposed(_inverse(powers(N)))
    largest = [max(map(abs, row)) for row in g]
    g = [[v / s for v in row] for row, s in zip(g, largest, strict=True)]
    return a, g, [[v * s for v in row] for row, s in zip(b, largest, strict=True)]


def _transposed(rows: Matrix) -> Matrix:
    return [list(column) for column in zip(*rows, strict=True)]


def _inverse(rows: Matrix) -> Matrix:
    """By elimination, each pivot brought up from below."""
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
    """The same transforms backwards: each step is linear in what it is given.

    A transformed image is [8, rows · batch · tiles, channels], so that any `oh` of its rows one below the other are one matrix.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        a, g, b = _transforms(x.dtype)
        (batch, channels, h, width), outputs, rows = x.shape, w.shape[0], x.shape[2] + 2 * padding
        oh, ow = (size + 2 * padding - R + 1 for size in (h, width))
        across = -(-ow // M)
        image = _padded(x.permute(0, 2, 3, 1), (0, 0, padding, M * across + M - width - padding, padding, padding))
        image = image.contiguous()
        sb, sh, sw, _ = image.stride()
        tiles = image.as_strided((N, rows, batch, across, channels), (sw, sh, sb, M * sw, 1))
        d = (b @ tiles.reshape(N, -1)).view(N, -1, channels)
        u = (g @ w.permute(3, 2, 1, 0).reshape(R, -1)).view(N, R, channels, outputs)
        below = batch * across
        m = torch.bmm(d[:, : oh * below], u[:, 0])
        for r in range(1, R):
            m.baddbmm_(d[:, r * below : (r + oh) * below], u[:, r])
        y = (a @ m.view(N, -1)).view(M, oh, batch, across, outputs)
        y = y.permute(2, 1, 3, 0, 4).reshape(batch, oh, M * across, outputs)[:, :, :ow]
        ctx.save_for_backward(x, w, d, u)
        ctx.padding, ctx.biased = padding, bias is not None
        return (y if bias is None else y + bias).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w, d, u = ctx.saved_tensors
        by_x, by_w, by_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient will be differentiated: by torch's own, which can be
            pads, mask = [ctx.padding] * 2, [by_x, by_w, by_bias]
            given = (grad, x, w, [w.shape[0]] if ctx.biased else None)
            found = torch.ops.aten.convolution_backward(*given, [1, 1], pads, [1, 1], False, [0, 0], 1, mask)
            return found[0], found[1], found[2], None
        a, g, b = _transforms(grad.dtype)
        (batch, channels, h, width), (_, outputs, oh, ow), p = x.shape, grad.shape, ctx.padding
        across, rows = -(-ow // M), h + 2 * p
        below = batch * across
        y = grad.permute(0, 2, 3, 1)
        bias = y.sum((0, 1, 2)) if by_bias else None
        y = _padded(y, (0, 0, 0, M * across - ow)).reshape(batch, oh, across, M, outputs)
        m = (a.T @ y.permute(3, 1, 0, 2, 4).reshape(M, -1)).view(N, -1, outputs)
        taps = [slice(r * below, (r + oh) * below) for r in range(R)]
        image = weight = None
        if by_w:
            products = torch.stack([torch.bmm(d[:, part].mT, m) for part in taps], 1)
            weight = (g.T @ products.view(N, -1)).view(R, R, channels, outputs).permute(3, 2, 1, 0)
        if by_x:  # tiles overlap by half: a pixel is in the left half of one and in the right half of the one before
            whole = grad.new_zeros((N, rows * below, channels))
            for r, part in enumerate(taps):
                whole[:, part].baddbmm_(m, u[:, r].mT)
            halves = (b.T @ whole.view(N, -1)).view(2, M, rows, batch, across, channels).permute(0, 3, 2, 4, 1, 5)
            flat = grad.new_zeros((batch, rows, across + 1, M, channels))
            flat[:, :, :across] = halves[0]
            flat[:, :, 1:] += halves[1]
            image = flat.view(batch, rows, -1, channels)[:, p : p + h, p : p + width].permute(0, 3, 1, 2)
        return image, weight, bias, None
