"""The random numbers of one pass through a model, from a key in place of torch's generator.

The n-th draw of a pass depends on (key, n, sample, place in the sample) alone, so it is the same on every device, in both
engines, and whether a batch is padded or not. Which axis of a draw has the samples is seen when a model is probed (`axes`); it is
the first where nothing is known. Drawn here is what models draw in training: dropout of all kinds, stochastic depth, noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InputError
from ..core.plan import uniform_bits
from .kernels import masks

SELU_FLOOR = -1.7580993408473766  # −λα, to which alpha dropout sets what it drops
Size = Sequence[int]


class NoKey(ValueError):
    """A draw in a pass that has no key: evaluation, in which nothing may be random."""


class Draws:
    """The draws of one pass, counted from 1. Without a key, as in evaluation, there are none."""

    def __init__(self, key: Tensor | None, axes: Mapping[int, int] | None = None) -> None:
        self.key, self.axes = key, axes or {}
        self.shapes: list[tuple[int, ...]] = []  # of the draws so far

    def bits(self, shape: Size) -> Tensor:
        """Draw 32 bits (as int64) for every entry of a shape."""
        return self._draw(uniform_bits, shape)

    def keeps(self, p: float, shape: Size) -> Tensor:
        """Draw what dropout at rate p keeps: the entries whose bits are at least p·2³²."""
        return self._draw(functools.partial(masks.keeps, least=int(p * 2**32)), shape)

    def _draw(self, draw: Callable[[Tensor, int, Size], Tensor], shape: Size) -> Tensor:
        """Count a draw, and make it with the samples' axis first."""
        if self.key is None:
            raise NoKey("a training pass through a model with dropout needs a key")
        self.shapes.append(tuple(shape))
        number = len(self.shapes)
        axis = self.axes.get(number, 0)
        if not axis:
            return draw(self.key, number, shape)
        first = (shape[axis], *shape[:axis], *shape[axis + 1 :])
        return draw(self.key, number, first).movedim(0, axis)

    def uniforms(self, shape: Size, dtype: torch.dtype) -> Tensor:
        """Draw numbers from 0 up to, but not including, 1."""
        return (self.bits(shape) >> 8).to(dtype) / 2**24

    def normals(self, shape: Size, dtype: torch.dtype) -> Tensor:
        """Draw standard normal numbers (Box and Muller)."""
        u, v = ((self.bits(shape).double() + 0.5) / 2**32 for _ in range(2))
        return ((-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()).to(dtype)

    # ---- dropout -----------------------------------------------------------------------------------------------------
    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero single numbers."""
        return self._drop(input, p, training, input.shape)

    def feature_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero whole channels."""
        return self._drop(input, p, training, (*input.shape[:2], *[1] * (input.ndim - 2)))

    def _drop(self, input: Tensor, p: float, training: bool, shape: Size) -> Tensor:
        if not training or p == 0:
            return input
        if p == 1:
            return input * 0
        return input * (self.keeps(p, shape).to(input.dtype) / (1 - p))

    def alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """Set single numbers to SELU's floor, and scale so that mean and variance stay."""
        return self._alpha(input, p, training, input.shape)

    def feature_alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        """Set whole channels to SELU's floor, and scale so that mean and variance stay."""
        return self._alpha(input, p, training, (*input.shape[:2], *[1] * (input.ndim - 2)))

    def _alpha(self, input: Tensor, p: float, training: bool, shape: Size) -> Tensor:
        if not training or p == 0:
            return input
        if p == 1:
            return input * 0
        keep = self.keeps(p, shape).to(input.dtype)
        scale: float = ((1 - p) * (1 + p * SELU_FLOOR**2)) ** -0.5
        return scale * (input * keep + SELU_FLOOR * (1 - keep)) - scale * p * SELU_FLOOR

    def rrelu(
        self,
        input: Tensor,
        lower: float = 1.0 / 8,
        upper: float = 1.0 / 3,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        """Apply ReLU with a slope below 0 that is drawn for each number; in evaluation it is the mean one."""
        share = self.uniforms(input.shape, input.dtype) if training else 0.5
        slope = lower + (upper - lower) * share
        return torch.where(input >= 0, input, input * slope)

    # ---- torch's random functions ------------------------------------------------------------------------------------
    def bernoulli(self, input: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
        """Draw 0 or 1, with probabilities `p` of 1, or with those in `input`."""
        _without(generator)
        below = input if p is None else p
        limit = below.double() * 2**32 if isinstance(below, Tensor) else int(below * 2**32)
        return (self.bits(input.shape) < limit).to(input.dtype)

    def rand(self, *size: Any, generator: Any = None, **form: Any) -> Tensor:
        """Draw numbers in [0, 1) of a given shape."""
        _without(generator)
        like = torch.empty(*size, **form)
        return self.uniforms(like.shape, like.dtype)

    def randn(self, *size: Any, generator: Any = None, **form: Any) -> Tensor:
        """Draw standard normal numbers of a given shape."""
        _without(generator)
        like = torch.empty(*size, **form)
        return self.normals(like.shape, like.dtype)

    def rand_like(self, input: Tensor, **form: Any) -> Tensor:
        """Draw numbers in [0, 1) of a tensor's shape."""
        return self.uniforms(input.shape, form.get("dtype") or input.dtype)

    def randn_like(self, input: Tensor, **form: Any) -> Tensor:
        """Draw standard normal numbers of a tensor's shape."""
        return self.normals(input.shape, form.get("dtype") or input.dtype)

    def bernoulli_(self, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
        """Fill with 0 or 1."""
        return input.copy_(self.bernoulli(input, p, generator=generator))

    def uniform_(self, input: Tensor, *ends: float, generator: Any = None, **named: float) -> Tensor:
        """Fill with numbers between two ends."""
        _without(generator)
        low, high = _two(ends, named, ("from", "to"), (0.0, 1.0))
        return input.copy_(low + (high - low) * self.uniforms(input.shape, input.dtype))

    def normal_(self, input: Tensor, *moments: float, generator: Any = None, **named: float) -> Tensor:
        """Fill with normal numbers."""
        _without(generator)
        mean, std = _two(moments, named, ("mean", "std"), (0.0, 1.0))
        return input.copy_(mean + std * self.normals(input.shape, input.dtype))

    def exponential_(self, input: Tensor, lambd: float = 1, *, generator: Any = None) -> Tensor:
        """Fill with exponential numbers."""
        _without(generator)
        u = (self.bits(input.shape).double() + 0.5) / 2**32
        return input.copy_(-u.log() / lambd)

    def empty(self, *size: Any, **form: Any) -> Tensor:
        """Return memory that may be filled with draws: in a stack, with a row for each client, as the key has."""
        made = torch.empty(*size, **form)
        if self.key is None or not made.is_floating_point() or made.device != self.key.device:
            return made
        return made + (self.key * 0).to(made.dtype)


def _two(
    given: Sequence[float], named: Mapping[str, float], names: tuple[str, str], defaults: tuple[float, float]
) -> tuple[float, float]:
    """Return two arguments that may be given by place or by name."""
    first, second = (
        given[i] if i < len(given) else named.get(name, default)
        for i, (name, default) in enumerate(zip(names, defaults, strict=True))
    )
    return first, second


def _without(generator: Any) -> None:
    """Refuse a generator of the model's own: what it draws would not be a function of the key."""
    if generator is not None:
        raise InputError("model", "generator=…", "without a generator of its own: its draws then have keys")


Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {
    F.dropout: Draws.dropout,
    torch.dropout: Draws.dropout,
    F.dropout1d: Draws.feature_dropout,
    F.dropout2d: Draws.feature_dropout,
    F.dropout3d: Draws.feature_dropout,
    torch.feature_dropout: Draws.feature_dropout,
    F.alpha_dropout: Draws.alpha_dropout,
    torch.alpha_dropout: Draws.alpha_dropout,
    F.feature_alpha_dropout: Draws.feature_alpha_dropout,
    torch.feature_alpha_dropout: Draws.feature_alpha_dropout,
    F.rrelu: Draws.rrelu,
    torch.bernoulli: Draws.bernoulli,
    torch.rand: Draws.rand,
    torch.randn: Draws.randn,
    torch.rand_like: Draws.rand_like,
    torch.randn_like: Draws.randn_like,
    torch.empty: Draws.empty,
    Tensor.bernoulli: Draws.bernoulli,
    Tensor.bernoulli_: Draws.bernoulli_,
    Tensor.uniform_: Draws.uniform_,
    Tensor.normal_: Draws.normal_,
    Tensor.exponential_: Draws.exponential_,
}
