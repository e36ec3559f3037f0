"""A folder with one CSV or npz file for each client: data that already has its owners."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from ..core.errors import InputError, Shown
from .dataset import Array, Dataset, dataset, samples, targets
from .files import npz, split_arrays, wrong

LABELS = ("label", "y")


def silo_files(folder: Path) -> list[Path]:
    """The CSV and npz files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".npz") and p.is_file())


def silo_set(name: str, folder: Path) -> Dataset | None:
    """The data set of a folder of silos (sorted by file name, each a client), or None where there is no such file."""
    files = silo_files(folder)
    if not files:
        return None
    xs, ys, tests, heads = [], [], [], []
    for path in files:
        if path.suffix.lower() == ".csv":
            x, y, head = table(path)
            test = None
            heads.append((path, head))
        else:
            x, y, test = split_arrays(str(path), npz(path))
        xs.append(samples(str(path), x))
        ys.append(targets(str(path), y, len(x)))
        if xs[-1].shape[1:] != xs[0].shape[1:] or xs[-1].dtype != xs[0].dtype:
            raise wrong(path, f"samples of {_kind(xs[0])} as in {files[0].name} (it has {_kind(xs[-1])})")
        tests.append(test)
    _same_columns([(path, head) for path, head in heads if head is not None])
    with_test = [test is not None for test in tests]
    if any(with_test) and not all(with_test):
        raise wrong(files[with_test.index(False)], f"with test_x and test_y as {files[with_test.index(True)].name} is")
    test_x = [samples(str(p), t[0]) for p, t in zip(files, tests, strict=True) if t is not None]
    for path, part in zip(files, test_x, strict=False):
        if part.shape[1:] != xs[0].shape[1:] or part.dtype != xs[0].dtype:
            raise wrong(path, f"test samples of {_kind(xs[0])} (it has {_kind(part)})")
    test_y = [targets(str(p), t[1], len(t[0])) for p, t in zip(files, tests, strict=True) if t is not None]
    return dataset(
        name,
        str(folder),
        np.concatenate(xs),
        np.concatenate(ys),
        (np.concatenate(test_x), np.concatenate(test_y)) if test_x else None,
        owner=np.repeat(np.arange(len(xs)), [len(x) for x in xs]),
        test_owner=np.repeat(np.arange(len(test_x)), [len(x) for x in test_x]) if test_x else None,
        groups=tuple(path.stem for path in files),
    )


def _kind(x: Array) -> str:
    return f"shape {x.shape[1:]} and type {x.dtype}"


def _same_columns(heads: list[tuple[Path, list[str]]]) -> None:
    """Columns in another order would be other features under the same number."""
    for path, head in heads:
        if head != heads[0][1]:
            raise wrong(path, f"with the columns of {heads[0][0].name}: {', '.join(heads[0][1])}")


def table(path: Path) -> tuple[Array, Array, list[str] | None]:
    """Features, labels and header (if any) of a CSV file; the label is the column `label` or `y`, else the last."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if any(c.strip() for c in row)]
    except OSError as error:
        raise wrong(path, f"a readable file ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise wrong(path, f"a CSV file in UTF-8 ({error})") from None
    head = None
    if rows and _is_head(rows[0][1]):
        head = [cell.strip() for cell in rows.pop(0)[1]]
    if not rows:
        raise wrong(path, "a CSV file with at least one row of numbers")
    width = len(rows[0][1]) if head is None else len(head)
    if width < 2:
        raise wrong(path, "a CSV file with at least one feature and a label in each row")
    values = np.empty((len(rows), width))
    for i, (number, row) in enumerate(rows):
        if len(row) != width:
            raise InputError(
                f"{path}, line {number}", Shown(f"{len(row)} cells"), f"{width} cells as in the first line"
            )
        for j, cell in enumerate(row):
            if not _is_number(cell):
                raise InputError(f"{path}, line {number}, column {j + 1}", cell, "a number")
            values[i, j] = float(cell)
    named = [i for i, cell in enumerate(head or []) if cell.lower() in LABELS]
    label = named[0] if named else width - 1
    return np.delete(values, label, axis=1), values[:, label], head


def _is_head(row: list[str]) -> bool:
    """A header names the label or has no number at all; a first row with one bad cell is a bad row, not a header."""
    return any(cell.strip().lower() in LABELS for cell in row) or not any(_is_number(cell) for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
