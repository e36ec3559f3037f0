"""Write files so that a kill, a power cut or a full disk leaves each either as it was or as it should be.

A sealed file is JSON with a checksum of its own, so that one changed digit is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .reading import Missing, Unreadable, open_regular, read_json

PART = ".part"  # ends the name of a file that is being written
SEAL = "sha256"  # the checksum's name in a sealed file
SEALED_BYTES = 1 << 30  # of a sealed file at most: the index of a checkpoint names what every client keeps


class Damaged(ValueError):
    """A file is not as it was written. The message says what is wrong with it, without its name."""


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


def seal(record: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return a record as JSON with a checksum."""
    return (json.dumps({**record, SEAL: _checksum(record)}, indent=indent, allow_nan=False) + "\n").encode()


def unseal(path: Path) -> dict[str, Any]:
    """Return the record of a sealed file; raise `Damaged` where it is missing or not as it was written."""
    try:
        record = read_json(path, SEALED_BYTES, depth=100)
    except Missing:
        raise Damaged("it is missing") from None
    except Unreadable as error:
        raise Damaged(f"it should be {error}") from None
    if record.pop(SEAL, None) != _checksum(record):
        raise Damaged("its checksum is wrong")
    return record


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, of which little is in memory at once; raise `Damaged` where it is no regular file."""
    try:
        with open_regular(path) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except Unreadable as error:
        raise Damaged(f"it should be {error}") from None


def _checksum(record: Mapping[str, Any]) -> str:
    return digest(json.dumps(record, sort_keys=True).encode())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Within, have errors of the system name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error
