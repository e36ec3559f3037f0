"""Save a site's training while it goes on, so that a site that is killed continues in the middle of the round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Tree
from ..core.version import __version__
from ..engine.progress import Halfway
from .state_files import read_saved, write_saved

SHARE = 0.05  # of the training time that saving may take where no interval is set
FIRST = 0.5  # seconds of training before the first save where no interval is set


@dataclass(frozen=True)
class SaveEvery:
    """How often training under way is saved: after so many epochs, or so many steps.

    With 0 for both, after an epoch whenever saving takes at most a twentieth of the time.
    """

    epochs: int = 0
    steps: int = 0


class Savepoint:
    """Saves and loads the training of one order (`engine.progress.Savepoint`), of the same version alone."""

    def __init__(
        self, file: Path, about: Mapping[str, Any], device: torch.device, often: SaveEvery, log: Callable[[str], None]
    ) -> None:
        """Save to `file`; `about` names the order, and what another one has saved is not loaded."""
        self.file, self.device, self.often, self.log = file, device, often, log
        self.about = {**about, "version": __version__, "torch": str(torch.__version__)}
        self._epochs = 0  # since the last save
        self._at = (0, 0)  # phase and step of the last save
        self._since, self._pause = time.monotonic(), FIRST

    def load(self) -> Halfway | None:
        """Return what was saved of this order's training; None where it begins anew."""
        saved = read_saved(self.file)
        if saved is None:
            if self.file.exists():
                self.log(
                    f"round {self.about['round']}: {self.file.name} is damaged and not used: the round begins again"
                )
            return None
        about, state, _ = saved
        if any(about.get(name) != value for name, value in self.about.items()):
            return None
        self._at = about["phase"], about["step"]
        self.log(f"round {self.about['round']}: goes on after step {about['step']} of phase {about['phase'] + 1}")
        return Halfway(*self._at, unpack(state, about["outline"], about["strides"], self.device))

    def due(self, phase: int, step: int, epoch: bool) -> bool:
        """Return whether to save now."""
        self._epochs += epoch
        if self.often.steps and step - (self._at[1] if phase == self._at[0] else 0) >= self.often.steps:
            return True
        if self.often.epochs:
            return epoch and self._epochs >= self.often.epochs
        return epoch and not self.often.steps and time.monotonic() - self._since >= self._pause

    def save(self, halfway: Halfway) -> None:
        """Save the training as it is now."""
        began = time.monotonic()
        data, strides = pack(halfway.state)
        where = {"phase": halfway.phase, "step": halfway.step, "outline": tree.outline(halfway.state)}
        write_saved(self.file, {**self.about, **where, "strides": strides}, data, b"")
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
