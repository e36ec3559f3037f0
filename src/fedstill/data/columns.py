"""The columns of tables: what categories they have, and how they become features.

A column of numbers is one feature, a column of categories one for each category. The categories of a column are those of all
sites, sorted, so that the form of a sample does not depend on the division into training and test data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown, can_be_shown
from ..core.memory import require
from ..core.reading import Unreadable, field, items
from .targets import Array

LONGEST_NAME = 200  # signs of a column, a class or a category
MOST_TEXTS = 1000  # different texts in a column
MOST_FEATURES = 1 << 18  # and columns of a file


NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d*)(?:[.,]\d+)?")


def as_category(cell: str, comma: bool = False) -> str:
    """Return the category of a cell: equal numbers are one category, and so are the spellings of true and false.

    Numbers with leading zeros or an exponent are codes, and stay as they are. With `comma` there are decimal commas.

    >>> [as_category(cell) for cell in ("1", "1.0", "+1.50", "-0.0", "007", "1E05", "TRUE", "True", "I, 2")]
    ['1', '1', '1.5', '0', '007', '1E05', 'true', 'true', 'I, 2']
    """
    if cell.lower() in ("true", "false"):
        return cell.lower()
    if not NUMBER.fullmatch(cell) or ("," in cell and not comma):
        return cell
    whole, _, part = cell.replace(",", ".").lstrip("+").partition(".")
    text = f"{whole}.{part.rstrip('0')}".rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True)
class Columns:
    """The features' columns of tables, in the order of the header."""

    names: tuple[str, ...]
    categories: tuple[tuple[str, ...] | None, ...]  # of each column; None: numbers
    named: bool = True  # whether a header has named them

    @classmethod
    def of_numbers(cls, count: int) -> Columns:
        """Return columns of numbers that have no names."""
        return cls(tuple(f"column {j + 1}" for j in range(count)), (None,) * count, named=False)

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each feature: `age`, `sex=f`, `sex=m`."""
        pairs = zip(self.names, self.categories, strict=True)
        return tuple(n if kinds is None else f"{n}={kind}" for n, kinds in pairs for kind in kinds or ("",))

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(1 if kinds is None else len(kinds) for kinds in self.categories)

    @property
    def numeric(self) -> Array:
        """Whether each feature is a number, not a category."""
        return np.array([kinds is None for kinds in self.categories for _ in kinds or ("",)], bool)

    def expand(self, x: Array) -> Array:
        """Return features as float64: a gap of a number stays NaN; a gap or an unknown category is zeros in all its columns."""
        if not any(kinds is not None for kinds in self.categories):
            return x.astype(np.float64)
        require("data", f"{len(x):,} samples of {self.width:,} features", 12 * len(x) * self.width)  # and as float32
        out, start = np.zeros((len(x), self.width)), 0
        for j, kinds in enumerate(self.categories):
            if kinds is None:
                out[:, start] = x[:, j]
            else:
                rows = np.flatnonzero(~np.isnan(x[:, j]))
                out[rows, start + x[rows, j].astype(np.int64)] = 1.0
            start += 1 if kinds is None else len(kinds)
        return out

    def unknown(self, x: Array, other: Columns) -> dict[str, int]:
        """Return how many values of rows with these columns are of categories that others do not have, by column."""
        out: dict[str, int] = {}
        for j, (name, kinds, known) in enumerate(zip(self.names, self.categories, other.categories, strict=True)):
            if kinds is not None and known is not None:
                new = [i for i, kind in enumerate(kinds) if kind not in known]
                out[name] = int(np.isin(x[:, j], new).sum())
        return {name: count for name, count in out.items() if count}

    def recoded(self, x: Array, other: Columns) -> Array:
        """Return rows with these columns as rows of others of the same names: categories that those do not have become gaps."""
        out = x.astype(np.float64)
        for j, (kinds, known) in enumerate(zip(self.categories, other.categories, strict=True)):
            there = ~np.isnan(out[:, j])
            if (kinds is None) != (known is None) and there.any():
                shown = Shown("texts" if known is None else "numbers")
                raise InputError(f"column {self.names[j]}", shown, "numbers" if known is None else "texts")
            if kinds is not None and known is not None:
                number = np.array([known.index(kind) if kind in known else np.nan for kind in kinds])
                out[there, j] = number[out[there, j].astype(np.int64)]
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as plain JSON values."""
        return {
            "names": list(self.names),
            "categories": [None if kinds is None else list(kinds) for kinds in self.categories],
            "named": self.named,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Columns:
        """Return the columns that `to_dict` wrote; raise `Unreadable` where they are none."""
        names, kinds = items(record, "names", str), field(record, "categories", list)
        if not names or len(names) != len(kinds) or len(set(names)) < len(names):
            raise Unreadable("columns, each with a name of its own and its categories")
        found = tuple(None if own is None else tuple(items({"categories": own}, "categories", str)) for own in kinds)
        listed = [kinds for kinds in found if kinds is not None]
        if any(len(set(kinds)) < len(kinds) or not 0 < len(kinds) <= MOST_TEXTS for kinds in listed):
            raise Unreadable(f"columns of 1 to {MOST_TEXTS:,} categories that differ")
        if any(
            len(name) > LONGEST_NAME or not can_be_shown(name) for name in (*names, *(k for own in listed for k in own))
        ):
            raise Unreadable("columns and categories named in printable signs")
        columns = cls(tuple(names), found, field(record, "named", bool))
        if columns.width > MOST_FEATURES:
            raise Unreadable(f"columns that make at most {MOST_FEATURES:,} features")
        return columns
