"""Typed, documented, checked fields: one declaration serves Python, TOML and the command line.

A settings class is a frozen dataclass whose fields are made by `setting(default, help, ...)`. The limits are in the field's
metadata, so the check at construction, the flag's help and the TOML reader all use the same declaration. `Group` is the base
class of settings that also depend on one another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from .errors import InputError, nearest

S = TypeVar("S")


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    group: str = "",
) -> Any:
    """Return a dataclass field with its default, one line of help and its limits (`least` ≤ value, `above` < value ≤ `most`).

    `group` is the heading in the command's help under which the field's flag stands.
    """
    metadata = {"help": help, "least": least, "above": above, "most": most, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that were made by `setting`, in the order of declaration."""
    return [f for f in dataclasses.fields(cls) if "help" in f.metadata]


def types_of(cls: type) -> Mapping[str, Any]:
    """Return the type of every field, by name."""
    return _hints(cls)


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """Resolve a class's annotations, once: that takes longer than all of a check."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def values_of(settings: Any) -> dict[str, Any]:
    """Return the value of every field, by name, in the order of declaration."""
    return {f.name: getattr(settings, f.name) for f in fields_of(type(settings))}


def limits(metadata: Mapping[str, Any]) -> str:
    """Return the limits of a field in words; '' where there are none."""
    words = {"least": "at least", "above": "above", "most": "at most"}
    return " and ".join(f"{word} {metadata[name]:g}" for name, word in words.items() if metadata.get(name) is not None)


def kind(annotation: Any) -> str:
    """Return in words which values a type takes."""
    if get_origin(annotation) is Literal:
        return "one of: " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "a list of " + {int: "whole numbers", float: "numbers", str: "names"}[get_args(annotation)[0]]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(annotation, str(annotation))


def check(settings: Any) -> None:
    """Refuse a value of the wrong type or outside its limits; called from `__post_init__`."""
    types = types_of(type(settings))
    for field in fields_of(type(settings)):
        value = _convert(types[field.name], getattr(settings, field.name), field)
        object.__setattr__(settings, field.name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that belong together. Groups are combined by inheritance, so that their fields stay flat.

    A group extends `__post_init__` to refuse values that are illegal together, and `unused` to name fields that other fields
    leave without effect; both call `super()` first.
    """

    def __post_init__(self) -> None:
        check(self)

    def unused(self) -> dict[str, str]:
        """Return the fields that have no effect, given the others, each with the reason: "without `server`".

        A field that a reason refers to is in backticks, for the command to write it as a flag.
        """
        return {}

    def without_effect(self, names: Collection[str]) -> list[tuple[str, str]]:
        """Return (field, reason) for each of these fields that has no effect."""
        return [(name, reason) for name, reason in self.unused().items() if name in names]

    def require_defaults(self, names: Collection[str], reason: str) -> None:
        """Refuse the first of these fields whose value is not its default."""
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise InputError(field.name, value, f"{field.default!r} {reason}")


def build(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Return a settings object with these values; refuse an unknown name and suggest the nearest field."""
    known = {f.name for f in fields_of(cls)}
    for name in values:
        if name not in known:
            raise InputError(f"{where}{name}", values[name], f"left out, or did you mean {nearest(name, known)}")
    return cls(**values)


def _convert(annotation: Any, value: Any, field: dataclasses.Field[Any]) -> Any:
    """Return the value in the field's type; refuse one of another type or outside the field's limits."""
    right = " ".join(words for words in (kind(annotation), limits(field.metadata)) if words)
    origin = get_origin(annotation)
    if origin is Literal:
        if not isinstance(value, str | int | float) or value not in get_args(annotation):
            raise InputError(field.name, value, right)
        return value
    if origin is tuple:
        items = (value,) if isinstance(value, str | int | float) else value
        if not isinstance(items, list | tuple):
            raise InputError(field.name, value, right)
        return tuple(_convert(get_args(annotation)[0], item, field) for item in items)
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{field.name}: a settings field has one type, so that TOML and flags can write it")
    if annotation is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = _float(value)
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's whole numbers too
    if not isinstance(value, annotation) or (annotation is int and isinstance(value, bool)):
        raise InputError(field.name, value, right)
    if isinstance(value, int | float) and not isinstance(value, bool) and not _within(value, field.metadata):
        raise InputError(field.name, value, right)
    return value


def _float(value: numbers.Real) -> float:
    """Return a number as a float; an integer that is too large is infinite, which no field takes."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _within(value: float, metadata: Mapping[str, Any]) -> bool:
    """Return whether a number is finite, of 64 bits, and within its field's limits."""
    least, above, most = metadata.get("least"), metadata.get("above"), metadata.get("most")
    return (
        (abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value))
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
