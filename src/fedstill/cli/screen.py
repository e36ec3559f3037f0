"""Output to the screen: coloured with rich where it is installed and stdout is a terminal, plain text otherwise."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report import robustness
from ..report.bubbles import Counts, bubbles, sizes
from ..report.fit import RESULTS, Order, explained, fit
from ..report.text import Facts, aligned, columns, notes, rows

if TYPE_CHECKING:
    from rich.console import Console

    from ..run.result import Run


def console() -> Console | None:
    """Return rich's console where stdout is a terminal that can do more than plain lines, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    screen = Console(highlight=False)
    return None if screen.is_dumb_terminal else screen


def say(line: str = "") -> None:
    """Print a plain line at once."""
    print(line, flush=True)


def width() -> int | None:
    """Return the columns of the terminal; None where stdout is none, so that a file has all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def results(runs: Sequence[Run], facts: Facts, wide: bool = False) -> None:
    """Print the table of results, and below it what attackers cost, where there are some.

    In a narrow terminal columns are left out, unless `wide`.
    """
    lines = rows(runs)
    table(columns(lines), [row.best for row in lines], notes(runs, lines, facts), wide)
    if robustness.compares(runs):
        cells = robustness.columns(runs)
        table(cells, [False] * len(cells[0][1]), robustness.notes(runs), wide)


def table(
    cells: Sequence[tuple[str, Sequence[str]]],
    bold: Sequence[bool],
    notes: Sequence[str],
    wide: bool,
    order: Order = RESULTS,
    elsewhere: str = "--wide shows them, report.html has them",
) -> None:
    """Print columns, each with its heading, and the lines below them.

    In a narrow terminal columns are left out in this order, unless `wide`; `elsewhere` says where they are then.
    """
    room = None if wide else width()
    shown, left_out = fit(cells, room, order)
    notes = explained(notes, left_out)
    if left_out:
        notes = [*notes, f"not in {room} columns: {', '.join(left_out)} ({elsewhere})"]
    screen = console()
    if screen is None:
        say("\n" + "\n".join([*aligned(shown), "", *notes]))
        return
    heads, rule, *body = aligned(shown)
    screen.print()
    for line, style in [
        (heads, "bold"),
        (rule, "dim"),
        *zip(body, ["bold green" if best else "" for best in bold], strict=True),
    ]:
        screen.print(line, style=style, markup=False, no_wrap=True, overflow="ignore", crop=False)
    screen.print()
    for note in notes:
        screen.print(note, style="dim", markup=False)


def holdings(counts: Counts, names: Sequence[str] = (), labels: Sequence[str] = ()) -> None:
    """Print the samples of each client and class as bubbles."""
    screen = console()
    lines = bubbles(counts, width=screen.width if screen else 100, names=names, labels=labels)
    if screen is None:
        say("\n".join([*lines, sizes(counts)]))
        return
    from rich.text import Text

    for line in lines:
        text = Text(line)
        text.highlight_regex(r"[·•●⬤]", "cyan")
        text.highlight_regex(r"^ *class.*|^client +\d+|^….*|^samples.*", "dim")
        screen.print(text, no_wrap=True, overflow="crop")
    screen.print(sizes(counts))
