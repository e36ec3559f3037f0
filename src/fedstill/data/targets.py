"""Targets: which objective they are for where nobody says it, and their checked form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InputError, Shown
from ..core.objective import IGNORED, ObjectiveName

Array = NDArray[Any]
Ints = NDArray[np.int64]
AUTO = "auto"
NAMES: tuple[str, ...] = get_args(ObjectiveName)
MAX_CLASSES = 100_000  # each costs a row of the model's head and of the tables of counts
GAPS = 1000  # classes up to which labels may leave as many numbers out as they like
FRACTIONS = (
    0.1  # share of the targets with a fraction from which on they are taken for numbers, not for mistyped classes
)
SAY = "said with objective = 'regression', 'multilabel' or 'tokens' (--objective)"


def decide(where: str, ys: Sequence[Array], objective: str = AUTO) -> ObjectiveName:
    """Return the objective that targets are for: as it is said, else as their form and type say.

    Whole numbers [n]: classification. Numbers with fractions [n], real numbers [n, k]: regression. 0 and 1 as whole numbers or
    truth values [n, k > 1]: multilabel. Other matrices must be said.
    """
    if objective != AUTO:
        if objective not in NAMES:
            raise InputError("objective", objective, f"one of: {AUTO}, {', '.join(NAMES)}")
        return cast(ObjectiveName, objective)
    if any(y.ndim != 2 for y in ys):
        real = all(y.ndim == 1 and y.dtype.kind == "f" and np.isfinite(y).all() for y in ys)
        broken = sum(int((np.mod(y, 1) != 0).sum()) for y in ys) if real else 0
        return "regression" if broken and broken >= FRACTIONS * sum(map(len, ys)) else "classification"
    binary = all(np.isin(y, (0, 1)).all() for y in ys)
    if all(y.dtype.kind == "f" for y in ys) and not binary:
        return "regression"
    if all(y.dtype.kind in "bui" and y.shape[1] > 1 for y in ys) and binary:
        return "multilabel"
    raise InputError(
        where, Shown(f"targets of shape {ys[0].shape} and type {ys[0].dtype}"), f"one label for each sample, or {SAY}"
    )


def read(where: str, y: Array, count: int, objective: ObjectiveName, size: int | None = None) -> Array:
    """Return targets in the form of an objective, checked; `size` is its number of classes, labels or outputs, if known."""
    if objective == "classification":
        return class_targets(where, y, count, size)
    if y.dtype.kind not in "buif":
        raise InputError(where, Shown(f"targets of type {y.dtype}"), "numbers")
    if objective == "regression" and y.ndim == 1:
        y = y[:, None]
    if y.ndim != 2 or len(y) != count or not y.shape[1]:
        form = (
            "[n] or [n, outputs]"
            if objective == "regression"
            else "[n, labels]"
            if objective == "multilabel"
            else "[n, tokens]"
        )
        raise InputError(
            where, Shown(f"targets of shape {y.shape}"), f"{form} for the {count} samples with {objective}"
        )
    if objective != "tokens" and size is not None and y.shape[1] != size:
        raise InputError(where, Shown(f"{y.shape[1]} targets a sample"), f"{size} as the others have")
    if objective == "tokens":
        return _tokens(where, y, MAX_CLASSES if size is None else size)
    if objective == "multilabel":
        if not np.isin(y, (0, 1)).all():
            raise InputError(where, Shown(f"the label {y[~np.isin(y, (0, 1))][0].item()}"), "0 or 1 for each label")
        return y.astype(np.float32)
    with np.errstate(over="ignore"):
        out = y.astype(np.float64 if y.dtype.kind == "f" and y.dtype.itemsize >= 8 else np.float32)
    if not np.isfinite(out).all():
        bad = int(np.flatnonzero(~np.isfinite(out).all(axis=1))[0])
        raise InputError(where, Shown(f"target of sample {bad}, NaN or infinity"), "finite numbers")
    return out


def class_targets(where: str, y: Array, count: int, classes: int | None = None) -> Ints:
    """Return labels as int64, checked: one per sample, integers from 0 to `classes` − 1 (None: not known)."""
    if y.shape != (count,):
        raise InputError(where, Shown(f"labels of shape {y.shape}"), f"one label for each of the {count} samples")
    if y.dtype.kind not in "buif":
        raise InputError(where, Shown(f"labels of type {y.dtype}"), "whole numbers")
    limit = MAX_CLASSES if classes is None else classes
    # a NaN fails every comparison, so it is caught here as well
    valid = (y >= 0) & (y < limit) & (np.mod(y, 1) == 0) if y.dtype.kind == "f" else (y >= 0) & (y < limit)
    if not valid.all():
        first = int(np.flatnonzero(~valid)[0])
        shown = Shown(f"label {y[first].item()} of sample {first}")
        raise InputError(where, shown, f"a whole number of at least 0 and below {limit:,}")
    return y.astype(np.int64)


def count_classes(where: str, labels: Sequence[Ints]) -> int:
    """Return 1 + the largest label; refuse labels that leave most numbers out, since each number costs memory.

    >>> count_classes("y", [np.array([0, 2]), np.array([1, 4])])
    5
    """
    classes = 1 + max(int(y.max()) for y in labels)
    if classes > GAPS:
        occurring = len(np.unique(np.concatenate([np.unique(y) for y in labels])))
        if classes > 2 * occurring:
            shown = Shown(f"label {classes - 1} where {occurring} different labels occur")
            raise InputError(where, shown, "classes numbered 0, 1, 2, … with few numbers left out")
    return classes


def _tokens(where: str, y: Array, limit: int) -> Array:
    valid = ((y >= 0) & (y < limit) & (np.mod(y, 1) == 0)) | (y == IGNORED)
    if not valid.all():
        shown = Shown(f"the token {y[~valid][0].item()}")
        raise InputError(
            where, shown, f"a whole number of at least 0 and below {limit:,}, or {IGNORED} where none counts"
        )
    if (y == IGNORED).all(axis=1).any():
        bad = int(np.flatnonzero((y == IGNORED).all(axis=1))[0])
        raise InputError(
            where, Shown(f"sample {bad} of which no token counts"), f"a sample with a target other than {IGNORED}"
        )
    return y.astype(np.int64)


def size_of(where: str, ys: Sequence[Array], objective: ObjectiveName) -> int:
    """Return the number of classes, labels or outputs; refuse targets of differing widths."""
    if objective == "classification":
        return count_classes(where, list(ys))
    widths = {y.shape[1] for y in ys}
    if len(widths) > 1:
        raise InputError(where, Shown(f"{min(widths)} to {max(widths)} targets a sample"), "equally many everywhere")
    if objective == "tokens":
        return count_classes(where, [y[y != IGNORED] for y in ys])
    return int(widths.pop())
