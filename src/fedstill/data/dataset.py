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
from ..core.objective import ObjectiveName
from . import mapped
from . import targets as target_forms
from .columns import Columns
from .rules import PLAIN, Preprocessing
from .samples import Rows, Samples
from .targets import AUTO
from .targets import MAX_CLASSES as MAX_CLASSES
from .targets import Array as Array
from .targets import Ints as Ints
from .targets import count_classes as count_classes
from .transform import Transform

Floats = NDArray[np.float64]
targets = target_forms.class_targets


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels of one source, before they are dealt to clients.

    `x` is uint8 images (NCHW, 0 to 255), float32 features or int64 ids; `test_x` and `test_y` are the official test split, where
    there is one. `mean` and `std` are per channel, of x/255 for images and of x otherwise; empty means no normalisation.
    Of tables `columns` says what the columns of `x` are; where rules are to be fitted on training samples, `x` is float64 with
    NaN in gaps and numbers of categories, and becomes samples by a `transform`. `domain` and `owner` are the domain and the
    owning client of each training sample, `test_domain` and `test_owner` those of each test sample.
    """

    name: str
    x: Array
    y: Array
    classes: int  # of other objectives the number of labels, outputs or classes of tokens
    test_x: Array | None = None
    test_y: Array | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    domain: Ints | None = None
    test_domain: Ints | None = None
    owner: Ints | None = None
    test_owner: Ints | None = None
    labels: tuple[str, ...] = ()  # the classes' names, where the source has them
    groups: tuple[str, ...] = ()  # the domains' or owners' names
    objective: ObjectiveName = "classification"
    rules: Preprocessing = PLAIN  # what is done with the samples once it is known which are for training
    columns: Columns | None = None
    label_columns: tuple[str, ...] = ()  # the names of the columns of labels
    transform: Transform | None = None
    notes: tuple[str, ...] = ()  # what was left out, in words
    unlabelled: int = 0  # samples of tables that were left out for want of a label

    def __post_init__(self) -> None:
        for x, y, field in ((self.x, self.y, "x"), (self.test_x, self.test_y, "test_x")):
            if x is None and y is None:
                continue
            if x is None or y is None or len(x) != len(y) or len(x) == 0:
                raise InputError(
                    f"{self.name}.{field}", Shown("samples and labels that do not match"), "as many labels"
                )
            if x.dtype not in (np.uint8, np.float32, np.int64) and not (
                x.dtype == np.float64 and self.columns is not None
            ):
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
        return tuple(self.x.shape[1:]) if self.columns is None else (self.columns.width,)

    def checksum(self) -> str:
        """Return a checksum of all samples and labels, and whose they are; names play no part in it."""
        digest = hashlib.sha256(f"{self.classes} classes\n".encode())
        for field in ("x", "y", "test_x", "test_y", "domain", "test_domain", "owner", "test_owner"):
            values = getattr(self, field)
            if values is not None:
                digest.update(f"{field} {values.dtype} {values.shape}\n".encode())
                for piece in mapped.pieces(values):
                    digest.update(np.ascontiguousarray(piece).data)
        return f"sha256:{digest.hexdigest()}"

    def tensor(self, x: Array) -> torch.Tensor:
        """Return samples of this set as a new tensor: normalised float32, or ids as they are."""
        if x.dtype == np.int64:
            return torch.from_numpy(x.copy())
        if self.columns is not None and (self.transform is not None or x.dtype == np.float64):
            if self.transform is None:
                right = (
                    "divided among clients first (Federation.from_dataset): its rules depend on their training samples"
                )
                raise InputError("data", self.name, right)
            return torch.from_numpy(self.transform.apply(self.columns.expand(x)))
        out = torch.from_numpy(np.array(x, dtype=np.float32, order="C"))
        if x.dtype == np.uint8:
            out.div_(255)
        if self.mean:
            mean, std = self._normal(out.ndim)
            out.sub_(mean).div_(std)
        return out

    def rows(self, index: Ints | None = None, test: bool = False) -> Rows:
        """Return samples of the training split, or of the test split, as a model takes them; those in a file are not read."""
        x = self.test_x if test else self.x
        if x is None:
            raise ValueError(f"{self.name} has no official test split")
        view = mapped.mapping(x)
        if view is None or self.columns is not None or (self.mean and x.dtype != np.uint8):
            return self.tensor(x if index is None else x[index])
        order = torch.arange(len(x)) if index is None else torch.from_numpy(index)
        values = None
        if x.dtype == np.uint8:
            every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], x.shape[1], 1)
            values = self.tensor(every.reshape(256, -1, *[1] * (x.ndim - 2))).flatten(1).t().contiguous()
        pages = mapped.pages_of(view)
        return Samples(mapped.tensor(x), values, order, pages=pages, normal=self._normal(x.ndim) if self.mean else None)

    def _normal(self, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation in a form that broadcasts to samples."""
        view = (-1,) + (1,) * (dims - 2)
        return torch.tensor(self.mean).view(view), torch.tensor(self.std).view(view)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training split as normalised samples and targets."""
        return self.tensor(self.x), torch.from_numpy(self.y.copy())

    def test_tensors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the official test split, or None where there is none."""
        if self.test_x is None or self.test_y is None:
            return None
        return self.tensor(self.test_x), torch.from_numpy(self.test_y.copy())

    def test_rows(self) -> tuple[Rows, torch.Tensor] | None:
        """Return the official test split as `rows` does, or None where there is none."""
        return None if self.test_y is None else (self.rows(test=True), torch.from_numpy(self.test_y.copy()))

    def like(self, other: Dataset) -> Dataset:
        """Return this set normalised as another is, to test models that were trained on the other."""
        if (self.shape, self.classes, self.objective) != (other.shape, other.classes, other.objective):
            shown = Shown(f"samples {self.shape} of {self.classes} classes")
            raise InputError(self.name, shown, f"{other.shape} of {other.classes} classes as {other.name} is")
        return replace(self, mean=other.mean, std=other.std)

    def pooled(self) -> Dataset:
        """Return the set with the official test split appended to the training split."""
        if self.test_x is None or self.test_y is None:
            return self
        return replace(
            self,
            x=_joined(self.x, self.test_x),
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


def _joined(train: Array, test: Array) -> Array:
    """Return both splits as one: what lies side by side in a file stays there."""
    joined = mapped.adjacent(train, test)
    return np.concatenate([train, test]) if joined is None else joined


def samples(where: str, x: Array) -> Array:
    """Return samples in the layout of a Dataset: uint8 or finite float32, images NCHW; rows of other whole numbers are ids.

    Samples in a file whose type is one of these stay there.
    """
    if x.dtype.kind not in "buif":
        raise InputError(where, Shown(f"samples of type {x.dtype}"), "numbers")
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(where, Shown(f"samples of shape {x.shape}"), "[samples, …] with no length of 0")
    x, kind = images_first(x), kind_of(x)
    if mapped.mapping(x) is None or x.dtype != kind:
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(x, dtype=kind)
    if kind == np.float32:
        _check_finite(where, x)
    return x


def images_first(x: Array) -> Array:
    """Return a view in which images are NCHW."""
    if x.ndim == 3:
        return x[:, None]
    last = x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    return x.transpose(0, 3, 1, 2) if last else x


def kind_of(x: Array) -> np.dtype[Any]:
    """Return the type that samples have in a Dataset: bytes, ids of tokens, or float32."""
    return np.dtype(np.uint8 if x.dtype == np.uint8 else np.int64 if x.ndim == 2 and is_ids(x) else np.float32)


def _check_finite(where: str, x: Array) -> None:
    first = 0
    for piece in mapped.pieces(x):
        if not np.isfinite(piece).all():
            bad = first + int(np.flatnonzero(~np.isfinite(piece.reshape(len(piece), -1)).all(axis=1))[0])
            raise InputError(where, Shown(f"sample {bad} holds NaN or infinity"), "finite numbers that fit float32")
        first += len(piece)


def is_ids(x: Array) -> bool:
    """Return whether samples are whole numbers other than bytes: ids of tokens, for a model with an embedding."""
    return x.dtype.kind in "iu" and x.dtype != np.uint8


def same_kind(xs: Sequence[Array]) -> list[Array]:
    """Return ids as numbers where some of the arrays are numbers."""
    mixed = {x.dtype for x in xs} == {np.dtype(np.int64), np.dtype(np.float32)}
    return [x.astype(np.float32) if mixed and x.dtype == np.int64 else x for x in xs]


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel of x/255, from exact counts of uint8 values."""
    mean, std, values = [], [], np.arange(256) / 255
    every = np.zeros((x.shape[1], 256), np.int64)
    for piece in mapped.pieces(x):  # bincount widens its input to eight bytes a value
        for channel in range(x.shape[1]):
            every[channel] += np.bincount(piece[:, channel].reshape(-1), minlength=256)
    for counts in every:
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
    objective: str = AUTO,
    **fields: Any,
) -> Dataset:
    """Build a checked Dataset from raw arrays; `where` names the file or folder in an error."""
    if classes is not None and classes > MAX_CLASSES:
        raise InputError(where, Shown(f"{classes:,} classes"), f"at most {MAX_CLASSES:,}")
    train_x = samples(where, x)
    raw = [y, *([] if test is None else [test[1]])]
    kind = target_forms.decide(where, raw, objective if classes is None else objective.replace(AUTO, "classification"))
    train_y = target_forms.read(where, y, len(train_x), kind, classes)
    test_x = test_y = None
    if test is not None:
        train_x, test_x = same_kind([train_x, samples(where, test[0])])
        if test_x.shape[1:] != train_x.shape[1:] or test_x.dtype != train_x.dtype:
            shown = f"test samples {test_x.shape[1:]} {test_x.dtype}"
            raise InputError(where, Shown(shown), f"{train_x.shape[1:]} {train_x.dtype} as the training samples are")
        test_y = target_forms.read(where, test[1], len(test_x), kind, classes)
    if classes is None:
        classes = target_forms.size_of(where, [y for y in (train_y, test_y) if y is not None], kind)
    mean, std = moments(train_x) if train_x.dtype == np.uint8 else ((), ())
    return Dataset(name, train_x, train_y, classes, test_x, test_y, mean, std, objective=kind, **fields)
