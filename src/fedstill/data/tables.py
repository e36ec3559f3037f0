"""Read one CSV file as people have it: comma, semicolon or tab, decimal commas, gaps, and columns of texts.

The separator is the first of tab, semicolon and comma that divides the beginning of the file into rows of equal length. A number
may have a decimal comma where a comma does not separate, all such numbers of the file alike and at least one of them beyond
doubt (`1,5`; `1,234` alone may be a thousand). A cell that is empty, or NA, N/A, #N/A, <NA>, NaN, null, None or ?, is a gap.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from ..core.errors import InputError, Shown, can_be_shown, first_line
from ..core.memory import in_words, require
from .columns import LONGEST_NAME, MOST_FEATURES, MOST_TEXTS, as_category
from .files import regular, wrong
from .rules import as_flag
from .targets import Array

LABELS = ("label", "y")
LONGEST_LINE = 16 << 20  # bytes
SEPARATORS = ("\t", ";", ",")
BEGINNING = 1 << 16  # bytes that the separator is found in
GAPS = ("", "na", "n/a", "#n/a", "<na>", "nan", "null", "?")  # in any case
NONE = "None"  # a gap as Python writes it; `none` may be an answer
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # a decimal comma, or a thousand


@dataclass(frozen=True, eq=False)
class Table:
    """The cells of a file, its labels among them."""

    path: Path
    separator: str
    header: tuple[str, ...] | None
    values: Array  # float64 [rows, columns]: NaN where there is a gap; in a column of texts the number of the text
    texts: tuple[tuple[str, ...] | None, ...]  # of each column by number; None: it has numbers

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names; a column that has none is named by its number."""
        return self.header or tuple(f"column {j + 1}" for j in range(len(self.texts)))

    def where(self, row: int, column: int) -> str:
        """Return in words where a cell stands; the file is read again for its line."""
        with regular(self.path) as file, closing(_rows(file, self.separator)) as rows:
            first = row + (self.header is not None)
            line = next((line for line, _ in itertools.islice(rows, first, None)), 0)
        return place(self.path, line, column, self.header)


@dataclass(frozen=True)
class Places:
    """Which columns of a file are what, by number."""

    texts: set[int]  # texts whatever they hold
    labels: set[int]
    skipped: set[int]  # not read


@dataclass
class _Seen:
    """What the cells of a column are."""

    texts: dict[str, int] = field(default_factory=dict)
    text: tuple[int, str] = (0, "")  # the first text: its line, and what it is
    number: tuple[int, str] = (0, "")  # the first number of a column of texts
    numbers: int = 0
    others: int = 0


@dataclass
class _Decimals:
    """How numbers with fractions are written: the first of each way."""

    comma: tuple[int, int, str] | None = None  # line, column, cell
    point: tuple[int, str] | None = None
    certain: bool = False


def place(path: Path, line: int, column: int, header: Collection[str] | None) -> str:
    """Return in words where a cell stands."""
    name = "" if header is None else f" ({list(header)[column]})"
    return f"{path}, line {line}, column {column + 1}{name}"


def read_table(
    path: Path,
    labels: Collection[str] = (),
    as_texts: Collection[str] = (),
    ignore: Collection[str] = (),
    places: Callable[[tuple[str, ...] | None, int], Places] | None = None,
) -> Table:
    """Read a CSV file. A header names `labels`; the columns `as_texts` are texts whatever they hold; those in `ignore` are not
    read: all gaps. `places` says it instead, by header and number of columns.
    """
    with regular(path) as file:
        cells = _count_cells(path, file)
        separator = separator_of(path, file)
        try:
            header, width = _first(path, file, separator, labels)
            if places is None:
                texts, skipped = ({j for j, n in enumerate(header or ()) if n in names} for names in (as_texts, ignore))
                known = Places(texts, set(label_columns(path, header, width, labels)), skipped)
            else:
                known = places(header, width)
            reader = _Reader(path, separator, header, width, known, known.texts, places is None)
            values = reader.read(file, cells)
            if reader.late:  # texts where numbers stood before: once more, with these columns as texts
                reader = _Reader(path, separator, header, width, known, known.texts | reader.late, places is None)
                values = reader.read(file, cells)
        except (UnicodeDecodeError, csv.Error) as error:
            raise wrong(path, f"a CSV file in UTF-8 ({first_line(error)})") from None
    reader.check()
    kinds = tuple(tuple(reader.seen[j].texts) if j in reader.texts else None for j in range(width))
    return Table(path, separator, header, values, kinds)


