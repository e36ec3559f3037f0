"""Output to the screen: coloured with rich where it is installed and stdout is a terminal, plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    """Print the table of results."""
    screen = console()
    if screen is None:
        say("\n" + table(runs, facts))
        return
    from rich import box
    from rich.table import Table

    lines = rows(runs)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    cells = columns(lines)
    for i, (heading, _) in enumerate(cells):
        grid.add_column(heading, justify="right" if i else "left", no_wrap=i < 2)
    for i, row in enumerate(lines):
        grid.add_row(*(texts[i] for _, texts in cells), style="bold green" if row.best else "")
    screen.print(grid)
    for note in notes(runs, lines, facts):
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
