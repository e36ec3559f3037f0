"""Convolution for a stack of clients, each with weights of its own.

`vmap` turns it into a grouped convolution, which cuDNN computes slowly. Several algorithms give the same result to rounding:
`grouped`; `product`, patches and a batched matrix product; `triton`, the product without patches in memory. The gradient by
input may also be the forward kernel with flipped weights (`turned`), that by weight a kernel that reads pixels which lie
together (`weight_grad_rows`): in TF32, Hopper multiplies fast only what lies along the sum. `autotune` chooses one for each
shape, `vmapped` makes them one differentiable function.

Tensors are clients first and channels last: x [n, B, H, W, C], w [n, O, KH, KW, C], y [n, B, OH, OW, O].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Pair: TypeAlias = tuple[int, int]
GROUPED, PRODUCT, TRITON, TURNED = "grouped", "product", "triton", "turned"
ROWS = "weight_grad_rows"  # both an algorithm and its kernel
OPERATIONS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Shape:
    """The sizes of one client's convolution: batch, image, channels and kernel, and how the kernel moves."""

    batch: int
    image: Pair
    channels: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def out(self) -> Pair:
        """Height and width of the result."""
        h, w = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(self.image, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )
        return h, w

    def numbers(self) -> dict[str, int]:
        """Return the sizes by the names that the Triton kernels use."""
        names = ("H", "W", "OH", "OW", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
        pairs = (self.image, self.out, self.kernel, self.stride, self.padding, self.dilation)
        return {"B": self.batch, "C": self.channels, "O": self.outputs} | dict(
            zip(names, (v for pair in pairs for v in pair), strict=True)
        )

    def flops(self) -> int:
        """Return the FLOPs of one of the three operations for one client."""
        return (
            2 * self.batch * self.out[0] * self.out[1] * self.outputs * self.channels * self.kernel[0] * self.kernel[1]
        )

    def text(self, dtype: torch.dtype) -> str:
        """Return the shape in one line, as the key of a choice."""
        pairs = (self.image, self.kernel, self.stride, self.padding, self.dilation)
        return " ".join(
            [str(dtype).removeprefix("torch."), str(self.batch), str(self.channels), str(self.outputs)]
            + ["x".join(map(str, pair)) for pair in pairs]
        )


def turned(s: Shape) -> Shape:
    """Return the convolution that is the gradient by the input: of the result's gradient with flipped kernels, at stride 1."""
    padding = tuple(d * (k - 1) - p for d, k, p in zip(s.dilation, s.kernel, s.padding, strict=True))
    return Shape(s.batch, s.out, s.outputs, s.channels, s.kernel, (1, 1), (padding[0], padding[1]), s.dilation)


def turns(s: Shape) -> bool:
    """Return whether the gradient by the input can be computed so."""
    return s.stride == (1, 1) and min(turned(s).padding) >= 0


def kernel_of(algorithm: str, operation: str, s: Shape) -> tuple[str, Shape, list[int]]:
    """Return the kernel that does an operation by a tile: its name, its shape, the tile."""
    kind, *numbers = algorithm.split()
    tile = [int(v) for v in numbers]
    if kind == ROWS:
        return ROWS, s, tile
    if kind == TURNED:
        return "forward", turned(s), tile
    # A fourth channel of zeros for a pixel's three: four numbers are one load.
    padded = operation != "input_grad" and s.channels == 3
    return operation, dataclasses.replace(s, channels=4) if padded else s, tile


def apply(
    algorithm: str, operation: str, a: Tensor, b: Tensor, s: Shape, exact: bool, bias: Tensor | None = None
) -> Tensor:
    """Run one of the three operations by the given algorithm; `bias` [n, O] is for the forward pass."""
    if algorithm not in (GROUPED, PRODUCT):
        what, shape, tile = kernel_of(algorithm, operation, s)
        if what == ROWS:  # contiguous here, where a compiler can fuse the copy with what made the tensor
            a, b = (t.permute(0, 4, 1, 2, 3).contiguous() for t in (a, b))
        elif what != operation:
            b = b.flip(2, 3).permute(0, 4, 2, 3, 1).contiguous()
        elif shape.channels != s.channels:
            more = (0, shape.channels - s.channels)
            a, b = F.pad(a, more), F.pad(b, more) if operation == "forward" else b
        out: Tensor = _triton(what, a, b, bias, _sizes(shape), tile, exact)
        if what == ROWS:
            return out.permute(0, 1, 3, 4, 2)
        return out[..., : s.channels] if operation == "weight_grad" and shape.channels > s.channels else out
    out = grouped(operation, a, b, s) if algorithm == GROUPED else product(operation, a, b, s)
    return out if bias is None else out + bias[:, None, None, None].to(out.dtype)


def grouped(operation: str, a: Tensor, b: Tensor, s: Shape) -> Tensor:
    """Run an operation as one convolution with n groups."""
    n = a.shape[0]

    def to_image(t: Tensor) -> Tensor:  # [n, B, H, W, C] → [B, n·C, H, W]
        return t.permute(1, 0, 4, 2, 3).reshape(t.shape[1], n * t.shape[4], t.shape[2], t.shape[3])

    def from_image(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], n, -1, *t.shape[2:]).permute(1, 0, 3, 4, 2)

    def to_kernel(t: Tensor) -> Tensor:  # [n, O, KH, KW, C] → [n·O, C, KH, KW]
        return t.permute(0, 1, 4, 2, 3).reshape(n * s.outputs, s.channels, *s.kernel)

    if operation == "forward":
        return from_image(F.conv2d(to_image(a), to_kernel(b), None, s.stride, s.padding, s.dilation, n))
    if operation == "input_grad":
        return from_image(gradient(operation, to_image(a), to_kernel(b), (s.batch, n * s.channels, *s.image), s, n))
    result = gradient(operation, to_image(a), to_image(b), (n * s.outputs, s.channels, *s.kernel), s, n)
    return result.reshape(n, s.outputs, s.channels, *s.kernel).permute(0, 1, 3, 4, 2)


