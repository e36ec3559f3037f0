"""Tables in narrow terminals: columns are left out, the least important first, rather than broken into lines or cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

Columns: TypeAlias = Sequence[tuple[str, Sequence[str]]]

GAP = 2  # blanks between columns
FIRST = ("steps", "FLOPs", "B", "seconds", "per sample")  # are left out, in this order; units without their prefix
LAST = ("ε", "worst 10 %", "generic", "seeds")  # and these when nothing else is left
ALWAYS = ("personal", "score")  # never, as the first column never is


def fit(cells: Columns, width: int | None) -> tuple[list[tuple[str, Sequence[str]]], list[str]]:
    """Return the columns that a line of so many signs has room for, and the headings of those left out; None: all.

    >>> table = [("method", ["fedavg"]), ("personal %", ["91.2"]), ("seconds", ["3.0"]), ("kB", ["70"])]
    >>> [heading for heading, _ in fit(table, 25)[0]], fit(table, 25)[1]
    (['method', 'personal %'], ['seconds', 'kB'])
    >>> fit(table, 30)[1], fit(table, 31)[1]
    (['kB'], [])
    """
    shown = list(cells)
    optional = [i for i, (heading, _) in enumerate(cells) if i and _name(heading) not in ALWAYS]
    optional.sort(key=partial(_rank, cells))
    while width is not None and optional and _width(shown) > width:
        shown.remove(cells[optional.pop(0)])
    return shown, [column[0] for column in cells if column not in shown]


def _width(cells: Columns) -> int:
    return sum(max(map(len, (heading, *texts))) for heading, texts in cells) + GAP * (len(cells) - 1)


def _rank(cells: Columns, number: int) -> tuple[int, int]:
    """Return when a column is left out; those of equal rank are from the right."""
    heading = _name(cells[number][0])
    if heading in LAST:
        return len(FIRST) + 1 + LAST.index(heading), -number
    unit = heading[1:] if heading[:1] in tuple("kMGT") else heading
    return FIRST.index(unit) if unit in FIRST else len(FIRST), -number


def _name(heading: str) -> str:
    """Return a heading without what its numbers are: "personal %" and "personal MAE" are personal."""
    name, _, mark = heading.rpartition(" ")
    return name if name in (*FIRST, *LAST, *ALWAYS) and mark else heading


def explained(notes: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Return the notes of a table without those that explain columns that were left out."""
    return [note for note in notes if not _only_of(note, left_out)]


def _only_of(note: str, headings: Sequence[str]) -> bool:
    about = note.partition(":")[0].partition(" of ")[0].split(", ")
    return all(word in headings for word in about)
