"""Read a folder with one CSV or npz file for each client: data whose partition is fixed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from ..core.errors import InputError, Shown, can_be_shown, first_line, nearest
from ..core.memory import in_words, require
from . import targets as target_forms
from .dataset import Dataset, Ints, dataset, same_kind, samples, targets
from .files import npz, regular, wrong
from .targets import AUTO, Array

LABELS = ("label", "y")
LONGEST_LINE = 16 << 20  # bytes
LONGEST_NAME = 200  # signs of a class's name


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
        if len(y) != len(x):
            targets(str(path), y, len(x))
        if xs[-1].shape[1:] != xs[0].shape[1:] or _are_bytes(xs[-1]) != _are_bytes(xs[0]):
            raise wrong(path, f"samples of {_describe(xs[0])} as in {files[0].name} (it has {_describe(xs[-1])})")
        tests.append(test)
    _check_columns([(path, header) for path, header in headers if header is not None])
    with_test = [test is not None for test in tests]
    if any(with_test) and not all(with_test):
        raise wrong(files[with_test.index(False)], f"with test_x and test_y as {files[with_test.index(True)].name} is")
    test_x = [samples(str(p), t[0]) for p, t in zip(files, tests, strict=True) if t is not None]
    for path, x in zip(files, test_x, strict=False):
        if x.shape[1:] != xs[0].shape[1:] or _are_bytes(x) != _are_bytes(xs[0]):
            raise wrong(path, f"test samples of {_describe(xs[0])} (it has {_describe(x)})")
    both = same_kind([*xs, *test_x])
    xs, test_x = both[: len(xs)], both[len(xs) :]
    labels = _class_names(files, ys)
    given = [t[1] for t in tests if t is not None]
    kind = target_forms.decide(
        str(folder), [*ys, *given], "classification" if labels and objective == AUTO else objective
    )
    if labels and kind != "classification":
        raise InputError("objective", objective, f"'classification': the targets of {folder} are names of classes")
    numbers: list[Array] = [
        numbered(path, y, len(x), labels) if kind == "classification" else target_forms.read(str(path), y, len(x), kind)
        for path, x, y in zip(files, xs, ys, strict=True)
    ]
    test_y = [target_forms.read(str(p), y, len(x), kind) for p, y, x in zip(files, given, test_x, strict=False)]
    if kind != "classification":
        target_forms.size_of(str(folder), [*numbers, *test_y], kind)
    return dataset(
        name,
        str(folder),
        np.concatenate(xs),
        np.concatenate(numbers),
        (np.concatenate(test_x), np.concatenate(test_y)) if test_x else None,
        len(labels) or None,
        labels=labels,
        owner=np.repeat(np.arange(len(xs)), [len(x) for x in xs]),
        test_owner=np.repeat(np.arange(len(test_x)), [len(x) for x in test_x]) if test_x else None,
        groups=tuple(path.stem for path in files),
        objective=kind,
    )


def _class_names(files: list[Path], ys: list[Array]) -> tuple[str, ...]:
    """Return the names of the classes of all files, sorted; none where labels are numbers. Refuse both kinds side by side."""
    named = [y.dtype.kind == "U" for y in ys]
    if any(named) and not all(named):
        kinds = "names" if named[0] else "numbers"
        raise wrong(files[named.index(not named[0])], f"with {kinds} as labels as {files[0].name} has")
    return tuple(sorted({str(label) for y in ys for label in np.unique(y)})) if any(named) else ()


def numbered(path: Path, y: Array, count: int, labels: Sequence[str]) -> Ints:
    """Return labels as numbers of classes; refuse a name that is none of `labels`."""
    if y.dtype.kind != "U":
        return targets(str(path), y, count, len(labels) or None)
    names, codes = np.unique(y, return_inverse=True)
    for name in names:
        if name not in labels:
            raise InputError(f"{path}, label", str(name), nearest(str(name), labels))
    return np.array([labels.index(name) for name in names], np.int64)[codes]


def _are_bytes(x: Array) -> bool:
    return x.dtype == np.uint8


def _describe(x: Array) -> str:
    return f"shape {x.shape[1:]} and type {x.dtype}"


def _check_columns(headers: list[tuple[Path, list[str]]]) -> None:
    """Refuse differing headers: columns in another order would be other features under the same number."""
    for path, header in headers:
        if header != headers[0][1]:
            raise wrong(path, f"with the columns of {headers[0][0].name}: {', '.join(headers[0][1])}")


def read_csv(path: Path) -> tuple[Array, Array, list[str] | None]:
    """Read features, labels and header (if any) of a CSV file; the label is the column `label` or `y`, else the last.

    Labels are numbers, or the classes' names, which are no numbers.
    """
    header: list[str] | None = None
    width, done, label = 0, 0, 0
    names: dict[str, int] = {}  # of classes, with their numbers in order of appearance
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
                    label = next((i for i, cell in enumerate(header or []) if cell.lower() in LABELS), width - 1)
                    if header is not None:
                        continue
                if len(row) != width:
                    where, right = f"{path}, line {number}", f"{width} cells as in the first line"
                    raise InputError(where, Shown(f"{len(row)} cells"), right)
                if names or (not done and not _is_number(row[label])):
                    row[label] = str(_code(f"{path}, line {number}, column {label + 1}", row[label].strip(), names))
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
    y = values[:, label]
    return np.delete(values, label, axis=1), np.array(list(names))[y.astype(np.int64)] if names else y, header


def _code(where: str, name: str, names: dict[str, int]) -> int:
    """Return the number of a class's name, a new one for a new name."""
    if not name or _is_number(name.replace("_", "")) or len(name) > LONGEST_NAME or not can_be_shown(name):
        right = f"the name of a class, of at most {LONGEST_NAME} signs, as in the rows before; or a number in every row"
        raise InputError(where, name, right)
    return names.setdefault(name, len(names))


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
