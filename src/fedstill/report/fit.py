"""Tables in narrow terminals: columns are left out, the least important first, rather than broken into lines or cut."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Columns: TypeAlias = Sequence[tuple[str, Sequence[str]]]

GAP = 2  # blanks between columns


@dataclass(frozen=True)
class Order:
    """Which columns of a table matter less than others, by their headings; units are without their prefix."""

    first: tuple[str, ...] = ()  # are left out, in this order
    last: tuple[str, ...] = ()  # and these when nothing else is left
    always: tuple[str, ...] = ()  # never, as the first column never is


RESULTS = Order(
    ("steps", "FLOPs", "B", "seconds", "per sample"),
    ("ε", "worst 10 %", "generic", "seeds"),
    ("personal", "score"),
)


def fit(cells: Columns, width: int | None, order: Order = RESULTS) -> tuple[list[tuple[str, Sequence[str]]], list[str]]:
    """Return the columns that a line of so many signs has room for, and the headings of those left out; None: all.

    >>> table = [("method", ["fedavg"]), ("personal %", ["91.2"]), ("seconds", ["3.0"]), ("kB", ["70"])]
    >>> [heading for heading, _ in fit(table, 25)[0]], fit(table, 25)[1]
    (['method', 'personal %'], ['seconds', 'kB'])
    >>> fit(table, 30)[1], fit(table, 31)[1]
    (['kB'], [])
    """
    shown = list(range(len(cells)))
    optional = [i for i in shown if i and _known(cells[i][0], order) not in order.always]
    optional.sort(key=lambda i: _rank(cells[i][0], i, order))
    while width is not None and optional and _width([cells[i] for i in shown]) > width:
        shown.remove(optional.pop(0))
    return [cells[i] for i in shown], [heading for i, (heading, _) in enumerate(cells) if i not in shown]


def _width(cells: Columns) -> int:
    return sum(max(map(cells_of, (heading, *texts))) for heading, texts in cells) + GAP * (len(cells) - 1)


def _rank(heading: str, number: int, order: Order) -> tuple[int, int]:
    """Return when a column is left out; those of equal rank are from the right."""
    unit = _known(heading, order)
    if unit in order.last:
        return len(order.first) + 1 + order.last.index(unit), -number
    return order.first.index(unit) if unit in order.first else len(order.first), -number


def _known(heading: str, order: Order) -> str:
    """Return a heading without its prefix, or without what its numbers are: "personal MAE" is personal."""
    name, known = heading.rpartition(" ")[0], (*order.first, *order.last, *order.always)
    return name if name in known else _unit(heading)


def _unit(heading: str) -> str:
    """Return a heading without the prefix of its unit.

    >>> _unit("MFLOPs"), _unit("k numbers"), _unit("steps")
    ('FLOPs', 'numbers', 'steps')
    """
    return heading[1:].strip() if heading[:1] in tuple("kMGT") else heading


def cells_of(text: str) -> int:
    """Return how many cells of a terminal a text takes: two for a wide sign, none for one that combines with the one before.

    >>> cells_of("Köln"), cells_of("東京"), cells_of("e\u0301")
    (4, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def padded(text: str, width: int, left: bool = False) -> str:
    """Return a text with blanks before it, or with `left` after it, so that it takes so many cells.

    >>> padded("東", 4), padded("a", 3, left=True)
    ('  東', 'a  ')
    """
    blanks = " " * (width - cells_of(text))
    return text + blanks if left else blanks + text


def cut(text: str, width: int) -> str:
    """Return a text that takes at most so many cells, with … for what was cut off.

    >>> cut("Charité", 5), cut("東京病院", 5), cut("Rom", 3)
    ('Char…', '東京…', 'Rom')
    """
    if cells_of(text) <= width:
        return text
    while cells_of(text) >= width:
        text = text[:-1]
    return text + "…"


def hanging(head: str, text: str, width: int | None) -> str:
    """Return a name and what it is, further lines below the first one's text; None: one line.

    >>> print(hanging("  run   ", "one method, by name or file", 26))
      run   one method, by
            name or file
    """
    if width is None:
        return head + text
    blank = " " * len(head) if len(head) < width // 2 else "    "
    return textwrap.fill(
        text, width, initial_indent=head, subsequent_indent=blank, break_on_hyphens=False, break_long_words=False
    )


def explained(notes: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Return the notes of a table without those that explain columns that were left out."""
    return [note for note in notes if not _only_of(note, left_out)]


def _only_of(note: str, headings: Sequence[str]) -> bool:
    about = note.partition(":")[0].partition(" of ")[0].split(", ")
    return all(word in headings for word in about)
