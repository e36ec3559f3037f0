"""The part of a model's state that training never changes: frozen parameters, and buffers that a training pass leaves alone.

It exists once, as the skeletons' own tensors. It is in no tree, so it is not sent, merged, kept, stacked or put into checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..core.errors import InputError, Shown, TrainingError
from ..core.tree import Params

Slot: TypeAlias = tuple[
    str, dict[str, Tensor | None], str
]  # an entry's name, the dictionary of its module, the key there


class Constants:
    """Tensors by name, and the places in which a model's skeletons hold them."""

    def __init__(self, tensors: Params, slots: Collection[Slot] = ()) -> None:
        """Put each tensor into its slots."""
        self.tensors, self._slots = tensors, [slot for slot in slots if slot[0] in tensors]
        self._put(tensors)
        self._note()

    def _put(self, tensors: Params) -> None:
        for name, owner, leaf in self._slots:
            owner[leaf] = tensors[name]

    def _note(self) -> None:
        """Note the buffers, each with how often it has been changed in place."""
        others = [(name, value) for name, value in self.tensors.items() if not isinstance(value, nn.Parameter)]
        self.buffers = [(name, value, value._version) for name, value in others]

    def check(self) -> None:
        """Refuse a model that has changed a buffer which it left alone when it was looked at: all clients share it."""
        for name, value, version in self.buffers:
            if value._version != version:
                what = f"the model changes its buffer {name}, which it left alone at first"
                raise TrainingError(f"{what}: a buffer that training changes has to change in every training pass")

    @contextlib.contextmanager
    def replaced(self, tensors: Params) -> Iterator[None]:
        """Within, have the model take these tensors: a step that is traced gets them as inputs."""
        self._put(tensors)
        try:
            yield
        finally:
            self._put(self.tensors)

    def copies_of_buffers(self) -> Params:
        """Return copies of those that are no parameters."""
        return {name: value.clone() for name, value, _ in self.buffers}

    def copies(self) -> Params:
        """Return copies on the CPU."""
        plain = torch.contiguous_format
        return {name: value.detach().cpu().clone(memory_format=plain) for name, value in self.tensors.items()}

    def digest(self) -> str:
        """Return a checksum of names, types, shapes and bits; "" where there are no constants."""
        if not self.tensors:
            return ""
        total = hashlib.sha256()
        for name, value in self.tensors.items():
            total.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    def load(self, values: Params) -> None:
        """Take over the values of another model of this kind; refuse those of a model of another kind."""
        theirs, ours = ({n: (tuple(v.shape), v.dtype) for n, v in p.items()} for p in (values, self.tensors))
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                right = f"{ours.get(name, 'left out')}, as in the model"
                raise InputError(f"constant {name}", Shown(str(theirs.get(name, "nothing"))), right)
        with torch.no_grad():
            for name, value in self.tensors.items():
                value.copy_(values[name])
        self._note()


def slots(module: nn.Module, tied: dict[str, str]) -> list[Slot]:
    """Return for each entry of the state its name, the dictionary of the module that owns it, and the key there."""
    found: list[Slot] = []
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in module.state_dict(keep_vars=True):
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
        found.append((tied[name], owner._parameters if leaf in owner._parameters else owner._buffers, leaf))
    return found


def written(buffers: Sequence[str], before: Params, after: Params, statistics: Sequence[Tensor]) -> set[str]:
    """Return the buffers that a pass wrote to, by two copies of the state, of which it was given one.

    `statistics` are those that BatchNorms took in training: torch's own does not count its writing as a change in place.
    """
    moved = {id(value) for value in statistics}
    return {
        name
        for name in buffers
        if id(after[name]) in moved
        or after[name]._version != before[name]._version
        or not torch.equal(after[name], before[name])
    }
