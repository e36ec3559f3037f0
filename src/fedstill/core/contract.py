"""Mistakes in a method's class that can be seen without running it: a misspelt hook, a wrong signature, a missing decorator.

They are found when the class is defined or its first instance made, before any work, and named with the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from .errors import HookError

NEAR = 0.8  # similarity from which on a name is taken for a misspelt hook's, if its arguments are as many
NEAR_FLAG = 0.85  # and for a flag of the class
DECORATOR = "@dataclass(frozen=True, kw_only=True)"
STEP = ("task", "local", "batch")  # of `step`, which `Method` itself does not define


def hooks_of(base: type) -> dict[str, tuple[str, ...]]:
    """Return the hooks that a base class declares, each with the names of its arguments after self."""
    found = {
        name: tuple(inspect.signature(value).parameters)[1:]
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
    return {**found, "step": STEP}


def check_class(cls: type, base: type) -> None:
    """Refuse a class with a misspelt hook or flag, or with a hook that takes other arguments than it is given."""
    hooks = hooks_of(base)
    inherited = {name for kind in cls.__mro__[1:] for name in vars(kind)}
    flags = [name for name, value in vars(base).items() if not name.startswith("_") and name not in hooks]
    for name, value in list(vars(cls).items()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if name in hooks:
            if isinstance(function, FunctionType):
                _check_signature(cls, name, value, function, hooks[name])
        elif name.startswith("_") or name in inherited:
            continue
        elif isinstance(function, FunctionType):
            _check_name(cls, name, function, hooks)
        elif not callable(value) and not isinstance(value, property) and _is_class_variable(cls, name):
            near = difflib.get_close_matches(name, flags, n=1, cutoff=NEAR_FLAG)
            if near:
                raise HookError(f"{cls.__name__}.{name} is not known. Did you mean {near[0]}?")


def check_decorated(cls: type, base: type) -> None:
    """Refuse a class that declares fields without the decorator that makes them fields; mixins may annotate what they like."""
    for kind in cls.__mro__:
        if "__dataclass_params__" in vars(kind) or not issubclass(kind, base):
            continue
        own = [name for name in inspect.get_annotations(kind) if not _is_class_variable(kind, name)]
        own = [name for name in own if not name.startswith("_")]
        own += [name for name, value in vars(kind).items() if isinstance(value, dataclasses.Field) and name not in own]
        if own:
            fields = ", ".join(own)
            raise HookError(
                f"{kind.__name__} declares {fields} without a decorator. Write {DECORATOR} above class {kind.__name__}"
            )


def _check_name(cls: type, name: str, function: FunctionType, hooks: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a function whose name is nearly a hook's and that takes as many arguments."""
    bare = {_bare(hook): hook for hook in hooks}
    own = _bare(name)
    near = [
        other for other in difflib.get_close_matches(own, bare, n=1, cutoff=NEAR) if abs(len(other) - len(own)) <= 2
    ]
    near += [other for other in bare if sorted(other) == sorted(own)]  # letters in another order
    if not near:
        return
    hook = bare[near[0]]
    taken = tuple(inspect.signature(function).parameters)[1:]
    if len(taken) == len(hooks[hook]):
        right = f"{hook}({', '.join(hooks[hook])})"
        raise HookError(
            f"{cls.__name__}.{name}() is no hook, and nothing calls it. Did you mean {right}? "
            f"A function of your own begins with an underscore: _{name}()"
        )


def _check_signature(cls: type, name: str, value: Any, function: FunctionType, wanted: tuple[str, ...]) -> None:
    """Refuse a hook that cannot be called with its arguments, or that names them in another order."""
    right = f"It should be {name}(self, {', '.join(wanted)})".replace("self, )", "self)")
    signature = inspect.signature(function)
    names = list(signature.parameters)
    own = names if isinstance(value, staticmethod) else names[1:]
    given = tuple(wanted) if isinstance(value, staticmethod) else (None, *wanted)
    try:
        signature.bind(*given)
    except TypeError as error:
        raise HookError(
            f"{cls.__name__}.{name}({', '.join(names)}) cannot be called as a hook: {error}. {right}"
        ) from None
    swapped = [n for place, n in enumerate(own) if n in wanted and wanted.index(n) != place]
    if swapped:
        raise HookError(f"{cls.__name__}.{name}({', '.join(names)}) names {swapped[0]!r} in another place. {right}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HookError(
            f"{cls.__name__}.{name}() is a coroutine or a generator. A hook is a plain function that returns its result"
        )


def _bare(name: str) -> str:
    """Return a name without case and underscores."""
    return name.replace("_", "").lower()


def _is_class_variable(cls: type, name: str) -> bool:
    """Return whether a name is no field: a ClassVar, or without an annotation."""
    annotation = inspect.get_annotations(cls).get(name)
    return annotation is None or "ClassVar" in str(annotation)
