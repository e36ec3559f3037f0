"""Read a folder with one CSV or npz file for each client: data whose partition is fixed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from ..core.errors import InputError, Shown, first_line
from ..core.memory import in_words, require
from . import targets as target_forms
from .dataset import Dataset, dataset, samples
from .files import npz, regular, wrong
from .targets import AUTO, Array

LABELS = ("label", "y")
LONGEST_LINE = 16 << 20  # bytes


def silo_files(folder: Path) -> list[Path]:
    """Return the CSV and npz files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".npz") and p.is_file())


def silo_set(name: str, folder: Path, objective: str = AUTO) -> Dataset | None:
    """Read a folder of silos (sorted by file name, each a client); return None where there is no such file."""
    files = silo_files(folder)
    if not files:
        return None
    xs, ys, tests, headers = [], [], [], []
    for path in files:
        if path.suffix.lower() == ".csv":
            x, y, header = read_csv(path)
            test = None
            headers.append((path, header))
        else:
            x, y, test = npz(path)
        xs.append(samples(str(path), x))
        ys.append(y)
        if xs[-1].shape[1:] != xs[0].shape[1:] or xs[-1].dtype != xs[0].dtype:
            raise wrong(path, f"samples of {_describe(xs[0])} as in {files[0].name} (it has {_describe(xs[-1])})")
        tests.append(test)
    _check_columns([(path, header) for path, header in headers if header is not None])
    with_test = [test is not None for test in tests]
    if any(with_test) and not all(with_test):
        raise wrong(files[with_test.index(False)], f"with test_x and test_y as {files[with_test.index(True)].name} is")
    test_x = [samples(str(p), t[0]) for p, t in zip(files, tests, strict=True) if t is not None]
    for path, x in zip(files, test_x, strict=False):
        if x.shape[1:] != xs[0].shape[1:] or x.dtype != xs[0].dtype:
            raise wrong(path, f"test samples of {_describe(xs[0])} (it has {_describe(x)})")
    given = [t for t in tests if t is not None]
    kind = target_forms.decide(str(folder), [*ys, *(t[1] for t in given)], objective)
    ys = [target_forms.read(str(p), y, len(x), kind) for p, y, x in zip(files, ys, xs, strict=True)]
    test_y = [target_forms.read(str(p), t[1], len(t[0]), kind) for p, t in zip(files, given, strict=False)]
    target_forms.size_of(str(folder), [*ys, *test_y], kind)
    return dataset(
        name,
        str(folder),
        np.concatenate(xs),
        np.concatenate(ys),
        (np.concatenate(test_x), np.concatenate(test_y)) if test_x else None,
        owner=np.repeat(np.arange(len(xs)), [len(x) for x in xs]),
        test_owner=np.repeat(np.arange(len(test_x)), [len(x) for x in test_x]) if test_x else None,
        groups=tuple(path.stem for path in files),
        objective=kind,
    )


def _describe(x: Array) -> str:
    return f"shape {x.shape[1:]} and type {x.dtype}"


def _check_columns(headers: list[tuple[Path, list[str]]]) -> None:
    """Refuse differing headers: columns in another order would be other features under the same number."""
    for path, header in headers:
        if header != headers[0][1]:
            raise wrong(path, f"with the columns of {headers[0][0].name}: {', '.join(headers[0][1])}")


def read_csv(path: Path) -> tuple[Array, Array, list[str] | None]:
    """Read features, labels and header (if any) of a CSV file; the label is the column `label` or `y`, else the last."""
    header: list[str] | None = None
    width, done = 0, 0
    with regular(path) as file:
        flat = np.empty(_count_cells(path, file))
        try:
            for number, row in _rows(path, file):
                if not width:
                    width = len(row)
                    if width < 2:
                        raise wrong(path, "a CSV file with at least one feature and a label in each row")
                    if _is_header(row):
                        header = [cell.strip() for cell in row]
                        continue
                if len(row) != width:
                    where, right = f"{path}, line {number}", f"{width} cells as in the first line"
                    raise InputError(where, Shown(f"{len(row)} cells"), right)
                try:
                    flat[done : done + width] = [_number(cell) for cell in row]
                except ValueError:
                    j = next(j for j, cell in enumerate(row) if not _is_number(cell))
                    raise InputError(f"{path}, line {number}, column {j + 1}", row[j], "a number") from None
                done += width
        except (UnicodeDecodeError, csv.Error) as error:
            raise wrong(path, f"a CSV file in UTF-8 ({first_line(error)})") from None
    if not done:
        raise wrong(path, "a CSV file with at least one row of numbers")
    values = flat[:done].reshape(-1, width)
    named = [i for i, cell in enumerate(header or []) if cell.lower() in LABELS]
    label = named[0] if named else width - 1
    return np.delete(values, label, axis=1), values[:, label], header


def _count_cells(path: Path, file: IO[bytes]) -> int:
    """Return at most how many cells a CSV file has; refuse one that would not fit into the memory, or with endless lines."""
    commas = lines = quotes = longest = 0
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(LONGEST_LINE + 1):
        longest = max(longest, len(line))
        quotes += line.count(b'"') if lines else line.count(b'"') % 2  # a header is often quoted
        commas, lines = commas + line.count(b","), lines + 1 + line.rstrip(b"\r\n").count(b"\r")
    file.seek(0)
    if longest > LONGEST_LINE:
        raise wrong(path, f"a CSV file with lines of at most {in_words(LONGEST_LINE)}")
    cells = commas + lines
    # each number, its copy without the label, and as float32; a row of texts, which may be the whole file within quotes
    require("data file", str(path), 20 * cells + 60 * min(size if quotes else longest, cells))
    return cells


def _rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file that are not empty, each with its number."""
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        for number, row in enumerate(csv.reader(text), 1):
            if any(cell.strip() for cell in row):
                yield number, row


def _is_header(row: list[str]) -> bool:
    """Return whether a row names the label or has no number; a first row with one bad cell is a bad row, not a header."""
    return any(cell.strip().lower() in LABELS for cell in row) or not any(_is_number(cell) for cell in row)


def _number(cell: str) -> float:
    """Return a cell's number; an underscore within is a slip, though Python reads it."""
    if "_" in cell:
        raise ValueError
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True
