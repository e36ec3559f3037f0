"""The registry: every module of this folder is looked through for methods. Nothing else imports this folder."""

from __future__ import annotations

import importlib
import pkgutil

from ..core.errors import InputError, nearest
from ..core.method import Method


def _collect() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__):
                continue
            if "id" not in vars(value) or value.id in found:
                raise TypeError(f"{value.__module__}.{value.__name__} needs an id of its own")
            found[value.id] = value
    return dict(sorted(found.items()))


METHODS: dict[str, type[Method]] = _collect()


def get(name: str) -> type[Method]:
    """The method with this id."""
    if name not in METHODS:
        raise InputError("method", name, f"a method that is there: {nearest(name, METHODS)}")
    return METHODS[name]
