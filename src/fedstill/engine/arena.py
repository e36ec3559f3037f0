"""Tensors in memory that processes share: an anonymous file, made before a fork, that grows as needed.

The kernel frees it with the last process that has it open, so nothing is left behind in /dev/shm, not even by a kill.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

ALIGN = 64  # bytes; torch's own memory starts so, and kernels then take the same path and give the same bits
Place: TypeAlias = tuple[int, str, Sequence[int], Sequence[int]]  # offset, dtype, shape, strides; goes into messages


class Arena:
    """One process writes tensors, others read them. What is read is a view, valid until the writer clears the arena."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedstill")
        self._end = weakref.finalize(self, os.close, self._file)
        self._map: mmap.mmap | None = None
        self._used = 0
        self._places: dict[int, tuple[Place, Tensor]] = {}  # by id; a reference to the tensor keeps its id unique

    def clear(self) -> None:
        """Forget what is in the arena: it may be overwritten."""
        self._used = 0
        self._places.clear()

    def put(self, leaf: Tensor) -> Place:
        """Copy a tensor in, strides and all; one that is in already is not copied again."""
        if id(leaf) not in self._places:
            strides = torch.empty_like(leaf, device="meta").stride()
            place: Place = (self._used, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), strides)
            size = -(-leaf.numel() * leaf.element_size() // ALIGN) * ALIGN
            self._reach(self._used + size, grow=True)
            self.get(place).copy_(leaf.detach())
            self._used += size
            self._places[id(leaf)] = (place, leaf)
        return self._places[id(leaf)][0]

    def get(self, place: Place) -> Tensor:
        """Return the tensor at a place, as a view."""
        offset, name, shape, strides = place
        dtype, count = getattr(torch, name), math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        self._reach(offset + count * dtype.itemsize)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).as_strided(shape, strides)

    def _reach(self, size: int, grow: bool = False) -> None:
        """Map at least so many bytes. Views of an earlier map keep that one alive, and see the same memory."""
        mapped = 0 if self._map is None else len(self._map)
        if size <= mapped:
            return
        if grow:
            size = max(size, 2 * mapped)
            os.ftruncate(self._file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)

    def close(self) -> None:
        """Release the memory."""
        self.clear()
        self._map = None
        self._end()
