"""The Model Store: each client's memory as one row of bytes, on the device, on the host or on disk.

To store or to fetch a row is one copy. A `Layout` (layout.py) has the position of each tensor in it, and equal layouts are one
object. A `Hierarchy` (hierarchy.py) holds the rows in three tiers and moves them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.memory import available as available_memory
from ...core.tree import Tree, leaves
from .disk import READERS, Disk
from .gpu import Gpu
from .hierarchy import Hierarchy
from .layout import Layout, TreeSpec, copy_row, resize_spec, tree_spec
from .tiers import Row

NONE: frozenset[str] = frozenset()


class ModelStore:
    """Memories by client. A client has its run's initial memory, at no cost, until it stores another.

    Several runs of `clients` clients each may share a store: client k of run r then has the number r·`clients` + k.
    On a GPU, use it from one thread; what it returns is ready for the stream that is current at the call.
    """

    def __init__(
        self,
        initial: Tree,
        *,
        clients: int = 0,
        others: Sequence[Tree] = (),
        device: torch.device | str | None = None,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        folder: str | Path | None = None,
        disk: Disk | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """Set `initial` as the first run's initial memory, `others` as those of further runs (`clients` 0: one for all).

        `device` is where memories are used (None: where `initial` lies). Rows take at most `device_bytes` there (None: a
        quarter of what is free) and `host_bytes` on the host (None: half of what is available; one row always fits). The rest
        lies in a temporary folder, made inside `folder` when first needed, removed by `close` or at exit. On a CPU there is a
        tier above the host only where `device_bytes` is given. `disk` replaces `folder`, `gpu` replaces `device`.
        """
        if clients < (1 if others else 0):
            raise ValueError(f"clients is {clients}, not the number of clients of each initial memory")
        first = next((leaf for _, leaf in leaves(initial)), None)
        at = torch.device(device or (first.device if first is not None else "cpu"))
        if gpu is None and at.type == "cuda":
            gpu = Gpu(at)
        self._at = at if gpu is None else gpu.device
        if device_bytes is None and gpu is not None:
            device_bytes = gpu.free_bytes() // 4
        host_bytes = available_memory() // 2 if host_bytes is None else host_bytes
        self._hierarchy = Hierarchy(gpu, disk or Disk(folder), device_bytes, host_bytes)
        self._layouts: weakref.WeakValueDictionary[TreeSpec, Layout] = weakref.WeakValueDictionary()
        self._rows: dict[int, Row] = {}
        self._closed, self._clients = False, clients
        self._initial_layout = self._layout(tree_spec(initial))
        self._initial: list[Row] = []  # by run
        self._initial_trees: list[Tree] = []
        for memory in (initial, *others):
            self._add_initial(memory)

    @torch.no_grad()
    def _add_initial(self, memory: Tree) -> None:
        """Set the next run's initial memory: a row on the device that no tier counts, since it never leaves."""
        layout = self._layout(tree_spec(memory))
        if layout is not self._initial_layout:
            run = len(self._initial)
            raise ValueError(f"the initial memories of runs 0 and {run} differ in their names or shapes")
        row = Row(-1, layout)
        row.device = layout.pack(self._empty(layout.bytes), memory)
        row.uploaded = self._hierarchy.record()
        self._initial.append(row)
        self._initial_trees.append(layout.tree(row.device))

    @property
    def row_bytes(self) -> int:
        """The size of an initial memory as a row."""
        return self._initial_layout.bytes

    def get(self, client: int) -> Tree:
        """Return the client's memory on the device. Hooks do not change their arguments, so this is not a copy."""
        row = self._row(client)
        buffer = self._hierarchy.on_device(row)
        return row.layout.tree(buffer) if client in self._rows else self._initial_trees[self._run(client)]

    @torch.no_grad()
    def put(self, client: int, memory: Tree) -> None:
        """Store a copy of a new memory."""
        layout = self._layout(tree_spec(memory))
        row = self._new_row(client, layout)
        self._hierarchy.insert(row, layout.pack(self._empty(layout.bytes), memory), owned=True)
        self._rows[client] = row

    def forget(self, client: int) -> None:
        """Give the client its initial memory again."""
        self._row(client)  # refuses what `get` refuses
        row = self._rows.pop(client, None)
        if row is not None:
            self._hierarchy.remove(row)

    @torch.no_grad()
    def gather(self, clients: Sequence[int], per_sample: frozenset[str] = NONE, rows: int = 0) -> Tree:
        """Stack the clients' memories along a new leading axis; entries in `per_sample` as `tree.fit_rows` fits them.

        The leaves are views of one buffer that belongs to the caller.
        """
        members = [self._row(client) for client in clients]
        layout = self._resized(members[0].layout if members else self._initial_layout, per_sample, rows)
        for client, row in zip(clients, members, strict=True):
            if row.layout is not layout and self._resized(row.layout, per_sample, rows) is not layout:
                raise ValueError(f"the memories of clients {clients[0]} and {client} differ in their names or shapes")
        if not layout.bytes:  # nothing is remembered, nothing moves
            flat = self._empty(len(members), 0)
        elif members and all(row.device is not None and row.layout is layout for row in members):
            flat = torch.stack([self._hierarchy.on_device(row).view(torch.int64) for row in members]).view(torch.uint8)
        else:
            flat = self._empty(len(members), layout.bytes)
            for i, target in enumerate(flat):
                self._hierarchy.read_ahead(members[i : i + 2 * READERS])
                self._hierarchy.copy_to(target, members[i], layout)
        return layout.tree(flat)

    @torch.no_grad()
    def scatter(
        self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str] = NONE, sizes: Sequence[int] = ()
    ) -> None:
        """Store row i of a stacked tree as client i's memory, its entries in `per_sample` fitted to `sizes[i]` rows."""
        for name, leaf in leaves(memory):
            if leaf.ndim == 0 or len(leaf) != len(clients):
                raise ValueError(f"{name} has the shape {tuple(leaf.shape)} in a stack of {len(clients)} clients")
        stacked_layout = self._layout(tree_spec(memory, stacked=True))
        flat = stacked_layout.pack(self._empty(len(clients), stacked_layout.bytes), memory)
        packed = self._hierarchy.record() if stacked_layout.bytes else None
        ragged = any(name in per_sample for name in memory)
        rows = sizes if ragged else [0] * len(clients)
        for client, stacked, size in zip(clients, flat, rows, strict=True):
            layout = self._resized(stacked_layout, per_sample, size) if ragged else stacked_layout
            row = self._new_row(client, layout)
            if layout is stacked_layout:
                self._hierarchy.insert(row, stacked, owned=False, ready=packed)
            else:
                source = copy_row(stacked, stacked_layout, self._empty(layout.bytes), layout)
                self._hierarchy.insert(row, source, owned=True)
            self._rows[client] = row

    @torch.no_grad()
    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to bring these clients' rows up, as far as the tiers have room, without waiting for it.

        Rows on the host go to the device, rows on the disk to the host: `gather` takes them to the device from there.
        """
        self._refuse_closed()
        self._hierarchy.prefetch([self._rows[client] for client in dict.fromkeys(clients) if client in self._rows])

    def read(self, client: int) -> Tree:
        """Return the client's memory on the host; no row moves for it."""
        row = self._row(client)
        return row.layout.tree(self._hierarchy.to_host(row))

    def items(self) -> Iterator[tuple[int, Tree]]:
        """Yield every stored memory by ascending client, on the host; one at a time, and no row moves for it."""
        for client in sorted(self._rows):
            row = self._row(client)
            yield client, row.layout.tree(self._hierarchy.to_host(row))

    def stats(self) -> dict[str, dict[str, int]]:
        """Return clients and bytes by tier. A client counts in each tier that has a copy of its row."""
        self._hierarchy.settle()
        sizes: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
        for row in self._rows.values():
            for tier, copy in (("device", row.device), ("host", row.host), ("disk", row.file)):
                if copy is not None:
                    sizes[tier].append(row.layout.bytes)
        return {tier: {"clients": len(each), "bytes": sum(each)} for tier, each in sizes.items()}

    def close(self) -> None:
        """Drop everything and remove what lies on the disk. The store cannot be used afterwards."""
        self._closed = True
        self._hierarchy.close()
        self._rows.clear()

    def _row(self, client: int) -> Row:
        self._refuse_closed()
        row = self._rows.get(client)
        return self._initial[self._run(client)] if row is None else row

    def _run(self, client: int) -> int:
        """Return which run's initial memory the client has."""
        run = client // self._clients if self._clients else 0
        if not 0 <= run < len(self._initial):
            raise ValueError(f"client {client}: this store has {len(self._initial)} × {self._clients} clients")
        return run

    def _new_row(self, client: int, layout: Layout) -> Row:
        """Return an empty row for the client, whose old one is removed from every tier."""
        self._refuse_closed()
        self._run(client)
        if client in self._rows:
            self._hierarchy.remove(self._rows[client])
        return Row(client, layout)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this Model Store has been closed")

    def _layout(self, spec: TreeSpec) -> Layout:
        layout = self._layouts.get(spec)
        if layout is None:
            layout = self._layouts[spec] = Layout(spec)
        return layout

    def _resized(self, layout: Layout, per_sample: frozenset[str], rows: int) -> Layout:
        if not any(name in per_sample for name, _ in layout.spec):
            return layout
        return self._layout(resize_spec(layout.spec, per_sample, rows))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._at)
