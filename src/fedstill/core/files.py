"""Write files so that a kill, a power cut or a full disk leaves each either as it was or as it should be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably; where that fails leave nothing behind."""
    make_folder(path.parent)
    temporary = path.with_name(path.name + PART)
    with _named(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append to a file durably; where that fails cut the file back to what it was."""
    with _named(path):
        new = not path.exists()
        with path.open("ab", buffering=0) as file:
            length = file.tell()
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(length)
                raise
        if new:
            sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, durably."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in new:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: without it a renamed file may be gone after a power cut."""
    with contextlib.suppress(OSError):  # some file systems, and Windows, cannot
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Within, have errors of the system name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error
