"""report.html of a reproduced exhibit: a table and a figure for each panel, the published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..core import files
from ..papers import Exhibit, Panel
from ..report.costs import NONE
from ..report.html import clients, curves, holdings, page
from ..report.html.markup import Html, csv, join, tag
from ..report.html.svg import COLOURS, NARROW, Frame, figure, length, shortened, svg
from ..report.html.tables import Column, Table
from ..server.records import worst_tenth
from .layout import SHORT, notes_of, ours, printed
from .plan import Plan
from .reading import Reading
from .score import mean_curve
from .verdict import WORDS

ROW = 24.0
ROUND = "rounds"


def write(folder: Path, exhibit: Exhibit, readings: Sequence[Reading], plan: Plan, command: str) -> Path:
    """Write the page into the exhibit's folder; return where it is."""
    path = folder / page.REPORT
    files.write(path, render(exhibit, readings, plan, command).encode())
    return path


def render(exhibit: Exhibit, readings: Sequence[Reading], plan: Plan, command: str) -> str:
    """Return the page."""
    tables: list[Table] = []
    figures: list[Html] = []
    for number, panel in enumerate(exhibit.panels):
        own = [reading for reading in readings if reading.cell.panel == panel.id]
        if not own:
            continue
        title = panel.title or exhibit.title
        if any(reading.counts is None for reading in own):
            tables.append(_table(f"table-{number}", title, own))
        drawn = _figure(f"figure-{number}", title, panel, own)
        figures += [drawn] if drawn else []
    lines = notes_of(exhibit, readings, plan.scale)
    notes = tag("ul", *(tag("li", line.strip(), cls="sub" if line[:1] == " " else None) for line in lines), cls="notes")
    made = join([tag("h3", "The command"), tag("pre", command)])
    facts = f"{exhibit.title} ({exhibit.where})"
    return page.of_tables(
        exhibit.name, facts, sentences(readings, plan), tables, [*figures, tag("section", notes), tag("section", made)]
    )


def sentences(readings: Sequence[Reading], plan: Plan) -> list[str]:
    """Return what is said at the top: how the cells stand to the published ones, and what was cut."""
    kinds = [reading.verdict.kind for reading in readings if reading.verdict is not None]
    counts = [f"{kinds.count(kind)} {WORDS[kind]}" for kind in SHORT if kind in kinds]
    of = f"{len(kinds)} of {len(readings)} cells"
    if not kinds:
        lines = [f"{len(readings)} cells, none with a published number and all its seeds."]
    elif plan.scale.whole:
        lines = [f"{of} can be set beside a published number: {', '.join(counts)}."]
    else:
        lines = [f"{of} have a published number, with which scaled runs are not compared."]
    failed = sum(reading.state == "failed" for reading in readings)
    left = sum(reading.state in ("missing", "partial") for reading in readings)
    if failed or left:
        parts = [f"{failed} failed" if failed else "", f"{left} without all their seeds" if left else ""]
        lines.append(f"Cells: {', '.join(part for part in parts if part)}.")
    return lines if plan.scale.whole else [*lines, f"{plan.scale.words()}."]


def _table(name: str, title: str, readings: Sequence[Reading]) -> Table:
    """Return a row for each cell."""
    rows, columns = ([getattr(reading.cell, side) for reading in readings] for side in ("row", "column"))
    first = "method" if [r.cell.label for r in readings] == rows else "row"
    places = [(heading, texts) for heading, texts in ((first, rows), ("column", columns)) if any(texts)]
    if len(places) == 2 and len(set(columns)) == 1:
        places = places[:1]
    differences = ["" if r.verdict is None else f"{r.verdict.difference:+.2f}".replace("-", "−") for r in readings]
    noise = [r.verdict.bound if r.verdict is not None else None for r in readings]
    return Table(
        name,
        title,
        [
            *(
                Column(heading, texts, left=True)
                for heading, texts in places or [("cell", [r.cell.id for r in readings])]
            ),
            Column("published", [printed(reading) for reading in readings]),
            Column("ours ± std", [ours(reading) for reading in readings]),
            Column(
                "seeds",
                [f"{len(r.values)}" if len(r.values) == r.seeds else f"{len(r.values)} of {r.seeds}" for r in readings],
            ),
            Column("difference", [text or NONE for text in differences]),
            Column("noise up to", [NONE if bound is None else f"{bound:.2f}" for bound in noise]),
            Column("verdict", [_words(reading) for reading in readings], left=True),
        ],
    )


def _words(reading: Reading) -> str:
    if reading.verdict is not None:
        return reading.verdict.words
    return {"failed": "failed", "missing": "not run", "partial": "seeds are missing"}.get(reading.state, NONE)


