"""A model's state divided by layer or by module type, into what is shared and what stays at a client.

Buffers belong to the module that owns them, so a head's or a BatchNorm's running statistics are never on the wrong side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..core.errors import InputError, nearest
from ..core.task import Split


def by_head(module: nn.Module, head: str | Sequence[str] | None) -> Split | None:
    """Divide a model at its head: the modules named by `head`, or those the model itself names.

    A model names its head by an attribute `head_modules` (a name or several), by `get_classifier()` as timm's do, by calling a
    module `head`, or by calling the last one with parameters what torchvision and transformers call it (`LAST`). None where it
    does not: then only methods that need no head can run.
    """
    names = _head_names(module, head)
    if names is None:
        return None
    known = dict(module.named_modules(remove_duplicate=False))
    del known[""]
    order = {name: place for place, name in enumerate(known)}
    names.sort(key=lambda name: order.get(name, -1))  # the first is where the body ends, however they were listed
    inside: set[str] = set()
    entries = module.state_dict(keep_vars=True)
    state = set(entries)
    for name in names:
        if name not in known:
            raise InputError("head", name, f"a module of the model: {nearest(name, known)}")
        inside |= {entry for entry in state if entry.startswith(name + ".")}
    trainable = {name for name, _ in module.named_parameters()}
    if not inside & trainable:
        raise InputError("head", ", ".join(names), "a module that has parameters")
    tied = {id(entries[name]) for name in inside} & {id(entries[name]) for name in state - inside}
    if tied:
        both = sorted(name for name in state if id(entries[name]) in tied)
        raise InputError("head", ", ".join(names), f"apart from the body: {' and '.join(both)} are one tensor")
    if not trainable - inside:
        raise InputError("head", ", ".join(names), "a part of the model: a head that is the whole model leaves no body")
    return Split(tuple(names), frozenset(inside), frozenset(state - inside))


def by_type(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the names of everything owned by modules of these types (for example all BatchNorm layers)."""
    owners = [name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, kinds)]
    return frozenset(entry for entry in module.state_dict(keep_vars=True) if entry.rpartition(".")[0] in set(owners))


LAST = ("classifier", "fc", "heads", "score")  # what the last module is called in torchvision and transformers


def _by_custom(module: nn.Module) -> list[str] | None:
    """Return the name of the head as libraries give it; None where it is not found."""
    give = getattr(module, "get_classifier", None)
    classifier = give() if callable(give) else None
    found = [name for name, part in module.named_modules() if part is classifier and name]
    if found and next(module.get_submodule(found[0]).parameters(), None) is not None:
        return found
    if isinstance(getattr(module, "head", None), nn.Module):
        return ["head"]
    owners = [name for name, part in module.named_children() if next(part.parameters(), None) is not None]
    return owners[-1:] if owners[-1:] and owners[-1] in LAST and len(owners) > 1 else None


def _head_names(module: nn.Module, head: str | Sequence[str] | None) -> list[str] | None:
    named = head or getattr(module, "head_modules", None)
    if named is None:
        return _by_custom(module)
    names: list[Any] = list(named) if isinstance(named, list | tuple) else [named]
    if not all(isinstance(name, str) for name in names):
        raise InputError("head", named, "the name of a module, or several names")
    return names
