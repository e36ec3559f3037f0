"""The places of the Model Store: a client's row of bytes, the tiers that hold rows, page-locked slots, and the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.errors import TrainingError
from .layout import ALIGN, Layout

READERS = 4  # threads that read rows from the disk
Event: TypeAlias = torch.cuda.Event


class Row:
    """One client's memory, and the places that have a copy of it."""

    def __init__(self, client: int, layout: Layout) -> None:
        self.client, self.layout = client, layout
        self.device: Tensor | None = None
        self.landed: Event | None = None  # when the copy on the device is complete
        self.host: Slot | None = None
        self.reading: Future[None] | None = None  # fills the copy on the host
        self.writing: Future[int] | None = None  # makes the file `target`, and gives its checksum
        self.leaving = False  # the copy on the host goes when it is written
        self.target: Path | None = None
        self.file: Path | None = None
        self.crc = 0


class Tier:
    """A tier of memory: its rows, longest not asked for first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.free_until = limit - limit // 8  # where rows begin to leave for a slower tier
        self.rows: OrderedDict[int, Row] = OrderedDict()

    def enter(self, row: Row) -> None:
        """The row has a copy here now."""
        if row.layout.bytes:
            self.used += row.layout.bytes
            self.rows[row.client] = row

    def leave(self, row: Row) -> None:
        """It has none any more."""
        self.used -= row.layout.bytes
        self.rows.pop(row.client, None)

    def touch(self, row: Row) -> None:
        """It was asked for."""
        if row.client in self.rows:
            self.rows.move_to_end(row.client)


class Slot:
    """A buffer on the host. `filled` is when its bytes are there; `busy`, what still reads them on a GPU."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = self.whole = buffer
        self.filled: Event | None = None
        self.busy: list[Event] = []

    def used(self, until: Event | None) -> None:
        """Note that a copy from here runs until then."""
        if until is not None:
            self.busy = [*(event for event in self.busy if not event.query()), until]  # type: ignore[no-untyped-call]


class Gpu:
    """The device, with a stream for copies to it and one for copies from it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.up, self.down = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """The caller's stream."""
        return torch.cuda.current_stream(self.device)


class Pinned:
    """Page-locked slots. They come from slabs of about sixteen, since torch rounds each allocation up to a power of two."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.free: dict[int, deque[Slot]] = {}

    def take(self, size: int) -> Slot:
        """A slot; what is in its `busy` must have ended before it is written."""
        step = 1 << max(ALIGN.bit_length() - 1, size.bit_length() - 5)
        room = -(-size // step) * step
        free = self.free.setdefault(room, deque())
        if not free:
            slab = 1 << max(20, (16 * room - 1).bit_length())
            count = max(1, min(slab, self.limit - self.held) // room)
            self.held += count * room
            free += [Slot(part) for part in torch.empty((count, room), dtype=torch.uint8, pin_memory=True)]
        slot = free.popleft()
        slot.buffer = slot.whole[:size]
        return slot

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        if slot.filled is not None:
            slot.busy.append(slot.filled)
            slot.filled = None
        self.free[len(slot.whole)].append(slot)


# ---- the disk --------------------------------------------------------------------------------------------------------
class Disk:
    """A folder of rows, a file each, and the threads that write and read them. It goes when the object goes."""

    def __init__(self, folder: str | Path | None) -> None:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder, self.files = Path(tempfile.mkdtemp(prefix="fedstill-memories-", dir=folder)), 0
        self.writer, self.reader = ThreadPoolExecutor(1), ThreadPoolExecutor(READERS)
        self.close = weakref.finalize(self, _remove, self.folder, self.writer, self.reader)

    def new_file(self, client: int) -> Path:
        """A name that no row has had, so that an old row's file is never taken for a new one's."""
        self.files += 1
        return self.folder / f"{client}-{self.files}.row"


def _remove(folder: Path, *pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        with contextlib.suppress(RuntimeError):  # the last reference may go in one of its own threads
            pool.shutdown(wait=True, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)


def stop(job: Future[Any]) -> None:
    """Have a job neither running nor waiting to run; how it ended does not matter."""
    if not job.cancel():
        wait([job])


def write_row(client: int, file: Path, buffer: Tensor, filled: Event | None) -> int:
    """Write a row whole or not at all, and give its checksum."""
    if filled is not None:
        filled.synchronize()
    data, part = buffer.numpy().data, file.with_suffix(".part")
    try:
        part.write_bytes(data)
        part.replace(file)
    except OSError as error:
        raise TrainingError(f"client {client}: its memory cannot be written to {file}: {error.strerror}") from error
    return zlib.crc32(data)


def read_row(client: int, file: Path, buffer: Tensor, crc: int, busy: Sequence[Event] = ()) -> None:
    """Fill a buffer from a file, which must be what was written."""
    for event in busy:
        event.synchronize()
    data = buffer.numpy().data
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            whole = size == len(data) == stream.readinto(data)
    except OSError as error:
        raise TrainingError(f"client {client}: its memory cannot be read from {file}: {error.strerror}") from error
    if not whole:
        raise TrainingError(f"client {client}: its memory in {file} is damaged: {size} bytes instead of {len(data)}")
    if zlib.crc32(data) != crc:
        raise TrainingError(
            f"client {client}: its memory in {file} is damaged: the checksum is not that of what was kept"
        )


def available_memory() -> int:
    """Bytes of memory that this process may still take; a container's limit counts."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found
