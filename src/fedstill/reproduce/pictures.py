"""A reproduced exhibit as a picture in the paper's arrangement, ours beside the published points: PNG and SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..papers import Exhibit, Panel
from ..report.figures import COLOURS, INK, LINESTYLES
from .reading import Reading
from .scale import Scale
from .score import mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
ACROSS = 3  # plots beside one another at most
CLIENTS = 40  # in a bubble chart at most


def draw(exhibit: Exhibit, readings: Sequence[Reading], scale: Scale, folder: Path) -> list[Path]:
    """Draw an exhibit; return the files. A table is drawn as bars of ours with the published points, a figure by its form."""
    shown = [panel for panel in exhibit.panels if _of(panel, readings)]
    if not any(_has_numbers(reading) for reading in readings):
        return []
    painter = PAINTERS.get(exhibit.form, _bars)
    across = min(ACROSS, len(shown))
    down = -(-len(shown) // across)
    width = 12.0 if painter in (_bars, _bubbles) and across == 1 else max(6.0, 5.0 * across)
    figure = _figure(width, 1.0 + 3.7 * down)
    grid = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(grid.flat, shown, strict=False):
        own = _of(panel, readings)
        (_curves if any(reading.curves for reading in own) else painter)(axes, panel, own)
        axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors="#444444", labelsize=9)
        axes.set_axisbelow(True)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    _legend(figure, [axes for axes in grid.flat[: len(shown)]])
    beside = ", beside the published numbers of the whole" if _published(readings) else ""
    scaled = "" if scale.whole else f" — SCALED to {scale.share:g}{beside}"
    title = textwrap.fill(f"{exhibit.name}: {exhibit.title}{scaled}", round(9 * width))
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    made = []
    for suffix in SUFFIXES:
        path = folder / f"figure{suffix}"
        partial = path.with_name(f".{path.stem}.part{suffix}")
        try:
            figure.savefig(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        made.append(path)
    return made


def _of(panel: Panel, readings: Sequence[Reading]) -> list[Reading]:
    return [reading for reading in readings if reading.cell.panel == panel.id]


def _published(readings: Sequence[Reading]) -> bool:
    return any(reading.cell.published is not None for reading in readings)


def _has_numbers(reading: Reading) -> bool:
    return bool(reading.values) or reading.counts is not None


def _bars(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw groups of bars, one a row of the paper, a bar a column; the published numbers are marks on them."""
    rows = [row for row in panel.rows if any(r.cell.row == row for r in readings)]
    columns = [column for column in panel.columns if any(r.cell.column == column for r in readings)]
    one_row = len(rows) == 1
    groups, series = (columns, rows) if one_row else (rows, columns)
    wide = 0.8 / len(series)
    for number, name in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for place, group in enumerate(groups):
            row, column = (name, group) if one_row else (group, name)
            for reading in (r for r in readings if (r.cell.row, r.cell.column) == (row, column)):
                x = place - 0.4 + (number + 0.5) * wide
                if reading.ours is not None:
                    axes.bar(
                        x, reading.ours.mean, 0.9 * wide, color=colour, alpha=0.75, yerr=reading.ours.std, ecolor=INK
                    )
                if reading.cell.published is not None:
                    axes.errorbar(
                        x, reading.cell.published, reading.cell.spread, fmt="D", color=INK, markersize=4, mfc="white"
                    )
        axes.bar(0, 0, 0, color=colour, alpha=0.75, label=name or "ours")
    if _published(readings):
        axes.errorbar([], [], [], fmt="D", color=INK, markersize=4, mfc="white", label="published")
    axes.set_xticks(range(len(groups)), [_broken(group) for group in groups], fontsize=8)
    _from_lowest(axes, readings)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_ylabel(panel.y or _unit(readings))


def _from_lowest(axes: Axes, readings: Sequence[Reading]) -> None:
    """Begin the axis below the lowest number where all are far from 0."""
    values = [v for r in readings for v in (*r.values, *([] if r.cell.published is None else [r.cell.published]))]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0.3 * high > 0:
        axes.set_ylim(max(0.0, low - 0.25 * (high - low) - 1), high + 0.08 * (high - low) + 1)


