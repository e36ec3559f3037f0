"""Convert a user's arrays to tensors: checked, copied, and named in every error."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.errors import InputError, Shown
from ..core.objective import ObjectiveName
from . import targets
from .dataset import Array, is_ids


def array(where: str, value: Any) -> Array:
    """Return the value as a numpy array, which may share memory with it."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InputError(where, Shown(type(value).__name__), f"an array or a tensor ({error})") from None


def read_samples(where: str, value: Any) -> torch.Tensor:
    """Return samples as a new tensor.

    float64 stays as it is, uint8 is scaled to [0, 1], other whole numbers are ids and become int64, the rest float32.
    """
    x = array(where, value)
    if x.dtype.kind not in "buif":
        raise InputError(where, Shown(f"an array of type {x.dtype}"), "numbers")
    if x.ndim < 2:
        raise InputError(where, Shown(f"an array of shape {x.shape}"), "[samples, features…]")
    if 0 in x.shape:
        raise InputError(where, Shown(f"an array of shape {x.shape}"), "at least one sample with at least one feature")
    double = x.dtype.kind == "f" and x.dtype.itemsize >= 8
    dtype = np.int64 if is_ids(x) else np.float64 if double else np.float32
    out = torch.from_numpy(np.array(x, dtype=dtype, order="C"))
    if x.dtype == np.uint8:
        out.div_(255)
    if not bool(torch.isfinite(out).all()):
        bad = int(torch.nonzero(~torch.isfinite(out.flatten(1)).all(dim=1))[0])
        raise InputError(where, Shown(f"sample {bad} holds NaN or infinity"), "finite numbers")
    return out


def read_targets(
    where: str, value: Any, count: int, size: int | None, objective: ObjectiveName = "classification"
) -> torch.Tensor:
    """Return targets as a new tensor, one for each of `count` samples: labels are int64."""
    return torch.from_numpy(targets.read(where, array(where, value), count, objective, size))


def check_same(xs: dict[str, torch.Tensor], called: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Refuse samples of differing shapes; return all in the widest of their dtypes. `called` is what an error calls each."""
    first_name, first = next(iter(xs.items()))
    for where, x in xs.items():
        if x.shape[1:] != first.shape[1:]:
            shown = Shown(f"samples of shape {tuple(x.shape[1:])}")
            raise InputError(
                called[where], shown, f"samples of shape {tuple(first.shape[1:])} as {called[first_name]} is"
            )
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in xs.values()))
    return {where: x.to(dtype) for where, x in xs.items()}
