"""The Model Store: what each client keeps between rounds, in a bank of three tiers: device, pinned host, disk.

A memory is one row of bytes, so that to keep or to fetch it is one copy; a `Layout` (layout.py) says where in it each tensor
lies, and equal layouts are one object. A row never changes once it is filled: a new memory is a new row. So the copies of a row
in several tiers (tiers.py) cannot differ, leaving a tier costs nothing where another has a copy, and a tree that was handed out
stays valid.

Where a tier is full, the row that was longest not asked for goes one down. Copies between device and host run on streams of their
own, those to and from the disk in threads; only the caller's thread keeps the books. On a CPU, device and host are one memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import TrainingError
from ...core.tree import Tree, leaves
from .layout import Layout, Spec, fitted, refit, spec_of
from .tiers import READERS, Disk, Event, Gpu, Pinned, Row, Slot, Tier, available_memory, read_row, stop, write_row

NONE: frozenset[str] = frozenset()


class ModelStore:
    """Memories by client; every client starts from the same one, and costs nothing until it keeps another.

    On a GPU, use it from one thread; what it gives is ready for the stream that is current at the call.
    """

    def __init__(
        self,
        initial: Tree,
        *,
        device: torch.device | str | None = None,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        folder: str | Path | None = None,
        sharing: int = 1,
    ) -> None:
        """`device` is where memories are wanted (None: where `initial` lies).

        Rows take at most `device_bytes` there (None: a quarter of what is free) and `host_bytes` on the host (None: half of what
        is available; one row always fits), divided among so many stores as `sharing` says. The rest lies in a temporary folder,
        made inside `folder` when first needed, removed by `close` or at exit. On a CPU there is a tier above the host only where
        `device_bytes` is given.
        """
        first = next((leaf for _, leaf in leaves(initial)), None)
        at = torch.device(device or (first.device if first is not None else "cpu"))
        self._gpu = Gpu(at) if at.type == "cuda" else None
        self._at = at if self._gpu is None else self._gpu.device
        if device_bytes is None and self._gpu is not None:
            device_bytes = torch.cuda.mem_get_info(self._at)[0] // 4
        self._split = device_bytes is not None  # whether rows on the device are other memory than rows on the host
        self._device = Tier((device_bytes or 0) // sharing)
        self._host = Tier((available_memory() // 2 if host_bytes is None else host_bytes) // sharing)
        self._pinned = Pinned(self._host.limit) if self._gpu is not None else None
        self._folder = folder
        self._disk: Disk | None = None
        self._writing: deque[Row] = deque()  # in the order of their jobs
        self._leaving = 0  # bytes of the host tier that are only kept until they are written
        self._layouts: weakref.WeakValueDictionary[Spec, Layout] = weakref.WeakValueDictionary()
        self._rows: dict[int, Row] = {}
        self._closed = False
        with torch.no_grad():
            layout = self._layout(spec_of(initial))
            self._initial = Row(-1, layout)
            self._initial.device = layout.pack(self._empty(layout.bytes), initial)
            self._initial.landed = self._now()
            self._start = layout.tree(self._initial.device)

    # ---- what is asked for -------------------------------------------------------------------------------------------
    def get(self, client: int) -> Tree:
        """The client's memory on the device. Hooks do not change their arguments, so this is not a copy."""
        row = self._row(client)
        here = self._here(row)
        return self._start if row is self._initial else row.layout.tree(here)

    @torch.no_grad()
    def put(self, client: int, memory: Tree) -> None:
        """Keep a copy of a new memory."""
        layout = self._layout(spec_of(memory))
        self._keep(client, layout, layout.pack(self._empty(layout.bytes), memory), own=True)

    @torch.no_grad()
    def gather(self, clients: Sequence[int], per_sample: frozenset[str] = NONE, rows: int = 0) -> Tree:
        """The clients' memories as one tree with a leading client axis; entries in `per_sample` as `tree.fit_rows` fits them.

        The leaves are views of one buffer that belongs to the caller.
        """
        found = [self._row(client) for client in clients]
        layout = self._fitted(found[0].layout if found else self._initial.layout, per_sample, rows)
        for client, row in zip(clients, found, strict=True):
            if row.layout is not layout and self._fitted(row.layout, per_sample, rows) is not layout:
                raise ValueError(f"the memories of clients {clients[0]} and {client} differ in their names or shapes")
        if not layout.bytes:  # nothing is remembered, nothing moves
            flat = self._empty(len(found), 0)
        elif found and all(row.device is not None and row.layout is layout for row in found):
            flat = torch.stack([self._here(row).view(torch.int64) for row in found]).view(torch.uint8)
        else:
            flat = self._empty(len(found), layout.bytes)
            for i, place in enumerate(flat):
                self._read_ahead(found[i : i + 2 * READERS])
                self._copy(found[i], place, layout)
        return layout.tree(flat)

    @torch.no_grad()
    def scatter(
        self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str] = NONE, sizes: Sequence[int] = ()
    ) -> None:
        """Keep row i of a stacked tree as client i's memory, its entries in `per_sample` fitted to `sizes[i]` rows."""
        for name, leaf in leaves(memory):
            if leaf.ndim == 0 or len(leaf) != len(clients):
                raise ValueError(f"{name} has the shape {tuple(leaf.shape)} in a stack of {len(clients)} clients")
        whole = self._layout(spec_of(memory, stacked=True))
        flat = whole.pack(self._empty(len(clients), whole.bytes), memory)
        packed = self._now() if whole.bytes else None
        ragged = any(name in per_sample for name in memory)
        rows = sizes if ragged else [0] * len(clients)
        for client, stacked, size in zip(clients, flat, rows, strict=True):
            layout = self._fitted(whole, per_sample, size) if ragged else whole
            if layout is whole:
                self._keep(client, layout, stacked, own=False, ready=packed)
            else:
                self._keep(client, layout, refit(stacked, whole, self._empty(layout.bytes), layout), own=True)

    @torch.no_grad()
    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to bring these clients' rows up, as far as the tiers have room, without waiting for it.

        Rows on the host go to the device, rows on the disk to the host: `gather` takes them to the device from there.
        """
        found = [row for client in dict.fromkeys(clients) if (row := self._row(client)) is not self._initial]
        for row in reversed(found):
            self._touch(row)  # so that they do not push one another out, the first ones least of all
        total = 0
        for row in found if self._split else ():
            total += row.layout.bytes
            if total > self._device.limit:
                break
            if row.device is not None or row.host is None or (row.reading is not None and not row.reading.done()):
                continue
            if not self._device_room(row.layout.bytes, patient=False) or row.host is None:
                break
            self._on_host(row)
            row.device, row.landed = self._up(row, self._gpu.up if self._gpu else None)
            self._device.enter(row)
        self._read_ahead(found)

    def items(self) -> Iterator[tuple[int, Tree]]:
        """Every memory that was kept, by ascending client, on the host; one at a time, and no row moves for it."""
        for client in sorted(self._rows):
            row = self._row(client)
            yield client, row.layout.tree(self._bytes(row))

    def stats(self) -> dict[str, dict[str, int]]:
        """Clients and bytes by tier. A client counts in each tier that has a copy of its row."""
        self._settle()
        tiers: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
        for row in self._rows.values():
            for tier, held in (("device", row.device), ("host", row.host), ("disk", row.file)):
                if held is not None:
                    tiers[tier].append(row.layout.bytes)
        return {tier: {"clients": len(sizes), "bytes": sum(sizes)} for tier, sizes in tiers.items()}

    def close(self) -> None:
        """Forget everything and remove what lies on the disk. The store cannot be used afterwards."""
        self._closed = True
        if self._disk is not None:
            self._disk.close()
        self._writing.clear()
        self._rows.clear()
        self._device, self._host, self._pinned = Tier(0), Tier(0), None

    # ---- a row, in its places ----------------------------------------------------------------------------------------
    def _row(self, client: int) -> Row:
        if self._closed:
            raise RuntimeError("this Model Store has been closed")
        return self._rows.get(client, self._initial)

    def _keep(self, client: int, layout: Layout, source: Tensor, own: bool, ready: Event | None = None) -> None:
        """Make `source` the client's row: as it is where it is our own memory, else a copy."""
        if self._row(client) is not self._initial:
            self._forget(self._rows[client])
        row, size = Row(client, layout), layout.bytes
        if not size or (self._split and size <= self._device.limit):
            self._device_room(size)
            row.device = source if own else source.clone()
            row.landed = self._now() if size else None
            self._device.enter(row)
        elif self._split:
            self._down(row, source, ready or self._now())
        else:
            self._host_room(size)
            row.host = Slot(source if own else source.clone())
            self._host.enter(row)
        self._rows[client] = row

    def _here(self, row: Row) -> Tensor:
        """The row's bytes where training happens, ready for the current stream."""
        self._touch(row)
        if row.device is not None:
            return self._landed(row.device, row.landed)
        if not self._split:
            return self._on_host(row).buffer
        self._on_host(row)
        fits = row.layout.bytes <= self._device.limit and self._device_room(row.layout.bytes)
        self._on_host(row)  # making room on the device may have taken it from the host
        here, landed = self._up(row, None)
        if fits:
            row.device, row.landed = here, landed
            self._device.enter(row)
        return here

    def _landed(self, buffer: Tensor, landed: Event | None) -> Tensor:
        if self._gpu is not None and landed is not None:
            stream = self._gpu.current()
            stream.wait_event(landed)
            buffer.record_stream(stream)
        return buffer

    def _copy(self, row: Row, place: Tensor, layout: Layout) -> None:
        """The row into its place in a stack."""
        self._touch(row)
        if row.device is not None:
            refit(self._landed(row.device, row.landed), row.layout, place, layout)
            return
        slot = self._on_host(row)
        if self._gpu is not None and slot.filled is not None:
            self._gpu.current().wait_event(slot.filled)
        refit(slot.buffer, row.layout, place, layout)
        slot.used(self._now())

    def _on_host(self, row: Row) -> Slot:
        """The row on the host, read from the disk where it lies there."""
        if row.host is None:
            self._begin_read(row)
        assert row.host is not None
        if row.reading is not None:
            try:
                row.reading.result()
            except BaseException:
                self._drop_host(row)
                raise
            row.reading = None
        return row.host

    def _bytes(self, row: Row) -> Tensor:
        """The row's bytes on the host, as memory that is not used again."""
        if row.host is not None:
            slot = self._on_host(row)
            if slot.filled is not None:
                slot.filled.synchronize()
            return slot.buffer if self._pinned is None else slot.buffer.clone()
        if row.device is not None:
            return self._landed(row.device, row.landed).cpu()
        buffer = torch.empty(row.layout.bytes, dtype=torch.uint8)
        read_row(row.client, self._file(row), buffer, row.crc)
        return buffer

    def _touch(self, row: Row) -> None:
        """Note that the row was asked for. One that is being written stays on the host after all."""
        if row.leaving:
            row.leaving = False
            self._leaving -= row.layout.bytes
            self._host.rows[row.client] = row
        self._host.touch(row)
        self._device.touch(row)

    def _forget(self, row: Row) -> None:
        """Take the row from every tier."""
        if row.writing is not None:
            stop(row.writing)
            self._writing.remove(row)
            row.writing = None
        if row.host is not None:
            self._drop_host(row)
        if row.device is not None:
            self._drop_device(row)
        for file in (row.file, row.target):
            if file is not None and self._disk is not None:
                self._disk.reader.submit(file.unlink, missing_ok=True)
        row.file = row.target = None

    def _drop_device(self, row: Row) -> None:
        self._device.leave(row)
        row.device = row.landed = None

    def _drop_host(self, row: Row) -> None:
        if row.reading is not None:
            stop(row.reading)
            row.reading = None
        if row.leaving:
            row.leaving = False
            self._leaving -= row.layout.bytes
        self._host.leave(row)
        if row.host is not None and self._pinned is not None:
            self._pinned.give(row.host)
        row.host = None

    # ---- between the tiers -------------------------------------------------------------------------------------------
    def _device_room(self, size: int, patient: bool = True) -> bool:
        """Room for so many bytes on the device. False where the host has none for what would leave, unless patient."""
        while self._device.rows and self._device.used + size > self._device.limit:
            row = next(iter(self._device.rows.values()))
            if row.host is None and row.file is None:
                assert row.device is not None
                if not self._down(row, row.device, row.landed, patient):
                    return False
            self._drop_device(row)
        return True

    def _host_room(self, size: int, patient: bool = True) -> bool:
        """Room for so many bytes on the host. False where that takes waiting for the disk, unless patient.

        Rows begin to leave when an eighth is still free, so that there is seldom something to wait for.
        """
        self._settle()
        host = self._host
        while host.rows and host.used - self._leaving + size > host.free_until:
            row = next(iter(host.rows.values()))
            if row.file is not None or (row.device is not None and row.writing is None):
                self._drop_host(row)
                continue
            del host.rows[row.client]
            row.leaving = True
            self._leaving += row.layout.bytes
            if row.writing is None:
                self._begin_write(row)
        while self._writing and host.used + size > host.limit:
            if not patient:
                return False
            self._settle(at_least=1)
        return True

    def _down(self, row: Row, source: Tensor, ready: Event | None, patient: bool = True) -> bool:
        """Begin to copy bytes from the device into a slot on the host, once they are ready there."""
        size = row.layout.bytes
        if not self._host_room(size, patient):
            return False
        if self._gpu is None or self._pinned is None:
            row.host = Slot(source.clone())
        else:
            row.host, stream = self._pinned.take(size), self._gpu.down
            for event in (*row.host.busy, ready):
                if event is not None:
                    stream.wait_event(event)
            with torch.cuda.stream(stream):
                row.host.buffer.copy_(source, non_blocking=True)
                row.host.filled, row.host.busy = stream.record_event(), []
            source.record_stream(stream)
        self._host.enter(row)
        return True

    def _up(self, row: Row, stream: torch.cuda.Stream | None) -> tuple[Tensor, Event | None]:
        """Begin to copy a row from the host to the device, on a stream (None: the current one)."""
        slot = row.host
        assert slot is not None
        if self._gpu is None:
            return slot.buffer.clone(), None
        stream = stream or self._gpu.current()
        with torch.cuda.stream(stream):  # also allocates there, so that the copy need not wait for what computes now
            if slot.filled is not None:
                stream.wait_event(slot.filled)
            buffer = self._empty(row.layout.bytes)
            buffer.copy_(slot.buffer, non_blocking=True)
            landed = stream.record_event()
        slot.used(landed)
        return buffer, landed

    def _begin_write(self, row: Row) -> None:
        assert row.host is not None
        self._disk = self._disk or Disk(self._folder)
        row.target = self._disk.new_file(row.client)
        row.writing = self._disk.writer.submit(write_row, row.client, row.target, row.host.buffer, row.host.filled)
        self._writing.append(row)

    def _begin_read(self, row: Row, patient: bool = True) -> bool:
        file = self._file(row)
        assert self._disk is not None
        if not self._host_room(row.layout.bytes, patient):
            return False
        if self._pinned is None:
            row.host = Slot(torch.empty(row.layout.bytes, dtype=torch.uint8))
        else:
            row.host = self._pinned.take(row.layout.bytes)
        busy = tuple(row.host.busy)  # they stay noted: a job that is stopped before it runs has waited for none of them
        row.reading = self._disk.reader.submit(read_row, row.client, file, row.host.buffer, row.crc, busy)
        self._host.enter(row)
        return True

    def _read_ahead(self, rows: Sequence[Row]) -> None:
        """Begin to read those of the rows that lie on the disk, as many as the host has room for together."""
        rows = [row for row in rows if row.device is None] if self._disk is not None else []
        for row in reversed(rows):
            self._touch(row)
        total = 0
        for row in rows:
            total += row.layout.bytes
            if total > self._host.free_until or (row.host is None and not self._begin_read(row, patient=False)):
                return

    def _file(self, row: Row) -> Path:
        if row.file is None:
            raise TrainingError(f"client {row.client}: its memory was lost when a new one could not be kept")
        return row.file

    def _settle(self, at_least: int = 0) -> None:
        """Take note of rows that have reached the disk; wait for so many."""
        while self._writing:
            row = self._writing[0]
            assert row.writing is not None
            if at_least <= 0 and not row.writing.done():
                return
            job, row.writing = row.writing, None
            self._writing.popleft()
            at_least -= 1
            try:
                row.crc = job.result()
            except BaseException:
                self._touch(row)  # it stays on the host
                raise
            row.file, row.target = row.target, None
            if row.leaving:
                self._drop_host(row)

    # ---- layouts and streams -----------------------------------------------------------------------------------------
    def _layout(self, spec: Spec) -> Layout:
        found = self._layouts.get(spec)
        if found is None:
            found = self._layouts[spec] = Layout(spec)
        return found

    def _fitted(self, layout: Layout, per_sample: frozenset[str], rows: int) -> Layout:
        if not any(name in per_sample for name, _ in layout.spec):
            return layout
        return self._layout(fitted(layout.spec, per_sample, rows))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._at)

    def _now(self) -> Event | None:
        """A mark on the current stream."""
        return None if self._gpu is None else self._gpu.current().record_event()
