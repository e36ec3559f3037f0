"""The registry: collects the methods of every module of this folder, so that a new file is all a new method needs."""

from __future__ import annotations

import importlib
import pkgutil
import re

from ..core import own
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
    """Return the method with this id, or that a reference to code of one's own names (`core.own`)."""
    if own.is_reference(name):
        return register(name)
    if name not in METHODS:
        raise InputError("method", name, f"a method that is there: {nearest(name, METHODS)}")
    return METHODS[name]


def register(reference: str) -> type[Method]:
    """Add a method of one's own to the registry, under its id; return it."""
    cls = own.load("method", reference)
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise InputError("method", reference, "a class of methods, such as one that is derived from fedstill.FedAvg")
    if "id" not in vars(cls) or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", cls.id):
        right = f"a class with an id of its own, of a-z, 0-9 and -: id: ClassVar[str] = {cls.__name__.lower()!r}"
        raise InputError("method", reference, right)
    known = METHODS.get(cls.id, cls)
    if known is not cls and not own.reference_of(known):
        raise InputError("method", reference, f"a class with another id: {cls.id!r} is a method of fedstill's")
    METHODS[cls.id] = cls
    return cls


def name_of(method: Method) -> str:
    """Return what `get` finds the method's class by: its id, or the reference to code of one's own."""
    return own.reference_of(type(method)) or method.id
