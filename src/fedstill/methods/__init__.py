"""The registry: collects the methods of every module of this folder, so that a new file is all a new method needs."""

from __future__ import annotations

import importlib
import pkgutil

from ..core.errors import InputError, nearest
from ..core.method import Method


def _collect() -> dict[str, type[Method]]:
    """Return every method by its id; a class whose id is "" is a base of methods and not one itself."""
    methods: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__):
                continue
            if "id" not in vars(value) or value.id in methods:
                raise TypeError(f"{value.__module__}.{value.__name__} needs an id of its own")
            if value.id:
                methods[value.id] = value
    return dict(sorted(methods.items()))


METHODS: dict[str, type[Method]] = _collect()


def get(name: str) -> type[Method]:
    """Return the method with this id."""
    if name not in METHODS:
        raise InputError("method", name, f"a method that is there: {nearest(name, METHODS)}")
    return METHODS[name]
