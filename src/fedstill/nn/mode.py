"""The function mode in which a model runs (`functional.py`) where torch's dropout, BatchNorm, pooling or products will not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.plan import uniform_bits
from .kernels import winograd
from .kernels.convolution import Lowering, Shape, conv2d, max_pool


class Keyed(TorchFunctionMode):
    """While active, dropout is drawn from a key, BatchNorm leaves padding out, and products go as the engine says."""

    def __init__(
        self,
        key: Tensor | None,
        mask: Tensor | None,
        lowering: Lowering | None = None,
        bf16: bool = False,
        fast5: bool = False,
    ) -> None:
        super().__init__()
        self.key, self.mask, self.dropouts = key, mask, 0
        self.lowering, self.bf16, self.fast5 = lowering, bf16, fast5

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        return handler(self, *args, **(kwargs or {})) if handler else func(*args, **(kwargs or {}))

    def _low(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Floating operands in bfloat16, where that is asked for."""
        return [t.bfloat16() if self.bf16 and t is not None and t.is_floating_point() else t for t in tensors]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In bfloat16, where that is asked for."""
        return F.linear(*self._low(input, weight, bias))  # type: ignore[arg-type]

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """As the engine says: with a weight for each client, by Winograd's algorithm, or plainly."""
        x, w, b = self._low(input, weight, bias)
        assert x is not None
        assert w is not None
        if self.fast5 and (pad := winograd.takes(x, w, stride, padding, dilation, groups)) is not None:
            return winograd.conv2d(x, w, b, pad)
        if self.lowering is None or groups != 1 or isinstance(padding, str) or x.ndim != 4:
            return F.conv2d(x, w, b, stride, padding, dilation, groups)
        pairs = [(v, v) if isinstance(v, int) else (v[0], v[-1]) for v in (stride, padding, dilation)]
        image, kernel = (x.shape[2], x.shape[3]), (w.shape[2], w.shape[3])
        shape = Shape(x.shape[0], image, x.shape[1], w.shape[0], kernel, *pairs)
        return conv2d(x, w, bias, shape, self.lowering)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """By the key, each number for itself."""
        return self._drop(input, p, training, input.shape)

    def feature_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """By the key, whole channels."""
        return self._drop(input, p, training, (*input.shape[:2], *[1] * (input.ndim - 2)))

    def _drop(self, input: Tensor, p: float, training: bool, shape: tuple[int, ...]) -> Tensor:
        if not training or p == 0:
            return input
        if self.key is None:
            raise ValueError("a training pass through a model with dropout needs a key")
        self.dropouts += 1
        if p == 1:
            return input * 0
        keep = uniform_bits(self.key, self.dropouts, shape) >= int(p * 2**32)
        return input * (keep.to(input.dtype) / (1 - p))

    def max_pool2d(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """In a stack with a gradient of its own."""
        kernel, step, pad, spread = (
            (v, v) if isinstance(v, int) else tuple(v) for v in (kernel_size, stride or kernel_size, padding, dilation)
        )
        apart = kernel == step and pad == (0, 0) and spread == (1, 1) and not ceil_mode and input.ndim == 4
        if self.lowering is None or not apart or return_indices:
            return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)  # type: ignore[call-overload]
        return max_pool(input, kernel)

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Padding is left out of the statistics."""
        plain = self.lowering is None and not self.bf16
        if plain and (not training or (self.mask is None and len(input) > 1)):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        axes = [0, *range(2, input.ndim)]
        channel = [1, -1, *[1] * (input.ndim - 2)]
        given, input = input, input if weight is None else input.to(weight.dtype)
        if not training and running_mean is not None and running_var is not None:
            mean, variance = running_mean, running_var
        elif self.mask is None:
            variance, mean = torch.var_mean(input, axes, correction=0)
            count = torch.full_like(mean, input.numel() // input.shape[1])
        else:
            real = self.mask.to(input.dtype).reshape([-1, *[1] * (input.ndim - 1)])
            count = real.sum() * input[0, 0].numel()
            mean = (input * real).sum(axes) / count
            variance = ((input - mean.reshape(channel)).square() * real).sum(axes) / count
        if training and running_mean is not None and running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                running_mean.mul_(1 - momentum).add_(momentum * mean.detach())
                running_var.mul_(1 - momentum).add_(momentum * unbiased.detach())
        out = (input - mean.reshape(channel)) * torch.rsqrt(variance + eps).reshape(channel)
        if weight is not None:
            out = out * weight.reshape(channel)
        return (out if bias is None else out + bias.reshape(channel)).to(given.dtype)


_HANDLERS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: Keyed.dropout,
    torch.dropout: Keyed.dropout,
    F.dropout1d: Keyed.feature_dropout,
    F.dropout2d: Keyed.feature_dropout,
    F.dropout3d: Keyed.feature_dropout,
    torch.feature_dropout: Keyed.feature_dropout,
    F.batch_norm: Keyed.batch_norm,
    F.linear: Keyed.linear,
    F.conv2d: Keyed.conv2d,
    F.max_pool2d: Keyed.max_pool2d,
    torch.max_pool2d: Keyed.max_pool2d,
}
