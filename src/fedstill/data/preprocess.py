"""Fit preprocessing on clients' training samples; where statistics are of all sites, by `sums` alone.

Gaps count in no statistic and are filled afterwards. Test and validation samples are not used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown
from ..core.reading import Unreadable, field, items
from .columns import Columns
from .dataset import Dataset, Ints
from .rules import FEDERATED, SITE, Preprocessing
from .sums import Sums, add, deviations, mean_of, moments_of, sums
from .targets import Array
from .transform import Transform

CHUNK = 1 << 22  # numbers at a time


# ---- what is kept ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Preparation:
    """How a federation's samples were made of tables or images: enough to make others alike."""

    rules: Preprocessing
    columns: Columns | None  # of tables
    labels: tuple[str, ...] = ()  # the names of the columns of labels
    shared: Transform | None = None  # of every client, where no statistic is a site's own
    own: tuple[Transform, ...] = ()  # of each client, where some are

    def of(self, client: int | None) -> Transform:
        """Return a client's transform; without a client, that of all."""
        if client is not None and self.own:
            return self.own[client]
        if self.shared is None:
            right = "a client: the run prepared each site's samples by the site's own statistics"
            raise InputError("client", Shown("none"), right)
        return self.shared

    def only(self, client: int | None) -> Preparation:
        """Return the record without the statistics of other clients; without a client, of any."""
        return dataclasses.replace(self, own=() if client is None else self.own[client : client + 1])

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        record: dict[str, Any] = {"rules": self.rules.to_dict(), "label": list(self.labels)}
        if self.columns is not None:
            record |= {"columns": self.columns.to_dict(), "features": list(self.columns.features)}
        return {
            **record,
            **({} if self.shared is None else {"shared": self.shared.to_dict()}),
            **({"own": [transform.to_dict() for transform in self.own]} if self.own else {}),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], clients: int, channels: int) -> Preparation:
        """Return the record that `to_dict` wrote for so many clients; raise `Unreadable` where it is none."""
        rules, own = field(record, "rules", dict), items(record, "own", dict) if "own" in record else []
        known = Preprocessing.from_dict(rules)
        columns = Columns.from_dict(field(record, "columns", dict)) if "columns" in record else None
        width = channels if columns is None else columns.width
        shared = Transform.from_dict(field(record, "shared", dict), width) if "shared" in record else None
        if len(own) not in (0, clients) or (shared is not None and own):
            raise Unreadable("how all clients' samples were prepared, or each client's")
        transforms = tuple(Transform.from_dict(one, width) for one in own)
        return cls(known, columns, tuple(items(record, "label", str)), shared, transforms)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A data set with what was fitted on the clients' training samples."""

    data: Dataset
    preparation: Preparation | None = None
    notes: tuple[str, ...] = ()

    def of(self, client: int | None) -> Dataset:
        """Return the data set as a client's samples are made of it; without a client, as all clients' are."""
        if self.preparation is None:
            return self.data
        if self.preparation.shared is not None:
            return self._alike
        try:
            return applied(self.data, self.preparation.of(client))
        except InputError:
            right = f"'none' or {FEDERATED!r} where there are samples of no client: no site's statistics are theirs"
            raise InputError("normalise", self.preparation.rules.normalise, right) from None

    @functools.cached_property
    def _alike(self) -> Dataset:
        """The data set as all clients' samples are made of it."""
        assert self.preparation is not None
        return applied(self.data, self.preparation.of(None))

    def scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation by channel of images that are all scaled alike; empty where they are not."""
        if self.preparation is None:
            return self.data.mean, self.data.std
        if self.data.columns is not None or self.preparation.shared is None:
            return (), ()
        return self.preparation.shared.mean, self.preparation.shared.std


def applied(data: Dataset, transform: Transform) -> Dataset:
    """Return a data set whose samples are made by a transform."""
    if data.columns is not None:
        return dataclasses.replace(data, transform=transform)
    return dataclasses.replace(data, mean=transform.mean, std=transform.std)


# ---- fitting ---------------------------------------------------------------------------------------------------------
def fit(data: Dataset, train: Sequence[Ints], names: Sequence[str] = ()) -> Fitted:
    """Fit a data set's rules on the clients' training samples (`train`: their indices)."""
    rules = data.rules
    if rules.scales and data.x.dtype == np.int64:
        raise InputError("normalise", rules.normalise, "'none' of whole numbers, which are ids")
    if rules.normalise == "none" and data.columns is None and data.mean:
        none = Transform()
        return Fitted(dataclasses.replace(data, mean=(), std=()), Preparation(rules, None, (), none))
    if data.columns is None and rules.scales and data.x.ndim == 2:
        data = dataclasses.replace(data, columns=Columns.of_numbers(data.x.shape[1]))
    if data.columns is None and not rules.scales:
        return Fitted(data)
    if data.columns is not None and data.x.dtype != np.float64 and not rules.scales:
        return Fitted(data, Preparation(rules, data.columns, data.label_columns, Transform()))
    sites = [Values(data, rows) for rows in train]
    preparation = prepare(rules, data.columns, data.label_columns, sites, names)
    return Fitted(data, preparation, _notes(data, rules))


@dataclass(frozen=True, eq=False)
class Values:
    """The training samples of one site, as features."""

    data: Dataset
    rows: Ints

    def chunks(self) -> Iterator[Array]:
        """Yield features as float64 [values, features]; of images every pixel is a value of its channel."""
        step = max(1, CHUNK // max(1, math.prod(self.data.shape)))
        for start in range(0, len(self.rows), step):
            x = self.data.x[self.rows[start : start + step]]
            if self.data.columns is not None:
                yield self.data.columns.expand(x)
            else:
                pixels = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]).astype(np.float64)
                yield pixels / 255 if x.dtype == np.uint8 else pixels

    def first(self, numbers: bool = True) -> Sums:
        """Return the sums of the first exchange: without `numbers`, only which categories there are samples of."""
        found = self._seen(sums(self.chunks()))
        if not numbers and self.data.columns is not None:
            numeric = self.data.columns.numeric
            found.count[numeric] = found.total[numeric] = 0.0
        return found

    def second(self, mean: Array, squares: bool = True) -> Sums:
        """Return the sums of the second exchange, without those of `squares` where no deviation is wanted."""
        found = self._seen(deviations(self.chunks(), mean))
        if not squares and found.squares is not None:
            found.squares[:] = 0.0
        return found

    def _seen(self, found: Sums) -> Sums:
        """Return sums that say of a category only whether there is a sample of it."""
        if self.data.columns is not None:
            kinds = ~self.data.columns.numeric
            found.total[kinds] = found.total[kinds] > 0
            if found.squares is not None:
                found.total[kinds] = found.squares[kinds] = 0.0
        return found

    def medians(self) -> Array:
        """Return the median of each feature; NaN where there is no value."""
        features = np.concatenate(list(self.chunks()))
        none = np.isnan(features).all(0)
        out = np.full(features.shape[1], np.nan)
        out[~none] = np.nanmedian(features[:, ~none], 0)
        return out


@dataclass(frozen=True, eq=False)
class Totals:
    """What is known of all sites: the number of values, mean and deviation of each feature."""

    count: Array
    mean: Array
    std: Array

    @classmethod
    def of(cls, first: Sums, second: Sums | None = None) -> Totals:
        """Return what follows from the totals of both exchanges; without the second, which categories there are samples of."""
        if second is None:
            return cls(first.count, mean_of(first), np.ones(len(first.count)))
        return cls(first.count, *moments_of(mean_of(first), second))


def totals(sites: Sequence[Values], numbers: bool = True, squares: bool = True) -> Totals:
    """Exchange sums among sites that are all here: without `numbers`, only which categories there are samples of."""
    first = add([site.first(numbers) for site in sites])
    if not numbers:
        return Totals.of(first)
    mean = mean_of(first)
    return Totals.of(first, add([site.second(mean, squares) for site in sites]))


def numbers_needed(rules: Preprocessing) -> bool:
    """Return whether the rules need sums of numbers over all sites."""
    return FEDERATED in (rules.fill_scope, rules.normalise)


def squares_needed(rules: Preprocessing) -> bool:
    """Return whether the rules need the sums of squared deviations over all sites as well."""
    return rules.normalise == FEDERATED


def shared_needed(rules: Preprocessing, columns: Columns | None) -> bool:
    """Return whether the rules need anything of all sites: sums of numbers, or which categories occur in training."""
    return numbers_needed(rules) or (columns is not None and not columns.numeric.all())


def prepare(
    rules: Preprocessing,
    columns: Columns | None,
    labels: tuple[str, ...],
    sites: Sequence[Values],
    names: Sequence[str],
) -> Preparation:
    """Return how the samples of each site are prepared."""
    needed = shared_needed(rules, columns)
    common = totals(sites, numbers_needed(rules), squares_needed(rules)) if needed else None
    if SITE not in (rules.fill_scope, rules.normalise):
        return Preparation(rules, columns, labels, transform_of(rules, columns, common))
    own = []
    for k, site in enumerate(sites):
        name = names[k] if k < len(names) else str(k)
        own.append(transform_of(rules, columns, common, site, name))
    return Preparation(rules, columns, labels, None, tuple(own))


def transform_of(
    rules: Preprocessing, columns: Columns | None, common: Totals | None, site: Values | None = None, name: str = ""
) -> Transform:
    """Return the transform of a site, whose own statistics are used where the rules say so; without a site, that of all."""
    unseen: tuple[int, ...] = ()
    numeric = None if columns is None else columns.numeric
    if numeric is not None and common is not None and columns is not None:
        unseen = tuple(np.flatnonzero(~numeric & (common.mean == 0)).tolist())
    own = totals([site]) if site is not None and SITE in (rules.fill_scope, rules.normalise) else None
    fill: tuple[float, ...] = ()
    if rules.fills:
        used = own if rules.fill_scope == SITE else common
        assert used is not None
        values = used.mean.copy()
        if rules.fills == "median":
            assert site is not None
            values = site.medians()
        values[used.count == 0] = np.nan
        values[~_of_numbers(numeric, values)] = 0.0
        _check_filled(values, columns, rules, name)
        fill = tuple(values.tolist())
    if not rules.scales:
        return Transform(fill, unseen=unseen)
    used = own if rules.normalise == SITE else common
    assert used is not None
    mean, std = used.mean.copy(), used.std.copy()
    if fill:  # a column that a site has no value of has what its gaps are filled with as its mean
        mean = np.where(used.count == 0, fill, mean)
    number = _of_numbers(numeric, mean)
    mean[~number], std[~number] = 0.0, 1.0  # categories stay 0 and 1
    return Transform(fill, tuple(mean.tolist()), tuple(std.tolist()), unseen)


def _of_numbers(numeric: Array | None, values: Array) -> Array:
    return np.ones(len(values), bool) if numeric is None else numeric


def _check_filled(values: Array, columns: Columns | None, rules: Preprocessing, name: str) -> None:
    """Refuse to fill a column of which there is no value."""
    for i in np.flatnonzero(np.isnan(values)):
        feature = "" if columns is None else columns.features[int(i)]
        whose, remedy = (
            ("no site has a value", "")
            if rules.fill_scope == FEDERATED
            else (f"site {name} has none", "'mean:federated', or ")
        )
        right = f"{remedy}another rule: {whose} in its training samples (--ignore leaves a column out)"
        raise InputError("impute", Shown(f"{rules.impute} of {feature}"), right)


def _notes(data: Dataset, rules: Preprocessing) -> tuple[str, ...]:
    """Return a line for each rule, which says what it did to the samples."""
    whose = {SITE: "of each site's own training samples", FEDERATED: "of all sites' training samples"}
    if data.columns is None:
        return (f"channels are scaled by mean and deviation {whose[rules.normalise]}",) if rules.scales else ()
    notes = []
    numbers = [j for j, kinds in enumerate(data.columns.categories) if kinds is None]
    gaps = {data.columns.names[j]: int(np.isnan(data.x[:, j]).sum()) for j in numbers if data.x.dtype.kind == "f"}
    named = ", ".join(f"{name} {count:,}" for name, count in gaps.items() if count)
    if rules.fills and named:
        notes.append(f"gaps are filled with the {rules.fills} {whose[rules.fill_scope]}: {named}")
    kinds = [f"{n} ({len(own)})" for n, own in zip(data.columns.names, data.columns.categories, strict=True) if own]
    if kinds:
        notes.append(f"texts become a column for each category: {', '.join(kinds)}")
    if rules.scales:
        notes.append(f"numbers are scaled by mean and deviation {whose[rules.normalise]}")
    return tuple(notes)