def _curves(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw curves by round, a band of ± std over seeds around each; the published number is a mark at the end."""
    by_row = len({r.cell.row for r in readings}) > 1
    names = list(dict.fromkeys(r.cell.row if by_row else r.cell.label for r in readings))
    for reading in readings:
        label = reading.cell.row if by_row else reading.cell.label
        number = names.index(label)  # a curve and the numbers that are printed of it are of one colour
        colour, style = COLOURS[number % len(COLOURS)], LINESTYLES[number // len(COLOURS) % len(LINESTYLES)]
        points = mean_curve(reading.curves)
        if points:
            x, mean = [p[0] for p in points], np.array([p[1] for p in points])
            axes.plot(x, mean, style, color=colour, linewidth=1.8, label=label, marker="o" if len(x) < 3 else "")
            if points[0][2] is not None:
                std = np.array([p[2] for p in points], float)
                axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        elif reading.ours is not None and reading.cell.x is not None:
            axes.errorbar(reading.cell.x, reading.ours.mean, reading.ours.std, fmt="o", color=colour, label=label)
        if reading.cell.published is not None:
            at = reading.cell.x if reading.cell.x is not None else (points[-1][0] if points else 0)
            axes.plot(at, reading.cell.published, "D", color=colour, mfc="white", label=f"{label}, published")
    axes.set_xlabel(panel.x or "round")
    axes.set_ylabel(panel.y or _unit(readings))
    axes.grid(axis="y", color="#e6e6e6")


def _lines(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw numbers over a swept value, a line for each series; the published points beside them."""
    along_columns = len({r.cell.x for r in readings if r.cell.row == readings[0].cell.row}) > 1
    names = dict.fromkeys(r.cell.row if along_columns else r.cell.column for r in readings)
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        own = [r for r in readings if (r.cell.row if along_columns else r.cell.column) == name and r.cell.x is not None]
        own.sort(key=lambda r: r.cell.x or 0.0)
        done = [(r.cell.x or 0.0, r.ours) for r in own if r.ours is not None]
        if done:
            spread = [0.0 if ours.std is None else ours.std for _, ours in done]
            axes.errorbar(
                [x for x, _ in done], [ours.mean for _, ours in done], spread, fmt="-o", color=colour, label=name
            )
        printed = [(r.cell.x, r.cell.published) for r in own if r.cell.published is not None]
        if printed:
            axes.plot(
                *zip(*printed, strict=True), "--D", color=colour, mfc="white", alpha=0.8, label=f"{name}, published"
            )
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y or _unit(readings))
    axes.grid(axis="y", color="#e6e6e6")


def _heat_map(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw a grid of numbers, ours in the cell and the published below it."""
    places = {(r.cell.row, r.cell.column): r for r in readings}
    values = np.full((len(panel.rows), len(panel.columns)), np.nan)
    for (row, column), reading in places.items():
        if reading.ours is not None:
            values[panel.rows.index(row), panel.columns.index(column)] = reading.ours.mean
    axes.imshow(values, cmap="Blues", aspect="auto")
    middle = float(np.nanmean(values)) if np.isfinite(values).any() else 0.0
    for (row, column), reading in places.items():
        i, j = panel.rows.index(row), panel.columns.index(column)
        ours = "–" if reading.ours is None else f"{reading.ours.mean:.2f}"
        published = "" if reading.cell.published is None else f"\npublished {reading.cell.published:.2f}"
        dark = np.isfinite(values[i, j]) and values[i, j] > middle
        axes.text(j, i, ours + published, ha="center", va="center", fontsize=9, color="white" if dark else INK)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)


def _violins(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw the distribution over the clients, all seeds together, with median and mean."""
    shown = [reading for reading in readings if reading.distribution]
    if shown:
        parts: Mapping[str, Any] = axes.violinplot([r.distribution for r in shown], showmedians=True)
        for body, colour in zip(parts["bodies"], COLOURS * 9, strict=False):
            body.set_facecolor(colour)
        for name in ("cbars", "cmins", "cmaxes", "cmedians"):
            parts[name].set_color(INK)
            parts[name].set_linewidth(2.0 if name == "cmedians" else 0.8)
        parts["cmedians"].set_label("median")
        means = [float(np.mean(r.distribution)) for r in shown]
        axes.plot(range(1, len(shown) + 1), means, "o", color=INK, mfc="white", label="mean")
    names = [r.cell.row if len({r.cell.row for r in readings}) > 1 else r.cell.label for r in shown]
    axes.set_xticks(range(1, len(shown) + 1), [_broken(name) for name in names], fontsize=8)
    axes.set_ylabel(panel.x or "accuracy of a client (%)")  # the paper's histograms have the accuracy across
    axes.grid(axis="y", color="#e6e6e6")


def _bubbles(axes: Axes, panel: Panel, readings: Sequence[Reading]) -> None:
    """Draw clients × classes, the area of a bubble by the number of samples."""
    from matplotlib.ticker import MaxNLocator

    counts = next((r.counts for r in readings if r.counts is not None), None)
    if counts is None:
        return
    counts = counts[:CLIENTS]
    client, label = np.nonzero(counts)
    axes.scatter(
        client, label, s=120 * counts[client, label] / counts.max(), color=COLOURS[0], alpha=0.85, linewidths=0
    )
    axes.set_xlabel(panel.x or "client")
    axes.set_ylabel(panel.y or "class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#efefef")


PAINTERS: dict[str, Callable[[Axes, Panel, Sequence[Reading]], None]] = {
    "table": _bars,
    "bars": _bars,
    "curves": _curves,
    "lines": _lines,
    "heat-map": _heat_map,
    "distribution": _violins,
    "bubbles": _bubbles,
}


def _legend(figure: Figure, plots: Sequence[Axes]) -> None:
    """Put one legend for all plots below them."""
    handles: dict[str, Any] = {}
    for axes in plots:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower left",
            ncols=min(7, len(handles)),
            frameon=False,
            fontsize=9,
        )


def _unit(readings: Sequence[Reading]) -> str:
    units = {reading.cell.contract.unit for reading in readings}
    return units.pop() if len(units) == 1 else ""


def _broken(name: str) -> str:
    """Return a name on two lines where it is long."""
    return name.replace(", ", ",\n") if len(name) > 12 else name


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")
