"""The command `timeline`: a run's simulated rounds as a Gantt chart."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InputError, Shown
from ..report import figures
from ..report import timeline as report
from ..run.journal import Journal
from . import flags, keep
from .screen import say
from .show import picture

FIRST = 5  # rounds drawn where none are named


def timeline(argv: Sequence[str]) -> None:
    """`fedstill timeline RUN …`."""
    parser = flags.Parser(
        "timeline",
        "Draw what the server and each client did when, in simulated time: RUN is the folder of a run that was made with "
        f"--profile and --out. The picture shows the first {FIRST} rounds, or those of --rounds; several runs are drawn on one "
        "axis of time.",
        "RUN …",
        (
            "fedstill timeline runs/slow",
            "fedstill timeline runs/slow --rounds 10-12 --out rounds.png",
            "fedstill timeline runs/waits runs/wait-free",
        ),
    )
    group = parser.add_argument_group("results")
    flags.plain(parser, group, "rounds", f"rounds to draw [default 1-{FIRST}]", "A-B", "rounds such as 3-5, or one")
    flags.plain(
        parser, group, "out", "the picture's file [default RUN/timeline.png]", "FILE.png", "a file that ends in .png"
    )
    given, words = parser.read(argv)
    if "help" in given:
        parser.print_help()
        return
    if not words or len(set(words)) < len(words):
        raise InputError(
            "run", Shown(" ".join(words) or "nothing"), "folders of runs, each once: fedstill timeline RUN …"
        )
    folders = [Path(word) for word in words]
    runs = [_read(folder) for folder in folders]  # all, before anything is said
    shown = [_chosen(given["rounds"], lines) if "rounds" in given else lines[:FIRST] for lines, _ in runs]
    out = picture(given["out"]) if "out" in given else folders[0] / "timeline.png"
    panels: dict[str, Sequence[report.Line]] = {}
    for folder, (lines, said), chosen in zip(folders, runs, shown, strict=True):
        if len(folders) > 1:
            say(f"{folder}:")
        for text in report.summary(chosen if "rounds" in given else lines, said["late"], said.get("mode", "sync")):
            say(text)
        abandoned = [r["round"] for r in Journal(folder).history() if r.get("abandoned")]
        if abandoned:
            say(f"abandoned, with fewer than {said['minimum']} replies: {len(abandoned)} of {len(lines)} rounds")
        title = f"{said['method']['id']} on {said['data']}, devices {said['profile']}{_pace(said)}"
        panels[title if title not in panels else f"{title} ({folder})"] = chosen
    if not figures.available():
        say(figures.MISSING)
        return
    notes = {_note(said) for _, said in runs}
    report.draw(panels, out, notes.pop() if len(notes) == 1 else "")
    say(f"picture: {out}")


def _read(folder: Path) -> tuple[list[report.Line], Mapping[str, Any]]:
    """A run's timeline and its settings."""
    lines: list[report.Line] = [*Journal(folder).timelines()]
    if not lines:
        inside = [found for found in keep.run_folders(folder) if Journal(found).timeline.is_file()]
        hint = f", such as {inside[0]}" if inside else " (--profile uniform --out FOLDER makes one)"
        raise InputError("run", str(folder), f"the folder of a run in simulated time{hint}")
    # No Experiment: the run's sampler may be known in its own script only.
    return lines, tomllib.loads((folder / keep.RUN).read_text(encoding="utf-8"))


def _pace(said: Mapping[str, Any]) -> str:
    """Whether personal work waits, where that is a question."""
    kind = said.get("wait_free", "off")
    return f", wait-free ({kind})" if kind != "off" else ""


def _chosen(text: str, lines: Sequence[report.Line]) -> list[report.Line]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    chosen = [line for line in lines if first <= line["round"] <= last]
    if not chosen:
        right = f"rounds between {lines[0]['round']} and {lines[-1]['round']}, such as 1-3"
        raise InputError("--rounds", text, right)
    return chosen


def _note(said: Mapping[str, Any]) -> str:
    """What ends a round, in words."""
    if said.get("mode", "sync") != "sync":
        count = "every reply" if said["mode"] == "fedasync" else "every buffer of replies"
        return f"{said['mode']}: the server's step comes with {count}; sampler {said['sampler']}."
    ends = [f"{said['over_select']:g} times as many asked as wanted"] if said["over_select"] > 1 else []
    ends += [f"deadline {said['deadline']:g} s"] if said["deadline"] else []
    late = f"; late replies: {said['late']}" if ends else ""
    return f"End of a round: {', '.join(ends) or 'all that answer have done so'}{late}; sampler {said['sampler']}."
