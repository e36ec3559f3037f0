"""How one client's features become samples: gaps filled, numbers scaled, categories that nobody has trained on left at zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown
from ..core.reading import Unreadable, items
from .targets import Array


@dataclass(frozen=True)
class Transform:
    """Numbers by feature (of images: by channel), as fitted on training samples."""

    fill: tuple[float, ...] = ()  # what stands for a gap; empty: there are none
    mean: tuple[float, ...] = ()  # empty: numbers are not scaled
    std: tuple[float, ...] = ()
    unseen: tuple[int, ...] = ()  # features of categories that no training sample has

    def apply(self, features: Array) -> Array:
        """Return features [samples, features] as float32; they are changed."""
        if self.fill:
            rows, columns = np.nonzero(np.isnan(features))
            features[rows, columns] = np.array(self.fill)[columns]
        if self.mean:
            features -= np.array(self.mean)
            features /= np.array(self.std)
        features[:, list(self.unseen)] = 0.0
        with np.errstate(over="ignore"):
            out = features.astype(np.float32)
        if not np.isfinite(out).all():
            raise InputError("data", Shown("a value that is missing or too large"), "finite numbers that fit float32")
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values."""
        return {name: list(value) for name, value in vars(self).items() if value}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], width: int) -> Transform:
        """Return the transform of `width` features that `to_dict` wrote; raise `Unreadable` where it is none."""
        numbers = {n: tuple(items(record, n, float)) if n in record else () for n in ("fill", "mean", "std")}
        if any(values and len(values) != width for values in numbers.values()):
            raise Unreadable(f"{width} numbers, one for each feature")
        if bool(numbers["mean"]) != bool(numbers["std"]) or any(value <= 0 for value in numbers["std"]):
            raise Unreadable("means with deviations above 0")
        unseen = tuple(items(record, "unseen", int, least=0, most=width - 1)) if "unseen" in record else ()
        return cls(**numbers, unseen=unseen)
