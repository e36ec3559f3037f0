"""Read a folder that `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, without the package and any network.

    FOLDER/state.json  dataset_info.json  data-….arrow            one set
    FOLDER/dataset_dict.json  train/…  test/…                     with an official test split

`--owner COLUMN` makes a client of each value of a column, whose name is that value. Classes have the names of a ClassLabel, or
are the sorted texts of the column. Images are decoded as those in folders are, from bytes that are in the set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown, nearest
from ..core.memory import require
from ..core.reading import Unreadable, field, items, read_json
from . import arrow, cached, mapped, selection
from .dataset import Dataset, Ints, dataset, images_first, kind_of
from .files import wrong
from .images import decode_bytes, form_of_bytes
from .targets import AUTO, Array

STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
FILES = 100_000  # Arrow files of one set, at most


@dataclass(frozen=True)
class Chosen:
    """Which columns are what; empty: as `selection.choose` finds them, and no owner."""

    input: str = ""
    label: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Saved:
    """One saved set: its Arrow files, the names of its columns, and of the classes of those that have some."""

    folder: Path
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]

    @classmethod
    def at(cls, folder: Path) -> Saved:
        """Read what the folder's JSON files say; nothing outside of it is read."""
        state = _json(folder / STATE)
        try:
            files = [field(entry, "filename", str) for entry in items(state, "_data_files", dict)]
        except Unreadable as error:
            raise wrong(folder / STATE, f"written by save_to_disk, {error}") from None
        if not files or len(files) > FILES:
            raise wrong(folder / STATE, f"one that names 1 to {FILES:,} files")
        for name in files:
            if Path(name).name != name or not name.endswith(".arrow"):
                raise InputError(str(folder / STATE), name, "the name of an .arrow file in the same folder")
        paths = tuple(folder / name for name in files)
        for path in paths:
            arrow.check(path)
        features = _json(folder / INFO).get("features")
        classes = {}
        for name, feature in (features if isinstance(features, dict) else {}).items():
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                try:
                    classes[name] = tuple(items(feature, "names", str))
                except Unreadable as error:
                    raise wrong(folder / INFO, f"written by save_to_disk, {error}") from None
        return cls(folder, paths, tuple(arrow.column_names(paths[0])), classes)

    def batches(self, *names: str) -> Iterator[Any]:
        """Yield the batches of all files with these columns alone."""
        for path in self.files:
            yield from arrow.batches(path, names)


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by save_to_disk."""
    return (folder / STATE).is_file() or (folder / DICT).is_file()


def hf_set(
    name: str,
    folder: Path,
    chosen: Chosen,
    size: int | None = None,
    memory_map: str = mapped.AUTO,
    objective: str = AUTO,
) -> Dataset:
    """Read a saved Dataset, or the splits train and test of a saved DatasetDict."""
    if not is_saved(folder):
        raise InputError("data", f"hf:{folder}", "a folder written by datasets.Dataset.save_to_disk")
    sets = [Saved.at(folder)] if (folder / STATE).is_file() else [Saved.at(folder / part) for part in _splits(folder)]
    first = sets[0]
    for other in sets[1:]:
        if other.columns != first.columns or other.classes != first.classes:
            raise wrong(other.folder, f"with the columns and classes of {first.folder}: {', '.join(first.columns)}")
    if chosen.owner and chosen.owner not in first.columns:
        raise InputError("owner", chosen.owner, f"a column of {folder}: {nearest(chosen.owner, first.columns)}")
    without = (chosen.owner,) if chosen.owner else ()
    inputs, label = selection.choose(str(folder), first.columns, chosen.input, chosen.label, without)
    named = [_labels(each, label) for each in sets]
    ys, labels = _classes(named, first.classes.get(label, ()), str(folder))
    owners, groups = _owners(sets, chosen.owner)
    counts = [len(y) for y in ys]
    x = _samples(folder, sets, inputs, counts, size, memory_map)
    numbered = not labels or objective not in (AUTO, "classification")
    return dataset(
        name,
        str(folder),
        x[: counts[0]],
        ys[0],
        (x[counts[0] :], ys[1]) if len(sets) > 1 else None,
        None if numbered else len(labels),
        objective,
        owner=owners[0] if owners else None,
        test_owner=owners[1] if len(owners) > 1 else None,
        labels=labels if not numbered else (),
        groups=groups,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Unreadable as error:
        raise wrong(path, f"written by save_to_disk, {error}") from None


def _splits(folder: Path) -> list[str]:
    """Return the splits to read: train and, where there is one, test."""
    try:
        names = items(_json(folder / DICT), "splits", str)
    except Unreadable as error:
        raise wrong(folder / DICT, f"written by save_to_disk, {error}") from None
    if "train" not in names:
        raise wrong(folder / DICT, f"one whose splits have train and, if any, test (it has {', '.join(names)})")
    return ["train", *(["test"] if "test" in names else [])]


def _labels(saved: Saved, label: str) -> Array:
    """Return a set's labels: numbers, or texts."""
    where, parts = f"{saved.folder}, column {label}", list[Array]()
    for batch in saved.batches(label):
        column = batch.column(0)
        if arrow.is_text(column):
            arrow.check_whole(where, column)
            parts.append(np.array(column.to_pylist(), dtype=object))
        else:
            parts.append(arrow.numbers(where, column))
    if not sum(map(len, parts)):
        raise InputError("data", str(saved.folder), "a data set of at least one row")
    return np.concatenate(parts)


