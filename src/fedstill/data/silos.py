"""Read a folder with one CSV or npz file for each client: data whose partition is fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..core.errors import InputError, nearest
from . import targets as target_forms
from .dataset import Dataset, Ints, dataset, same_kind, samples, targets
from .files import npz, wrong
from .gather import gather
from .rules import PLAIN, Preprocessing
from .targets import AUTO, Array


def silo_files(folder: Path) -> list[Path]:
    """Return the CSV and npz files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".npz") and p.is_file())


def silo_set(name: str, folder: Path, objective: str = AUTO, rules: Preprocessing = PLAIN) -> Dataset | None:
    """Read a folder of silos (sorted by file name, each a client); return None where there is no such file."""
    files = silo_files(folder)
    if not files:
        return None
    if all(path.suffix.lower() == ".csv" for path in files):
        return table_set(name, files, objective, rules, folder)
    tables = {path for path in files if path.suffix.lower() == ".csv"}
    for rule, value in rules.of_tables.items():
        raise InputError(rule, value, f"left out: {min(set(files) - tables).name} is no CSV file")
    xs, ys, tests = [], [], []
    for path in files:
        if path in tables:
            found = gather([path], PLAIN)
            (x,), (y,), test = found.xs, found.ys, None
        else:
            x, y, test = npz(path)
        xs.append(samples(str(path), x))
        ys.append(y)
        if len(y) != len(x):
            targets(str(path), y, len(x))
        if xs[-1].shape[1:] != xs[0].shape[1:] or _are_bytes(xs[-1]) != _are_bytes(xs[0]):
            raise wrong(path, f"samples of {_describe(xs[0])} as in {files[0].name} (it has {_describe(xs[-1])})")
        tests.append(test)
    with_test = [test is not None for test in tests]
    if any(with_test) and not all(with_test):
        raise wrong(files[with_test.index(False)], f"with test_x and test_y as {files[with_test.index(True)].name} is")
    test_x = [samples(str(p), t[0]) for p, t in zip(files, tests, strict=True) if t is not None]
    for path, x in zip(files, test_x, strict=False):
        if x.shape[1:] != xs[0].shape[1:] or _are_bytes(x) != _are_bytes(xs[0]):
            raise wrong(path, f"test samples of {_describe(xs[0])} (it has {_describe(x)})")
    both = same_kind([*xs, *test_x])
    given = [t[1] for t in tests if t is not None]
    return _joined(name, folder, files, both[: len(xs)], ys, both[len(xs) :], given, objective)


def table_set(
    name: str, files: Sequence[Path], objective: str, rules: Preprocessing, folder: Path | None = None
) -> Dataset:
    """Read CSV files, each a client's where they lie in a folder; what `rules` says is fitted when the samples are divided."""
    found = gather(files, rules)
    where = files[0] if folder is None else folder
    if not rules.raw:  # numbers without gaps, taken as they are
        xs = [samples(str(path), x) for path, x in zip(files, found.xs, strict=True)]
        data = _joined(name, where, files, xs, found.ys, [], [], objective)
    else:
        plain = [np.zeros((len(x), 1), np.float32) for x in found.xs]
        data = _joined(name, where, files, plain, found.ys, [], [], objective)
        data = replace(data, x=np.concatenate(found.xs), columns=found.columns)
    several = found.labels if len(found.labels) > 1 else ()
    data = replace(
        data,
        columns=found.columns,
        label_columns=found.labels if found.columns.named else (),
        labels=data.labels or several,
        notes=found.notes,
        unlabelled=found.unlabelled,
    )
    return data if folder is not None else replace(data, owner=None, groups=())


def _joined(
    name: str,
    folder: Path,
    files: Sequence[Path],
    xs: list[Array],
    ys: list[Array],
    test_x: list[Array],
    given: list[Array],
    objective: str,
) -> Dataset:
    """Return the data set of all files, each an owner; `given` are the labels of their own tests."""
    labels = _class_names(files, ys)
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


def _class_names(files: Sequence[Path], ys: Sequence[Array]) -> tuple[str, ...]:
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
