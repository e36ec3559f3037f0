"""The memory hierarchy of the Model Store: device, host and disk, and the moves of rows between them.

A row never changes once it is filled: a new memory is a new row. So the copies of a row in several tiers cannot differ, leaving
a tier costs nothing where another has a copy, and a tree that was returned to a caller stays valid.

A full tier evicts its least recently used row to the next slower one. Copies between device and host run on streams of their
own, those to and from the disk in threads; only the caller's thread changes the books. On a CPU, device and host are one memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import TrainingError
from .disk import Disk, cancel
from .gpu import Gpu
from .layout import Layout, copy_row
from .tiers import Event, PinnedSlots, Row, Slot, Tier


class Hierarchy:
    """Rows in three tiers. `device_bytes` None means that there is no tier above the host."""

    def __init__(self, gpu: Gpu | None, disk: Disk, device_bytes: int | None, host_bytes: int) -> None:
        self._gpu, self.disk = gpu, disk
        self.has_device_tier = device_bytes is not None
        self.device, self.host = Tier(device_bytes or 0), Tier(host_bytes)
        self.pinned = None if gpu is None else PinnedSlots(host_bytes, gpu.allocate_pinned)
        self.writing: deque[Row] = deque()  # in the order of their jobs
        self.leaving = 0  # bytes of the host tier that stay only until they are written

    # ---- one row -----------------------------------------------------------------------------------------------------
    def insert(self, row: Row, source: Tensor, owned: bool, ready: Event | None = None) -> None:
        """Fill a new row with the bytes of `source`: by reference where we own it, else by a copy."""
        size = row.layout.bytes
        if not size or (self.has_device_tier and size <= self.device.limit):
            self.reserve_device(size)
            row.device = source if owned else source.clone()
            row.uploaded = self.record() if size else None
            self.device.add(row)
        elif self.has_device_tier:
            self.download(row, source, ready or self.record())
        else:
            self.reserve_host(size)
            row.host = Slot(source if owned else source.clone())
            self.host.add(row)

    def remove(self, row: Row) -> None:
        """Remove the row from every tier."""
        if row.writing is not None:
            cancel(row.writing)
            self.writing.remove(row)
            row.writing = None
        if row.host is not None:
            self.drop_host(row)
        if row.device is not None:
            self.drop_device(row)
        for file in (row.file, row.target):
            if file is not None:
                self.disk.begin_delete(file)
        row.file = row.target = None

    def touch(self, row: Row) -> None:
        """Mark the row as the most recently used. One that is being written stays on the host after all."""
        if row.leaving:
            row.leaving = False
            self.leaving -= row.layout.bytes
            self.host.rows[row.client] = row
        self.host.touch(row)
        self.device.touch(row)

    def on_device(self, row: Row) -> Tensor:
        """Return the row's bytes on the device, ready for the current stream."""
        self.touch(row)
        if row.device is not None:
            return self._await_upload(row.device, row.uploaded)
        if not self.has_device_tier:
            return self.on_host(row).buffer
        self.on_host(row)
        fits = row.layout.bytes <= self.device.limit and self.reserve_device(row.layout.bytes)
        self.on_host(row)  # making room on the device may have evicted it from the host
        buffer, uploaded = self._upload(row)
        if fits:
            row.device, row.uploaded = buffer, uploaded
            self.device.add(row)
        return buffer

    def on_host(self, row: Row) -> Slot:
        """Return the row's slot on the host, read from the disk where there is no copy in memory."""
        if row.host is None:
            self.begin_read(row)
        assert row.host is not None
        if row.reading is not None:
            try:
                row.reading.result()
            except BaseException:
                self.drop_host(row)
                raise
            row.reading = None
        return row.host

    def copy_to(self, target: Tensor, row: Row, layout: Layout) -> None:
        """Copy the row to a row of another layout on the device."""
        self.touch(row)
        if row.device is not None:
            copy_row(self._await_upload(row.device, row.uploaded), row.layout, target, layout)
            return
        slot = self.on_host(row)
        if self._gpu is not None:
            self._gpu.wait(slot.filled)
        copy_row(slot.buffer, row.layout, target, layout)
        slot.add_reader(self.record())

    def to_host(self, row: Row) -> Tensor:
        """Return the row's bytes on the host, in memory that is not reused; no row moves for it."""
        if row.host is not None:
            slot = self.on_host(row)
            if slot.filled is not None:
                slot.filled.synchronize()
            return slot.buffer if self.pinned is None else slot.buffer.clone()
        if row.device is not None:
            return self._await_upload(row.device, row.uploaded).cpu()
        buffer = torch.empty(row.layout.bytes, dtype=torch.uint8)
        self.disk.read(row.client, self._file(row), buffer, row.checksum, ())
        return buffer

    def drop_device(self, row: Row) -> None:
        """Remove the row from the device."""
        self.device.remove(row)
        row.device = row.uploaded = None

    def drop_host(self, row: Row) -> None:
        """Remove the row from the host."""
        if row.reading is not None:
            cancel(row.reading)
            row.reading = None
        if row.leaving:
            row.leaving = False
            self.leaving -= row.layout.bytes
        self.host.remove(row)
        if row.host is not None and self.pinned is not None:
            self.pinned.give_back(row.host)
        row.host = None

    # ---- room --------------------------------------------------------------------------------------------------------
    def reserve_device(self, size: int, wait: bool = True) -> bool:
        """Make room on the device by eviction. Return False where the host has no room for what leaves, unless `wait`."""
        while self.device.rows and self.device.used + size > self.device.limit:
            row = next(iter(self.device.rows.values()))
            if row.host is None and row.file is None:
                assert row.device is not None
                if not self.download(row, row.device, row.uploaded, wait):
                    return False
            self.drop_device(row)
        return True

    def reserve_host(self, size: int, wait: bool = True) -> bool:
        """Make room on the host by eviction. Return False where that takes waiting for the disk, unless `wait`.

        Rows begin to leave when an eighth is still free, so that there is seldom something to wait for.
        """
        self.settle()
        host = self.host
        while host.rows and host.used - self.leaving + size > host.watermark:
            row = next(iter(host.rows.values()))
            if row.file is not None or (row.device is not None and row.writing is None):
                self.drop_host(row)
                continue
            del host.rows[row.client]
            row.leaving = True
            self.leaving += row.layout.bytes
            if row.writing is None:
                self._begin_write(row)
        while self.writing and host.used + size > host.limit:
            if not wait:
                return False
            self.settle(at_least=1)
        return True

    def settle(self, at_least: int = 0) -> None:
        """Book the rows that have reached the disk; wait for `at_least` of them."""
        while self.writing:
            row = self.writing[0]
            assert row.writing is not None
            if at_least <= 0 and not row.writing.done():
                return
            job, row.writing = row.writing, None
            self.writing.popleft()
            at_least -= 1
            try:
                row.checksum = job.result()
            except BaseException:
                self.touch(row)  # it stays on the host
                raise
            row.file, row.target = row.target, None
            if row.leaving:
                self.drop_host(row)

    # ---- moves -------------------------------------------------------------------------------------------------------
    def download(self, row: Row, source: Tensor, ready: Event | None, wait: bool = True) -> bool:
        """Begin to copy bytes from the device, once they are ready there, to the row's slot on the host."""
        size = row.layout.bytes
        if not self.reserve_host(size, wait):
            return False
        if self._gpu is None or self.pinned is None:
            row.host = Slot(source.clone())
        else:
            row.host = self.pinned.take(size)
            after = [event for event in (*row.host.readers, ready) if event is not None]
            row.host.filled, row.host.readers = self._gpu.download(source, row.host.buffer, after), []
        self.host.add(row)
        return True

    def _upload(self, row: Row, ahead: bool = False) -> tuple[Tensor, Event | None]:
        """Begin to copy a row from the host to the device: on the caller's stream, or beside it where `ahead`."""
        slot = row.host
        assert slot is not None
        if self._gpu is None:
            return slot.buffer.clone(), None
        buffer, uploaded = self._gpu.upload(slot.buffer, slot.filled, ahead)
        slot.add_reader(uploaded)
        return buffer, uploaded

    def _begin_write(self, row: Row) -> None:
        assert row.host is not None
        row.target = self.disk.new_file(row.client)
        row.writing = self.disk.begin_write(row.client, row.target, row.host.buffer, row.host.filled)
        self.writing.append(row)

    def begin_read(self, row: Row, wait: bool = True) -> bool:
        """Begin to read a row from the disk. Return False where the host has no room for it, unless `wait`."""
        file = self._file(row)
        if not self.reserve_host(row.layout.bytes, wait):
            return False
        if self.pinned is None:
            row.host = Slot(torch.empty(row.layout.bytes, dtype=torch.uint8))
        else:
            row.host = self.pinned.take(row.layout.bytes)
        readers = tuple(row.host.readers)  # they stay noted: a job cancelled before it runs has waited for none of them
        row.reading = self.disk.begin_read(row.client, file, row.host.buffer, row.checksum, readers)
        self.host.add(row)
        return True

    def read_ahead(self, rows: Sequence[Row]) -> None:
        """Begin to read those of the rows that are only on the disk, as many as the host has room for together."""
        rows = [row for row in rows if row.device is None] if self.disk.folder is not None else []
        for row in reversed(rows):
            self.touch(row)
        total = 0
        for row in rows:
            total += row.layout.bytes
            if total > self.host.watermark or (row.host is None and not self.begin_read(row, wait=False)):
                return

    def prefetch(self, rows: Sequence[Row]) -> None:
        """Begin to copy rows on the host to the device and rows on the disk to the host, as far as there is room."""
        for row in reversed(rows):
            self.touch(row)  # so that they do not evict one another, the first ones least of all
        total = 0
        for row in rows if self.has_device_tier else ():
            total += row.layout.bytes
            if total > self.device.limit:
                break
            if row.device is not None or row.host is None or (row.reading is not None and not row.reading.done()):
                continue
            if not self.reserve_device(row.layout.bytes, wait=False) or row.host is None:
                break
            self.on_host(row)
            row.device, row.uploaded = self._upload(row, ahead=True)
            self.device.add(row)
        self.read_ahead(rows)

    def close(self) -> None:
        """Drop everything and remove what lies on the disk."""
        self.disk.close()
        self.writing.clear()
        self.device, self.host, self.pinned = Tier(0), Tier(0), None

    def record(self) -> Event | None:
        """Return a mark on the current stream of the device."""
        return None if self._gpu is None else self._gpu.record()

    def _await_upload(self, buffer: Tensor, uploaded: Event | None) -> Tensor:
        if self._gpu is not None:
            self._gpu.wait(uploaded, buffer)
        return buffer

    def _file(self, row: Row) -> Path:
        if row.file is None:
            raise TrainingError(f"client {row.client}: its memory was lost when a new one could not be kept")
        return row.file