def _classes(named: Sequence[Array], known: tuple[str, ...], where: str) -> tuple[list[Array], tuple[str, ...]]:
    """Return labels as numbers, and the classes' names where they have some."""
    if not any(y.dtype == object for y in named):
        if known and any(y.ndim != 1 or y.min() < 0 or y.max() >= len(known) for y in named):
            raise InputError("label", Shown(f"a class that {where} does not name"), f"one of its {len(known)} classes")
        return list(named), known
    if not all(y.dtype == object for y in named):
        raise InputError("label", Shown("texts in one split and numbers in the other"), "texts or numbers in both")
    labels = tuple(sorted({text for y in named for text in set(y.tolist())}))
    number = {text: c for c, text in enumerate(labels)}
    return [np.array([number[text] for text in y], np.int64) for y in named], labels


def _owners(sets: Sequence[Saved], owner: str) -> tuple[list[Ints], tuple[str, ...]]:
    """Return each sample's owner by number, and the owners' names: sorted texts, names of classes, or numbers."""
    if not owner:
        return [], ()
    values = [_labels(each, owner) for each in sets]
    for each, found in zip(sets, values, strict=True):
        if found.ndim != 1 or found.dtype.kind not in "iuO":
            raise InputError("owner", owner, f"a column of texts or whole numbers of {each.folder}")
    known = sets[0].classes.get(owner, ())
    distinct = sorted({value for found in values for value in found.tolist()}, key=lambda v: (isinstance(v, str), v))
    number = {value: k for k, value in enumerate(distinct)}
    names = tuple(known[v] if known and isinstance(v, int) and 0 <= v < len(known) else str(v) for v in distinct)
    if "" in names or len(set(names)) < len(names):
        raise InputError("owner", owner, "a column whose values can be names: none empty, no two alike")
    return [np.array([number[value] for value in found.tolist()], np.int64) for found in values], names


def _samples(
    folder: Path, sets: Sequence[Saved], inputs: Sequence[str], counts: Sequence[int], size: int | None, memory_map: str
) -> Array:
    """Return the samples of all sets one after another, in memory or in a file."""
    images = _form(sets, inputs[0], size) if len(inputs) == 1 else None
    first = next(_pieces(sets, inputs, images))
    shape = (sum(counts), *first.shape[1:])
    numbers = math.prod(shape)
    made_of = ("hf", folder, [path for saved in sets for path in saved.files], tuple(inputs), size)
    key = cached.digest(*made_of)

    def write(out: Array) -> None:
        done = 0
        for piece in _pieces(sets, inputs, images):
            if piece.shape[1:] != out.shape[1:] or piece.dtype != out.dtype:
                shown = Shown(f"samples {piece.shape[1:]} {piece.dtype}")
                raise InputError("data", shown, f"{out.shape[1:]} {out.dtype} as the first of {folder}")
            out[done : done + len(piece)] = piece
            done += len(piece)
            mapped.release(out)
        cached.check_unchanged(key, *made_of)

    if mapped.pays(memory_map, numbers):
        found = cached.find(key)
        return cached.make(key, first.dtype, shape, write) if found is None else found
    require("data", str(folder), (first.itemsize + 4) * numbers)
    out = np.empty(shape, first.dtype)
    write(out)
    return out


Form = tuple[int, tuple[int, int]]  # channels, (width, height)


def _form(sets: Sequence[Saved], name: str, size: int | None) -> Form | None:
    """Return the form of images, grey where every one is; None where the column holds none."""
    grey, found = True, None
    for saved in sets:
        where = f"{saved.folder}, column {name}"
        for batch in saved.batches(name):
            if not arrow.is_image(batch.column(0)):
                return None
            for is_grey, shape in form_of_bytes(where, arrow.image_bytes(where, batch.column(0))):
                grey, found = grey and is_grey, found or shape
                if size is None and shape != found:
                    right = f"images of {found[0]}×{found[1]} as the first is; or hf:FOLDER@32 resizes all to 32×32"
                    raise InputError(where, Shown(f"an image of {shape[0]}×{shape[1]}"), right)
    assert found is not None  # there is at least one row
    return 1 if grey else 3, found if size is None else (size, size)


def _pieces(sets: Sequence[Saved], inputs: Sequence[str], images: Form | None) -> Iterator[Array]:
    """Yield samples as a Dataset has them, a batch or an image at a time."""
    for saved in sets:
        wheres = [f"{saved.folder}, column {name}" for name in inputs]
        for batch in saved.batches(*inputs):
            if images is not None:
                yield from decode_bytes(wheres[0], arrow.image_bytes(wheres[0], batch.column(0)), *images)
                continue
            parts = [arrow.numbers(where, batch.column(i)) for i, where in enumerate(wheres)]
            if len(parts) > 1 or parts[0].ndim == 1:
                joined = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
                with np.errstate(over="ignore", invalid="ignore"):
                    yield joined.astype(np.float32)
            else:
                x = images_first(parts[0])
                yield np.ascontiguousarray(x, dtype=kind_of(x))
