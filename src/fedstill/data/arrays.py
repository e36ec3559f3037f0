"""A user's arrays as tensors of our own: checked, copied, named in every complaint."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..core.errors import InputError, Shown
from .dataset import Array, targets


def _array(where: str, given: Any) -> Array:
    """The given thing as a numpy array that may still share memory with it."""
    if isinstance(given, torch.Tensor):
        kept = given.detach().cpu()
        return np.asarray((kept.float() if kept.dtype == torch.bfloat16 else kept).numpy())
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise InputError(where, Shown(type(given).__name__), f"an array or a tensor ({error})") from None


def read_samples(where: str, given: Any) -> torch.Tensor:
    """Samples as a new tensor: float64 kept, uint8 scaled to [0, 1], every other kind of number in float32."""
    x = _array(where, given)
    if x.dtype.kind not in "buif":
        raise InputError(where, Shown(f"an array of type {x.dtype}"), "numbers")
    if x.ndim < 2:
        raise InputError(where, Shown(f"an array of shape {x.shape}"), "[samples, features…]")
    if 0 in x.shape:
        raise InputError(where, Shown(f"an array of shape {x.shape}"), "at least one sample with at least one feature")
    double = x.dtype.kind == "f" and x.dtype.itemsize >= 8
    out = torch.from_numpy(np.array(x, dtype=np.float64 if double else np.float32, order="C"))
    if x.dtype == np.uint8:
        out.div_(255)
    if not bool(torch.isfinite(out).all()):
        bad = int(torch.nonzero(~torch.isfinite(out.flatten(1)).all(dim=1))[0])
        raise InputError(where, Shown(f"sample {bad} holds NaN or infinity"), "finite numbers")
    return out


def read_labels(where: str, given: Any, count: int, classes: int | None) -> torch.Tensor:
    """Labels as a new int64 tensor, one for each of `count` samples."""
    return torch.from_numpy(targets(where, _array(where, given), count, classes))


def check_same(xs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All samples with one shape and, where some are float64, all in float64."""
    first, model = next(iter(xs.items()))
    for where, x in xs.items():
        if x.shape[1:] != model.shape[1:]:
            shown = Shown(f"samples of shape {tuple(x.shape[1:])}")
            raise InputError(where, shown, f"samples of shape {tuple(model.shape[1:])} as {first} is")
    double = any(x.dtype == torch.float64 for x in xs.values())
    return {where: x.double() if double else x for where, x in xs.items()}
