"""Messages as bytes: a length, a JSON header, and the tensors as safetensors. Nothing here is a pickle.

What arrives may be anything: bytes that are no message raise `MessageError`, and nothing else. A limit on their number is checked
before anything is read, and the header is bounded in depth and numbers (`core.reading`). JSON has no NaN; in a report, "nan",
"inf" and "-inf" stand for numbers that are not finite. What a message says is not checked here: see `server.gate`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from ..core import tree
from ..core.reading import Unreadable, checked, described, parse_json
from ..core.tree import Params, Tree
from .messages import Order, Reply

Message = TypeVar("Message", Order, Reply)
LENGTH = 8  # bytes in front of the header
_TREES = {Order: ("down", "generic"), Reply: ("up",)}
_HERE = ("fault",)  # fields that do not travel
_HINTS: dict[type, dict[str, Any]] = {
    kind: {name: hint for name, hint in get_type_hints(kind).items() if name not in _HERE} for kind in (Order, Reply)
}  # the types of the fields that travel
_NO_NUMBERS = ("nan", "inf", "-inf")


class MessageError(ValueError):
    """Bytes that are no message; the message is one line that says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(reason.split())[:300])


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
        elif field.name == "report":
            header["report"] = {
                n: v if not isinstance(v, float) or math.isfinite(v) else str(v) for n, v in value.items()
            }
        elif field.name not in _HERE:
            header[field.name] = value
    # Each leaf as its own contiguous memory: trees of one message may share tensors.
    body = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.leaves(tensors)})
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def decode(data: bytes, kind: type[Message], device: torch.device | str = "cpu", most: int = 0) -> Message:
    """Return the message that `encode` wrote, its tensors on a device; `most` is the largest number of bytes, 0: any."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if most and len(data) > most:
        raise MessageError(f"it has {len(data):,} bytes; at most {most:,} are read")
    if len(data) < LENGTH:
        raise MessageError(f"it has {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > len(data) - LENGTH:
        raise MessageError(f"its header of {length:,} bytes is not whole")
    try:
        header = _header(parse_json(data[LENGTH : LENGTH + length]), kind)
        flat = load(data[LENGTH + length :])
    except Unreadable as error:
        raise MessageError(f"its header should be {error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        raise MessageError(
            str(error) if isinstance(error, MessageError) else f"its tensors are not whole ({error})"
        ) from None
    named = 0
    for name in _TREES[kind]:
        if header.get(name) is not None:
            header[name] = tree.to(_filled(header[name], flat, f"{name}{tree.SEPARATOR}"), device)
            named += sum(1 for _ in tree.leaves(header[name]))
    if named != len(flat):
        raise MessageError(f"it names {named} of its {len(flat)} tensors")
    return kind(**header)


def device_of(message: Order | Reply) -> torch.device:
    """Return the device of the message's tensors."""
    trees = [getattr(message, name) or {} for name in _TREES[type(message)]]
    return next((leaf.device for each in trees for _, leaf in tree.leaves(each)), torch.device("cpu"))


def _header(values: Any, kind: type[Order | Reply]) -> dict[str, Any]:
    """Return a header's fields in their types, trees as their outlines."""
    if not isinstance(values, dict):
        raise MessageError(f"its header is {described(values)}")
    hints = _HINTS[kind]
    for name in ("kind", "round", "client"):
        if name not in values:
            raise MessageError(f"its header has no {name}")
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        raise MessageError(f"its header has a field {unknown[0][:40]!r}")
    return {name: _field(name, value, hints[name], kind) for name, value in values.items()}


def _field(name: str, value: Any, hint: Any, kind: type[Order | Reply]) -> Any:
    if name in _TREES[kind]:
        optional = hint == Params | None
        if not isinstance(value, dict) and not (optional and value is None):
            raise MessageError(f"its {name} is {described(value)}")
        return value
    if name == "report":
        return {key: _number(key, number) for key, number in checked(value, dict, "whose report is").items()}
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise MessageError(f"its {name} is {described(value)}")
        return value
    return checked(value, hint, f"whose {name} is", least=0 if hint is int else None)


def _number(name: str, value: Any) -> float:
    """Return a number of a report."""
    if isinstance(value, str) and value in _NO_NUMBERS:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MessageError(f"it reports {described(value)} as {name[:40]}")
    return value


def _filled(outline: Mapping[str, Any], flat: Params, prefix: str) -> Tree:
    """Return the tree with this outline, whose leaves are in `flat`: `tree.fill` for an outline that may be anything."""
    filled: Tree = {}
    for name, branch in outline.items():
        if tree.SEPARATOR in name:
            raise MessageError(f"it has an entry with the name {name[:40]!r}")
        if isinstance(branch, dict):
            filled[name] = _filled(branch, flat, f"{prefix}{name}{tree.SEPARATOR}")
        elif branch is not None or prefix + name not in flat:
            raise MessageError(f"it has no tensor {(prefix + name)[:100]}")
        else:
            filled[name] = flat[prefix + name]
    return filled