class _Reader:
    """One pass over the rows of a file, some of whose columns are texts."""

    def __init__(
        self,
        path: Path,
        separator: str,
        header: tuple[str, ...] | None,
        width: int,
        places: Places,
        texts: set[int],
        hints: bool,
    ) -> None:
        """Read the columns `texts` as texts, of which somebody has named those of `places`; errors may have `hints` at flags."""
        self.path, self.separator, self.header, self.width = path, separator, header, width
        self.given, self.texts, self.skipped, self.labels = places.texts, set(texts), places.skipped, places.labels
        self.hints = hints
        self.seen: dict[int, _Seen] = defaultdict(_Seen)  # of columns of texts
        self.late: set[int] = set()  # columns whose first text comes after a number
        self.began: set[int] = set()  # columns that have had a number, in rows that were read cell by cell
        self.fast = False  # whether a row was read as a whole
        self.decimals = _Decimals()

    def read(self, file: IO[bytes], cells: int) -> Array:
        """Return the values, [rows, columns]."""
        file.seek(0)
        flat, done = np.empty(cells), 0
        plain = self.separator == "," and not self.skipped
        for number, (line, row) in enumerate(_rows(file, self.separator)):
            if not number and self.header is not None:
                continue
            if len(row) != self.width:
                right = f"{self.width} cells as in the first line"
                raise InputError(f"{self.path}, line {line}", Shown(f"{len(row)} cells"), right)
            try:
                if not plain or self.texts:
                    raise ValueError
                flat[done : done + self.width] = [_number(cell) for cell in row]
                self.fast = True
            except ValueError:
                flat[done : done + self.width] = [self._value(line, j, cell.strip()) for j, cell in enumerate(row)]
            done += self.width
        if not done:
            raise wrong(self.path, "a CSV file with at least one row of numbers")
        return flat[:done].reshape(-1, self.width)

    def _value(self, line: int, column: int, cell: str) -> float:
        """Return a cell's number, or the number of its text."""
        if column in self.skipped or cell.lower() in GAPS or cell == NONE:
            return np.nan
        value = self._as_number(line, column, cell)
        if column not in self.texts:
            if value is not None:
                self.began.add(column)
                return value
            if self.fast or column in self.began:
                self.late.add(column)
                return np.nan
            self.texts.add(column)
        seen = self.seen[column]
        if value is None:
            seen.others += 1
            seen.text = seen.text if seen.others > 1 else (line, cell)
        else:
            seen.numbers += 1
            seen.number = seen.number if seen.numbers > 1 else (line, cell)
        if column not in self.labels:
            cell = as_category(cell, self.separator != ",")
        if cell not in seen.texts and (len(cell) > LONGEST_NAME or not can_be_shown(cell)):
            right = f"a number, or a text of at most {LONGEST_NAME} signs"
            raise InputError(place(self.path, line, column, self.header), cell, right)
        if len(seen.texts) >= MOST_TEXTS and cell not in seen.texts:
            remedy = f"; --ignore {as_flag(self.header[column])} leaves it out" if self.header and self.hints else ""
            right = f"one of at most {MOST_TEXTS:,} texts in a column{remedy}"
            raise InputError(place(self.path, line, column, self.header), cell, right)
        return seen.texts.setdefault(cell, len(seen.texts))

    def _as_number(self, line: int, column: int, cell: str) -> float | None:
        """Return the number that a cell holds; None where it is a text."""
        try:
            value = _number(cell)
        except ValueError:
            if self.separator == "," or not DECIMAL_COMMA.fullmatch(cell):
                return None
            if column not in self.texts:
                self.decimals.comma = self.decimals.comma or (line, column, cell)
                self.decimals.certain = self.decimals.certain or not THOUSANDS.fullmatch(cell)
            return float(cell.replace(",", "."))
        if "." in cell and column not in self.texts:
            self.decimals.point = self.decimals.point or (line, cell)
        return value

    def check(self) -> None:
        """Refuse numbers that can be read in two ways, and columns that mix numbers and texts."""
        if self.decimals.comma is not None:
            line, column, cell = self.decimals.comma
            if self.decimals.point is not None:
                right = f"with a decimal point, as {self.decimals.point[1]} in line {self.decimals.point[0]}"
                raise InputError(place(self.path, line, column, self.header), cell, right)
            if not self.decimals.certain:
                right = f"with a decimal point or without a comma: it may be {cell.replace(',', '.')} or {cell.replace(',', '')}"
                raise InputError(place(self.path, line, column, self.header), cell, right)
        for j, seen in sorted(self.seen.items()):
            if j in self.given or not seen.numbers or not seen.others or j in self.labels:
                continue
            if seen.numbers >= seen.others:
                name = (
                    f"; --encode onehot:{as_flag(self.header[j])} takes all as texts"
                    if self.header and self.hints
                    else ""
                )
                right = f"a number, as {seen.numbers:,} of the column's {seen.numbers + seen.others:,} values are{name}"
                raise InputError(place(self.path, seen.text[0], j, self.header), seen.text[1], right)
        for j in sorted(self.labels):
            seen = self.seen[j]
            if seen.numbers and seen.others:
                if seen.text[0] < seen.number[0]:
                    line, cell = seen.number
                    right = f"the name of a class, of at most {LONGEST_NAME} signs, as before; or a number in every row"
                else:
                    line, cell = seen.text
                    right = "a number, as before; or the name of a class in every row"
                raise InputError(place(self.path, line, j, self.header), cell, right)


