"""Rows on disk: a file each, written completely or not at all, and read only if it is what was written."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from ...core.errors import TrainingError
from .tiers import Event

READERS = 4  # threads that read rows
Write: TypeAlias = Callable[[int, Path, Tensor, Event | None], int]  # as write_row
Read: TypeAlias = Callable[[int, Path, Tensor, int, Sequence[Event]], None]  # as read_row


def write_row(client: int, file: Path, buffer: Tensor, filled: Event | None) -> int:
    """Write a client's row completely or not at all, once its buffer is filled, and return its checksum."""
    if filled is not None:
        filled.synchronize()
    data, partial = buffer.numpy().data, file.with_suffix(".part")
    try:
        partial.write_bytes(data)
        partial.replace(file)
    except OSError as error:
        raise TrainingError(f"client {client}: its memory cannot be written to {file}: {error.strerror}") from error
    return zlib.crc32(data)


def read_row(client: int, file: Path, buffer: Tensor, checksum: int, after: Sequence[Event] = ()) -> None:
    """Fill a buffer from a client's file, once the events have happened; the file must be what was written."""
    for event in after:
        event.synchronize()
    data = buffer.numpy().data
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            complete = size == len(data) == stream.readinto(data)
    except OSError as error:
        raise TrainingError(f"client {client}: its memory cannot be read from {file}: {error.strerror}") from error
    if not complete:
        raise TrainingError(f"client {client}: its memory in {file} is damaged: {size} bytes instead of {len(data)}")
    if zlib.crc32(data) != checksum:
        raise TrainingError(
            f"client {client}: its memory in {file} is damaged: the checksum is not that of what was kept"
        )


class Disk:
    """A temporary folder of rows inside `parent`, and the threads that write and read them.

    The folder is made with the first file, and removed by `close` or with the object. The background jobs hold no
    reference to the object, so that it can go while some are waiting.
    """

    def __init__(self, parent: str | Path | None = None, *, write: Write = write_row, read: Read = read_row) -> None:
        self.parent, self.write, self.read = parent, write, read
        self.folder: Path | None = None
        self.files = 0
        self._writer, self._readers = ThreadPoolExecutor(1), ThreadPoolExecutor(READERS)
        self._remove: Callable[[], object] | None = None

    def new_file(self, client: int) -> Path:
        """Return a path that no row has had, so that an old row's file is never taken for a new one's."""
        if self.folder is None:
            if self.parent is not None:
                Path(self.parent).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="fedstill-memories-", dir=self.parent))
            self._remove = weakref.finalize(self, _remove, self.folder, self._writer, self._readers)
        self.files += 1
        return self.folder / f"{client}-{self.files}.row"

    def begin_write(self, client: int, file: Path, buffer: Tensor, filled: Event | None) -> Future[int]:
        """Write a row in the background; the result is its checksum."""
        return self._writer.submit(self.write, client, file, buffer, filled)

    def begin_read(
        self, client: int, file: Path, buffer: Tensor, checksum: int, after: Sequence[Event]
    ) -> Future[None]:
        """Fill a buffer from a file in the background."""
        return self._readers.submit(self.read, client, file, buffer, checksum, after)

    def begin_delete(self, file: Path) -> None:
        """Delete a file in the background."""
        self._readers.submit(file.unlink, missing_ok=True)

    def wait_for_readers(self) -> None:
        """Wait until nothing is being read or deleted. Nothing can be read afterwards."""
        self._readers.shutdown(wait=True)

    def close(self) -> None:
        """Remove the folder."""
        if self._remove is not None:
            self._remove()


def _remove(folder: Path, *pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        with contextlib.suppress(RuntimeError):  # the last reference may go in one of its own threads
            pool.shutdown(wait=True, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)


def cancel(job: Future[Any]) -> None:
    """Cancel a job, or wait for it to end where it is running; its outcome does not matter."""
    if not job.cancel():
        wait([job])
