"""Read folders of npy files, which may be larger than the memory: their samples are then read when they are needed.

    FOLDER/x.npy  y.npy  [owner.npy]  [test_x.npy  test_y.npy]      one set
    FOLDER/CLIENT/x.npy  y.npy  [test_x.npy  test_y.npy]            a folder for each client

Labels are read whole. Samples in one file, of a type that a Dataset has, stay where they are; several files are copied once,
piece by piece, into the folder of decoded samples (`cached`), so that they are one array. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from ..core.memory import require
from . import cached, mapped
from .dataset import Dataset, Ints, dataset, images_first, kind_of, same_kind
from .files import array_header, fill, regular, wrong
from .targets import AUTO, Array

X, Y, OWNER, TEST_X, TEST_Y = "x.npy", "y.npy", "owner.npy", "test_x.npy", "test_y.npy"
WHOLE = "a whole npy file that holds a plain array"


@dataclass(frozen=True)
class Stored:
    """One array in an npy file, whose header says what it is."""

    path: Path
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @classmethod
    def at(cls, path: Path) -> Stored:
        """Return what a file holds, by its header, checked against the file's size."""
        with regular(path) as file:
            dtype, shape, fortran, start = array_header(file, str(path), "it", WHOLE)
            size, has = start + math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
        if size != has:
            raise wrong(path, f"{size:,} bytes long as its header says (it has {has:,})")
        if 0 in shape or not shape:
            raise wrong(path, f"an array of at least one sample (its shape is {shape})")
        return cls(path, dtype, shape, fortran, start)

    def map(self) -> Array:
        """Return the array as one in a file."""
        with regular(self.path) as file:
            return mapped.open_map(file, self.start, self.dtype, self.shape, self.fortran)

    def read(self) -> Array:
        """Return the array in memory."""
        out = np.empty(math.prod(self.shape) * self.dtype.itemsize, np.uint8)
        with regular(self.path) as file:
            file.seek(self.start)
            if fill(file, out.data) != len(out):
                raise wrong(self.path, f"{WHOLE} (it ends too early)")
        flat = out.view(self.dtype)
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


def npy_set(name: str, folder: Path, memory_map: str = mapped.AUTO, objective: str = AUTO) -> Dataset | None:
    """Read a folder of npy files; return None where there are none."""
    alone = (folder / X).is_file()
    places = [folder] if alone else sorted(p for p in folder.iterdir() if p.is_dir() and (p / X).is_file())
    if not places:
        return None
    train = [(Stored.at(place / X), _labels(place / Y)) for place in places]
    tested = [place for place in places if (place / TEST_X).exists()]
    if tested and len(tested) < len(places):
        missing = next(place for place in places if place not in tested)
        raise wrong(missing / TEST_X, f"there, as in {tested[0].name}; or nowhere")
    tests = [(Stored.at(place / TEST_X), _labels(place / TEST_Y)) for place in tested]
    stored = [x for x, _ in (*train, *tests)]
    _check_shapes(stored)
    x = _samples(folder, stored, memory_map)
    count = sum(stored.shape[0] for stored, _ in train)
    y, test_y = (np.concatenate([y for _, y in split]) if split else None for split in (train, tests))
    assert y is not None
    owner, test_owner, groups = _owners(folder, alone, train, tests)
    return dataset(
        name,
        str(folder),
        x[:count],
        y,
        None if test_y is None else (x[count:], test_y),
        None,
        objective,
        owner=owner,
        test_owner=test_owner,
        groups=groups,
    )


def _labels(path: Path) -> Array:
    """Read a small array whole."""
    stored = Stored.at(path)
    require("data file", str(path), 3 * math.prod(stored.shape) * max(8, stored.dtype.itemsize))
    return stored.read()


def _check_shapes(stored: Sequence[Stored]) -> None:
    """Refuse samples that differ in shape, or of which some are bytes and some are not."""
    first = stored[0]
    for other in stored:
        if len(other.shape) < 2:
            raise wrong(other.path, f"[samples, …] (its shape is {other.shape})")
        if other.shape[1:] != first.shape[1:] or (other.dtype == np.uint8) != (first.dtype == np.uint8):
            right = f"samples of shape {first.shape[1:]} and type {first.dtype} as in {first.path}"
            raise wrong(other.path, f"{right} (it has {other.shape[1:]} and {other.dtype})")


def _samples(folder: Path, stored: Sequence[Stored], memory_map: str) -> Array:
    """Return all samples one after another, in memory or in a file."""
    numbers = sum(math.prod(each.shape) for each in stored)
    if not mapped.pays(memory_map, numbers):
        require("data", str(folder), sum(math.prod(s.shape) * (s.dtype.itemsize + 4) for s in stored))
        xs = [each.read() for each in stored]
        return xs[0] if len(xs) == 1 else np.concatenate(same_kind([images_first(x).astype(kind_of(x)) for x in xs]))
    views = [images_first(each.map()) for each in stored]
    kinds = {kind_of(view) for view in views}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    if len(views) == 1 and views[0].dtype == kind:
        return views[0]
    made_of = ("npy", folder, [each.path for each in stored], str(kind))
    key = cached.digest(*made_of)
    found = cached.find(key)

    def copy(out: Array) -> None:
        done = 0
        for view in views:
            for piece in mapped.pieces(view):
                with np.errstate(over="ignore"):
                    out[done : done + len(piece)] = piece
                done += len(piece)
                mapped.release(out)
        cached.check_unchanged(key, *made_of)

    return cached.make(key, kind, (sum(map(len, views)), *views[0].shape[1:]), copy) if found is None else found


Split = list[tuple[Stored, Array]]


def _owners(folder: Path, alone: bool, train: Split, tests: Split) -> tuple[Ints | None, Ints | None, tuple[str, ...]]:
    """Return each sample's owner, each test sample's, and the owners' names."""
    if not alone:
        lengths = [[stored.shape[0] for stored, _ in split] for split in (train, tests)]
        owner, test_owner = (np.repeat(np.arange(len(each)), each) if each else None for each in lengths)
        return owner, test_owner, tuple(stored.path.parent.name for stored, _ in train)
    path = folder / OWNER
    if not path.exists():
        return None, None, ()
    values = _labels(path)
    if values.shape != train[0][0].shape[:1] or values.dtype.kind not in "iu":
        raise wrong(path, f"a whole number for each of the {train[0][0].shape[0]:,} samples")
    if tests:
        raise InputError("data file", str(path), f"left out where there is {TEST_X}: whose the tests are, nobody says")
    numbers, owner = np.unique(values, return_inverse=True)
    return owner.astype(np.int64), None, tuple(str(number) for number in numbers)
