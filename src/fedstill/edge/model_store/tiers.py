"""Rows, the tiers of memory that have copies of them, and buffers on the host."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import Tensor

from .layout import ALIGN, Layout


class Event(Protocol):
    """A mark on a stream of the device, as torch.cuda.Event is."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """Return whether it has happened."""


class Row:
    """A client's memory as bytes, and the tiers that have a copy of it."""

    def __init__(self, client: int, layout: Layout) -> None:
        self.client, self.layout = client, layout
        self.device: Tensor | None = None
        self.uploaded: Event | None = None  # when the copy on the device is complete
        self.host: Slot | None = None
        self.reading: Future[None] | None = None  # fills the copy on the host
        self.writing: Future[int] | None = None  # writes the file `target`, and returns its checksum
        self.leaving = False  # the copy on the host is dropped when it is written
        self.target: Path | None = None
        self.file: Path | None = None
        self.checksum = 0


class Tier:
    """A tier of memory: its limit and use in bytes, and its rows in LRU order."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.watermark = limit - limit // 8  # bytes in use at which rows begin to leave for a slower tier
        self.rows: OrderedDict[int, Row] = OrderedDict()

    def add(self, row: Row) -> None:
        """Count the row's copy in this tier, as the most recently used."""
        if row.layout.bytes:
            self.used += row.layout.bytes
            self.rows[row.client] = row

    def remove(self, row: Row) -> None:
        """Uncount the row's copy in this tier."""
        self.used -= row.layout.bytes
        self.rows.pop(row.client, None)

    def touch(self, row: Row) -> None:
        """Mark the row as the most recently used."""
        if row.client in self.rows:
            self.rows.move_to_end(row.client)


class Slot:
    """A buffer on the host; `filled` is when its bytes have arrived, `readers` are the device's copies from it."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = self.buffer = storage  # the buffer is as much of the storage as the row needs
        self.filled: Event | None = None
        self.readers: list[Event] = []

    def add_reader(self, until: Event | None) -> None:
        """Note that the device copies from here until this event."""
        if until is not None:
            self.readers = [*(event for event in self.readers if not event.query()), until]


class PinnedSlots:
    """Page-locked slots for reuse, cut from slabs of about sixteen, since torch rounds an allocation up to a power of two.

    `allocate(count, size)` makes a slab.
    """

    def __init__(self, limit: int, allocate: Callable[[int, int], Tensor]) -> None:
        self.limit, self.allocated, self.allocate = limit, 0, allocate
        self.free: dict[int, deque[Slot]] = {}

    def take(self, size: int) -> Slot:
        """Return a free slot; its `readers` must have ended before it is written."""
        step = 1 << max(ALIGN.bit_length() - 1, size.bit_length() - 5)
        rounded = -(-size // step) * step
        free = self.free.setdefault(rounded, deque())
        if not free:
            slab = 1 << max(20, (16 * rounded - 1).bit_length())
            count = max(1, min(slab, self.limit - self.allocated) // rounded)
            self.allocated += count * rounded
            free += [Slot(storage) for storage in self.allocate(count, rounded)]
        slot = free.popleft()
        slot.buffer = slot.storage[:size]
        return slot

    def give_back(self, slot: Slot) -> None:
        """Make a slot free again."""
        if slot.filled is not None:
            slot.readers.append(slot.filled)
            slot.filled = None
        self.free[len(slot.storage)].append(slot)
