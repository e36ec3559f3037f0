"""Mistakes in a method's class that can be seen without running it: a misspelt hook, a wrong signature, a missing decorator.

They are found when the class is defined or its first instance made, before any work, and named with the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from .errors import HookError

SHORT = 3  # letters of a hook whose name is taken for misspelt in another case alone: many words resemble `fit`
NEAR_FLAG = 0.85  # similarity from which on a class variable is taken for a misspelt flag
DECORATOR = "@dataclass(frozen=True, kw_only=True)"
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
SCORES = {"generic", "personal"}
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
    _check_values(cls)
    for name, value in list(vars(cls).items()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if name in hooks:
            if isinstance(function, FunctionType):
                _check_signature(cls, name, value, function, hooks[name])
        elif name.startswith("_") or name in inherited:
            continue
        elif isinstance(function, FunctionType):
            _check_name(cls, name, value, function, hooks)
        elif not callable(value) and not isinstance(value, property) and _is_class_variable(cls, name):
            near = difflib.get_close_matches(name, flags, n=1, cutoff=NEAR_FLAG)
            if near:
                raise HookError(f"{cls.__name__}.{name} is not known. Did you mean {near[0]}?")


def _check_values(cls: type) -> None:
    """Refuse values that would be no fields: set in an `__init__`, or over an inherited field without its annotation."""
    where = cls.__name__
    if "__init__" in vars(cls) and "__dataclass_params__" not in vars(cls):
        raise HookError(
            f"{where}.__init__() cannot be written: what it sets would not be part of the experiment. Declare each value as a "
            f"field, mu: float = fs.setting(0.1, 'what it is'), with {DECORATOR} above class {where}"
        )
    parents = [kind for kind in cls.__mro__[1:] if "__dataclass_params__" in vars(kind)]
    fields = {field.name for kind in parents for field in dataclasses.fields(kind)}
    for name in vars(cls):
        if name in fields and name not in inspect.get_annotations(cls):
            kind = _annotation(next(k for k in cls.__mro__[1:] if name in inspect.get_annotations(k)), name)
            raise HookError(
                f"{where}.{name} has no annotation, so that the inherited value would stay. Annotate it: "
                f"{name}: {kind} = fs.setting({_value(vars(cls)[name])}, 'what it is'), with {DECORATOR}"
            )
    scores = vars(cls).get("scores", ("generic",))
    if not isinstance(scores, tuple) or not scores or not set(scores) <= SCORES:
        raise HookError(
            f"{where}.scores = {scores!r}: it should be ('generic',), ('personal',) or ('personal', 'generic')"
        )


def check_decorated(cls: type, base: type) -> None:
    """Refuse a class that declares fields without the decorator that makes them fields, or a field that is no setting.

    Mixins may annotate what they like.
    """
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
    for field in dataclasses.fields(cls):
        if field.init and "help" not in field.metadata:
            kind = next(k for k in cls.__mro__ if field.name in inspect.get_annotations(k))
            if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
                continue  # of a method that fedstill makes for itself, as for fine-tuning: no experiment names it
            value = "0.1" if field.default is dataclasses.MISSING else repr(field.default)
            raise HookError(
                f"{kind.__name__}.{field.name} is no setting, and would not be part of the experiment. Write "
                f"{field.name}: {_annotation(kind, field.name)} = fs.setting({value}, 'what it is')"
            )


def _annotation(kind: type, name: str) -> str:
    """Return a field's type as it is written."""
    annotation = inspect.get_annotations(kind)[name]
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _value(value: Any) -> str:
    return repr(value.default if isinstance(value, dataclasses.Field) else value)


def _check_name(cls: type, name: str, value: Any, function: FunctionType, hooks: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a function whose name is clearly a hook's with a slip, and that takes as many arguments."""
    taken = tuple(inspect.signature(function).parameters)[0 if isinstance(value, staticmethod) else 1 :]
    for hook, wanted in hooks.items():
        if len(taken) == len(wanted) and is_misspelt(name, hook):
            right = f"{hook}({', '.join(wanted)})"
            raise HookError(
                f"{cls.__name__}.{name}() is no hook. Did you mean {right}? "
                f"A function of your own begins with an underscore: _{name}()"
            )


def is_misspelt(name: str, hook: str) -> bool:
    """Return whether a name is a hook's with one slip: another case, a letter left out, doubled or swapped with the next.

    Names that are words of their own are not: a hook's name beside other words, another first letter, a plural's s.

    >>> [is_misspelt(name, "loss") for name in ("losss", "Loss", "lsos", "los", "kd_loss", "loss2", "less")]
    [True, True, True, True, False, False, False]
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)]
    own, right = name.replace("_", "").lower(), hook.replace("_", "")
    if own == right:
        return True
    if len(right) <= SHORT or own[:1] != right[0] or (len(words) > 1 and right in words):
        return False
    shorter = {right[:i] + right[i + 1 :] for i in range(len(right)) if i < len(right) - 1 or right[i] != "s"}
    doubled = {right[:i] + right[i] + right[i:] for i in range(len(right))}
    swapped = {right[:i] + right[i + 1] + right[i] + right[i + 2 :] for i in range(len(right) - 1)}
    return own in shorter | doubled | swapped


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
    places = [n for n in own if signature.parameters[n].kind in (inspect.Parameter.POSITIONAL_ONLY, POSITIONAL)]
    swapped = [n for place, n in enumerate(places) if n in wanted and wanted.index(n) != place]
    if swapped:
        raise HookError(f"{cls.__name__}.{name}({', '.join(names)}) names {swapped[0]!r} in another place. {right}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HookError(
            f"{cls.__name__}.{name}() is a coroutine or a generator. A hook is a plain function that returns its result"
        )


def _is_class_variable(cls: type, name: str) -> bool:
    """Return whether a name is no field: a ClassVar, or without an annotation."""
    annotation = inspect.get_annotations(cls).get(name)
    return annotation is None or "ClassVar" in str(annotation)
