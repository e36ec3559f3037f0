"""Several messages as one: a JSON header, and one row of bytes in which every tensor lies once.

Orders to many clients mostly hold the same tensors (what all are sent). `pack` finds them by their memory, so that each travels
once, whatever the number of messages that it is part of. Nothing here is a pickle.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Tree
from .messages import Order, Reply

Message = TypeVar("Message", Order, Reply)
Header: TypeAlias = dict[str, Any]
TREES = {Order: ("down", "generic"), Reply: ("up",)}
ALIGN = 16  # bytes; each tensor begins at a multiple, as every dtype needs


class Parcel:
    """Messages on their way: the tensors that they share, each once, and for each message what it holds."""

    def __init__(self) -> None:
        self.messages: list[Header] = []
        self.tensors: list[Tensor] = []
        self._places: dict[tuple[object, ...], int] = {}

    def add(self, message: Order | Reply) -> None:
        """Add a message; tensors that lie in the parcel already are not added again."""
        header: Header = {}
        for field in dataclasses.fields(message):
            value = getattr(message, field.name)
            if field.name in TREES[type(message)] and value is not None:
                at = [self._place(leaf) for _, leaf in tree.leaves(value)]
                header[field.name] = {"outline": tree.outline(value), "at": at}
            else:
                header[field.name] = value
        self.messages.append(header)

    def places(self, number: int) -> set[int]:
        """Return the numbers of the tensors that a message holds."""
        values = self.messages[number].values()
        return {place for value in values if isinstance(value, dict) and "at" in value for place in value["at"]}

    def _place(self, leaf: Tensor) -> int:
        key = (leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device)
        if leaf.numel() == 0 or key not in self._places:
            self._places[key] = len(self.tensors)
            self.tensors.append(leaf.detach())
        return self._places[key]


def unpack(messages: Sequence[Header], tensors: dict[int, Tensor], kind: type[Message]) -> list[Message]:
    """Return the messages of a parcel, given its tensors by number."""
    unpacked = []
    for header in messages:
        values = dict(header)
        for name in TREES[kind]:
            if values.get(name) is not None:
                values[name] = _tree(values[name]["outline"], iter(values[name]["at"]), tensors)
        unpacked.append(kind(**values))
    return unpacked


def _tree(outline: Header, places: Any, tensors: dict[int, Tensor]) -> Tree:
    return {
        name: tensors[next(places)] if branch is None else _tree(branch, places, tensors)
        for name, branch in outline.items()
    }


# ---- tensors as one row of bytes -------------------------------------------------------------------------------------
def layout(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the dtype and shape of each tensor, as JSON."""
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]


def join(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the tensors' bytes in one row on a device."""
    total = sum(_room(tensor.nbytes) for tensor in tensors)
    row, at = torch.empty(total, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        row[at : at + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
        at += _room(tensor.nbytes)
    return row


def size(layout: Sequence[Sequence[Any]]) -> int:
    """Return the number of bytes that tensors of this layout take in a row."""
    return sum(_room(_nbytes(dtype, shape)) for dtype, shape in layout)


def part(row: Tensor, layout: Sequence[Sequence[Any]], device: torch.device) -> list[Tensor]:
    """Return the tensors that `join` put into a row; on the same device they are views of it."""
    tensors, at = [], 0
    row = row.to(device)
    for name, shape in layout:
        length = _nbytes(name, shape)
        tensors.append(row[at : at + length].view(getattr(torch, name)).reshape(shape))
        at += _room(length)
    return tensors


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return torch.Size(shape).numel() * itemsize


def _room(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def encode(header: Header) -> Tensor:
    """Return a header as bytes, in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)


def decode(row: Tensor) -> Header:
    """Return the header that `encode` made."""
    header: Header = json.loads(row.numpy().tobytes())
    return header