def label_columns(path: Path, header: tuple[str, ...] | None, width: int, labels: Collection[str]) -> list[int]:
    """Return the columns of the labels: those named, else `label` or `y`, else the last."""
    if labels:
        return [] if header is None else [header.index(name) for name in labels if name in header]
    usual = next((j for j, name in enumerate(header or ()) if name.lower() in LABELS), width - 1)
    return [usual]


def separator_of(path: Path, file: IO[bytes]) -> str:
    """Return what divides the cells of a file, from its beginning."""
    file.seek(0)
    raw = file.read(BEGINNING)
    whole = len(raw) < BEGINNING
    text = raw.decode("utf-8-sig", errors="replace")
    best, most = ",", 0
    for separator in SEPARATORS:
        rows: list[list[str]] = []
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if any(row)]
        except csv.Error:
            continue
        widths = [len(row) for row in (rows if whole or len(rows) < 2 else rows[:-1])]
        if widths and widths[0] > 1 and len(set(widths)) == 1:
            return separator
        if widths and widths[0] > most and widths[0] > 1:
            best, most = separator, widths[0]
    return best


def _first(path: Path, file: IO[bytes], separator: str, labels: Collection[str]) -> tuple[tuple[str, ...] | None, int]:
    """Return the header, if the first row is one, and the number of columns."""
    file.seek(0)
    with closing(_rows(file, separator)) as rows:
        _, row = next(rows, (0, []))
    if not row:
        raise wrong(path, "a CSV file with at least one row of numbers")
    if len(row) < 2:
        raise wrong(path, "a CSV file with at least one feature and a label in each row")
    cells = [cell.strip() for cell in row]
    usual = any(cell.lower() in LABELS or cell in labels for cell in cells)
    if not usual and any(_is_number(cell, separator) for cell in cells):
        return None, len(row)
    header = tuple(cell or f"column {j + 1}" for j, cell in enumerate(cells))
    for j, name in enumerate(header):
        if name in header[:j]:
            raise wrong(path, f"with a name of its own for each column ({name!r} is there twice)")
        if len(name) > LONGEST_NAME or not can_be_shown(name):
            raise wrong(path, f"with columns named in at most {LONGEST_NAME} printable signs (column {j + 1})")
    return header, len(row)


def _count_cells(path: Path, file: IO[bytes]) -> int:
    """Return at most how many cells a CSV file has; refuse one that would not fit into the memory, or with endless lines."""
    counts, widest = dict.fromkeys((b",", b";", b"\t"), 0), 0
    lines = quotes = longest = 0
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(LONGEST_LINE + 1):
        longest = max(longest, len(line))
        quotes += line.count(b'"') if lines else line.count(b'"') % 2  # a header is often quoted
        here = {sign: line.count(sign) for sign in counts}
        counts = {sign: count + here[sign] for sign, count in counts.items()}
        widest = max(widest, *here.values())
        lines += 1 + line.rstrip(b"\r\n").count(b"\r")
    file.seek(0)
    if longest > LONGEST_LINE:
        raise wrong(path, f"a CSV file with lines of at most {in_words(LONGEST_LINE)}")
    if widest >= MOST_FEATURES:
        raise wrong(path, f"a CSV file with at most {MOST_FEATURES:,} columns (a line has {widest + 1:,})")
    cells = max(counts.values()) + lines
    # each number, its copy without the label, and as float32; a row of texts, which may be the whole file within quotes
    require("data file", str(path), 20 * cells + 60 * min(size if quotes else longest, cells))
    return cells


def _rows(file: IO[bytes], separator: str) -> Generator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file that are not empty, each with the line at which it ends."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        reader = csv.reader(text, delimiter=separator)
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    finally:
        text.detach()


def _number(cell: str) -> float:
    """Return a cell's number; an underscore within is a slip, though Python reads it."""
    if "_" in cell:
        raise ValueError
    return float(cell)


def _is_number(cell: str, separator: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return separator != "," and DECIMAL_COMMA.fullmatch(cell) is not None
    return True
