"""Preprocessing over sites: they agree on columns and classes, give sums of their training samples, and are given the totals.

Before a run the hub asks all its sites (`HubServer.question`) for the numbers of samples and for which categories training
samples have. Only where a rule is `federated` it also asks for the sums of `data.sums`, and a second time, with the common mean,
for those of deviations. What leaves a site is the names of its columns, of its categories and classes, how many gaps a column
has, and these sums, over at least `FEWEST` training samples. A rule that needs no sums of numbers is sent none.
The totals are part of what the run is set up with, and are kept with it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.errors import InputError, Shown, TrainingError, can_be_shown, nearest
from ..core.objective import OBJECTIVES
from ..core.reading import Unreadable, field, items, parse_json
from ..data.columns import LONGEST_NAME, Columns
from ..data.dataset import Dataset, Ints
from ..data.federation import Client
from ..data.partition import deal
from ..data.preprocess import (
    Preparation,
    Totals,
    Values,
    applied,
    numbers_needed,
    shared_needed,
    squares_needed,
    transform_of,
)
from ..data.rules import SITE, Preprocessing
from ..data.split import parse_split, split_indices
from ..data.sums import LARGEST, Sums, add, mean_of
from ..data.transform import Transform
from .disclosure import FEWEST

LONGEST = 1 << 19  # characters of a site's names of columns and categories


@dataclass(frozen=True)
class Agreed:
    """What the samples of all sites of a run are made by."""

    rules: Preprocessing
    columns: Columns | None  # of tables
    labels: tuple[str, ...]  # the names of the classes; empty: they are numbered
    label: tuple[str, ...] = ()  # the columns of labels, where they have the same names everywhere

    def to_dict(self) -> dict[str, Any]:
        """Return this as plain JSON values."""
        columns = {} if self.columns is None else {"columns": self.columns.to_dict()}
        return {"rules": self.rules.to_dict(), "labels": list(self.labels), "label": list(self.label), **columns}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Agreed:
        """Return what `to_dict` wrote; raise `Unreadable` where it is none."""
        columns = Columns.from_dict(field(record, "columns", dict)) if "columns" in record else None
        labels = tuple(items(record, "labels", str))
        if len(set(labels)) < len(labels) or any(len(n) > LONGEST_NAME or not can_be_shown(n) for n in labels):
            raise Unreadable("classes with names that differ")
        label = tuple(items(record, "label", str))
        return cls(Preprocessing.from_dict(field(record, "rules", dict)), columns, labels, label)


def totals_to_dict(totals: Totals) -> dict[str, Any]:
    """Return what is known of all sites as plain JSON values."""
    return {name: getattr(totals, name).tolist() for name in ("count", "mean", "std")}


def totals_from_dict(record: Mapping[str, Any]) -> Totals:
    """Return what `totals_to_dict` wrote; raise `Unreadable` where it is none."""
    found = Totals(*(np.array(items(record, name, float)) for name in ("count", "mean", "std")))
    if not len(found.count) == len(found.mean) == len(found.std) or (found.std <= 0).any() or (found.count < 0).any():
        raise Unreadable("a count, a mean and a deviation above 0 for each feature")
    return found


# ---- at a site -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RawSite:
    """A site's samples as they were read, before it is known what is done with gaps, texts and scales."""

    data: Dataset
    split: str

    @property
    def plain(self) -> bool:
        """Whether the samples are numbers without gaps, which need no rule."""
        columns = self.data.columns
        return columns is None or bool(columns.numeric.all() and not np.isnan(self.data.x).any())

    def about(self) -> dict[str, Any]:
        """Return what the hub must know of tables before it can say how samples are made; nothing of others."""
        if self.data.columns is None:
            return {}
        gaps = np.isnan(self.data.x).sum(0).tolist()
        table = {"columns": self.data.columns.to_dict(), "gaps": gaps, "label": list(self.data.label_columns)}
        return {"table": {**table, **({"unlabelled": self.data.unlabelled} if self.data.unlabelled else {})}}

    def checksum(self) -> str:
        """Return a checksum of what a table says that its numbers do not: gaps, and names of columns, categories and classes."""
        if self.data.columns is None:
            return ""
        names = json.dumps([self.data.columns.to_dict(), list(self.data.labels), list(self.data.label_columns)])
        return hashlib.sha256(f"{self.data.checksum()}{names}".encode()).hexdigest()[:16]

    def under(self, agreed: Agreed) -> Ready:
        """Return the samples as all sites have agreed to make them, divided into training and test samples."""
        data, rules = self.data, agreed.rules
        if (data.columns is None) != (agreed.columns is None):
            raise InputError(
                "data", data.name, f"{'a table' if agreed.columns else 'no table'}, as the run's other sites have"
            )
        if agreed.columns is not None:
            data = self._table(agreed.columns, agreed)
        elif rules.scales and data.x.ndim == 2 and data.x.dtype != np.int64:
            data = dataclasses.replace(data, columns=Columns.of_numbers(data.x.shape[1]))
        if data.test_x is not None:
            return Ready(data, rules, np.arange(len(data)), None, None)
        (own,) = deal(
            "iid", np.zeros(len(data), np.int64), 1, 0, classes=1, min_samples=parse_split(self.split).min_samples
        )
        train, val, test = split_indices(own, parse_split(self.split), 0, 0)
        return Ready(data, rules, train, test, val if len(val) else None)

    def _table(self, columns: Columns, agreed: Agreed) -> Dataset:
        """Return a table with the categories and classes of all sites, and without the samples that the rules drop."""
        data, y = self.data, self.data.y
        assert data.columns is not None
        if data.columns.names != columns.names:
            raise InputError("data", data.name, f"with the columns {', '.join(columns.names)}")
        named = data.objective == "classification" and bool(agreed.labels)
        if named:
            for name in data.labels:
                if name not in agreed.labels:
                    raise InputError("class", name, f"one of the run's: {nearest(name, agreed.labels)}")
            y = np.array([agreed.labels.index(name) for name in data.labels])[y]
        x = data.columns.recoded(data.x, columns)
        kept = ~np.isnan(data.x).any(1) if agreed.rules.drops else np.ones(len(x), bool)
        if not kept.any():
            raise InputError("impute", agreed.rules.impute, "another rule: no sample of this site is without a gap")
        data = dataclasses.replace(data, x=x[kept], y=y[kept], columns=columns, owner=None)
        return dataclasses.replace(data, labels=agreed.labels, classes=len(agreed.labels)) if named else data


