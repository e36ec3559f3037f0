"""Join the tables of all sites: their columns must be the same, and texts and gaps need a rule, or are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import InputError, Shown, nearest
from .columns import MOST_FEATURES, MOST_TEXTS, NUMBER, Columns
from .files import wrong
from .rules import Preprocessing, as_flag
from .tables import LABELS, Places, Table, label_columns, read_table
from .targets import Array

MANY = 20  # features of a column of texts, above which a line says so
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The tables of a source, by file."""

    columns: Columns
    labels: tuple[str, ...]  # the names of the columns of labels
    xs: list[Array]  # float64: NaN where there is a gap, categories by number
    ys: list[Array]  # numbers, names of classes, or [n, k] where there are several labels
    notes: tuple[str, ...]  # what was left out
    unlabelled: int = 0  # samples that were left out for want of a label


def gather(paths: Sequence[Path], rules: Preprocessing) -> Gathered:
    """Read the tables of a source; refuse gaps and texts for which there is no rule."""
    tables = [read_table(path, rules.labels, rules.as_texts, rules.ignored) for path in paths]
    first = tables[0]
    for table in tables:
        if (table.header is not None and first.header is not None and table.header != first.header) or len(
            table.texts
        ) != len(first.texts):
            raise wrong(
                table.path,
                f"with the columns of {first.path.name}: {', '.join(first.names)} (it has {', '.join(table.names)})",
            )
    header = next((table.header for table in tables if table.header is not None), None)
    for name in (*rules.labels, *rules.ignored, *rules.as_texts):
        which = "label" if name in rules.labels else "ignore" if name in rules.ignored else "encode"
        if header is None:
            raise InputError(which, name, f"left out: {first.path.name} has no header with names of columns")
        if name not in header:
            raise InputError(which, name, f"a column of {first.path.name}: {nearest(name, header)}")
    labels = label_columns(first.path, header, len(first.texts), rules.labels)
    ignored = [j for j, name in enumerate(header or ()) if name in rules.ignored]
    for j in set(labels) & set(ignored):
        raise InputError("ignore", first.names[j], "another column than the label")
    own = [j for j in range(len(first.texts)) if j not in (*labels, *ignored)]
    if not own:
        raise wrong(first.path, "a CSV file with at least one feature and a label in each row")
    _check(tables, own, labels, rules)
    names = first.names if header is None else header
    kinds = tuple(_categories(tables, j, rules) for j in own)
    columns = Columns(tuple(names[j] for j in own), kinds, named=header is not None)
    if columns.width > MOST_FEATURES:
        raise wrong(
            first.path.parent, f"tables that make at most {MOST_FEATURES:,} features (these make {columns.width:,})"
        )
    xs, ys = [], []
    left: dict[str, dict[str, int]] = {"label": {}, "gap": {}}
    for table in tables:
        x = np.column_stack([_coded(table, j, k) for j, k in zip(own, kinds, strict=True)])
        unlabelled = np.isnan(table.values[:, labels]).any(1)
        gaps = np.isnan(x).any(1) & ~unlabelled if rules.drops else np.zeros(len(x), bool)
        for what, rows in (("label", unlabelled), ("gap", gaps)):
            if rows.any():
                left[what][table.path.stem] = int(rows.sum())
        kept = ~(unlabelled | gaps)
        if unlabelled.all():
            right = f"a column with values in {table.path.name}: none of its {len(x):,} samples has a label"
            raise InputError("label", ", ".join(names[j] for j in labels), right)
        if not kept.any():
            raise InputError("impute", rules.impute, f"another rule: no sample of {table.path.name} is without a gap")
        xs.append(x[kept])
        ys.append(_labels(table, labels, kept))
    total = sum(len(table.values) for table in tables)
    notes = []
    for what, why in (("label", "without a label"), ("gap", "with gaps (--impute drop)")):
        by = left[what]
        if by:
            files = ", ".join(f"{name} {count:,}" for name, count in by.items())
            notes.append(f"left out: {sum(by.values()):,} of {total:,} samples, {why}: {files}")
    notes += _many(columns, xs, rules.as_texts)
    named = tuple(names[j] for j in labels)
    return Gathered(columns, named, xs, ys, tuple(notes), sum(left["label"].values()))


