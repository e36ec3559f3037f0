"""Typed, documented, checked fields: one declaration serves Python, TOML and the command line.

A settings class is a frozen dataclass whose fields are made by `setting(default, help, ...)`. The limits live in the
field's metadata, so the check at construction, the flag's help and the TOML reader all read the same line.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping
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
    """A field with its default, one line of help, and its limits (`least` ≤ value, `above` < value ≤ `most`)."""
    metadata = {"help": help, "least": least, "above": above, "most": most, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields that were made by `setting`, in the order of declaration."""
    return [f for f in dataclasses.fields(cls) if "help" in f.metadata]


def types_of(cls: type) -> dict[str, Any]:
    """Every field's type, resolved."""
    return typing.get_type_hints(cls)


def values_of(settings: Any) -> dict[str, Any]:
    """Every field's value, by name, in the order of declaration."""
    return {f.name: getattr(settings, f.name) for f in fields_of(type(settings))}


def limits(metadata: Mapping[str, Any]) -> str:
    """The limits of a field in words, or ''."""
    parts = []
    if metadata.get("least") is not None:
        parts.append(f"at least {metadata['least']:g}")
    if metadata.get("above") is not None:
        parts.append(f"above {metadata['above']:g}")
    if metadata.get("most") is not None:
        parts.append(f"at most {metadata['most']:g}")
    return " and ".join(parts)


def kind(annotation: Any) -> str:
    """What a field takes, in words."""
    if get_origin(annotation) is Literal:
        return "one of: " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "a list of " + {int: "whole numbers", float: "numbers", str: "names"}[get_args(annotation)[0]]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(annotation, str(annotation))


def check(settings: Any) -> None:
    """Refuse a value of the wrong type or outside its limits; called from `__post_init__`."""
    hints = types_of(type(settings))
    for field in fields_of(type(settings)):
        value = _as(hints[field.name], getattr(settings, field.name), field)
        object.__setattr__(settings, field.name, value)


def build(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Make a settings object from names and values; an unknown name is refused with the nearest right one."""
    known = {f.name for f in fields_of(cls)}
    for name in values:
        if name not in known:
            raise InputError(f"{where}{name}", values[name], f"left out, or did you mean {nearest(name, known)}")
    return cls(**values)


def _as(annotation: Any, value: Any, field: dataclasses.Field[Any]) -> Any:
    """The value in the field's type, within the field's limits."""
    right = " ".join(part for part in (kind(annotation), limits(field.metadata)) if part)
    origin = get_origin(annotation)
    if origin is Literal:
        if value not in get_args(annotation):
            raise InputError(field.name, value, right)
        return value
    if origin is tuple:
        values = (value,) if isinstance(value, str | int | float) else value
        if not isinstance(values, list | tuple):
            raise InputError(field.name, value, right)
        return tuple(_as(get_args(annotation)[0], item, field) for item in values)
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{field.name}: a settings field has one type, so that TOML and flags can write it")
    if annotation is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's whole numbers too
    if not isinstance(value, annotation) or (annotation is int and isinstance(value, bool)):
        raise InputError(field.name, value, right)
    if isinstance(value, int | float) and not isinstance(value, bool):
        meta = field.metadata
        low, above, high = meta.get("least"), meta.get("above"), meta.get("most")
        outside = (
            not math.isfinite(value)
            or (low is not None and value < low)
            or (above is not None and value <= above)
            or (high is not None and value > high)
        )
        if outside:
            raise InputError(field.name, value, right)
    return value
