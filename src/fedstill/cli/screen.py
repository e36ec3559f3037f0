"""Output to the screen: coloured with rich where it is installed and stdout is a terminal, plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..report import robustness
from ..report.bubbles import Counts, bubbles, sizes
from ..report.text import Facts, columns, notes, rows, table

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


def results(runs: Sequence[Run], facts: Facts) -> None:
    """Print the table of results, and below it what attackers cost, where there are some."""
    screen = console()
    if screen is None:
        say("\n" + table(runs, facts))
    else:
        lines = rows(runs)
        _grid(screen, columns(lines), [row.best for row in lines], notes(runs, lines, facts))
    if robustness.compares(runs):
        if screen is None:
            say("\n" + robustness.table(runs))
        else:
            cells = robustness.columns(runs)
            _grid(screen, cells, [False] * len(cells[0][1]), robustness.notes(runs))


def _grid(
    screen: Console, cells: Sequence[tuple[str, Sequence[str]]], bold: Sequence[bool], notes: Sequence[str]
) -> None:
    """Print columns, each with its heading, and the lines below them."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, (heading, _) in enumerate(cells):
        grid.add_column(heading, justify="right" if i else "left", no_wrap=i < 2)
    for i, best in enumerate(bold):
        grid.add_row(*(texts[i] for _, texts in cells), style="bold green" if best else "")
    screen.print(grid)
    for note in notes:
        screen.print(note, style="dim", markup=False)


def holdings(counts: Counts) -> None:
    """Print the samples of each client and class as bubbles."""
    screen = console()
    lines = bubbles(counts, width=screen.width if screen else 100)
    if screen is None:
        say("\n".join([*lines, sizes(counts)]))
        return
    from rich.text import Text

    for line in lines:
        text = Text(line)
        text.highlight_regex(r"[·•●⬤]", "cyan")
        text.highlight_regex(r"^ +class.*|^client +\d+|^….*|^samples.*", "dim")
        screen.print(text, no_wrap=True, overflow="crop")
    screen.print(sizes(counts))
