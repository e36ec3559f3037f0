"""A tree of tensors as one row of bytes: where in it each tensor lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...core.tree import Tree, leaves

ALIGN = 64  # bytes; every tensor of a row starts at a multiple, as fast kernels want it


class Kind(NamedTuple):
    """A tensor as it is described."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Spec: TypeAlias = tuple[tuple[str, Any], ...]  # of every entry its name, and its Kind or again a Spec


class Leaf(NamedTuple):
    """A tensor in a row: its bytes from `start` to `stop`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int


def spec_of(tree: Tree, stacked: bool = False) -> Spec:
    """Names, dtypes and shapes of a tree; of one client's where it is stacked."""
    return tuple(
        (name, spec_of(part, stacked) if isinstance(part, dict) else Kind(part.dtype, tuple(part.shape[stacked:])))
        for name, part in tree.items()
    )


def fitted(spec: Spec, names: frozenset[str] | None, rows: int) -> Spec:
    """The spec with so many rows in the named entries (None: in all)."""

    def fit(part: Any) -> Any:
        return part._replace(shape=(rows, *part.shape[1:])) if isinstance(part, Kind) else fitted(part, None, rows)

    return tuple((name, fit(part) if names is None or name in names else part) for name, part in spec)


class Layout:
    """Where in a row each tensor of a tree lies."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.bytes = spec, 0
        self.leaves: list[Leaf] = []
        self._add(spec)

    def _add(self, spec: Spec) -> None:
        for _, part in spec:
            if isinstance(part, Kind):
                size = part.dtype.itemsize * torch.Size(part.shape).numel()
                strides = torch.empty(part.shape, device="meta").stride()
                self.leaves.append(Leaf(part.dtype, part.shape, strides, self.bytes, self.bytes + size))
                self.bytes += -(-size // ALIGN) * ALIGN
            else:
                self._add(part)

    def tree(self, flat: Tensor) -> Tree:
        """A row, or a stack of rows, as a tree of views."""
        return _fill(self.spec, self._views(flat))

    def pack(self, flat: Tensor, tree: Tree) -> Tensor:
        """Fill a row, or a stack of rows, from a tree: one launch for each dtype of a row, for each leaf of a stack."""
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, (_, value) in zip(self._views(flat), leaves(tree), strict=True):
            if value.numel():
                into, source = kinds.setdefault(view.dtype, ([], []))
                into.append(view)
                source.append(value.detach())
        for into, source in kinds.values():
            torch._foreach_copy_(into, source)
        return flat

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        typed = {dtype: flat.view(dtype) for dtype in {leaf.dtype for leaf in self.leaves}}
        for leaf in self.leaves:
            base = typed[leaf.dtype]
            start = base.storage_offset() + leaf.start // leaf.dtype.itemsize
            yield base.as_strided((*flat.shape[:-1], *leaf.shape), (*base.stride()[:-1], *leaf.strides), start)


def _fill(spec: Spec, parts: Iterator[Tensor]) -> Tree:
    return {name: next(parts) if isinstance(part, Kind) else _fill(part, parts) for name, part in spec}


def refit(source: Tensor, old: Layout, place: Tensor, new: Layout) -> Tensor:
    """Copy a row to one of another layout, which differs in the number of rows of some leaves: cut, or filled up with zeros.

    Leaves that are alike lie at the same distance from one another in both, so a stretch of them is one copy.
    """
    if old is new:
        return place.copy_(source, non_blocking=True)
    stretch = (0, 0, 0)  # from, to, bytes

    def copy(a: int, b: int, size: int) -> None:
        if size:
            place[b : b + size].copy_(source[a : a + size], non_blocking=True)

    for mine, its in zip(old.leaves, new.leaves, strict=True):
        if mine.shape == its.shape:
            a, b, size = stretch
            stretch = (a, b, its.stop - b) if size else (mine.start, its.start, its.stop - its.start)
            continue
        copy(*stretch)
        stretch = (0, 0, 0)
        size = min(mine.stop - mine.start, its.stop - its.start)
        copy(mine.start, its.start, size)
        place[its.start + size : its.stop].zero_()
    copy(*stretch)
    return place
