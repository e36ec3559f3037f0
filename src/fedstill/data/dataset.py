"""A checked data set in numpy arrays, and how its samples become tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import InputError, Shown, can_be_shown

Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels of one source, before they are dealt to clients.

    `x` is uint8 images (NCHW, 0 to 255), float32 features or int64 ids; `test_x` and `test_y` are the official test split, where
    there is one. `mean` and `std` are per channel, of x/255 for images and of x otherwise; empty means no normalisation.
    `domain` and `owner` are the domain and the owning client of each training sample, `test_domain` and `test_owner`
    those of each test sample.
    """

    name: str
    x: Array
    y: Ints
    classes: int
    test_x: Array | None = None
    test_y: Ints | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    domain: Ints | None = None
    test_domain: Ints | None = None
    owner: Ints | None = None
    test_owner: Ints | None = None
    labels: tuple[str, ...] = ()  # the classes' names, where the source has them
    groups: tuple[str, ...] = ()  # the domains' or owners' names

    def __post_init__(self) -> None:
        for x, y, field in ((self.x, self.y, "x"), (self.test_x, self.test_y, "test_x")):
            if x is None and y is None:
                continue
            if x is None or y is None or len(x) != len(y) or len(x) == 0:
                raise InputError(
                    f"{self.name}.{field}", Shown("samples and labels that do not match"), "as many labels"
                )
            if x.dtype not in (np.uint8, np.float32, np.int64):
                right = "uint8, float32 or int64"
                raise InputError(f"{self.name}.{field}", Shown(f"an array of type {x.dtype}"), right)
        for name in (self.name, *self.labels, *self.groups):
            if not can_be_shown(name):
                raise InputError("data", name, "named in printable characters: its clients and classes too")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def checksum(self) -> str:
        """Return a checksum of all samples and labels, and whose they are; names play no part in it."""
        digest = hashlib.sha256(f"{self.classes} classes\n".encode())
        for field in ("x", "y", "test_x", "test_y", "domain", "test_domain", "owner", "test_owner"):
            values = getattr(self, field)
            if values is not None:
                digest.update(f"{field} {values.dtype} {values.shape}\n".encode())
                digest.update(np.ascontiguousarray(values).data)
        return f"sha256:{digest.hexdigest()}"

    def tensor(self, x: Array) -> torch.Tensor:
        """Return samples of this set as a new tensor: normalised float32, or ids as they are."""
        if x.dtype == np.int64:
            return torch.from_numpy(x.copy())
        out = torch.from_numpy(np.array(x, dtype=np.float32, order="C"))
        if x.dtype == np.uint8:
            out.div_(255)
        if self.mean:
            view = (-1,) + (1,) * (out.ndim - 2)
            out.sub_(torch.tensor(self.mean).view(view)).div_(torch.tensor(self.std).view(view))
        return out

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training split as normalised samples and int64 labels."""
        return self.tensor(self.x), torch.from_numpy(self.y.copy())

    def test_tensors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the official test split, or None where there is none."""
        if self.test_x is None or self.test_y is None:
            return None
        return self.tensor(self.test_x), torch.from_numpy(self.test_y.copy())

    def like(self, other: Dataset) -> Dataset:
        """Return this set normalised as another is, to test models that were trained on the other."""
        if self.shape != other.shape or self.classes != other.classes:
            shown = Shown(f"samples {self.shape} of {self.classes} classes")
            raise InputError(self.name, shown, f"{other.shape} of {other.classes} classes as {other.name} is")
        return replace(self, mean=other.mean, std=other.std)

    def pooled(self) -> Dataset:
        """Return the set with the official test split appended to the training split."""
        if self.test_x is None or self.test_y is None:
            return self
        return replace(
            self,
            x=np.concatenate([self.x, self.test_x]),
            y=np.concatenate([self.y, self.test_y]),
            domain=_concatenate(self.domain, self.test_domain),
            owner=_concatenate(self.owner, self.test_owner),
            test_x=None,
            test_y=None,
            test_domain=None,
            test_owner=None,
        )


def _concatenate(train: Ints | None, test: Ints | None) -> Ints | None:
    return None if train is None or test is None else np.concatenate([train, test])


def samples(where: str, x: Array) -> Array:
    """Return samples in the layout of a Dataset: uint8 or finite float32, images NCHW; rows of other whole numbers are ids."""
    if x.dtype.kind not in "buif":
        raise InputError(where, Shown(f"samples of type {x.dtype}"), "numbers")
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(where, Shown(f"samples of shape {x.shape}"), "[samples, …] with no length of 0")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if x.ndim == 2 and is_ids(x):
        return np.ascontiguousarray(x, dtype=np.int64)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))[0])
        raise InputError(where, Shown(f"sample {bad} holds NaN or infinity"), "finite numbers that fit float32")
    return x


def is_ids(x: Array) -> bool:
    """Return whether samples are whole numbers other than bytes: ids of tokens, for a model with an embedding."""
    return x.dtype.kind in "iu" and x.dtype != np.uint8


def same_kind(xs: Sequence[Array]) -> list[Array]:
    """Return ids as numbers where some of the arrays are numbers."""
    mixed = {x.dtype for x in xs} == {np.dtype(np.int64), np.dtype(np.float32)}
    return [x.astype(np.float32) if mixed and x.dtype == np.int64 else x for x in xs]


MAX_CLASSES = 100_000  # each costs a row of the model's head and of the tables of counts
GAPS = 1000  # classes up to which labels may leave as many numbers out as they like


def targets(where: str, y: Array, count: int, classes: int | None = None) -> Ints:
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


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel of x/255, from exact counts of uint8 values."""
    mean, std, values = [], [], np.arange(256) / 255
    for channel in range(x.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(x), 4096):  # in chunks: bincount widens its input to eight bytes a value
            counts += np.bincount(x[start : start + 4096, channel].reshape(-1), minlength=256)
        share = counts / counts.sum()
        channel_mean = float((share * values).sum())
        channel_std = float(np.sqrt((share * (values - channel_mean) ** 2).sum()))
        mean.append(channel_mean)
        std.append(channel_std if channel_std > 1e-12 else 1.0)  # a constant channel is not divided by 0
    return tuple(mean), tuple(std)


def dataset(
    name: str,
    where: str,
    x: Array,
    y: Array,
    test: tuple[Array, Array] | None = None,
    classes: int | None = None,
    **fields: Any,
) -> Dataset:
    """Build a checked Dataset from raw arrays; `where` names the file or folder in an error."""
    if classes is not None and classes > MAX_CLASSES:
        raise InputError(where, Shown(f"{classes:,} classes"), f"at most {MAX_CLASSES:,}")
    train_x = samples(where, x)
    train_y = targets(where, y, len(train_x), classes)
    test_x = test_y = None
    if test is not None:
        train_x, test_x = same_kind([train_x, samples(where, test[0])])
        if test_x.shape[1:] != train_x.shape[1:] or test_x.dtype != train_x.dtype:
            shown = f"test samples {test_x.shape[1:]} {test_x.dtype}"
            raise InputError(where, Shown(shown), f"{train_x.shape[1:]} {train_x.dtype} as the training samples are")
        test_y = targets(where, test[1], len(test_x), classes)
    if classes is None:
        classes = count_classes(where, [y for y in (train_y, test_y) if y is not None])
    mean, std = moments(train_x) if train_x.dtype == np.uint8 else ((), ())
    return Dataset(name, train_x, train_y, classes, test_x, test_y, mean, std, **fields)