def _many(columns: Columns, xs: Sequence[Array], named: Sequence[str]) -> list[str]:
    """Return a line for each column whose texts make more features than `MANY`, or have numbers among them.

    In columns that somebody has `named` as texts numbers are expected.
    """
    notes = []
    for j, (name, kinds) in enumerate(zip(columns.names, columns.categories, strict=True)):
        numbers = [kind for kind in kinds or () if NUMBER.fullmatch(kind)]
        mixed = 0 < len(numbers) < len(kinds or ()) and name not in named
        if kinds is None or not (mixed or len(kinds) > MANY):
            continue
        rows = sum(int((~np.isnan(x[:, j])).sum()) for x in xs)
        often = "nearly every sample has its own" if 2 * len(kinds) > rows else "a feature for each"
        among = f", {len(numbers):,} of them numbers ({numbers[0]})" if mixed else ""
        notes.append(
            f"{name} has {len(kinds):,} texts in {rows:,} samples{among}, {often}: --ignore {as_flag(name)} leaves it out"
        )
    return notes


@dataclass(frozen=True, eq=False)
class Alike:
    """A file with the columns of a run."""

    x: Array
    y: Array | None  # None: it has no labels
    notes: tuple[str, ...]  # which categories the run does not know


def read_alike(path: Path, columns: Columns, labels: Sequence[str], rules: Preprocessing) -> Alike:
    """Read a file with the columns of a run, and its labels where it has any; other columns are left out.

    Where a header has named the run's columns they are found by name, or stand alone in their order; else they stand in their
    order, with the label as the last one or named as usual.
    """
    usual = [name for name in LABELS if name not in columns.names]
    usual = usual if all(name.lower() in LABELS for name in (*labels, *rules.labels)) else []

    def places(header: tuple[str, ...] | None, width: int) -> Places:
        own, found = _places(path, columns, labels, usual, header, width)
        texts = {j for j, kinds in zip(own, columns.categories, strict=True) if kinds is not None}
        return Places(texts, set(found), set(range(width)) - {*own, *found})

    table = read_table(path, (*labels, *LABELS), places=places)
    own, found = _places(path, columns, labels, usual, table.header, len(table.texts))
    if np.isnan(table.values[:, found]).any():
        found = []  # labels that are not known: no score, but predictions
    x = np.column_stack([_coded(table, j, kinds) for j, kinds in zip(own, columns.categories, strict=True)])
    _check_finite(table, own)
    numbers = [j for j, kinds in zip(own, columns.categories, strict=True) if kinds is None]
    if not rules.fills and np.isnan(table.values[:, numbers]).any():
        raise _gap(table, numbers, "a value: the run fills no gaps")
    new = (np.isnan(x) & ~np.isnan(table.values[:, own])).sum(0).tolist()
    note = unknown_note({name: count for name, count in zip(columns.names, new, strict=True) if count})
    return Alike(x, _labels(table, found) if found else None, note)


