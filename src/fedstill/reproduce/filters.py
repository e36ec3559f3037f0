"""Choose cells: `--only cifar100,100clients,pfedsd`.

Each word must be something of a cell: its data, number of clients, partition, method, setting, model, row, column, panel, label
or id; `*` matches anything. Words of the same kind are alternatives (fedavg,pfedsd), words of different kinds must all hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..core.errors import InputError
from ..papers import Cell

USUAL = ("data", "clients", "method")  # kinds of words that are listed where a word is not known
Facets = Mapping[str, frozenset[str]]  # by kind what a cell is called


def facets(cell: Cell, values: Mapping[str, Any]) -> Facets:
    """Return what a cell is called, by kind; `values` are those of its experiment."""
    partition = str(values.get("partition", ""))
    kind = partition.partition(":")[0]
    kinds = {
        "method": {cell.method},
        "data": {str(values.get("data", "")), re.split("[:@#]", str(values.get("data", "")))[0]},
        "clients": {f"{values['clients']}clients"} if values.get("clients") else set(),
        "partition": {partition, kind, kind.removeprefix("balanced-")},
        "setting": {cell.setting},
        "model": {str(values.get("model", ""))},
        "row": {cell.row},
        "column": {cell.column},
        "panel": {cell.panel},
        "label": {cell.label},
        "id": {cell.id},
    }
    return {name: frozenset(_plain(word) for word in words if word) for name, words in kinds.items()}


def choose(cells: Sequence[Cell], only: str, values: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return the cells that the words of `only` choose, in their order; all where it is empty."""
    words = [_plain(word) for word in only.split(",") if word.strip()]
    if only.strip() and not words:
        raise InputError("--only", only, "words with commas between them, as cifar100,pfedsd")
    known = [facets(cell, own) for cell, own in zip(cells, values, strict=True)]
    chosen: dict[str, list[str]] = {}
    for word in words:
        kinds = [kind for kind in (known[0] if known else {}) if any(_matches(word, own[kind]) for own in known)]
        if not kinds:
            raise InputError("--only", word, _nearest(word, known))
        chosen.setdefault(kinds[0], []).append(word)
    kept = [
        cell
        for cell, own in zip(cells, known, strict=True)
        if all(any(_matches(word, own[kind]) for word in alternatives) for kind, alternatives in chosen.items())
    ]
    if not kept:
        both = " and ".join(" or ".join(alternatives) for alternatives in chosen.values())
        raise InputError("--only", only, f"words that some cell has together: none is of {both}")
    return kept


def _nearest(word: str, known: Sequence[Facets]) -> str:
    """Return what to write instead of an unknown word: the closest name of any kind, then those of the usual kinds."""
    names = {name for own in known for kind in own for name in own[kind] if "," not in name}
    close = difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.5)
    usual = sorted({name for own in known for kind in USUAL for name in own[kind] if "," not in name})
    return f"{f'{close[0]!r}? ' if close else ''}(a name, such as {', '.join(usual)})"


def _plain(text: str) -> str:
    """Return a name as it is compared.

    >>> _plain(" LG-FedAvg"), _plain("Non-IID (s = 2)")
    ('lg-fedavg', 'non-iid (s = 2)')
    """
    return " ".join(text.lower().split())


def _matches(word: str, names: frozenset[str]) -> bool:
    return any(word == name or fnmatchcase(name, word) for name in names)
