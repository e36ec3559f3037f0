"""The papers' files: which there are, what a file says, and the values of `Experiment` for a setting with a method."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from ..core.errors import InputError, nearest

ABOUT = ("note", "unstated")  # keys of a setting that are no fields of Experiment
BESIDE = (
    "id",
    "note",
    "unstated",
    "tried",
    "experiment",
    "on",
)  # keys of a method's table that are no fields of the method


def names() -> tuple[str, ...]:
    """Return the papers, by the ids of their methods."""
    files = (entry.name for entry in resources.files(__package__).iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load(name: str) -> dict[str, Any]:
    """Return a paper's file, with `common` merged into each of its settings."""
    check_name("paper", name, names())
    return copy.deepcopy(_read(name))


def values(name: str, setting: str, method: str = "") -> dict[str, Any]:
    """Return the values of `Experiment.from_values` for a paper's setting with one of its methods, by default its own."""
    paper = load(name)
    own = paper["method"]["id"]
    tables = {own: paper["method"], **paper["baselines"]}
    check_name("setting", setting, paper["settings"])
    check_name("method", method or own, tables)
    table = tables[method or own]
    experiment = {field: value for field, value in paper["settings"][setting].items() if field not in ABOUT}
    fields: dict[str, Any] = {}
    matching = [overrides for pattern, overrides in table.get("on", {}).items() if fnmatchcase(setting, pattern)]
    for entries in (table, *matching):
        fields.update((field, value) for field, value in entries.items() if field not in BESIDE)
        experiment.update(entries.get("experiment", {}))
    return {**experiment, "method": {"id": method or own, **fields}}


def vary(values: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with a variant's put over them; its table `method` is put over the method's fields.

    >>> vary({"rounds": 9, "method": {"id": "pfedsd", "tau": 1.0}}, {"rounds": 5, "method": {"lam": 0.5}})
    {'rounds': 5, 'method': {'id': 'pfedsd', 'tau': 1.0, 'lam': 0.5}}
    """
    method = {**values.get("method", {}), **variant.get("method", {})}
    return {**values, **variant, **({"method": method} if method else {})}


def check_name(field: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name and suggest the nearest one."""
    known = list(known)
    if name not in known:
        raise InputError(field, name, nearest(name, known))


@cache
def _read(name: str) -> dict[str, Any]:
    """Read a paper's file once."""
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    common = paper.pop("common", {})
    for setting in paper["settings"].values():
        own = dict(setting)
        unstated = [*common.get("unstated", ()), *own.get("unstated", ())]
        setting.update({**common, **own, "unstated": unstated})
    return paper
