"""Weights to start from: a safetensors file whose entries are the model's."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core import reading
from ..core.errors import InputError, first_line
from ..core.task import Split

REFERENCE = re.compile(r"(?P<path>.+?)(?:@(?P<digest>[0-9a-f]{16}))?")
LISTED = 5  # names in an error


def settled(text: str) -> str:
    """Return a file by its whole path with its checksum, so that a run is not continued from other weights."""
    path, known = _parse(text)
    return f"{path}@{known or _digest(_read(text, path))}"


def load(model: nn.Module, text: str, split: Split | None) -> None:
    """Load a file's entries into a model. Those of a head that are not there or have another size start anew, by a line.

    Whatever else does not fit is refused by name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as tensors_of

    path, known = _parse(text)
    content = _read(text, path)
    if known and _digest(content) != known:
        raise InputError("weights", str(path), f"the file that it was (checksum {known}): it has changed since")
    try:
        found = tensors_of(content)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise InputError("weights", str(path), f"a safetensors file ({first_line(error)})") from None
    state = model.state_dict(keep_vars=True)
    known_tensors = {id(state[name]) for name in found if name in state}
    missing = [n for n, value in state.items() if n not in found and id(value) not in known_tensors]
    differing = [n for n, value in found.items() if n in state and value.shape != state[n].shape]
    head = frozenset() if split is None else split.head
    anew = [name for name in (*missing, *differing) if name in head]
    _refuse(path, "has no", [name for name in missing if name not in head])
    _refuse(path, "has another size of", [_sized(n, found, state) for n in differing if n not in head])
    _refuse(path, "has, and the model has not,", [name for name in found if name not in state])
    with torch.no_grad():
        for name, value in found.items():
            if name not in anew:
                state[name].copy_(value)
    if anew:
        print(f"fedstill: {path}: {', '.join(sorted(anew))} start anew", file=sys.stderr, flush=True)


def _refuse(path: Path, what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise InputError("weights", str(path), f"weights of this model: it {what} {', '.join(names[:LISTED])}{more}")


def _sized(name: str, found: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    shapes = ("×".join(map(str, entries[name].shape)) or "1" for entries in (found, state))
    return "{} ({}, the model {})".format(name, *shapes)


def _parse(text: str) -> tuple[Path, str | None]:
    match = REFERENCE.fullmatch(text)
    assert match is not None
    path = Path(match["path"]).expanduser().absolute()
    if path.suffix != ".safetensors":
        raise InputError("weights", text, "a file that ends in .safetensors")
    return path, match["digest"]


def _read(text: str, path: Path) -> bytes:
    try:
        with reading.open_regular(path) as file:
            return file.read()
    except (reading.Missing, FileNotFoundError):
        raise InputError("weights", text, f"a file that exists: there is no {path}") from None
    except (reading.Unreadable, OSError) as error:
        raise InputError("weights", text, f"a file that can be read ({first_line(error)})") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