def _figure(name: str, title: str, panel: Panel, readings: Sequence[Reading]) -> Html | None:
    """Return the panel's figure: curves, clients, samples, or numbers with the published ones."""
    counts = next((reading.counts for reading in readings if reading.counts is not None), None)
    if counts is not None:
        of = {k: [int(n) for n in row] for k, row in enumerate(counts[: holdings.CLIENTS])}
        labels = [str(c) for c in range(counts.shape[1])]
        table = csv(
            ("client", "class", "samples"), [(k, c, n) for k, row in of.items() for c, n in enumerate(row) if n]
        )
        names = {k: str(k) for k in of}
        return figure(name, title, lambda width: holdings.draw(of, names, labels, width), table)
    lines = {_name(r, readings): _curve(r) for r in readings if len(mean_curve(r.curves)) > 1}
    if lines:
        classes = _classes(list(lines))
        low, high, hidden = curves.in_sight(lines, [label for label, cls in classes.items() if cls != "sx"])
        points = [(label, t, line.mean[i]) for label, line in lines.items() for i, t in enumerate(line.rounds)]
        unit = readings[0].cell.contract.unit
        if unit != "%":
            (low, high), hidden = _range([value for line in lines.values() for value in line.mean]), 0
        below = f" {hidden} points of early rounds lie below the axis." if hidden else ""
        return figure(
            name, title, lambda width: curves.draw(lines, classes, ROUND, (low, high), width, panel.y or unit, name),
            csv(("label", "round", panel.y or unit), points), f"Mean over seeds; band: ± standard deviation.{below}",
        )  # fmt: skip
    rates = {_name(r, readings): np.array(r.distribution) for r in readings if r.distribution}
    if rates:
        worst = {label: worst_tenth(of) for label, of in rates.items()}
        classes = _classes(list(rates))
        cells = [(label, value) for label, of in rates.items() for value in of.tolist()]
        caption = "All seeds together. Box: quartiles; line: median; diamond: mean; triangle: worst 10 %."
        return figure(
            name,
            title,
            lambda width: clients.violins(rates, worst, classes, width),
            csv(("label", "%"), cells),
            caption,
        )
    numbers = [reading for reading in readings if reading.ours is not None]
    if not numbers:
        return None
    rows = [(r.cell.row, r.cell.column, r.ours.mean if r.ours else None, r.cell.published) for r in numbers]
    return figure(
        name, title, lambda width: _beside(numbers, width), csv(("row", "column", "ours", "published"), rows),
        "Dot: ours, with ± standard deviation over seeds; diamond: published, with its ± where it is printed.",
    )  # fmt: skip


def _curve(reading: Reading) -> curves.Curve:
    points = mean_curve(reading.curves)
    spread = None if points[0][2] is None else [float(p[2] or 0.0) for p in points]
    rounds = [p[0] for p in points]
    return curves.Curve([int(t) for t in rounds], [p[1] for p in points], spread, {ROUND: rounds})


def _classes(labels: Sequence[str]) -> Mapping[str, str]:
    return {label: f"s{i}" if i < COLOURS else "sx" for i, label in enumerate(labels)}


def _name(reading: Reading, beside: Sequence[Reading]) -> str:
    """Return a cell's name among those of its panel."""
    cell = reading.cell
    parts = [getattr(cell, side) for side in ("row", "column") if len({getattr(r.cell, side) for r in beside}) > 1]
    return ", ".join(dict.fromkeys(part for part in parts if part)) or cell.label or cell.id


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def _beside(readings: Sequence[Reading], width: int) -> Html:
    """Draw ours and the published number of every cell, a row each."""
    narrow = width <= NARROW
    letters = 16 if narrow else 44
    names = [_name(reading, readings) for reading in readings]
    left = max(length(shortened(name, letters)) for name in names) + 16
    ends = [x for r in readings for x in _ends(r.ours.mean if r.ours else None, r.ours.std if r.ours else None)]
    ends += [x for r in readings for x in _ends(r.cell.published, r.cell.spread)]
    above = 30.0
    height = above + ROW * len(readings) + 42
    frame = Frame.of(width, int(height), _range(ends), (len(readings), 0.0), left=left, right=16, top=above, bottom=42)
    unit = {reading.cell.contract.unit for reading in readings}
    parts: list[object] = [frame.x_axis(unit.pop() if len(unit) == 1 else "", grid=True)]
    parts += [
        tag("circle", cx=14, cy=12, r=4.5, cls="dot s0"), tag("text", "ours", x=26, y=16, cls="ink"),
        tag("path", d=_diamond(82, 12), cls="dot s1"), tag("text", "published", x=94, y=16, cls="ink"),
    ]  # fmt: skip
    for i, (reading, name) in enumerate(zip(readings, names, strict=True)):
        y, cell, mine = round(frame.y(i + 0.5), 1), reading.cell, reading.ours
        marks: list[object] = []
        if cell.published is not None:
            marks += _whisker(frame, cell.published, cell.spread, y + 3, "s1")
            marks.append(tag("path", d=_diamond(frame.x(cell.published), y + 3), cls="dot s1"))
        if mine is not None:
            marks += _whisker(frame, mine.mean, mine.std, y - 3, "s0")
            marks.append(tag("circle", cx=round(frame.x(mine.mean), 1), cy=y - 3, r=4.5, cls="dot s0"))
        tip = f"{name}: ours {ours(reading)}, published {printed(reading)}; {_words(reading)}"
        parts.append(tag("g", *marks, data_tip=tip))
        parts.append(tag("text", shortened(name, letters), x=left - 8, y=y + 4, text_anchor="end", cls="name ink"))
    return svg(width, height, "Ours beside the published numbers", *parts)


def _ends(mean: float | None, std: float | None) -> list[float]:
    return [] if mean is None or not math.isfinite(mean) else [mean - (std or 0.0), mean + (std or 0.0)]


def _whisker(frame: Frame, mean: float, std: float | None, y: float, cls: str) -> list[Html]:
    if not std:
        return []
    x1, x2 = round(frame.x(mean - std), 1), round(frame.x(mean + std), 1)
    return [tag("line", x1=x1, x2=x2, y1=y, y2=y, cls=f"whisker {cls}", stroke_width=2)]


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5-5.5z"