def gradient(operation: str, a: Tensor, b: Tensor, shape: tuple[int, ...], s: Shape, groups: int) -> Tensor:
    """Return ATen's gradient of a convolution, of the given shape: by the input from (g, w), by the weight from (x, g)."""
    like = a.new_empty(1).expand(shape)  # only its shape is used
    by_input = operation == "input_grad"
    tensors = (a, like, b) if by_input else (b, a, like)
    settings = (None, s.stride, s.padding, s.dilation, False, (0, 0), groups, (by_input, not by_input, False))
    result: Tensor = torch.ops.aten.convolution_backward(*tensors, *settings)[0 if by_input else 1]
    return result


def _taps(s: Shape) -> Iterator[tuple[slice, slice]]:
    """Yield for each tap of the kernel the rows and columns of the padded image that it meets."""
    for i in range(s.kernel[0]):
        for j in range(s.kernel[1]):
            starts = (i * s.dilation[0], j * s.dilation[1])
            rows, columns = (
                slice(first, first + (size - 1) * step + 1, step)
                for first, size, step in zip(starts, s.out, s.stride, strict=True)
            )
            yield rows, columns


def product(operation: str, a: Tensor, b: Tensor, s: Shape) -> Tensor:
    """Run an operation as a batched matrix product of patches, which are shifted slices."""
    n, (oh, ow), m = a.shape[0], s.out, s.batch * s.out[0] * s.out[1]
    (ph, pw), (h, w) = s.padding, s.image
    if operation != "input_grad":
        padded = F.pad(a, (0, 0, pw, pw, ph, ph)) if ph or pw else a
        taps = [padded[:, :, rows, columns] for rows, columns in _taps(s)]
        patches = torch.stack(taps, 4).reshape(n, m, len(taps) * s.channels)
        if operation == "forward":
            return torch.bmm(patches, b.reshape(n, s.outputs, -1).mT).reshape(n, s.batch, oh, ow, s.outputs)
        result = torch.bmm(b.reshape(n, m, s.outputs).mT, patches)
        return result.reshape(n, s.outputs, *s.kernel, s.channels)
    columns_ = torch.bmm(a.reshape(n, m, s.outputs), b.reshape(n, s.outputs, -1))
    columns_ = columns_.reshape(n, s.batch, oh, ow, -1, s.channels)
    total = columns_.new_zeros((n, s.batch, h + 2 * ph, w + 2 * pw, s.channels))
    for tap, (rows, columns) in enumerate(_taps(s)):
        total[:, :, rows, columns] += columns_[..., tap, :]
    return total[:, :, ph : ph + h, pw : pw + w]


def _out_shape(operation: str, n: int, s: Shape) -> tuple[int, ...]:
    return {
        "forward": (n, s.batch, *s.out, s.outputs),
        "input_grad": (n, s.batch, *s.image, s.channels),
        "weight_grad": (n, s.outputs, *s.kernel, s.channels),
        ROWS: (n, s.outputs, s.channels, *s.kernel),
    }[operation]


@torch.library.custom_op("fedstill::convolution", mutates_args=())
def _triton(
    operation: str, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], tile: list[int], exact: bool
) -> Tensor:
    from . import triton as kernels  # needs Triton, which is not everywhere

    bias = None if bias is None else bias.contiguous()
    return kernels.launch(operation, a.contiguous(), b.contiguous(), bias, _shape(sizes).numbers(), tuple(tile), exact)


@_triton.register_fake
def _(
    operation: str, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], tile: list[int], exact: bool
) -> Tensor:
    return a.new_empty(_out_shape(operation, a.shape[0], _shape(sizes)))


def _shape(sizes: list[int]) -> Shape:
    pairs = [(sizes[i], sizes[i + 1]) for i in range(3, 13, 2)]
    return Shape(sizes[0], pairs[0], sizes[1], sizes[2], *pairs[1:])


def _sizes(s: Shape) -> list[int]:
    pairs = (s.image, s.kernel, s.stride, s.padding, s.dilation)
    return [s.batch, s.channels, s.outputs, *(v for pair in pairs for v in pair)]
