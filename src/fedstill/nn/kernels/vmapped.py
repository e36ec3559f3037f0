"""Convolution and pooling as a client's model calls them, with rules of their own under `vmap` and autograd.

The three operations of a convolution (itself, and its gradients by input and by weight) are bilinear and closed under
differentiation, so any order of derivative works.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autotune import Lowering
from .convolution import GROUPED, Pair, Shape, apply, gradient


def conv2d(x: Tensor, w: Tensor, bias: Tensor | None, s: Shape, lowering: Lowering) -> Tensor:
    """Convolve one client's images, NCHW; under `vmap` those of a stack."""
    return _conv(x, w, bias, "forward", s, lowering)


def _conv(a: Tensor, b: Tensor, bias: Tensor | None, operation: str, s: Shape, lowering: Lowering) -> Tensor:
    out: Tensor = _Conv.apply(a, b, bias, operation, s, lowering)  # type: ignore[no-untyped-call]
    return out


class _Conv(torch.autograd.Function):
    """The three bilinear operations, each differentiable by the other two."""

    generate_vmap_rule = False

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, operation: str, s: Shape, lowering: Lowering) -> Tensor:
        if operation == "forward":
            return F.conv2d(a, b, None if bias is None else bias.to(a.dtype), s.stride, s.padding, s.dilation)
        by_input = operation == "input_grad"
        shape = (a.shape[0], s.channels, *s.image) if by_input else (s.outputs, s.channels, *s.kernel)
        return gradient(operation, a, b, shape, s, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, ctx.operation, ctx.s, ctx.lowering = inputs
        ctx.save_for_backward(a, b)
        ctx.biased = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        a, b = ctx.saved_tensors
        s, lowering = ctx.s, ctx.lowering
        # (x, w) → y, (g, w) → dx, (x, g) → dw; each argument's gradient is one of the other two operations.
        factors = {
            "forward": (("input_grad", grad, b), ("weight_grad", a, grad)),
            "input_grad": (("forward", grad, b), ("weight_grad", grad, a)),
            "weight_grad": (("input_grad", b, grad), ("forward", a, grad)),
        }[ctx.operation]
        out = [
            _conv(left, right, None, operation, s, lowering) if needed else None
            for needed, (operation, left, right) in zip(ctx.needs_input_grad[:2], factors, strict=True)
        ]
        bias = None if ctx.biased is None else grad.sum((0, 2, 3), dtype=ctx.biased)
        return out[0], out[1], bias, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        operation: str,
        s: Shape,
        lowering: Lowering,
    ) -> Any:
        n = info.batch_size
        if (
            in_dims[1] is None and in_dims[2] is None and operation != "weight_grad"
        ):  # everybody's weights: a larger batch
            wide = a.movedim(in_dims[0], 0)
            flat = wide.reshape(n * wide.shape[1], *wide.shape[2:])
            result = _conv(flat, b, bias, operation, dataclasses.replace(s, batch=flat.shape[0]), lowering)
            return result.reshape(n, wide.shape[1], *result.shape[1:]), 0
        a, b = (_rows_of(t, d, n) for t, d in zip((a, b), in_dims[:2], strict=True))
        bias = None if bias is None else _rows_of(bias, in_dims[2], n)
        nested = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (a, b))
        a, b = (t.permute(0, 1, 3, 4, 2).contiguous() for t in (a, b))
        algorithm = GROUPED if nested else lowering.choices.algorithm(operation, s, a.dtype, a.is_cuda)
        result = apply(algorithm, operation, a, b, s, lowering.exact, bias)
        return result.permute(0, 1, 4, 2, 3), 0


def _rows_of(t: Tensor, axis: int | None, n: int) -> Tensor:
    """Return the tensor with the client axis first; a tensor that all clients share gets one."""
    return t.expand(n, *t.shape) if axis is None else t.movedim(axis, 0)


def max_pool(x: Tensor, kernel: Pair) -> Tensor:
    """Return the maximum over adjacent windows, NCHW; of equal values the first counts, as in torch."""
    out: Tensor = _Pool.apply(x, kernel)[0]  # type: ignore[no-untyped-call]
    return out


class _Pool(torch.autograd.Function):
    """Pooling whose gradient is one pass over the windows, which a compiler makes into one kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: Pair) -> tuple[Tensor, Tensor]:
        (kh, kw), (h, w) = kernel, (x.shape[2] // kernel[0], x.shape[3] // kernel[1])
        windows = x[:, :, : h * kh, : w * kw].reshape(*x.shape[:2], h, kh, w, kw)
        values, place = windows.transpose(3, 4).flatten(4).max(-1)
        return values, place.to(torch.uint8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.kernel = inputs
        ctx.image = (x.shape[2], x.shape[3])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        (kh, kw), (h, w) = ctx.kernel, ctx.image
        taps = torch.arange(kh * kw, device=grad.device)
        spread = torch.where(place.unsqueeze(-1) == taps, grad.unsqueeze(-1), torch.zeros_like(grad).unsqueeze(-1))
        covered = spread.reshape(*grad.shape, kh, kw).transpose(3, 4).flatten(4).flatten(2, 3)
        return F.pad(covered, (0, w - covered.shape[3], 0, h - covered.shape[2])), None
