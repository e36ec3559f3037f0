"""The page of runs that go on: progress and time left, then the report's table and figures of the rounds so far."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError
from ...core.metric import ACCURACY, Measure, measure_of
from ...core.reading import Unreadable, read_json, read_toml
from ...run.journal import EXPERIMENT, Journal
from ...run.lock import LOCK
from ..costs import duration
from . import clients, curves, page, results
from .markup import Html, join, tag
from .read import Study, read
from .style import styles

JOB = "job.json"
NEWEST = 20  # rounds from which the time left is estimated
REFUSALS = 12  # shown at most
GAP = 2.0  # seconds between two readings of the folder, at least; where drawing takes long, five times that


@dataclass(frozen=True)
class Progress:
    """One run: how far it is."""

    label: str
    seed: int
    rounds: int
    records: Sequence[Mapping[str, Any]]
    failure: str = ""
    names: Sequence[str] = ()  # the clients', where they have names

    def client(self, number: str) -> str:
        """Return a client's name, or its number where it has none."""
        return self.names[int(number)] if number.isdecimal() and int(number) < len(self.names) else number

    @property
    def done(self) -> int:
        """The rounds that are over."""
        return len(self.records)

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return bool(self.failure) or self.stopped or self.done >= self.rounds

    @property
    def stopped(self) -> bool:
        """Whether it has ended early, after so many rounds without a better score."""
        return bool(self.records) and bool(self.records[-1].get("stopped"))

    @property
    def accuracy(self) -> float | None:
        """The personal accuracy (or error) of the last round that was scored."""
        return next((float(record["personal"]) for record in reversed(self.records) if "personal" in record), None)

    @property
    def measure(self) -> Measure:
        """What that number is."""
        return measure_of("", next((record for record in reversed(self.records) if "personal" in record), None))

    @property
    def pace(self) -> float | None:
        """Seconds a round, by the newest rounds; the first, which also warms up, counts only where it is the only one."""
        spent = [record["seconds"] - record.get("compile_seconds", 0.0) for record in self.records]
        return float(np.mean((spent[1:] or spent)[-NEWEST:])) if spent else None


def progress_of(root: Path) -> list[Progress]:
    """Return the progress of the runs that a folder holds or will hold."""
    try:
        job = read_json(root / JOB) if (root / JOB).is_file() else {}
        if not job:
            settings = read_toml(root / EXPERIMENT)
            table = {str(settings["method"]["id"]): settings}
            return [_one(label, int(each["seed"]), int(each["rounds"]), root) for label, each in table.items()]
        found, seeds = [], int(job["seeds"])
        for label, each in job["experiments"].items():
            for seed in range(int(each.get("seed", 0)), int(each.get("seed", 0)) + seeds):
                parts = [str(label)] if job["command"] != "run" else []
                if ".." in Path(label).parts or Path(label).is_absolute():
                    raise ValueError(label)
                folder = root.joinpath(*parts, *([f"seed-{seed}"] if seeds > 1 else []))
                found.append(_one(str(label), seed, int(each["rounds"]), folder))
        return found
    except (Unreadable, KeyError, TypeError, ValueError, AttributeError):
        raise InputError("folder", str(root), "the folder of a run, a comparison or a sweep that has begun") from None


def _one(label: str, seed: int, rounds: int, folder: Path) -> Progress:
    journal = Journal(folder)
    with contextlib.suppress(Unreadable, KeyError, TypeError, ValueError):  # more, where a flag said so later
        rounds = int(read_toml(folder / EXPERIMENT)["rounds"])
    outline = journal.outline() if journal.begun else None
    names = () if outline is None else outline.names
    return Progress(label, seed, rounds, journal.history() if journal.begun else [], journal.failure(), names)


