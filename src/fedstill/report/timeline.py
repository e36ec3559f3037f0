"""Simulated rounds as a Gantt chart and in a few lines of text, from a run's timeline.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .figures import COLOURS, INK, _figure, _note, _save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line: TypeAlias = Mapping[str, Any]  # of timeline.jsonl: a round
PARTS = {  # of a client's round, each with its colour
    "download": COLOURS[4],
    "generic": COLOURS[0],
    "personal": COLOURS[3],
    "upload": COLOURS[5],
}
WAIT, MERGE = "#e4e4e4", INK
NAMES = {
    "download": "download",
    "generic": "work, generic model",
    "personal": "work, personal model",
    "upload": "upload",
}
MARKS = {  # what became of a reply that was not merged in time: marker, colour, in words
    "dropped": ("x", COLOURS[1], "dropped out"),
    "refused": ("|", INK, "refused"),
    "late": (">", COLOURS[1], "came too late"),
}
WORKED = ("merged", "late", "under way")
CLIENTS = 40  # the most that the picture shows


def summary(lines: Sequence[Line], late: str = "drop") -> list[str]:
    """What the rounds took, where the clients' time went, and what became of the replies."""
    lengths = [line["end"] - line["start"] for line in lines]
    shares = _shares(lines)
    counts = {name: sum(line["state"].count(name) for line in lines) for name in ("merged", *MARKS)}
    folded = sum(len(line["folded"]) for line in lines)
    fate = f" ({folded} of them merged later)" if late == "fold" else " (not merged)"
    asked = sum(len(line["clients"]) for line in lines)
    said = [f"{counts['merged']:,} merged in time", f"{counts['late']:,} late{fate if counts['late'] else ''}"]
    under_way = sum(line["state"].count("under way") for line in lines)
    if under_way:  # replies are merged as they arrive
        said = [f"{counts['merged'] + folded:,} merged ({folded:,} of them with later ones)"]
    said += [f"{counts['dropped']:,} dropped out", f"{counts['refused']:,} refused"]
    return [
        f"rounds {lines[0]['round']}–{lines[-1]['round']}: {sum(lengths):,.4g} simulated seconds, "
        f"{min(lengths):,.4g} to {max(lengths):,.4g} a round",
        "clients that worked: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        f"asked {asked:,}: " + ", ".join(said),
    ]


def _shares(lines: Sequence[Line]) -> dict[str, float]:
    """Of the time of clients that worked, from the order to the end of the round or of their work: what went where."""
    total = dict.fromkeys((*PARTS, "waiting"), 0.0)
    for line in lines:
        for i, state in enumerate(line["state"]):
            if state in WORKED:
                spent = {name: line[name][i] for name in PARTS}
                total["waiting"] += max(0.0, line["end"] - line["start"] - sum(spent.values()))
                for name, value in spent.items():
                    total[name] += value
    whole = sum(total.values()) or 1.0
    return {NAMES.get(name, name): value / whole for name, value in total.items() if value or name == "waiting"}


def draw(lines: Sequence[Line], path: str | Path, title: str = "", note: str = "") -> None:
    """A row for the server and for each client, fastest on top; a column of bars for each round."""
    everyone = {k for line in lines for k in line["clients"]}
    took: dict[int, list[float]] = {k: [] for k in everyone}
    for line in lines:
        for i, k in enumerate(line["clients"]):
            if line["state"][i] in WORKED:
                took[k].append(sum(line[name][i] for name in PARTS))
    order = sorted(everyone, key=lambda k: (float(np.mean(took[k])) if took[k] else np.inf, k))
    if len(order) > CLIENTS:  # from the fastest to the slowest, evenly
        order = [order[i] for i in np.linspace(0, len(order) - 1, CLIENTS).round().astype(int)]
    row = {k: i + 1 for i, k in enumerate(order)}
    figure = _figure(12.5, max(3.2, 1.9 + 0.24 * (len(order) + 1)))
    axes = figure.subplots()
    seen: set[str] = set()
    for line in lines:
        _server(axes, line)
        _clients(axes, line, row, seen)
    start, end = lines[0]["start"], lines[-1]["end"]
    longest = max([end, *(_arrival(line, i) for line in lines for i in range(len(line["clients"])))])
    axes.set_xlim(start, start + (1.01 * min(longest - start, 1.15 * (end - start)) or 1.0))
    axes.set_ylim(len(order) + 0.6, -0.7)
    small = len(order) > 25
    axes.set_yticks(range(len(order) + 1), ["server", *map(str, order)], fontsize=7.5 if small else 9)
    axes.set_ylabel("client")
    axes.set_xlabel("simulated time (s)")
    axes.grid(visible=False)
    _legend(axes, lines, seen, title)
    if len(everyone) > len(order):
        note = f"{len(order)} of the {len(everyone):,} clients that were asked, from the fastest to the slowest. {note}"
    if note:
        _note(figure, note)
    _save(figure, path)


def _server(axes: Axes, line: Line) -> None:
    start, closed, end = line["start"], line["closed"], line["end"]
    axes.barh(0, closed - start, left=start, height=0.62, color=WAIT, linewidth=0)
    axes.barh(0, end - closed, left=closed, height=0.62, color=MERGE, edgecolor=MERGE, linewidth=1.6, zorder=3)
    axes.axvline(end, color="#9a9a9a", linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    axes.annotate(
        f"round {line['round']}", ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
        textcoords="offset points", ha="center", va="bottom", fontsize=8.5, color="#444444",
    )  # fmt: skip


def _clients(axes: Axes, line: Line, row: Mapping[int, int], seen: set[str]) -> None:
    shown = [(i, row[k]) for i, k in enumerate(line["clients"]) if k in row]
    if not shown:
        return
    places = np.array([i for i, _ in shown])
    rows = np.array([r for _, r in shown])
    left = np.full(len(shown), float(line["start"]))
    for name, colour in PARTS.items():
        width = np.array(line[name])[places]
        axes.barh(rows, width, left=left, height=0.72, color=colour, linewidth=0)
        if width.any():
            seen.add(name)
        left = left + width
    states = np.array(line["state"])[places]
    merged = states == "merged"
    axes.barh(rows[merged], line["end"] - left[merged], left=left[merged], height=0.72, color=WAIT, linewidth=0)
    for state, (marker, colour, _) in MARKS.items():
        chosen = states == state
        if chosen.any():
            seen.add(state)
            axes.scatter(left[chosen], rows[chosen], marker=marker, s=34, color=colour, linewidths=1.6, zorder=4)


def _arrival(line: Line, i: int) -> float:
    return float(line["start"] + sum(line[name][i] for name in PARTS))


def _legend(axes: Axes, lines: Sequence[Line], seen: set[str], title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=NAMES[name]) for name, colour in PARTS.items() if name in seen]
    handles += [Patch(color=WAIT, label="waiting"), Patch(color=MERGE, label="merging")]
    handles += [
        Line2D([], [], linestyle="", marker=marker, color=colour, markersize=6, markeredgewidth=1.6, label=words)
        for state, (marker, colour, words) in MARKS.items()
        if state in seen
    ]
    axes.figure.legend(
        handles=handles, loc="outside upper left", ncols=9, frameon=False, fontsize=9, title=title or "Simulated time",
        title_fontproperties={"size": 13, "weight": "bold"}, alignment="left", borderpad=0.2, columnspacing=1.3,
    )  # fmt: skip
