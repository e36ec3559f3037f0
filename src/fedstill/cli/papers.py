"""The command `papers`: the tables and figures of the five papers, what they need, and what they would cost here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from .. import papers as library
from ..core.errors import InputError
from ..papers import Exhibit
from ..report.costs import NONE, duration
from ..report.fit import Order, fit
from ..report.text import aligned
from ..reproduce import quick, sources
from ..reproduce.plan import Plan, find, plan
from ..run.experiment import Experiment
from . import flags, screen
from .screen import say

ABOUT = (
    "List the tables and figures of the five papers: what each shows, its cells, the data that it needs and whether they are "
    "here, and about what all its cells would cost on this machine. With PAPER or PAPER/EXHIBIT, what its cells are."
)
EXAMPLES = ("fedstill papers", "fedstill papers pfedsd", "fedstill papers pfedsd/table2")


def papers(argv: Sequence[str]) -> None:
    """`fedstill papers [PAPER[/EXHIBIT]]`."""
    parser = flags.Parser("papers", ABOUT, "[PAPER[/EXHIBIT]]", EXAMPLES)
    flags.add(parser, Experiment, ("data_root",))
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if len(words) > 1:
        raise InputError("argument", words[1], "left out ('fedstill papers --help')")
    root = flags.take(Experiment, flag_values).get("data_root", "")
    exhibits = find(words or library.names())
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 160))
    clock = quick.Clock(root)
    if len(exhibits) == 1 and "/" in words[0]:
        say("\n".join(_exhibit(exhibits[0], root, width, clock)))
    else:
        say("\n".join(_list(exhibits, root, width, clock, bool(words))))


def _list(exhibits: Sequence[Exhibit], root: str, width: int, clock: quick.Clock, detailed: bool) -> list[str]:
    """Return a line for each exhibit, under its paper."""
    lines: list[str] = []
    for paper in dict.fromkeys(exhibit.paper for exhibit in exhibits):
        about = library.load(paper)
        own = [exhibit for exhibit in exhibits if exhibit.paper == paper]
        lines += textwrap.wrap(f"{paper}: {about['title']} ({about['venue']})", width)
        if detailed:
            lines += textwrap.wrap(
                " ".join(about["note"].split()), width - 2, initial_indent="  ", subsequent_indent="  "
            )
        rows = [_row(exhibit, root, clock, width // 4) for exhibit in own]
        heads = ("exhibit", "cells", "runs", "about", "data", "shows")
        columns = [(head, [row[i] for row in rows]) for i, head in enumerate(heads[:-1])]
        texts = aligned(columns)
        room = max(10, width - max(map(len, texts)) - 2)
        longest = max(map(len, texts))
        for number, text in enumerate(texts):
            what = "shows" if number == 0 else "" if number == 1 else rows[number - 2][-1]
            what = what if len(what) <= room else what[: room - 1] + "…"
            lines.append(f"{text:<{longest}}  {what}".rstrip())
        lines.append("")
    lines += textwrap.wrap(
        "about: all cells with the paper's seeds on this machine, by the time of a plain step of each model (methods differ; "
        "'fedstill reproduce … --dry-run' times each); – where data are not here: ↓ downloaded when first used, ✗ missing. "
        "'fedstill papers PAPER/EXHIBIT' lists the cells, 'fedstill reproduce PAPER/EXHIBIT' runs them.",
        width,
    )
    return lines


def _row(exhibit: Exhibit, root: str, clock: quick.Clock, room: int) -> tuple[str, ...]:
    planned = plan([exhibit])
    runs = sum(trial.seeds for trial in planned.trials if trial.trains)
    needs = sources.needs((trial.experiment for trial in planned.trials), root)
    data = _marks([need.mark for need in needs], room) or "generated"
    cost = _cost(planned, clock)
    return exhibit.id, str(len(exhibit.cells)), str(runs), cost, data, exhibit.title


def _marks(marks: Sequence[str], room: int) -> str:
    """Return as many of the data as there is room for, the missing ones first, and how many more there are.

    >>> _marks(["mnist", "svhn✗"], 20), _marks(["mnist", "svhn✗", "usps✗"], 9)
    ('mnist svhn✗', 'svhn✗ +2')
    """
    if len(" ".join(marks)) <= room:
        return " ".join(marks)
    first = sorted(marks, key=lambda mark: not mark.endswith("✗"))
    shown = len(first)
    while shown > 1 and len(" ".join(first[:shown])) + len(f" +{len(first) - shown}") > room:
        shown -= 1
    return f"{' '.join(first[:shown])} +{len(first) - shown}"


def _cost(planned: Plan, clock: quick.Clock) -> str:
    """Return about how long a plan takes on this machine."""
    seconds = clock.seconds(planned) if planned.trials else None
    return NONE if seconds is None else duration(seconds)


def _exhibit(exhibit: Exhibit, root: str, width: int, clock: quick.Clock) -> list[str]:
    """Return the cells of one exhibit."""
    planned = plan([exhibit])
    needs = sources.needs((trial.experiment for trial in planned.trials), root)
    lines = textwrap.wrap(f"{exhibit.name}: {exhibit.title} ({exhibit.where})", width)
    lines += textwrap.wrap(" ".join(exhibit.note.split()), width)
    runs = sum(trial.seeds for trial in planned.trials if trial.trains)
    lines.append(
        f"{len(exhibit.cells)} cells from {runs} runs, {exhibit.seeds} seeds each; about {_cost(planned, clock)} here"
    )
    lines += textwrap.wrap(f"data: {', '.join(need.words for need in needs) or 'generated'}", width)
    for need in needs:
        if not need.present:
            lines += textwrap.wrap(
                f"  {need.name} needs {', '.join(need.missing)}{need.contents}", width, subsequent_indent="    "
            )
    if exhibit.unstated:
        lines += textwrap.wrap(f"not stated by the paper, ours: {', '.join(exhibit.unstated)}", width)
    columns = [
        ("cell", [cell.id for cell in exhibit.cells]),
        ("row", [cell.row for cell in exhibit.cells]),
        ("column", [cell.column for cell in exhibit.cells]),
        ("published", [_published(cell.published, cell.spread, cell.relation) for cell in exhibit.cells]),
    ]
    return [*lines, "", *aligned(fit(columns, screen.width(), CELLS)[0])]


CELLS = Order(("row", "column"), always=("published",))  # a cell's name says its row and column


def _published(value: float | None, spread: float | None, relation: str) -> str:
    if value is None:
        return NONE
    text = f"{value:g}" if relation == "=" else f"{relation} {value:g}"
    return text if spread is None else f"{text} ± {spread:g}"