@dataclass(frozen=True, eq=False)
class Ready:
    """A site's samples under what was agreed on, for which nothing has been fitted."""

    data: Dataset
    rules: Preprocessing
    train: Ints
    test: Ints | None  # None: the data have their own test samples
    val: Ints | None

    @functools.cached_property
    def values(self) -> Values:
        """The training samples, as features."""
        return Values(self.data, self.train)

    def answer(self, mean: Sequence[float] | None) -> dict[str, Any]:
        """Return the number of samples in each split and, where the rules need them, the sums that leave the site."""
        tests = self.data.test_y if self.test is None else self.test
        test = 0 if tests is None else len(tests)
        sizes = {"train": len(self.train), "test": test, **({} if self.val is None else {"val": len(self.val)})}
        if not shared_needed(self.rules, self.data.columns):
            return {"sizes": sizes}
        numbers = numbers_needed(self.rules)
        if mean is not None and not numbers:
            right = (
                f"left out: impute {self.rules.impute!r} and normalise {self.rules.normalise!r} need no sums of numbers"
            )
            raise InputError("mean", Shown("of the hub"), right)
        if mean is not None and any(abs(value) > LARGEST for value in mean):
            raise InputError("mean", Shown("of the hub"), "of numbers that fit float32, as samples do")
        if mean is not None and len(mean) != self._width:
            raise InputError("mean", Shown(f"{len(mean)} numbers"), f"{self._width}, one for each feature")
        if mean is None:
            found = self.values.first(numbers)
        else:
            found = self.values.second(np.array(mean, np.float64), squares_needed(self.rules))
        few = np.flatnonzero((found.count > 0) & (found.count < FEWEST))
        if len(few):
            shown = Shown(f"{int(found.count[few[0]])} values of {self._feature(int(few[0]))}")
            raise InputError("sums", shown, f"none or at least {FEWEST} at a site: fewer would tell of single samples")
        return {"sizes": sizes, "sums": found.to_dict()}

    def tells(self, mean: Sequence[float] | None) -> str:
        """Return in words what leaves the site with `answer`, beside numbers of samples."""
        if not shared_needed(self.rules, self.data.columns):
            return ""
        if not numbers_needed(self.rules):
            return "which categories training samples have"
        return "sums" if mean is None else "sums of deviations"

    @property
    def _width(self) -> int:
        return int(self.data.x.shape[1]) if self.data.columns is None else self.data.columns.width

    def _feature(self, i: int) -> str:
        return f"channel {i + 1}" if self.data.columns is None else self.data.columns.features[i]

    def transform(self, totals: Totals | None) -> Transform:
        """Return how this site's samples are made."""
        if shared_needed(self.rules, self.data.columns) and (totals is None or len(totals.count) != self._width):
            raise InputError("totals", Shown("of the hub"), f"{self._width} numbers, one for each feature")
        return transform_of(self.rules, self.data.columns, totals, self.values, "here")

    def client(self, transform: Transform) -> Client:
        """Return the samples."""
        data = applied(self.data, transform)

        def part(rows: Ints) -> tuple[torch.Tensor, torch.Tensor]:
            return data.tensor(data.x[rows]), torch.from_numpy(data.y[rows])

        tests = data.test_tensors() if self.test is None else part(self.test)
        assert tests is not None
        return Client(*part(self.train), *tests, *(() if self.val is None else part(self.val)))


