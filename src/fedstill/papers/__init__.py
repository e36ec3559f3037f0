"""What the five papers ran: one TOML file a paper, by the names and values of this library.

    title, venue, note             the paper
    [common]                       what all its settings share; `load` puts it into each
    [settings.NAME]                fields of `Experiment`; `unstated` names those whose values are ours, for want of the paper's
    [method]                       the paper's own method: `id`, and the fields that the paper states
    [baselines.ID]                 a method it compares with, in the same form; what the paper does not state is left out
    [published.TABLE.SETTING]      its accuracies in per cent by method and score: a number, or [mean, ± as printed]

A method's table may also hold `tried` (values that the paper chose among), `experiment` (fields of `Experiment` that it has to
itself, such as `head`) and `on.PATTERN` (what holds in the settings so named, `*` standing for anything). `note` says where in
the paper a thing stands and what is missing there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from ..core.errors import InputError, nearest

ABOUT = ("note", "unstated")  # of a setting: what is no field of Experiment
BESIDE = ("id", "note", "tried", "experiment", "on")  # of a method's table: what is no field of the method


def names() -> tuple[str, ...]:
    """The papers, by the ids of their methods."""
    files = (entry.name for entry in resources.files(__package__).iterdir())
    return tuple(sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml")))


def load(name: str) -> dict[str, Any]:
    """A paper's file, with `common` put into each of its settings."""
    _known("paper", name, names())
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    common = paper.pop("common", {})
    for setting in paper["settings"].values():
        own = dict(setting)
        unstated = [*common.get("unstated", ()), *own.get("unstated", ())]
        setting.update({**common, **own, "unstated": unstated})
    return paper


def values(name: str, setting: str, method: str = "") -> dict[str, Any]:
    """A paper's setting with one of its methods (its own where none is named), as `Experiment.from_values` takes it."""
    paper = load(name)
    own = paper["method"]["id"]
    tables = {own: paper["method"], **paper["baselines"]}
    _known("setting", setting, paper["settings"])
    _known("method", method or own, tables)
    table = tables[method or own]
    experiment = {field: value for field, value in paper["settings"][setting].items() if field not in ABOUT}
    fields: dict[str, Any] = {}
    for part in (table, *(part for on, part in table.get("on", {}).items() if fnmatchcase(setting, on))):
        fields.update((field, value) for field, value in part.items() if field not in BESIDE)
        experiment.update(part.get("experiment", {}))
    return {**experiment, "method": {"id": method or own, **fields}}


def _known(what: str, name: str, right: Iterable[str]) -> None:
    right = list(right)
    if name not in right:
        raise InputError(what, name, nearest(name, right))
