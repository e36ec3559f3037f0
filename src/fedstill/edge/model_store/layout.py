"""A tree of tensors as one row of bytes: the position of each tensor in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...core.tree import Tree, leaves

ALIGN = 64  # bytes; every tensor of a row starts at a multiple, as fast kernels want it


class LeafSpec(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


TreeSpec: TypeAlias = tuple[tuple[str, Any], ...]  # (name, LeafSpec or TreeSpec) of every entry


class Leaf(NamedTuple):
    """A tensor in a row: its bytes from `start` to `stop`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int


def tree_spec(tree: Tree, stacked: bool = False) -> TreeSpec:
    """Return the names, dtypes and shapes of a tree; of one client's tree where `stacked` has a leading client axis."""
    return tuple(
        (
            name,
            tree_spec(entry, stacked)
            if isinstance(entry, dict)
            else LeafSpec(entry.dtype, tuple(entry.shape[stacked:])),
        )
        for name, entry in tree.items()
    )


def resize_spec(spec: TreeSpec, names: frozenset[str] | None, rows: int) -> TreeSpec:
    """Return the spec with `rows` rows in the named entries (None: in all)."""

    def resize(entry: Any) -> Any:
        if isinstance(entry, LeafSpec):
            return entry._replace(shape=(rows, *entry.shape[1:]))
        return resize_spec(entry, None, rows)

    return tuple((name, resize(entry) if names is None or name in names else entry) for name, entry in spec)


class Layout:
    """The position of each tensor of a tree in a row."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec, self.bytes = spec, 0
        self.leaves: list[Leaf] = []
        self._append(spec)

    def _append(self, spec: TreeSpec) -> None:
        for _, entry in spec:
            if isinstance(entry, LeafSpec):
                size = entry.dtype.itemsize * torch.Size(entry.shape).numel()
                strides = torch.empty(entry.shape, device="meta").stride()
                self.leaves.append(Leaf(entry.dtype, entry.shape, strides, self.bytes, self.bytes + size))
                self.bytes += -(-size // ALIGN) * ALIGN
            else:
                self._append(entry)

    def tree(self, flat: Tensor) -> Tree:
        """Return a row, or a stack of rows, as a tree of views."""
        return _unflatten(self.spec, self._views(flat))

    def pack(self, flat: Tensor, tree: Tree) -> Tensor:
        """Fill a row, or a stack of rows, from a tree: one launch per dtype for a row, one per leaf for a stack."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, (_, value) in zip(self._views(flat), leaves(tree), strict=True):
            if value.numel():
                targets, sources = by_dtype.setdefault(view.dtype, ([], []))
                targets.append(view)
                sources.append(value.detach())
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources)
        return flat

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        typed = {dtype: flat.view(dtype) for dtype in {leaf.dtype for leaf in self.leaves}}
        for leaf in self.leaves:
            base = typed[leaf.dtype]
            start = base.storage_offset() + leaf.start // leaf.dtype.itemsize
            yield base.as_strided((*flat.shape[:-1], *leaf.shape), (*base.stride()[:-1], *leaf.strides), start)


def _unflatten(spec: TreeSpec, views: Iterator[Tensor]) -> Tree:
    return {name: next(views) if isinstance(entry, LeafSpec) else _unflatten(entry, views) for name, entry in spec}


def copy_row(source: Tensor, layout: Layout, target: Tensor, target_layout: Layout) -> Tensor:
    """Copy a row into one whose leaves may have other numbers of rows: they are cut, or filled up with zeros.

    Leaves of equal shapes lie at equal distances from one another in both rows, so consecutive ones are one copy.
    """
    if layout is target_layout:
        return target.copy_(source, non_blocking=True)
    pending = (0, 0, 0)  # from, to, bytes

    def copy(a: int, b: int, size: int) -> None:
        if size:
            target[b : b + size].copy_(source[a : a + size], non_blocking=True)

    for old, new in zip(layout.leaves, target_layout.leaves, strict=True):
        if old.shape == new.shape:
            a, b, size = pending
            pending = (a, b, new.stop - b) if size else (old.start, new.start, new.stop - new.start)
            continue
        copy(*pending)
        pending = (0, 0, 0)
        size = min(old.stop - old.start, new.stop - new.start)
        copy(old.start, new.start, size)
        target[new.start + size : new.stop].zero_()
    copy(*pending)
    return target