# ---- at the hub ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Prepared:
    """What a hub keeps of it with a run."""

    agreed: Agreed
    totals: Totals | None
    sizes: tuple[dict[str, int], ...]  # of each site's splits, after samples were dropped

    def for_sites(self) -> dict[str, Any]:
        """Return what sites set up the run with."""
        totals = {} if self.totals is None else {"totals": totals_to_dict(self.totals)}
        return {"agreed": self.agreed.to_dict(), **totals}

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        return {**self.for_sites(), "sizes": list(self.sizes)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Prepared:
        """Return what `to_dict` wrote; raise `Unreadable` where it is none."""
        totals = totals_from_dict(field(record, "totals", dict)) if "totals" in record else None
        sizes = tuple({str(n): int(v) for n, v in one.items()} for one in items(record, "sizes", dict))
        return cls(Agreed.from_dict(field(record, "agreed", dict)), totals, sizes)

    def about(self, about: Mapping[str, Any], k: int) -> dict[str, Any]:
        """Return how site k's samples are once they are made: their shape, classes and numbers."""
        columns, labels = self.agreed.columns, self.agreed.labels
        changed: dict[str, Any] = {"sizes": dict(self.sizes[k])}
        if columns is not None:
            changed["shape"] = [columns.width]
        if labels and about["objective"] == "classification":
            changed |= {"labels": list(labels), "classes": len(labels)}
        return {**{name: value for name, value in about.items() if name != "table"}, **changed}

    def preparation(self) -> Preparation:
        """Return what the hub knows of how samples were made: nothing of statistics that are a site's own."""
        rules, columns = self.agreed.rules, self.agreed.columns
        own = SITE in (rules.fill_scope, rules.normalise)
        return Preparation(
            rules, columns, self.agreed.label, None if own else transform_of(rules, columns, self.totals)
        )


def agree(rules: Preprocessing, names: Sequence[str], abouts: Sequence[Mapping[str, Any]]) -> Agreed | None:
    """Return what the sites' samples are made by; None where they need nothing. Refuse what does not fit together."""
    tables = [about.get("table") for about in abouts]
    if not any(tables):
        for name, value in rules.of_tables.items():
            raise InputError(name, value, "left out: no site has tables (CSV files)")
        return None if rules.normalise == "auto" else Agreed(rules, None, ())
    for name, table in zip(names, tables, strict=True):
        if table is None:
            raise InputError(
                f"data of site {name!r}", Shown("no table"), f"a table (CSV) as at site {names[0]!r}, or none anywhere"
            )
    for name, table in zip(names, tables, strict=True):
        left = 0 if table is None else table.get("unlabelled", 0)
        if left and rules.impute == "none":
            right = f"mean, median or drop, which leave such samples out: site {name!r} has {left:,} without a label"
            raise InputError("impute", rules.impute, right)
    own = [Columns.from_dict(table["columns"]) for table in tables if table is not None]
    gaps = [table["gaps"] for table in tables if table is not None]
    for name, columns in zip(names, own, strict=True):
        if columns.names != own[0].names:
            right = f"{', '.join(own[0].names)} as at site {names[0]!r}"
            raise InputError(f"columns of site {name!r}", Shown(", ".join(columns.names)), right)
    kinds = []
    for j, column in enumerate(own[0].names):
        texts = [columns.categories[j] for columns in own]
        union = tuple(sorted({text for known in texts for text in known or ()}))
        for name, known, missing, about in zip(names, texts, gaps, abouts, strict=True):
            if union and known is None and missing[j] < sum(about["sizes"].values()):
                right = "texts as at other sites, or numbers everywhere (fedstill site start --encode onehot:COLUMN)"
                raise InputError(f"column {column!r} of site {name!r}", Shown("numbers"), right)
            if known and not rules.encodes:
                raise InputError("encode", rules.encode, f"'onehot': column {column!r} has texts at site {name!r}")
            if missing[j] and rules.impute == "none":
                right = f"mean, median or drop: site {name!r} has {missing[j]:,} gaps in {column!r}"
                raise InputError("impute", rules.impute, right)
        kinds.append(union or None)
    named = [about["labels"] for about in abouts]
    if any(named) and not all(named):
        odd = names[[bool(labels) for labels in named].index(False)]
        raise InputError(f"classes of site {odd!r}", Shown("numbers"), "names as at the other sites")
    labels = named[0]
    if OBJECTIVES[abouts[0]["objective"]].name == "classification":
        labels = sorted({label for own in named for label in own})
    if not rules.raw and not any(kinds) and all(own == labels for own in named):
        return None
    targets = {tuple(table["label"]) for table in tables if table is not None}
    label = targets.pop() if len(targets) == 1 else ()
    return Agreed(rules, Columns(own[0].names, tuple(kinds), own[0].named), tuple(labels), label)


Question = Callable[[bytes], Mapping[str, bytes]]
"""Asks all sites of a run, and returns what each has answered."""


def prepare(agreed: Agreed, names: Sequence[str], ask: Question) -> Prepared:
    """Have the sites give their sums, and return the totals; raise `TrainingError` where a site answers with something else."""
    asked = {"agreed": agreed.to_dict()}
    answers = {name: _read(name, data) for name, data in ask(json.dumps(asked).encode()).items()}
    sizes = tuple(_sizes(name, answers[name]) for name in names)
    if not shared_needed(agreed.rules, agreed.columns):
        return Prepared(agreed, None, sizes)
    width = _channels(names[0], answers[names[0]]) if agreed.columns is None else agreed.columns.width
    first = add([_sums(name, answers[name], width, False) for name in names])
    if not numbers_needed(agreed.rules):
        return Prepared(agreed, Totals.of(first), sizes)
    mean = mean_of(first)
    again = ask(json.dumps({**asked, "mean": mean.tolist()}).encode())
    second = add([_sums(name, _read(name, again[name]), width, True) for name in names])
    return Prepared(agreed, Totals.of(first, second), sizes)


def _read(name: str, data: bytes) -> dict[str, Any]:
    try:
        answer = parse_json(data)
        if not isinstance(answer, dict):
            raise Unreadable("an object")
    except Unreadable as error:
        raise TrainingError(f"site {name}: its answer should be {error}") from None
    return answer


def _sizes(name: str, answer: Mapping[str, Any]) -> dict[str, int]:
    try:
        sizes = field(answer, "sizes", dict)
        return {
            split: field(sizes, split, int, least=1, most=1 << 40)
            for split in ("train", "test", "val")
            if split in sizes
        }
    except Unreadable as error:
        raise TrainingError(f"site {name}: its numbers of samples should be {error}") from None


def _channels(name: str, answer: Mapping[str, Any]) -> int:
    """Return how many channels a site's images have: so many sums it sends."""
    try:
        return len(items(field(answer, "sums", dict), "count", float))
    except Unreadable as error:
        raise TrainingError(f"site {name}: its sums should be {error}") from None


def _sums(name: str, answer: Mapping[str, Any], width: int, squares: bool) -> Sums:
    try:
        return Sums.from_dict(field(answer, "sums", dict), width, squares)
    except Unreadable as error:
        raise TrainingError(f"site {name}: its sums should be {error}") from None
