"""Sums that sites give so that mean and deviation over all of them can be had.

A site gives, by feature, how many values it has and their sum; it is given the mean of all sites and gives the sum of the
deviations from it and of their squares. Nothing else leaves it, and whoever adds up needs to see the totals alone, so the
additions can be those of a secure aggregation.
Mean and variance follow without cancellation as in E[x²] − E[x]²:

    m = Σ x / n      μ = m + Σ(x − m) / n      σ² = Σ(x − m)² / n − (Σ(x − m) / n)²

Gaps (NaN) count nowhere: they are left out of n and of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.reading import Unreadable, items
from .targets import Array

LARGEST = float(np.finfo(np.float32).max)  # of a sample's numbers
MOST = 1 << 53  # values that a site gives a sum of


@dataclass(frozen=True, eq=False)
class Sums:
    """What a site gives, by feature: the number of values, their sum (or of deviations), and the sum of squared deviations."""

    count: Array
    total: Array
    squares: Array | None = None

    def to_dict(self) -> dict[str, list[float]]:
        """Return the sums as plain JSON values."""
        named = {"count": self.count, "total": self.total, "squares": self.squares}
        return {name: values.tolist() for name, values in named.items() if values is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], width: int, squares: bool) -> Sums:
        """Return the sums over `width` features that a site has sent; raise `Unreadable` where they are none."""
        found = {name: items(record, name, float) for name in ("count", "total", "squares")[: 3 if squares else 2]}
        if any(len(values) != width for values in found.values()):
            raise Unreadable(f"{width} numbers, one for each feature")
        if any(n < 0 or n != int(n) for n in found["count"]) or any(s < 0 for s in found.get("squares", ())):
            raise Unreadable("counts, and squares of at least 0")
        most = [n * 2 * LARGEST for n in found["count"]]  # of samples and of deviations, so that totals are finite
        if any(n > MOST for n in found["count"]) or any(abs(s) > m for s, m in zip(found["total"], most, strict=True)):
            raise Unreadable("sums of numbers that fit float32")
        if any(s > m * 2 * LARGEST for s, m in zip(found.get("squares", ()), most, strict=False)):
            raise Unreadable("sums of squares of numbers that fit float32")
        return cls(*(np.array(values, np.float64) for values in found.values()))


def sums(chunks: Iterable[Array]) -> Sums:
    """Return count and sum of a site's values, by feature."""
    parts = [((~np.isnan(f)).sum(0).astype(np.float64), _total(f)) for f in chunks]
    return Sums(np.sum([count for count, _ in parts], 0), np.sum([total for _, total in parts], 0))


def deviations(chunks: Iterable[Array], mean: Array) -> Sums:
    """Return count, sum and sum of squares of a site's deviations from the mean of all sites, by feature."""
    parts = []
    for features in chunks:
        off = features - mean
        parts.append(((~np.isnan(off)).sum(0).astype(np.float64), _total(off), _total(off * off)))
    count, total, squares = (np.sum(column, 0) for column in zip(*parts, strict=True))
    return Sums(count, total, squares)


def _total(values: Array) -> Array:
    """Return the sum of each column, by pairs: numpy adds rows one by one, and a long constant column would not stay one."""
    return np.asarray(np.where(np.isnan(values), 0.0, values).T.copy().sum(1))


def add(parts: Sequence[Sums]) -> Sums:
    """Return the totals over sites, each rounded once: their order does not matter."""

    def total(arrays: Sequence[Array]) -> Array:
        return np.array([math.fsum(column) for column in zip(*(a.tolist() for a in arrays), strict=True)])

    squares = [part.squares for part in parts if part.squares is not None]
    return Sums(total([p.count for p in parts]), total([p.total for p in parts]), total(squares) if squares else None)


def mean_of(totals: Sums) -> Array:
    """Return the mean of each feature; 0 where there is no value."""
    return np.asarray(totals.total / np.maximum(totals.count, 1.0))


def moments_of(mean: Array, totals: Sums) -> tuple[Array, Array]:
    """Return mean and standard deviation of each feature from the deviations from `mean`; a constant has deviation 1."""
    assert totals.squares is not None
    shift = mean_of(totals)
    variance = totals.squares / np.maximum(totals.count, 1.0) - shift * shift
    std = np.sqrt(
        np.maximum(variance, 0.0)
    )  # exactly 0 of a constant: it is a few units of rounding from `mean`, all alike
    return mean + shift, np.where(std > 0, std, 1.0)
