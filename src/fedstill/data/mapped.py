"""Arrays that lie in files and behave as numpy arrays: their pages are read when they are needed, and let go of again.

An array is one of these where the memory that it looks at is a mapping of a file (`mapping`), whatever views were taken since.
Nothing here copies a whole one: `pieces` yields parts that fit into memory. A process counts the pages that it has looked at as
its own until it lets go of them (`release`); the system keeps them in its cache as long as nobody else needs the memory.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import torch

from ..core.errors import InputError
from ..core.memory import available
from .targets import Array

MemoryMap = Literal["auto", "on", "off"]
AUTO, ON, OFF = get_args(MemoryMap)
TIMES = (
    10  # bytes of memory for each number of a set of images: the bytes, and float32 for the clients and for the engine
)
PIECE = 8 << 20  # bytes of samples, as float32, to work on at a time
BUDGET = 512 << 20  # bytes of mapped files that a process looks at before it lets go of them
AROUND = 1 << 21  # bytes that the system may map around a sample that is looked at


def check(mode: str) -> None:
    """Refuse another word than those of `MemoryMap`."""
    if mode not in get_args(MemoryMap):
        raise InputError("memory_map", mode, f"one of: {', '.join(get_args(MemoryMap))}")


def pays(mode: str, numbers: int) -> bool:
    """Return whether samples of so many numbers should stay in a file: as it is said, else if they would take half of the memory.

    >>> pays("on", 1), pays("off", 1 << 60), pays("auto", 1), pays("auto", 1 << 60)
    (True, False, False, True)
    """
    return mode == ON or (mode == AUTO and TIMES * numbers > available() // 2)


def open_map(file: IO[bytes], start: int, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool = False) -> Array:
    """Return the array of an open file that begins at a byte of it; the caller has checked that the file is long enough."""
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(shape, dtype, buffer=view, offset=start, order="F" if fortran else "C")


def create(path: Path, start: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Make a file that begins with `start`; return the array behind that, to be written to. All of it has its place on disk."""
    size = len(start) + int(np.prod(shape, dtype=object)) * dtype.itemsize
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and not a signal later
        else:
            file.truncate(size)
        file.write(start)
        file.flush()
        return np.ndarray(shape, dtype, buffer=mmap.mmap(file.fileno(), size), offset=len(start))


def mapping(x: object) -> mmap.mmap | None:
    """Return the mapped file that an array is a view of; None where it lies in memory."""
    while isinstance(x, np.ndarray):
        x = x.base
    if isinstance(x, memoryview):
        x = x.obj
    return x if isinstance(x, mmap.mmap) else None


def release(x: Array) -> None:
    """Let go of the pages of a mapped file that this process has looked at; those written to go to the file."""
    if (view := mapping(x)) is not None:
        drop(view)


def drop(view: mmap.mmap) -> None:
    """Let go of a mapping's pages, where the system has a way to say so."""
    if hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):
            view.madvise(mmap.MADV_DONTNEED)


def resident() -> int:
    """Return the bytes of files that this process has mapped and looked at; 0 where nobody can tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


def step(x: Array, size: int = PIECE) -> int:
    """Return how many samples make a piece."""
    return max(1, size // max(1, 4 * int(np.prod(x.shape[1:]))))


def pieces(x: Array, size: int = PIECE) -> Iterator[Array]:
    """Yield an array's samples in pieces; the pages of a mapped one are let go of after each."""
    rows = step(x, size)
    for first in range(0, len(x), rows):
        yield x[first : first + rows]
        release(x)


def adjacent(a: Array, b: Array) -> Array | None:
    """Return one view of two arrays that lie in one file, the second right behind the first; else None."""
    view = mapping(a)
    both = view is not None and view is mapping(b)
    if (
        not both
        or a.dtype != b.dtype
        or a.shape[1:] != b.shape[1:]
        or not (a.flags.c_contiguous and b.flags.c_contiguous)
    ):
        return None
    if a.ctypes.data + a.nbytes != b.ctypes.data:
        return None
    start = a.ctypes.data - np.frombuffer(view, np.uint8).ctypes.data  # type: ignore[arg-type]
    return np.ndarray((len(a) + len(b), *a.shape[1:]), a.dtype, buffer=view, offset=start)


def tensor(x: Array) -> torch.Tensor:
    """Return a tensor that is a view of the array. One of a mapped file must never be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
        return torch.from_numpy(x)


class Pages:
    """Lets go of a mapped file's pages whenever `budget` bytes of them have been looked at."""

    def __init__(self, view: mmap.mmap, budget: int) -> None:
        self._view, self._budget = view, budget
        self._looked, self._limit = 0, resident() + budget

    def looked_at(self, samples: int) -> None:
        """Note that so many samples were read."""
        self._looked += samples
        if self._looked * AROUND < self._budget:
            return
        self._looked = 0
        if resident() > self._limit:
            drop(self._view)
            self._limit = resident() + self._budget


_pages: weakref.WeakKeyDictionary[mmap.mmap, Pages] = (
    weakref.WeakKeyDictionary()
)  # the system's account is of a process, too


def pages_of(view: mmap.mmap) -> Pages:
    """Return what lets go of a mapping's pages, the same for all who read it."""
    if view not in _pages:
        _pages[view] = Pages(view, BUDGET)
    return _pages[view]
