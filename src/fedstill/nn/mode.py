"""How a model is executed: the description, and the torch function mode that carries it out.

The mode replaces torch's random functions, normalisation, pooling, convolution, linear and recurrent layers and attention where
those would not do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import draws, recurrent
from .attention import attend
from .draws import Draws
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
    plain: bool = False  # recurrent layers step by step and attention in plain products, outside of torch.func too


AS_WRITTEN = Execution()


class ExecutionMode(TorchFunctionMode):
    """While active, random numbers come from a key, BatchNorm ignores padding, and products follow the description."""

    def __init__(
        self,
        key: Tensor | None,
        mask: Tensor | None,
        execution: Execution = AS_WRITTEN,
        axes: Mapping[int, int] | None = None,  # which axis of each draw has the samples, where not the first
    ) -> None:
        super().__init__()
        self.draws, self.mask = Draws(key, axes), mask
        self.norms = self.composites = 0  # how many BatchNorms, recurrent layers and attentions were met
        self.statistics: list[Tensor] = []  # running statistics that were met in training
        self.limits, self.bf16, self.lowering = execution.winograd, execution.bf16, execution.lowering
        self.plain = execution.plain or transformed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        return handler(self, *args, **(kwargs or {})) if handler else func(*args, **(kwargs or {}))

    def _low(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return floating operands in bfloat16 if `bf16` is set."""
        return [t.bfloat16() if self.bf16 and t is not None and t.is_floating_point() else t for t in tensors]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a linear layer, in bfloat16 if `bf16` is set."""
        return F.linear(*self._low(input, weight, bias))  # type: ignore[arg-type]

    def product(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply matrices, one of which may be in bfloat16 if `bf16` is set."""
        if self.bf16 and len({factor.dtype for factor in args}) > 1:
            args = tuple(self._low(*args))
        return func(*args, **kwargs)  # type: ignore[no-any-return]

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

    def layer_norm(
        self, input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """Normalise each sample, in the weights' precision."""
        wide = input if weight is None else input.to(weight.dtype)
        return F.layer_norm(wide, shape, weight, bias, eps).to(input.dtype)

    def group_norm(
        self, input: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """Normalise each sample by groups of channels, in the weights' precision."""
        wide = input if weight is None else input.to(weight.dtype)
        return F.group_norm(wide, groups, weight, bias, eps).to(input.dtype)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend: as torch does or, with dropout and within `torch.func`, in plain products."""
        self.composites += 1
        if not dropout_p and not self.plain:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        def drop(weights: Tensor) -> Tensor:
            return self.draws.dropout(weights, dropout_p)

        return attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)

    def recurrent(self, func: Any, input: Tensor, *args: Any) -> Any:
        """Run recurrent layers: as torch does or, with dropout between them and within `torch.func`, step by step."""
        self.composites += 1
        if recurrent.is_packed(args):
            return func(input, *args)
        state, weights, biased, depth, dropout, train, bidirectional, batch_first = args
        input = input.to(weights[0].dtype)
        if not self.plain and not (dropout and train and depth > 1):
            return func(input, *args)
        return recurrent.layers(
            recurrent.KINDS[func], input, state, weights, biased, depth, dropout, train, bidirectional, batch_first,
            self.draws.dropout,
        )  # fmt: skip

    def cell(self, func: Any, *args: Any) -> Any:
        """Run a recurrent cell."""
        self.composites += 1
        args = (args[0].to(args[2].dtype), *args[1:])
        return recurrent.cell(recurrent.CELLS[func], *args) if self.plain else func(*args)

    def within(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a Python function of torch's so that what it calls reaches this mode."""
        with self:
            return _open(func)(*args, **kwargs)

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


def _no_nesting(mode: ExecutionMode, *args: Any) -> bool:
    """Say that padding cannot be left out by nested tensors: an encoder then computes as it does in training."""
    return False


def transformed() -> bool:
    """Return whether a transform of `torch.func` is active: few fused kernels can be vmapped or differentiated twice."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _never(*args: Any) -> bool:
    return False


@functools.cache
def _open(func: types.FunctionType) -> types.FunctionType:
    """Return a function of torch's without its check for overrides, which would call the mode again with the same function."""
    names = {name: _never for name in func.__code__.co_names if name.startswith("has_torch_function")}
    copied = types.FunctionType(func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _drawn(handler: draws.Handler) -> Callable[..., Any]:
    return lambda mode, *args, **kwargs: handler(mode.draws, *args, **kwargs)


def _with(method: Callable[..., Any], func: Any) -> Callable[..., Any]:
    return lambda mode, *args, **kwargs: method(mode, func, *args, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: ExecutionMode.batch_norm,
    F.layer_norm: ExecutionMode.layer_norm,
    F.group_norm: ExecutionMode.group_norm,
    F.linear: ExecutionMode.linear,
    F.conv2d: ExecutionMode.conv2d,
    F.max_pool2d: ExecutionMode.max_pool2d,
    torch.max_pool2d: ExecutionMode.max_pool2d,
    F.scaled_dot_product_attention: ExecutionMode.attention,
    torch._nested_tensor_from_mask_left_aligned: _no_nesting,
    **{func: _drawn(handler) for func, handler in draws.HANDLERS.items()},
    **{
        func: _with(ExecutionMode.product, func)
        for func in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
    },
    **{func: _with(ExecutionMode.recurrent, func) for func in recurrent.KINDS},
    **{func: _with(ExecutionMode.cell, func) for func in recurrent.CELLS},
    **{func: _with(ExecutionMode.within, func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)},
}
