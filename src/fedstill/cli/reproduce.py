"""The command `reproduce`: a paper's table or figure run again, beside the published numbers."""

from __future__ import annotations

import math
import shlex
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import settings
from ..core.errors import InputError, Shown
from ..core.settings import setting
from ..report import figures
from ..report.costs import duration
from ..reproduce import cost, layout, pictures, sources, write
from ..reproduce import report as web
from ..reproduce.plan import Plan, find, plan
from ..reproduce.reading import read
from ..reproduce.runner import Member, Runner
from ..reproduce.scale import Scale
from ..reproduce.shelf import Shelf
from ..reproduce.store import Result, Store
from ..run.experiment import Experiment
from ..run.prepare import named_device, pick_device
from . import flags
from .screen import console, say

MACHINE = ("data_root", "device", "precision", "engine")
EVERY = 30.0  # seconds between lines on a run that goes on, where lines are all that can be shown
NARROW, WIDE = 80, 160  # columns of a table, where the terminal does not say otherwise, and at most


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own flags."""

    only: str = setting(
        "", "cells by data, number of clients (100clients), partition, method, setting, model, row or column, as "
        "cifar100,100clients,pfedsd: words of one kind are alternatives", group="cells",
    )  # fmt: skip
    seeds: int = setting(0, "seeds a cell; 0: as many as the paper", least=0, group="cells")
    scale: float = setting(
        1.0, "share of the rounds, clients and data; below 1 all is marked as scaled", above=0, most=1, group="cells"
    )
    out: str = setting("reproduced", "folder for the results, which exhibits share", group="results")
    report: bool = setting(
        False, "run nothing: only report what has been run, here or on a machine whose results lie in --out", group="results"
    )  # fmt: skip
    dry_run: bool = setting(False, "only say what it would cost: time, memory, FLOPs", group="results")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.report and self.dry_run:
            raise InputError("--report", Shown("beside --dry-run"), "one of the two: neither runs anything")


ABOUT = (
    "Run the cells of a paper's table or figure and set them beside the published numbers: published, ours ± std, difference, a "
    "verdict that counts both spreads and numbers of seeds, and whether the ranking holds. Each distinct experiment is run once, "
    "seeds side by side; the same command goes on where it was stopped. 'fedstill papers' lists what there is."
)
EXAMPLES = (
    "fedstill reproduce pfedsd/table2 --only cifar100,100clients,pfedsd --device cuda",
    "fedstill reproduce pfedkd-wcl/table1 --scale 0.1",
    "fedstill reproduce pfedsd/table2 --dry-run",
    "fedstill reproduce pfedsd/table2 --device cuda --report",
)


def reproduce(argv: Sequence[str]) -> None:
    """`fedstill reproduce PAPER/EXHIBIT…`."""
    parser = flags.Parser("reproduce", ABOUT, "PAPER/EXHIBIT…", EXAMPLES)
    flags.add(parser, Options)
    flags.add(parser, Experiment, MACHINE)
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if not words:
        raise InputError(
            "exhibit", Shown("nothing"), "one of a paper's, as pfedsd/table2 ('fedstill papers' lists them)"
        )
    command = shlex.join(["fedstill", "reproduce", *argv])
    with flags.named(flag_values):
        options = Options(**flags.take(Options, flag_values))
        if not options.out:
            raise InputError("--out", "", "a folder")
        machine = flags.take(Experiment, flag_values)
        root = machine.pop("data_root", "")
        (named_device if options.report else pick_device)(machine.get("device", "auto"))
        planned = plan(find(words), options.only, options.seeds, Scale(options.scale), machine)
    sources.check((trial.experiment for trial in planned.wanted), root)
    shelf = Shelf()
    store = Store(Path(options.out), lambda source: shelf.checksum(source, root))
    if options.dry_run:
        say(cost.report(planned, store, shelf, root, _width()))
        return
    watch = Lines(planned, store)
    runner = Runner(planned, store, shelf, root, command, watch)
    _say_first(planned, runner, store)
    if not options.report:
        runner.run()
    _report(planned, runner, store, shelf, root, command)


def _say_first(planned: Plan, runner: Runner, store: Store) -> None:
    """Say what is run and where the results go."""
    missing = runner.missing()
    total = sum(trial.seeds for trial in planned.wanted if trial.trains)
    cells = sum(len(part.cells) for part in planned.chosen)
    names = ", ".join(part.exhibit.name for part in planned.chosen)
    done = f", {total - len(missing)} of them done before" if len(missing) < total else ""
    say(f"{names}: {cells} cells from {total} runs{done}; results in {store.out}")
    if not planned.scale.whole:
        say(textwrap.fill(planned.scale.words(), _width()))
    runner.watch.left = list(missing)  # type: ignore[attr-defined]


def _report(planned: Plan, runner: Runner, store: Store, shelf: Shelf, root: str, command: str) -> None:
    """Print the tables and write the files."""
    whole = read(planned, store, shelf, root, runner.reasons)
    for part in planned.chosen:
        readings, chosen = whole[part.exhibit.name], {cell.id for cell in part.cells}
        shown = [reading for reading in readings if reading.cell.id in chosen]
        say("\n" + layout.text(part.exhibit, shown, planned.scale, _width()))
        made = write.write(store.out, part.exhibit, readings, planned, command)
        if figures.available():
            made += pictures.draw(part.exhibit, readings, planned.scale, made[0].parent)
        elif part.exhibit.kind == "figure":
            say(figures.MISSING)
        made.append(web.write(made[0].parent, part.exhibit, readings, planned, command))
        names = textwrap.wrap(", ".join(path.name for path in made), _width() - 2)
        say("\n".join([f"\nwritten: {made[0].parent}/", *(f"  {line}" for line in names)]))


def _width() -> int:
    """Return the columns that a table may take."""
    return max(40, min(shutil.get_terminal_size((NARROW, 24)).columns, WIDE))


class Lines:
    """Shows each run that ends in a line, and between them how far it is."""

    def __init__(self, planned: Plan, store: Store) -> None:
        self.planned, self.store = planned, store
        self.left: list[Member] = []
        self.total = 0
        self.began = self.printed = time.monotonic()
        self.spent = 0.0  # work that is over, in the unit of `_work`
        self.rounds: dict[tuple[int, int], int] = {}
        self.screen = console()

    def begin(self, members: Sequence[Member]) -> None:
        """Note that some runs begin, or go on, side by side."""
        self.total = self.total or len(self.left)
        self.printed = time.monotonic()

    def step(self, member: Member, record: dict[str, Any]) -> None:
        """Show a round, now and then."""
        now = time.monotonic()
        if self.screen is not None:
            done = self.total - len(self.left)
            accuracy = f"{100 * record['personal']:.1f} %" if "personal" in record else ""
            where = f"{member.trial.label}, seed {member.experiment.seed}, round {record['round']}/{member.experiment.rounds}"
            print(f"\r\x1b[K[{done}/{self.total}] {where}  {accuracy}"[: self.screen.width + 4], end="", flush=True)
        elif now - self.printed >= EVERY:
            self.printed = now
            say(
                f"  {member.trial.label}, seed {member.experiment.seed}: round {record['round']}/{member.experiment.rounds}"
            )

    def end(self, member: Member, result: Result | None, reason: str) -> None:
        """Show that a run is over, or why it cannot be."""
        if self.screen is not None:
            print("\r\x1b[K", end="")
        self.left = [other for other in self.left if (other.trial, other.number) != (member.trial, member.number)]
        self.total = max(self.total, len(self.left) + 1)
        self.spent += _work(member)
        done = self.total - len(self.left)
        what = f"failed: {reason}" if reason else ""
        if result is not None and not result.failed:
            record: dict[str, Any] = next((r for r in reversed(result.history) if "personal" in r), {})
            accuracy = f"{100 * record['personal']:.2f} %" if record else "done"
            what = f"{accuracy} in {result.seconds:.1f} s"
        elapsed = time.monotonic() - self.began
        rest = sum(map(_work, self.left)) * elapsed / self.spent if self.spent else 0.0
        left = f"; about {duration(rest)} left" if self.left else f"; {duration(elapsed)} in all"
        say(
            f"[{done:>{len(str(self.total))}}/{self.total}] {member.trial.label}, seed {member.experiment.seed}: {what}{left}"
        )


def _work(member: Member) -> float:
    """Return about how much a run is, in passes over its data."""
    e = member.experiment
    return math.ceil(e.rounds * e.participation * ((e.local_steps or e.epochs) + 1))
