"""Decoded samples in a folder of bounded size on disk, so that images are decoded once and never lie in memory all together.

    CACHE/KEY.npy    one array, named by a digest of what it was made of (paths, sizes and times of files, the images' size, …)

A file is written under another name and renamed when it is whole. Whatever was not used for the longest time goes when there
is no more room; a process that still reads it goes on reading. Only the user may read the folder: it has the data's content.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown
from ..core.memory import in_words, size_in
from .files import array_header, regular, wrong
from .mapped import create, open_map, release
from .targets import Array

FOLDER, SIZE = "FEDSTILL_CACHE", "FEDSTILL_CACHE_SIZE"
USUAL = "~/.cache/fedstill/decoded"
LARGEST = 64 << 30  # bytes that all files may take, where the variable says nothing else
LEFT = 1 << 30  # bytes of the disk to leave free
NAME = re.compile(r"\.?[0-9a-f]{64}\.(?:npy|(?P<pid>[0-9]+)\.part)")  # of a whole file, or of one that is being written
FORMAT = 1  # raised when what is made of the same files changes


def folder() -> Path:
    """Return the folder of decoded samples: the variable FEDSTILL_CACHE, else one in the user's cache."""
    return Path(os.environ.get(FOLDER) or USUAL).expanduser()


def digest(kind: str, root: Path, paths: Sequence[Path], *settings: object) -> str:
    """Return a name for what is made of these files: another one as soon as one of them has changed."""
    found = hashlib.sha256(f"{FORMAT} {kind} {os.path.realpath(root)} {settings}\n".encode())
    for path in paths:
        try:
            about = path.stat()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise wrong(path, "a file that exists" if missing else f"a readable file ({error.strerror})") from None
        changed = (about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        found.update(f"{os.fsencode(os.path.relpath(path, root))!r} {changed}\n".encode())
    return found.hexdigest()


def check_unchanged(key: str, kind: str, root: Path, paths: Sequence[Path], *settings: object) -> None:
    """Refuse files of which one has changed since they were named by `digest`, while they were read."""
    if digest(kind, root, paths, *settings) != key:
        raise wrong(root, "left alone while its files are read: one of them has changed")


def find(key: str) -> Array | None:
    """Return the array of this name as one in a file; None where it is not here, or not whole."""
    path = folder() / f"{key}.npy"
    try:
        with regular(path) as file:
            dtype, shape, fortran, start = array_header(file, str(path), "it")
            if fortran or start + math.prod(shape) * dtype.itemsize != os.fstat(file.fileno()).st_size:
                return None
            found = open_map(file, start, dtype, shape)
        os.utime(path, ns=(time.time_ns(),) * 2)  # it is in use
    except (InputError, OSError, ValueError):
        return None
    return found


def make(key: str, dtype: Any, shape: tuple[int, ...], write: Callable[[Array], None]) -> Array:
    """Return the array of this name, which `write` fills, as one in a file."""
    kind, place, header = np.dtype(dtype), folder(), io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    size = header.tell() + math.prod(shape) * kind.itemsize
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_room(place, size)
        partial = place / f".{key}.{os.getpid()}.part"
        partial.unlink(missing_ok=True)
        try:
            out = create(partial, header.getvalue(), kind, shape)
            write(out)
            release(out)
            del out
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, place / f"{key}.npy")
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        right = f"a folder with room for {in_words(size)} ({error.strerror or error}); memory_map off needs none"
        raise InputError(FOLDER, str(place), right) from None
    found = find(key)
    if found is None:
        raise wrong(place / f"{key}.npy", "left alone by others while it is written")
    return found


def limit() -> int:
    """Return the bytes that all files may take together."""
    text = os.environ.get(SIZE, "")
    return size_in(SIZE, text) if text else LARGEST


def _make_room(place: Path, size: int) -> None:
    """Delete what was not used for the longest time until there is room for so many bytes; refuse what never has room."""
    most = limit()
    if size > most:
        right = f"at least {in_words(size)} for these samples, or memory_map off with enough memory"
        raise InputError(SIZE, Shown(in_words(most)), right)
    ours = {path: match for path in place.iterdir() if (match := NAME.fullmatch(path.name))}  # others' files stay
    for path, match in ours.items():
        if match["pid"] and not _lives(int(match["pid"])):  # of a process that was ended
            path.unlink(missing_ok=True)
    whole = [(path.stat(), path) for path, match in ours.items() if not match["pid"]]
    files = sorted(((about.st_mtime_ns, about.st_size, path) for about, path in whole), key=lambda entry: entry[0])
    taken = sum(each for _, each, _ in files)
    for _, each, path in files:
        if taken + size <= most and shutil.disk_usage(place).free >= size + LEFT:
            break
        path.unlink(missing_ok=True)
        taken -= each


def _lives(pid: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True
