"""Simulated rounds as a Gantt chart and as a few lines of text, from a run's timeline.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .figures import COLOURS, INK, begin, footnote, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line: TypeAlias = Mapping[str, Any]  # a line of timeline.jsonl: one round
STAGES = {  # the stages of a client's round, each with its colour
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
MARKS = {  # the states of a reply that was not merged in time: marker, colour, in words
    "dropped": ("x", COLOURS[1], "dropped out"),
    "refused": ("|", INK, "refused"),
    "late": (">", COLOURS[1], "came too late"),
}
WORKED = ("merged", "late", "under way")
CLIENTS = 40  # the most in a chart


def summary(lines: Sequence[Line], late: str = "drop", mode: str = "sync") -> list[str]:
    """Describe how long the rounds took, how the clients spent their time, and what happened to the replies."""
    durations = [line["end"] - line["start"] for line in lines]
    shares = _shares(lines)
    counts = {name: sum(line["state"].count(name) for line in lines) for name in ("merged", *MARKS)}
    folded = sum(len(line["folded"]) for line in lines)
    fate = f" ({folded} of them merged later)" if late == "fold" else " (not merged)"
    asked = sum(len(line["clients"]) for line in lines)
    replies = [f"{counts['merged']:,} merged in time", f"{counts['late']:,} late{fate if counts['late'] else ''}"]
    if mode != "sync":  # replies are merged as they arrive
        replies = [f"{counts['merged'] + folded:,} merged ({folded:,} of them with later ones)"]
    replies += [f"{counts['dropped']:,} dropped out", f"{counts['refused']:,} refused"]
    return [
        f"rounds {lines[0]['round']}–{lines[-1]['round']}: {sum(durations):,.4g} simulated seconds, "
        f"{min(durations):,.4g} to {max(durations):,.4g} a round",
        "clients that worked: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        f"asked {asked:,}: " + ", ".join(replies),
    ]


def _shares(lines: Sequence[Line]) -> dict[str, float]:
    """Return the share of each stage in the time of clients that worked, from the order to the end of the round or work.

    In wait-free training the time in which a client trains its personal model while it sends or waits counts as training.
    """
    total = dict.fromkeys((*STAGES, "waiting"), 0.0)
    for line in lines:
        for i, state in enumerate(line["state"]):
            if state in WORKED:
                spent = {name: line[name][i] for name in STAGES}
                length = line["end"] - line["start"]
                if line.get("ahead"):
                    hold = line["hold"][i]
                    overlap = min(spent["personal"], max(0.0, length - spent["download"] - hold - spent["generic"]))
                    spent |= {"personal": overlap + hold, "upload": max(0.0, spent["upload"] - overlap)}
                total["waiting"] += max(0.0, length - sum(spent.values()))
                for name, value in spent.items():
                    total[name] += value
    everything = sum(total.values()) or 1.0
    return {NAMES.get(name, name): value / everything for name, value in total.items() if value or name == "waiting"}


def draw(
    panels: Mapping[str, Sequence[Line]],
    path: str | Path,
    note: str = "",
    names: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Draw a panel per run, by title: a row for the server and for each client, fastest on top, with bars for each round.

    The panels are stacked and share the axis of time. `names` are the clients' names, by title, where they have names.
    """
    orders = {title: _order(lines) for title, lines in panels.items()}
    heights = [max(1.6, 0.24 * (len(order) + 1)) for order, _ in orders.values()]
    figure = begin(12.5, max(3.2, 1.9 + sum(heights) + 0.75 * (len(panels) - 1)))
    panel_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    seen: set[str] = set()
    first = min(lines[0]["start"] for lines in panels.values())
    last = max(_end(lines) for lines in panels.values())
    for axes, (title, lines) in zip(panel_axes, panels.items(), strict=True):
        order, _ = orders[title]
        row = {k: i + 1 for i, k in enumerate(order)}
        for line in lines:
            _server(axes, line)
            _clients(axes, line, row, seen)
        axes.set_xlim(first, first + (1.01 * (last - first) or 1.0))
        axes.set_ylim(len(order) + 0.6, -0.7)
        small = len(order) > 25
        known = (names or {}).get(title, ())
        rows = [plain(known[k], k) if k < len(known) else str(k) for k in order]
        axes.set_yticks(range(len(order) + 1), ["server", *rows], fontsize=7.5 if small else 9)
        axes.set_ylabel("client")
        axes.grid(visible=False)
        if len(panels) > 1:
            axes.set_title(title, loc="left", fontsize=10.5, pad=16)
    panel_axes[-1].set_xlabel("simulated time (s)")
    _legend(panel_axes[0], seen, next(iter(panels)) if len(panels) == 1 else "Simulated time")
    thinned = [(len(order), count) for order, count in orders.values() if count > len(order)]
    if thinned:
        shown, count = thinned[0]
        note = f"{shown} of the {count:,} clients that were asked, from the fastest to the slowest. {note}"
    if note:
        footnote(figure, note)
    save(figure, path)


