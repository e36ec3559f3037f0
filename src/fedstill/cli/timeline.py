"""The command `timeline`: a run's simulated rounds as a Gantt chart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InputError, Shown
from ..core.reading import Unreadable, field, read_toml
from ..report import figures
from ..report import timeline as report
from ..run.journal import Journal
from . import flags, folders
from .screen import say
from .show import picture

SETTINGS: dict[str, type] = {  # that are printed
    **{"data": str, "method": dict, "profile": str, "late": str, "sampler": str},
    **{"minimum": int, "over_select": float, "deadline": float},
}
FIRST = 5  # rounds that are drawn by default


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
    flag_values, words = parser.read(argv)
    if "help" in flag_values:
        parser.print_help()
        return
    if not words or len(set(words)) < len(words):
        raise InputError(
            "run", Shown(" ".join(words) or "nothing"), "folders of runs, each once: fedstill timeline RUN …"
        )
    paths = [Path(word) for word in words]
    runs = [_read(path) for path in paths]  # all, before anything is printed
    shown = [_select(flag_values["rounds"], lines) if "rounds" in flag_values else lines[:FIRST] for lines, _ in runs]
    out = picture(flag_values["out"]) if "out" in flag_values else paths[0] / "timeline.png"
    panels: dict[str, Sequence[report.Line]] = {}
    names: dict[str, Sequence[str]] = {}
    for path, (lines, values), selected in zip(paths, runs, shown, strict=True):
        if len(paths) > 1:
            say(f"{path}:")
        summed = selected if "rounds" in flag_values else lines
        for text in report.summary(summed, values["late"], values.get("mode", "sync")):
            say(text)
        abandoned = [record["round"] for record in Journal(path).history() if record.get("abandoned")]
        if abandoned:
            say(f"abandoned, with fewer than {values['minimum']} replies: {len(abandoned)} of {len(lines)} rounds")
        title = f"{values['method']['id']} on {values['data']}, devices {values['profile']}{_wait_free(values)}"
        title = title if title not in panels else f"{title} ({path})"
        panels[title], outline = selected, Journal(path).outline()
        names[title] = () if outline is None else outline.names
    if not figures.available():
        say(figures.MISSING)
        return
    notes = {_note(values) for _, values in runs}
    report.draw(panels, out, notes.pop() if len(notes) == 1 else "", names)
    say(f"picture: {out}")


def _read(folder: Path) -> tuple[list[report.Line], Mapping[str, Any]]:
    """Return a run's timeline and the values of its settings."""
    lines: list[report.Line] = [*Journal(folder).timelines()]
    if not lines:
        inside = [run for run in folders.run_folders(folder) if Journal(run).timeline.is_file()]
        hint = f", such as {inside[0]}" if inside else " (--profile uniform --out FOLDER makes one)"
        raise InputError("run", str(folder), f"the folder of a run in simulated time{hint}")
    # Not read as an Experiment: the run's sampler may be registered in its own script only.
    try:
        values = read_toml(folder / folders.RUN)
    except Unreadable as error:
        raise InputError("run", str(folder), f"the folder of a run with its {folders.RUN} ({error})") from None
    if missing := [name for name in SETTINGS if name not in values]:
        raise InputError("run", str(folder), f"the folder of a run whose {folders.RUN} has {', '.join(missing)}")
    try:
        field(values["method"], "id", str)
        for name, kind in SETTINGS.items():
            field(values, name, kind)
        for name in ("mode", "wait_free"):
            field(values, name, str, "")
    except Unreadable as error:
        raise InputError("run", str(folder), f"the folder of a run, {folders.RUN} {error}") from None
    return lines, values


def _wait_free(values: Mapping[str, Any]) -> str:
    """Return a clause that names the kind of wait-free training, where it is on."""
    kind = values.get("wait_free", "off")
    return f", wait-free ({kind})" if kind != "off" else ""


def _select(text: str, lines: Sequence[report.Line]) -> list[report.Line]:
    """Return the lines of the rounds that `--rounds` names: "3-5" or "3"."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    selected = [line for line in lines if first <= line["round"] <= last]
    if not selected:
        right = f"rounds between {lines[0]['round']} and {lines[-1]['round']}, such as 1-3"
        raise InputError("--rounds", text, right)
    return selected


def _note(values: Mapping[str, Any]) -> str:
    """Return in words what ends a round."""
    if values.get("mode", "sync") != "sync":
        count = "every reply" if values["mode"] == "fedasync" else "every buffer of replies"
        return f"{values['mode']}: the server's step comes with {count}; sampler {values['sampler']}."
    ends = [f"{values['over_select']:g} times as many asked as wanted"] if values["over_select"] > 1 else []
    ends += [f"deadline {values['deadline']:g} s"] if values["deadline"] else []
    late = f"; late replies: {values['late']}" if ends else ""
    return f"End of a round: {', '.join(ends) or 'all that answer have done so'}{late}; sampler {values['sampler']}."
