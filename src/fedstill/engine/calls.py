"""Calls of hooks whose arguments are compared before and after, and checks of what hooks return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core import tree
from ..core.errors import TrainingError, nearest
from ..core.method import Method, Phase
from ..core.tree import Params, Tree
from .bench import Bench

TREE = "It should return a tree: a dictionary whose values are tensors or such dictionaries"
UNCHANGED = "A hook must return new tensors (x = x + y, not x += y) and new dictionaries ({**tree, name: x})"
ARGUMENTS = {
    "loss": ("task", "params", "local", "batch"), "enter": ("task", "local"), "after_epoch": ("task", "before", "after"),
}  # fmt: skip
"""What a phase's own functions are given."""


@dataclass(frozen=True)
class Calls:
    """Calls hooks and compares their arguments before and after."""

    method: Method

    def __call__(self, hook: str, call: Callable[[], Any], **arguments: Tree) -> Any:
        """Return what a hook returns; refuse one that changes an argument."""
        before = {name: tree.flatten(tree.clone(argument)) for name, argument in arguments.items()}
        value = call()
        for name, argument in arguments.items():
            now = tree.flatten(argument)
            changed = [leaf for leaf, old in before[name].items() if leaf not in now or not _same(old, now[leaf])]
            changed += [leaf for leaf in now if leaf not in before[name]]
            if changed:
                where = name + "".join(f"[{key!r}]" for key in changed[0].split(tree.SEPARATOR))
                raise TrainingError(f"{name_of(self.method, hook)} changed its argument {where} in place. {UNCHANGED}")
        return value

    def tree(self, hook: str, call: Callable[[], Any], **arguments: Tree) -> Tree:
        """Return the tree that a hook returns."""
        return check_tree(self.method, hook, self(hook, call, **arguments))


def _same(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def check_tree(method: Method, hook: str, value: Any) -> Tree:
    """Refuse what is no tree of tensors."""
    if not isinstance(value, dict):
        raise wrong(method, hook, value, TREE)
    for name, entry in value.items():
        if not isinstance(name, str):
            raise wrong(method, hook, name, f"{TREE}, by name")
        if isinstance(entry, dict):
            check_tree(method, hook, entry)
        elif not isinstance(entry, Tensor):
            raise wrong(method, hook, entry, TREE, f" as {name!r}")
    return value


def check_loss(method: Method, hook: str, value: Any, right: str) -> None:
    """Refuse what is not one number."""
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        raise wrong(method, hook, value, right)


def check_model(method: Method, hook: str, model: Tree, initial: Params) -> None:
    """Refuse a model whose entries are not those of the model that is trained."""
    for name, entry in initial.items():
        if name not in model:
            raise TrainingError(
                f"{name_of(method, hook)} returned no {name!r}. It should return every entry of the model"
            )
        if not isinstance(model[name], Tensor) or model[name].shape != entry.shape:
            raise wrong(method, hook, model[name], f"It should be of the shape {_shape(entry)}", f" as {name!r}")
    others = [name for name in model if name not in initial]
    if others:
        raise TrainingError(
            f"{name_of(method, hook)} returned {others[0]!r}. It should return the model's entries alone"
        )


def check_memory(method: Method, before: Tree, after: Tree) -> None:
    """Refuse a memory with other names, shapes or types than it had."""
    old, new = tree.flatten(before), tree.flatten(after)
    right = (
        "A memory has one form for every client and round: init_client returns it with zeros where nothing is known yet"
    )
    for name in [*old, *new]:
        entry = name.replace(tree.SEPARATOR, "/")
        if name not in new or name not in old:
            what = "leaves out" if name in old else "adds"
            raise TrainingError(f"{name_of(method, 'finish')} {what} {entry!r} of the memory. {right}")
        rows = 1 if name.split(tree.SEPARATOR)[0] in method.per_sample else 0
        a, b = old[name], new[name]
        if a.shape[rows:] != b.shape[rows:] or a.ndim != b.ndim or a.dtype != b.dtype:
            what = f"gives the memory's {entry!r} as {_shape(b)} {b.dtype}, which was {_shape(a)} {a.dtype}"
            raise TrainingError(f"{name_of(method, 'finish')} {what}. {right}")


def check_functions(method: Method, number: int, phase: Phase) -> None:
    """Refuse a phase's function that cannot be called with what it is given."""
    for field, wanted in ARGUMENTS.items():
        function = getattr(phase, field)
        if function is None:
            continue
        what = f"{name_of(method, named(function, field))} ({field} of phase {number})"
        right = f"It should be a function ({', '.join(wanted)})"
        if not callable(function):
            raise TrainingError(f"{what} is a {type(function).__name__}. {right}")
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin's, which is not known
            continue
        try:
            signature.bind(*wanted)
        except TypeError as error:
            taken = ", ".join(signature.parameters)
            raise TrainingError(f"{what} takes ({taken}) and cannot be called: {error}. {right}") from None


def check_private(bench: Bench, names: Any, initial: Params) -> None:
    """Refuse names of private entries that the model does not have, of which nothing would be private."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise wrong(bench.method, "private", names, "It should return a frozenset of names of the model's entries")
    known = {**initial, **bench.net.export(initial)}
    for name in sorted(names, key=str):
        if name not in known:
            inside = [entry for entry in known if entry.startswith(f"{name}.")]
            close = ", ".join(map(repr, inside[:3])) + (", …" if len(inside) > 3 else "")
            what = f"{name_of(bench.method, 'private')} names {name!r}, which is no entry of the model"
            raise TrainingError(f"{what}. It should name entries: {close or nearest(str(name), known)}")


def named(function: Any, otherwise: str) -> str:
    """Return a function's name; `otherwise` where it has none of its own."""
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else str(name)


def wrong(method: Method, hook: str, value: Any, right: str, where: str = "") -> TrainingError:
    """Return the error for a hook that returned this value."""
    shown = f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        shown += f" of {len(value)}"
    elif isinstance(value, dict):
        shown = f"one tree ({', '.join(map(str, value)) or 'empty'})"
    return TrainingError(f"{name_of(method, hook)} returned {shown}{where}. {right}")


def _shape(value: Tensor) -> str:
    return "×".join(map(str, value.shape)) or "one number"


def name_of(method: Method, hook: str) -> str:
    """Return a hook as messages name it."""
    return f"{type(method).__name__}.{hook}()"