def at_work(root: Path) -> bool:
    """Return whether a process works in a folder, by what it has noted there; this never stands in its way."""
    try:
        words = (root / LOCK).read_text(errors="replace").split()
        number, host = int(words[1]), words[3]
    except (OSError, IndexError, ValueError):
        return False
    if host != socket.gethostname():
        return True  # nobody here knows
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class Live:
    """The page of a folder, made anew when something in it has changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()  # several pages may be open
        self._made: tuple[object, str] = (None, "")
        self._next = 0.0

    def page(self) -> str:
        """Return the whole page."""
        return page.document(f"{self.root.name}: live", str(self.root), [Html(self.part())], live=True)

    def part(self) -> str:
        """Return what changes."""
        with self._lock:
            return self._part()

    def _part(self) -> str:
        if time.monotonic() < self._next:
            return self._made[1]
        files = sorted(file for file in self.root.rglob("*.*") if file.suffix in (".jsonl", ".json"))
        seen = (tuple((str(file), _changed(file)) for file in files), at_work(self.root))
        if seen != self._made[0]:
            start = time.monotonic()
            self._made = seen, str(render(progress_of(self.root), seen[1], _study(self.root)))
            self._next = time.monotonic() + max(GAP / 2, 5 * (time.monotonic() - start))
        return self._made[1]


def render(runs: Sequence[Progress], working: bool, study: Study | None) -> Html:
    """Return the part of the page that changes."""
    parts: list[object] = [_head(runs, working), _table(runs, working)]
    if study is not None:
        classes = styles(study)
        parts += [
            tag("section", results.results(study, None, {}).html()),
            tag("section", tag("h2", "Training"), curves.curves(study, classes)),
            tag("section", tag("h2", "Clients"), clients.clients(study, classes)),
        ]
    return join([*parts, _refused(runs)])


def _head(runs: Sequence[Progress], working: bool) -> Html:
    done, total = sum(run.done for run in runs), sum(run.done if run.stopped else run.rounds for run in runs)
    rest = left(runs)
    if all(run.over for run in runs) and not working:
        sentence = f"Finished: {done:,} rounds."
        return tag("p", sentence, cls="answer", data_over=True)
    if not working:
        return tag(
            "p", f"Stopped after {done:,} of {total:,} rounds; 'fedstill resume' goes on.", cls="answer", data_over=True
        )
    more = f", about {duration(rest)} left" if rest is not None and rest > 0 else ""
    return tag("p", f"{done:,} of {total:,} rounds{more}.", cls="answer")


def left(runs: Sequence[Progress]) -> float | None:
    """Return the seconds that are left, at the pace of each run, or of the others where it has not begun; None: not known."""
    paces = [run.pace for run in runs if run.pace is not None]
    if not paces:
        return None
    others = float(np.mean(paces))
    return sum((run.pace or others) * (run.rounds - run.done) for run in runs if not run.over)


def _table(runs: Sequence[Progress], working: bool) -> Html:
    several = len({run.seed for run in runs}) > 1
    heads = [
        "run",
        *(["seed"] if several else []),
        "rounds",
        "",
        next((run.measure for run in runs if run.accuracy is not None), ACCURACY).heading("personal"),
        "left",
    ]
    rows = []
    for run in runs:
        pace = run.pace
        rest = "failed" if run.failure else "stopped early" if run.stopped else "done" if run.over else ""
        if not rest:
            rest = (
                "waits" if not run.done else duration((pace or 0) * (run.rounds - run.done)) if working else "stopped"
            )
        bar = tag(
            "progress", value=run.done, max=run.rounds, aria_label=f"{run.label}: {run.done} of {run.rounds} rounds"
        )
        score = "–" if run.accuracy is None else run.measure.text(run.accuracy)
        cells = [run.label, *([run.seed] if several else []), f"{run.done}/{run.rounds}", bar, score, rest]
        rows.append(tag("tr", *(tag("td", cell) for cell in cells)))
    head = tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads)))
    failures = [tag("p", f"{run.label}, seed {run.seed}: {run.failure}", cls="warn") for run in runs if run.failure]
    table = tag("div", tag("table", head, tag("tbody", *rows)), cls="scroll")
    return tag("section", table, *failures, id="progress")


def _refused(runs: Sequence[Progress]) -> Html:
    """Return the newest refusals of clients' replies."""
    lines = [
        f"{run.label}, seed {run.seed}, round {record['round']}, client {run.client(str(client))}: {reason}"
        for run in runs
        for record in run.records
        for client, reason in dict(record.get("rejected") or {}).items()
    ]
    shown = [tag("li", line) for line in lines[-REFUSALS:][::-1]]
    return tag("section", tag("h2", f"Refused: {len(lines)}"), tag("ul", *shown), id="refused") if lines else Html("")


def _study(root: Path) -> Study | None:
    """Return the results so far; None before a round was scored, and while files are being replaced."""
    try:
        return read([root])
    except InputError:
        return None


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
