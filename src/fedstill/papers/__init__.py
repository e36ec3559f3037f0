"""The experiments of the five papers: one TOML file per paper, with the names and values of this library.

    title, venue, note             the paper
    [common]                       values that all its settings share; `load` merges them into each
    [settings.NAME]                fields of `Experiment`; `unstated` lists those that the paper does not state, with our values
    [method]                       the paper's own method: `id`, and the fields that the paper states
    [baselines.ID]                 a method it compares with, in the same form; fields that the paper does not state are left out
    [published.TABLE.SETTING]      its accuracies in per cent by method and score: a number, or [mean, ± as printed]

A method's table may also have `tried` (values that the paper chose among), `experiment` (fields of `Experiment` for this method
only, such as `head`) and `on.PATTERN` (values for the settings with matching names; `*` matches anything). `note` says where in
the paper a value is stated and what is missing there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from ..core.errors import InputError, nearest

ABOUT = ("note", "unstated")  # keys of a setting that are no fields of Experiment
BESIDE = ("id", "note", "tried", "experiment", "on")  # keys of a method's table that are no fields of the method


def names() -> tuple[str, ...]:
    """Return the papers, by the ids of their methods."""
    files = (entry.name for entry in resources.files(__package__).iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load(name: str) -> dict[str, Any]:
    """Return a paper's file, with `common` merged into each of its settings."""
    _check_name("paper", name, names())
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    common = paper.pop("common", {})
    for setting in paper["settings"].values():
        own = dict(setting)
        unstated = [*common.get("unstated", ()), *own.get("unstated", ())]
        setting.update({**common, **own, "unstated": unstated})
    return paper


def values(name: str, setting: str, method: str = "") -> dict[str, Any]:
    """Return the values of `Experiment.from_values` for a paper's setting with one of its methods, by default its own."""
    paper = load(name)
    own = paper["method"]["id"]
    tables = {own: paper["method"], **paper["baselines"]}
    _check_name("setting", setting, paper["settings"])
    _check_name("method", method or own, tables)
    table = tables[method or own]
    experiment = {field: value for field, value in paper["settings"][setting].items() if field not in ABOUT}
    fields: dict[str, Any] = {}
    matching = [overrides for pattern, overrides in table.get("on", {}).items() if fnmatchcase(setting, pattern)]
    for entries in (table, *matching):
        fields.update((field, value) for field, value in entries.items() if field not in BESIDE)
        experiment.update(entries.get("experiment", {}))
    return {**experiment, "method": {"id": method or own, **fields}}


def _check_name(field: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name and suggest the nearest one."""
    known = list(known)
    if name not in known:
        raise InputError(field, name, nearest(name, known))
