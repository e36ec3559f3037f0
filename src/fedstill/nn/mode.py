"""How a model is executed: the description, and the torch function mode that carries it out.

The mode replaces torch's dropout, BatchNorm, pooling, convolution and linear layers where those would not do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.plan import uniform_bits
from .kernels import winograd
from .kernels.autotune import Lowering
from .kernels.convolution import Shape
from .kernels.vmapped import conv2d, max_pool


@dataclass(frozen=True)
class Execution:
    """How a model is computed. All but `bf16` give the same numbers to rounding; the default is the model as written."""

    channels_last: bool = False  # convolution weights lie channels last; pays where a CPU trains clients one by one
    winograd: winograd.Limits | None = None  # 5×5 convolutions within these limits by Winograd's algorithm
    pool_first: bool = False  # max-pooling before ReLU where that gives the same bits (`pool_first`)
    bf16: bool = False  # convolutions and linear layers multiply bfloat16 numbers
    lowering: Lowering | None = None  # how convolutions with weights for each client are computed


AS_WRITTEN = Execution()


class ExecutionMode(TorchFunctionMode):
    """While active, dropout masks come from a key, BatchNorm ignores padding, and products follow the description."""

    def __init__(self, key: Tensor | None, mask: Tensor | None, execution: Execution = AS_WRITTEN) -> None:
        super().__init__()
        self.key, self.mask = key, mask
        self.dropouts = self.norms = 0  # how many of them were met
        self.statistics: list[Tensor] = []  # running statistics that were met in training
        self.limits, self.bf16, self.lowering = execution.winograd, execution.bf16, execution.lowering

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        return handler(self, *args, **(kwargs or {})) if handler else func(*args, **(kwargs or {}))

    def _low(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return floating operands in bfloat16 if `bf16` is set."""
        return [t.bfloat16() if self.bf16 and t is not None and t.is_floating_point() else t for t in tensors]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a linear layer, in bfloat16 if `bf16` is set."""
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
        """Convolve: with weights for each client, by Winograd's algorithm, or as torch does."""
        x, w, b = self._low(input, weight, bias)
        assert x is not None
        assert w is not None
        if self.limits is not None:
            pad = winograd.takes(x, w, stride, padding, dilation, groups, self.limits)
            if pad is not None:
                return winograd.conv2d(x, w, b, pad)
        if self.lowering is None or groups != 1 or isinstance(padding, str) or x.ndim != 4:
            return F.conv2d(x, w, b, stride, padding, dilation, groups)
        pairs = [(v, v) if isinstance(v, int) else (v[0], v[-1]) for v in (stride, padding, dilation)]
        image, kernel = (x.shape[2], x.shape[3]), (w.shape[2], w.shape[3])
        shape = Shape(x.shape[0], image, x.shape[1], w.shape[0], kernel, *pairs)
        return conv2d(x, w, bias, shape, self.lowering)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero single numbers, by the key."""
        return self._drop(input, p, training, input.shape)

    def feature_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero whole channels, by the key."""
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
        """Pool; in a stack with a gradient of our own."""
        kernel, step, pad, spread = (
            (v, v) if isinstance(v, int) else tuple(v) for v in (kernel_size, stride or kernel_size, padding, dilation)
        )
        adjacent = kernel == step and pad == (0, 0) and spread == (1, 1) and not ceil_mode and input.ndim == 4
        plain = (
            self.lowering is None or not torch.is_grad_enabled()
        )  # torch's own is faster where nothing is fused with it
        if plain or not adjacent or return_indices:
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
        """Normalise; padding is left out of the statistics."""
        self.norms += 1
        if training and running_mean is not None and running_var is not None:
            self.statistics += [running_mean, running_var]
        plain = self.lowering is None and not self.bf16
        if plain and (not training or (self.mask is None and len(input) > 1)):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        axes = [0, *range(2, input.ndim)]
        channel = [1, -1, *[1] * (input.ndim - 2)]
        dtype, input = input.dtype, input if weight is None else input.to(weight.dtype)
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
        return (out if bias is None else out + bias.reshape(channel)).to(dtype)


_HANDLERS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: ExecutionMode.dropout,
    torch.dropout: ExecutionMode.dropout,
    F.dropout1d: ExecutionMode.feature_dropout,
    F.dropout2d: ExecutionMode.feature_dropout,
    F.dropout3d: ExecutionMode.feature_dropout,
    torch.feature_dropout: ExecutionMode.feature_dropout,
    F.batch_norm: ExecutionMode.batch_norm,
    F.linear: ExecutionMode.linear,
    F.conv2d: ExecutionMode.conv2d,
    F.max_pool2d: ExecutionMode.max_pool2d,
    torch.max_pool2d: ExecutionMode.max_pool2d,
}