def unknown_note(counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the line that says how many values of which columns are of categories that a run does not know."""
    if not counts:
        return ()
    named = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return (f"categories that the run does not know are zeros in all features of their column: {named}",)


def _places(
    path: Path,
    columns: Columns,
    labels: Sequence[str],
    usual: Sequence[str],
    header: tuple[str, ...] | None,
    width: int,
) -> tuple[list[int], list[int]]:
    """Return where a file has the columns of a run, and where its labels, if it has any."""
    count = len(columns.names)
    if header is not None and columns.named:
        for name in columns.names:
            if name not in header:
                raise InputError("data", str(path), f"with the column {nearest(name, header)}: {name!r} is not there")
        found = [header.index(name) for name in labels if name in header]
        found = found if len(found) == len(labels) else []
        if not found and len(labels) < 2:
            found = [j for j, name in enumerate(header) if name in usual][:1]
        return [header.index(name) for name in columns.names], found
    if columns.named:
        if width != count:
            right = f"with a header, or {count} columns as the run's features (it has {width} and no header)"
            raise InputError("data", str(path), right)
        return list(range(count)), []
    found = [j for j, name in enumerate(header or ()) if name.lower() in LABELS][:1]
    found = found or ([width - 1] if width > count else [])
    own = [j for j in range(width) if j not in found]
    if len(own) != count:
        right = f"with {count} columns as the run's features, or {count + 1} with a label (it has {width})"
        raise InputError("data", str(path), right)
    return own, found


def _coded(table: Table, column: int, kinds: tuple[str, ...] | None) -> Array:
    """Return a column of a table: its numbers, or the numbers of its categories here; NaN of one that is unknown."""
    texts, values = table.texts[column], table.values[:, column]
    if kinds is None and texts:
        row = int(np.flatnonzero(~np.isnan(values))[0])
        raise InputError(table.where(row, column), texts[int(values[row])], "a number")
    if kinds is None or texts is None:
        return values
    number = {name: i for i, name in enumerate(kinds)}
    code = np.array([number.get(text, np.nan) for text in texts] + [np.nan])
    return code[np.where(np.isnan(values), len(texts), values).astype(np.int64)]


def _labels(table: Table, columns: Sequence[int], kept: Array | None = None) -> Array:
    """Return the labels of a table's rows (those `kept`): numbers, names of classes, or numbers [n, k] of several columns."""
    if len(columns) == 1:
        texts, values = table.texts[columns[0]], table.values[:, columns[0]]
        values = values if kept is None else values[kept]
        if texts is None:
            return values
        return np.array([*texts, ""])[np.where(np.isnan(values), len(texts), values).astype(np.int64)]
    for j in columns:
        if table.texts[j] is not None:
            row = int(np.flatnonzero(~np.isnan(table.values[:, j]))[0])
            cell = (table.texts[j] or ("",))[int(table.values[row, j])]
            raise InputError(
                table.where(row, j), cell, "a number, 0 or 1 of several labels: names are for one column of classes"
            )
    values = table.values[:, list(columns)]
    values = values if kept is None else values[kept]
    return values.astype(np.int64) if np.isin(values, (0, 1)).all() else values


def _categories(tables: Sequence[Table], column: int, rules: Preprocessing) -> tuple[str, ...] | None:
    """Return the categories of a column in all tables, sorted; None where it has numbers."""
    texts = {text for table in tables for text in table.texts[column] or ()}
    if not texts:
        return None
    odd = [t for t in tables if t.texts[column] is None and not np.isnan(t.values[:, column]).all()]
    if odd:
        other = next(table for table in tables if table.texts[column])
        row = int(np.flatnonzero(~np.isnan(odd[0].values[:, column]))[0])
        shown = Shown(f"{odd[0].values[row, column]:g}")
        name = f"; --encode onehot:{as_flag(odd[0].names[column])} takes numbers as texts" if odd[0].header else ""
        raise InputError(odd[0].where(row, column), shown, f"a text as in {other.path.name}, or numbers in both{name}")
    if len(texts) > MOST_TEXTS:
        right = f"one of at most {MOST_TEXTS:,} texts; --ignore leaves a column out"
        raise InputError("column", tables[0].names[column], right)
    return tuple(sorted(texts))


def _check(tables: Sequence[Table], own: Sequence[int], labels: Sequence[int], rules: Preprocessing) -> None:
    """Refuse what is no finite number, and texts, gaps and missing labels for which there is no rule."""
    for table in tables:
        _check_finite(table, [*own, *labels])
    if not rules.encodes:
        for table in tables:
            for j in own:
                texts, values = table.texts[j], table.values[:, j]
                if texts:
                    row = int(np.flatnonzero(~np.isnan(values))[0])
                    different = len({text for t in tables for text in t.texts[j] or ()})
                    name = f" (--ignore {as_flag(table.names[j])} leaves it out)" if table.header else ""
                    right = f"a number; --encode onehot makes a column of each of the {different:,} texts in this column{name}"
                    raise InputError(table.where(row, j), texts[int(values[row])], right)
    if rules.impute == "none":
        for table in tables:
            if np.isnan(table.values[:, own]).any():
                raise _gap(
                    table, own, f"a value ({_count(tables, own)}); --impute mean, median or drop says what to do"
                )
        for table in tables:
            if np.isnan(table.values[:, labels]).any():
                right = f"a label ({_count(tables, labels)}); with --impute drop such samples are left out"
                raise _gap(table, labels, right)


def _count(tables: Sequence[Table], columns: Sequence[int]) -> str:
    """Return in words how many cells are missing in which columns."""
    missing = {tables[0].names[j]: sum(int(np.isnan(t.values[:, j]).sum()) for t in tables) for j in columns}
    missing = {name: count for name, count in missing.items() if count}
    named = ", ".join(f"{name} {count:,}" for name, count in list(missing.items())[:8])
    more = f" and {len(missing) - 8} more columns" if len(missing) > 8 else ""
    files = sum(bool(np.isnan(t.values[:, list(columns)]).any()) for t in tables)
    where = f" in {files} of {len(tables)} files" if len(tables) > 1 else ""
    total = sum(missing.values())
    return f"{total:,} {'value is' if total == 1 else 'values are'} missing{where}: {named}{more}"


def _gap(table: Table, columns: Sequence[int], right: str) -> InputError:
    """Return the error for the first gap of a table in these columns."""
    row, at = (int(i) for i in np.argwhere(np.isnan(table.values[:, list(columns)]))[0])
    return InputError(table.where(row, columns[at]), Shown("nothing"), right)


def _check_finite(table: Table, columns: Sequence[int]) -> None:
    """Refuse infinity, and numbers that float32 cannot hold."""
    with np.errstate(invalid="ignore"):
        bad = np.abs(table.values[:, list(columns)]) > LARGEST
    if bad.any():
        row, at = (int(i) for i in np.argwhere(bad)[0])
        value = table.values[row, columns[at]]
        raise InputError(table.where(row, columns[at]), Shown(f"{value:g}"), "a finite number that fits float32")
