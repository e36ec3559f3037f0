"""Messages as bytes: a length, a JSON header, and the tensors as safetensors. Nothing here is a pickle."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, TypeVar

import torch

from ..core import tree
from ..core.tree import Tree
from .messages import Order, Reply

Message = TypeVar("Message", Order, Reply)
_TREES = {Order: ("down", "generic"), Reply: ("up",)}


def encode(message: Order | Reply) -> bytes:
    """Return the message as bytes."""
    from safetensors.torch import save

    header: dict[str, Any] = {}
    tensors: Tree = {}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if field.name in _TREES[type(message)] and value is not None:
            tensors[field.name] = value
            header[field.name] = tree.outline(value)
        else:
            header[field.name] = value
    # Each leaf as its own contiguous memory: trees of one message may share tensors.
    body = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.leaves(tensors)})
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def decode(data: bytes, kind: type[Message], device: torch.device | str = "cpu") -> Message:
    """Return the message that `encode` wrote, its tensors on a device."""
    from safetensors.torch import load

    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    flat = load(data[8 + length :])
    for name in _TREES[kind]:
        if header.get(name) is not None:
            header[name] = tree.to(tree.fill(header[name], flat, f"{name}{tree.SEPARATOR}"), device)
    return kind(**header)


def device_of(message: Order | Reply) -> torch.device:
    """Return the device of the message's tensors."""
    trees = [getattr(message, name) or {} for name in _TREES[type(message)]]
    return next((leaf.device for each in trees for _, leaf in tree.leaves(each)), torch.device("cpu"))
