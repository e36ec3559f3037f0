"""Rules by which tables become numbers: which columns are labels, what is done with gaps and texts, how numbers are scaled."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..core.errors import InputError
from ..core.reading import Unreadable

SITE, FEDERATED = "site", "federated"
IMPUTE = ("none", "drop", "mean", "mean:federated", "mean:site", "median", "median:site")
NORMALISE = ("auto", "none", SITE, FEDERATED)
ONEHOT = "onehot"


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What is done with the samples of a source before they are dealt and trained on.

    label      the column of the labels in CSV files, by its name in the header; several with commas
    ignore     columns to leave out, with commas
    impute     gaps in columns of numbers: none (refused), drop (the sample is left out), mean (of all sites' training samples,
               `mean:site`: of the site's own), median (of the site's own: a median cannot be had from sums)
    encode     columns of texts: none (refused), onehot (a column for each text), onehot:a,b (of a and b too, whatever they hold)
    normalise  numbers to mean 0 and deviation 1: none, site (each site's own training samples), federated (all sites', by sums),
               auto (images as their source says, tables not at all)
    """

    label: str = ""
    ignore: str = ""
    impute: str = "none"
    encode: str = "none"
    normalise: str = "auto"

    def __post_init__(self) -> None:
        for f in fields(self):
            if not isinstance(getattr(self, f.name), str):
                raise InputError(f.name, getattr(self, f.name), "a text")
        if self.impute == "median:federated":
            right = "'median:site', or 'mean:federated': a median over all sites cannot be had from sums"
            raise InputError("impute", self.impute, right)
        if self.impute not in IMPUTE:
            raise InputError("impute", self.impute, f"one of: {', '.join(IMPUTE)}")
        if self.encode not in ("none", ONEHOT) and not (self.encode.startswith(f"{ONEHOT}:") and self.as_texts):
            raise InputError("encode", self.encode, "one of: none, onehot, onehot:COLUMN,COLUMN")
        if self.normalise not in NORMALISE:
            raise InputError("normalise", self.normalise, f"one of: {', '.join(NORMALISE)}")

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of the labels; none: the usual one."""
        return _names(self.label)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The columns that are left out."""
        return _names(self.ignore)

    @property
    def as_texts(self) -> tuple[str, ...]:
        """The columns that are categories whatever they hold."""
        return _names(self.encode.partition(":")[2])

    @property
    def encodes(self) -> bool:
        """Whether columns of texts become features."""
        return self.encode != "none"

    @property
    def drops(self) -> bool:
        """Whether samples with gaps are left out."""
        return self.impute == "drop"

    @property
    def fills(self) -> str:
        """What gaps are filled with: mean, median or, where they are not, nothing."""
        return "" if self.impute in ("none", "drop") else self.impute.partition(":")[0]

    @property
    def fill_scope(self) -> str:
        """Whose training samples gaps are filled from: `site` or `federated`; empty without."""
        if not self.fills:
            return ""
        return self.impute.partition(":")[2] or (FEDERATED if self.fills == "mean" else SITE)

    @property
    def scales(self) -> bool:
        """Whether numbers are normalised by statistics of the clients' training samples."""
        return self.normalise in (SITE, FEDERATED)

    @property
    def fitted(self) -> bool:
        """Whether anything depends on training samples."""
        return self.scales or bool(self.fills)

    @property
    def raw(self) -> bool:
        """Whether a table's cells are kept as they are until the rules are fitted."""
        return self.fitted or self.drops or self.encodes

    @property
    def of_tables(self) -> dict[str, str]:
        """The rules that only tables can follow, where they are not the defaults."""
        names = ("label", "ignore", "impute", "encode")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(PLAIN, name)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Preprocessing:
        """Return the rules that `to_dict` wrote; raise `Unreadable` where they are none."""
        try:
            return cls(**{f.name: record[f.name] for f in fields(cls)})
        except (KeyError, InputError) as error:
            raise Unreadable(f"rules of preprocessing ({error})") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas; a name that has commas itself stands in quotes, as in a CSV file.

    >>> _names(' a, b, "weight, kg"')
    ('a', 'b', 'weight, kg')
    """
    try:
        cells = next(csv.reader([text.replace("\r", " ").replace("\n", " ")], skipinitialspace=True), [])
    except csv.Error:
        cells = [text]
    return tuple(dict.fromkeys(name.strip() for name in cells if name.strip()))


def as_flag(name: str) -> str:
    """Return a column's name as a flag with commas takes it on a command line.

    >>> print(as_flag("age"), as_flag("blood pressure"), as_flag("weight, kg"))
    age 'blood pressure' '"weight, kg"'
    """
    quoted = '"' + name.replace('"', '""') + '"' if "," in name or name.startswith('"') else name
    return shlex.quote(quoted)


PLAIN = Preprocessing()