def chosen_clients(lines: Sequence[Line]) -> list[int]:
    """Return the clients that a chart shows, from the fastest to the slowest."""
    return _order(lines)[0]


def _order(lines: Sequence[Line]) -> tuple[list[int], int]:
    """Return the clients from the fastest to the slowest, evenly thinned to CLIENTS, and their number before."""
    everyone = {k for line in lines for k in line["clients"]}
    durations: dict[int, list[float]] = {k: [] for k in everyone}
    for line in lines:
        for i, k in enumerate(line["clients"]):
            if line["state"][i] in WORKED:
                durations[k].append(sum(line[name][i] for name in STAGES))
    order = sorted(everyone, key=lambda k: (float(np.mean(durations[k])) if durations[k] else np.inf, k))
    if len(order) > CLIENTS:
        return [order[i] for i in np.linspace(0, len(order) - 1, CLIENTS).round().astype(int)], len(everyone)
    return order, len(everyone)


def _end(lines: Sequence[Line]) -> float:
    """Return where the chart ends: with the last round, or a little later where a reply is late."""
    start, end = lines[0]["start"], lines[-1]["end"]
    latest = max([end, *(_arrival(line, i) for line in lines for i in range(len(line["clients"])))])
    return float(start + min(latest - start, 1.15 * (end - start)))


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
    positions = np.array([i for i, _ in shown])
    rows = np.array([r for _, r in shown])
    left = np.full(len(shown), float(line["start"]))
    ahead = bool(line.get("ahead"))
    height = 0.34 if ahead else 0.72
    above, below = (rows - 0.19, rows + 0.19) if ahead else (rows, rows)  # wait-free: messages above, work below
    for name, colour in STAGES.items():
        width = np.array(line[name])[positions]
        if width.any():
            seen.add(name)
        if ahead and name == "generic":
            left = left + np.array(line["hold"])[positions]
        message = name in ("download", "upload")
        axes.barh(above if message else below, width, left=left, height=height, color=colour, linewidth=0)
        if not (ahead and name == "personal"):
            left = left + width
    states = np.array(line["state"])[positions]
    merged = states == "merged"
    axes.barh(above[merged], line["end"] - left[merged], left=left[merged], height=height, color=WAIT, linewidth=0)
    for state, (marker, colour, _) in MARKS.items():
        matching = states == state
        if matching.any():
            seen.add(state)
            axes.scatter(left[matching], rows[matching], marker=marker, s=34, color=colour, linewidths=1.6, zorder=4)


def _arrival(line: Line, i: int) -> float:
    stages = ("download", "hold", "generic", "upload") if line.get("ahead") else STAGES
    return float(line["start"] + sum(line[name][i] for name in stages))


def _legend(axes: Axes, seen: set[str], title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=NAMES[name]) for name, colour in STAGES.items() if name in seen]
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
