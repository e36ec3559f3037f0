"""Files that a site writes of its client, with checksums; and the work under way, with which a killed site goes on."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core import files, tree
from ..core.tree import Tree
from ..core.version import __version__
from ..engine.progress import Halfway

MAGIC = b"fedstill-state-1"
SHARE = 0.05  # of the time that training takes, what keeping it may take where nobody has said how often
FIRST = 0.5  # seconds of training before the first time, where nobody has said how often
Kept: TypeAlias = tuple[dict[str, Any], bytes, bytes]  # what a file says of itself, the client's state, the last reply


# ---- files -----------------------------------------------------------------------------------------------------------
def seal(path: Path, about: Mapping[str, Any], state: bytes, reply: bytes) -> None:
    """Write a file of state durably: in full, or not at all."""
    head = json.dumps({**about, "state": len(state), "reply": len(reply)}).encode()
    body = struct.pack("<Q", len(head)) + head + state + reply
    files.write(path, MAGIC + hashlib.sha256(body).digest() + body)


def unseal(path: Path) -> Kept | None:
    """Return what `seal` wrote; None where there is nothing, or not all of it as it was."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    begin = len(MAGIC) + 32
    body = memoryview(data)[begin:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : begin]:
        return None
    (length,) = struct.unpack_from("<Q", body)
    about = json.loads(bytes(body[8 : 8 + length]))
    rest = bytes(body[8 + length :])
    return about, rest[: about["state"]], rest[about["state"] :]


# ---- work under way --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Often:
    """How often work under way is kept: after so many epochs, or so many steps; 0 for both: after each epoch that leaves
    at most a twentieth of the time to it.
    """

    epochs: int = 0
    steps: int = 0


class Savepoint:
    """Keeps one order's work (`engine.progress.Savepoint`); another order's, or another version's, is not gone on with."""

    def __init__(
        self, file: Path, about: Mapping[str, Any], device: torch.device, often: Often, log: Callable[[str], None]
    ) -> None:
        """Keep the work that `about` names in `file`."""
        self.file, self.device, self.often, self.log = file, device, often, log
        self.about = {**about, "version": __version__, "torch": str(torch.__version__)}
        self._epochs = 0  # since it was kept last
        self._at = (0, 0)  # the phase and step at which it was
        self._since, self._pause = time.monotonic(), FIRST

    def load(self) -> Halfway | None:
        """Return what was kept of this work."""
        kept = unseal(self.file)
        if kept is None:
            if self.file.exists():
                self.log(
                    f"round {self.about['round']}: {self.file.name} is damaged and not used: the round begins again"
                )
            return None
        about, state, _ = kept
        if any(about.get(name) != value for name, value in self.about.items()):
            return None
        self._at = about["phase"], about["step"]
        self.log(f"round {self.about['round']}: goes on after step {about['step']} of phase {about['phase'] + 1}")
        return Halfway(*self._at, unpack(state, about["outline"], about["strides"], self.device))

    def due(self, phase: int, step: int, epoch: bool) -> bool:
        """Return whether the work should be kept now."""
        self._epochs += epoch
        if self.often.steps and step - (self._at[1] if phase == self._at[0] else 0) >= self.often.steps:
            return True
        if self.often.epochs:
            return epoch and self._epochs >= self.often.epochs
        return epoch and not self.often.steps and time.monotonic() - self._since >= self._pause

    def save(self, halfway: Halfway) -> None:
        """Keep the work as it is now."""
        began = time.monotonic()
        data, strides = pack(halfway.state)
        where = {"phase": halfway.phase, "step": halfway.step, "outline": tree.outline(halfway.state)}
        seal(self.file, {**self.about, **where, "strides": strides}, data, b"")
        self._epochs, self._at, self._since = 0, (halfway.phase, halfway.step), time.monotonic()
        self._pause = (self._since - began) / SHARE


def pack(state: Tree) -> tuple[bytes, dict[str, list[int]]]:
    """Return a tree's tensors as bytes, and the strides of those that are laid out otherwise than row by row."""
    from safetensors.torch import save

    leaves = {name: leaf.detach() for name, leaf in tree.leaves(state)}
    strides = {name: list(leaf.stride()) for name, leaf in leaves.items() if not leaf.is_contiguous()}
    return save({name: leaf.cpu().contiguous().clone() for name, leaf in leaves.items()}), strides


def unpack(data: bytes, outline: dict[str, Any], strides: Mapping[str, list[int]], device: torch.device | str) -> Tree:
    """Return the tree that `pack` was given, laid out as it was: which bits a product has may depend on that."""
    from safetensors.torch import load

    flat = {name: leaf.to(device) for name, leaf in load(data).items()}
    return tree.fill(outline, {name: _laid_out(leaf, strides.get(name)) for name, leaf in flat.items()})


def _laid_out(leaf: Tensor, strides: list[int] | None) -> Tensor:
    if strides is None or 0 in strides:  # an expanded tensor has no memory of its own
        return leaf
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
