"""Read samples for a model that is there already: of the form that it was trained on, with labels or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..core.errors import InputError, Shown, nearest
from . import mapped
from .columns import Columns
from .dataset import Array, Dataset, Ints, same_kind, samples
from .files import npz_samples, wrong
from .gather import gather, read_alike
from .images import SUFFIXES, decode, folders_in, images_in, is_class_folder
from .outline import Outline
from .rules import PLAIN
from .samples import Rows
from .silos import numbered, silo_files
from .targets import read as read_targets

ARRAYS = (".csv", ".npz")


@dataclass(frozen=True)
class Own:
    """Samples, normalised as those of the run were, and where each is from; labels where the files have them."""

    x: Rows
    y: torch.Tensor | None
    where: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what the run does not know


def read(path: str | Path, outline: Outline, client: int | None = None, memory_map: str = mapped.AUTO) -> Own:
    """Read a CSV or npz file, an image, or a folder of these (class folders of images, too), prepared as a client's samples."""
    made = outline.preparation
    transform = None if made is None else made.of(client)
    place = Path(path)
    notes: list[str] = []
    try:
        if place.is_dir():
            x, y, where = _folder(place, outline, memory_map, notes)
        elif place.suffix.lower() in ARRAYS:
            x, y, where = _arrays([place], outline, notes)
        elif place.suffix.lower() in SUFFIXES:
            x, y, where = _images([place], None, place.parent, outline)
        else:
            raise wrong(place, f"a file that ends in {', '.join((*ARRAYS, *SUFFIXES))}, or a folder of such files")
    except OSError as error:
        raise wrong(place, f"a file or folder that can be read ({error.strerror or error})") from None
    columns = None if made is None else made.columns
    if columns is not None and transform is not None and x.shape[1:] == (len(columns.names),):
        made_alike = torch.from_numpy(transform.apply(columns.expand(x)))
        return Own(made_alike, None if y is None else torch.from_numpy(y), where, tuple(notes))
    if tuple(x.shape[1:]) != outline.shape:
        raise InputError(
            "data",
            Shown(f"{place} with samples of shape {_shape(x.shape[1:])}"),
            f"samples of {_shape(outline.shape)}, as the run's",
        )
    if x.dtype != np.uint8:
        x = x.astype(np.int64 if outline.dtype == "int64" else np.float32)
    labels = np.zeros(len(x), np.int64) if y is None or outline.objective != "classification" else y
    scale = (outline.mean, outline.std) if transform is None or columns is not None else (transform.mean, transform.std)
    alike = Dataset("data", x, labels, outline.classes, mean=scale[0], std=scale[1])
    return Own(alike.rows(), None if y is None else torch.from_numpy(y), where)


def _folder(
    folder: Path, outline: Outline, memory_map: str, notes: list[str]
) -> tuple[Array, Ints | None, tuple[str, ...]]:
    tables = silo_files(folder)
    if tables:
        return _arrays(tables, outline, notes)
    if is_class_folder(folder):
        paths, labels = [], []
        for child in folders_in(folder):
            inside = images_in(child)
            paths += inside
            labels += [_class_of(child, outline)] * len(inside) if inside else []
        return _images(paths, np.array(labels, np.int64), folder, outline, memory_map)
    loose = images_in(folder)
    if not loose:
        raise wrong(folder, "a folder that holds CSV, npz or image files, or class folders of images")
    return _images(loose, None, folder, outline, memory_map)


def _class_of(folder: Path, outline: Outline) -> int:
    """Return the number of the class that a folder is named after."""
    known = outline.labels or tuple(map(str, range(outline.classes)))
    if folder.name not in known:
        raise InputError("class folder", str(folder), f"named after a class of the run: {nearest(folder.name, known)}")
    return known.index(folder.name)


def _images(
    paths: Sequence[Path], labels: Ints | None, folder: Path, outline: Outline, memory_map: str = mapped.OFF
) -> tuple[Array, Ints | None, tuple[str, ...]]:
    if len(outline.shape) != 3:
        raise wrong(folder, f"samples of shape {_shape(outline.shape)}, as the run's: these are images")
    channels, height, width = outline.shape
    size = height if height == width else None
    where = tuple(path.relative_to(folder).as_posix() for path in paths)
    return decode(paths, size, folder, channels == 3, memory_map), labels, where


def _arrays(paths: Sequence[Path], outline: Outline, notes: list[str]) -> tuple[Array, Ints | None, tuple[str, ...]]:
    """Read files of one form; `notes` gets a line for each file with categories that the run does not know."""
    xs, ys, where = [], [], []
    for path in paths:
        if path.suffix.lower() == ".csv":
            x, y, own = _csv(path, outline)
            notes += own if len(paths) == 1 else [f"{path.name}: {note}" for note in own]
        else:
            x, y = npz_samples(path)
            _check_columns(path, x, outline)
        xs.append(x if x.dtype == np.float64 and _table_of(outline) is not None else samples(str(path), x))
        if xs[-1].shape[1:] != xs[0].shape[1:]:
            raise wrong(
                path, f"samples of {_shape(xs[0].shape[1:])} as in {paths[0].name} (it has {_shape(xs[-1].shape[1:])})"
            )
        known = outline.labels or tuple(map(str, range(outline.classes)))
        if y is not None and outline.objective != "classification":
            y = read_targets(str(path), y, len(x), outline.objective, outline.classes)
        ys.append(
            None if y is None else y if outline.objective != "classification" else numbered(path, y, len(x), known)
        )
        where += [f"{path.name}:{row}" for row in range(len(x))]
    labelled = [y for y in ys if y is not None]
    if labelled and len(labelled) < len(ys):
        raise wrong(paths[ys.index(None)], "labelled as the other files of its folder are")
    return np.concatenate(same_kind(xs)), np.concatenate(labelled) if labelled else None, tuple(where)


def _csv(path: Path, outline: Outline) -> tuple[Array, Array | None, Sequence[str]]:
    """Read a CSV file. Without a column more than the samples have features, it has no labels."""
    columns, made = _table_of(outline), outline.preparation
    if columns is not None and made is not None:
        alike = read_alike(path, columns, made.labels, made.rules)
        return alike.x, alike.y, alike.notes
    found = gather([path], PLAIN)
    (x,), (last,) = found.xs, found.ys
    named = any(cell.lower() in ("label", "y") for cell in found.labels)
    if not named and last.dtype.kind != "U" and outline.shape == (x.shape[1] + 1,):
        return np.column_stack([x, last]), None, ()
    return x, last, ()


def _check_columns(path: Path, x: Array, outline: Outline) -> None:
    """Refuse arrays where the run has columns of categories: a number does not say which category it is."""
    columns = _table_of(outline)
    kinds = (
        [] if columns is None else [n for n, k in zip(columns.names, columns.categories, strict=True) if k is not None]
    )
    if columns is not None and kinds and x.shape[1:] == (len(columns.names),):
        raise wrong(path, f"a CSV file: the run has categories in {', '.join(kinds)}, which arrays do not name")


def _table_of(outline: Outline) -> Columns | None:
    """Return the columns of the run's tables."""
    return None if outline.preparation is None else outline.preparation.columns


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "()"
