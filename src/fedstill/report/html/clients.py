"""How accuracy is spread over clients: a violin for each method, and the share of clients up to each accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.metric import ACCURACY, Measure
from ...server.records import worst_tenth
from ..significance import Unit
from .markup import Html, csv, download, join, tag
from .read import Study
from .style import Styles, coloured
from .svg import NARROW, Frame, figure, length, path, shortened, svg

Floats = NDArray[np.float64]
GRID = 96  # points of a violin's outline
LISTED = 1000  # rows of the table at most; the CSV has all
DOTS = 80  # clients up to which each is a dot
ROW = 34.0


def rates_of(study: Study) -> dict[str, Floats]:
    """Return the clients' numbers as they are shown (accuracies in per cent), all seeds together, by method."""
    return {label: study.tested_by.factor * np.array([*of.values()]) for label, of in study.rates().items()}


def clients(study: Study, classes: Styles) -> Html:
    """Return both figures."""
    rates, measure = rates_of(study), study.tested_by
    by_seed = {(label, run.seed): run for label, runs in study.runs.items() for run in runs}
    rows = [
        (
            label,
            seed,
            by_seed[label, seed].client(k),
            measure.factor * rate,
            by_seed[label, seed].last["samples"].get(k),
        )
        for label, of in study.rates().items()
        for (seed, k), rate in of.items()
    ]
    table = csv(("method", "seed", "client", measure.heading(), "test samples"), rows)
    worst = {label: _worst(of, measure) for label, of in study.rates().items()}
    words = "Width: density of clients; box: quartiles; line: median; diamond: mean; triangle: mean of the worst 10 % of clients."
    tenth = f"{len(next(iter(rates.values()))):,} clients" + (f" of {study.seeds} seeds" if study.seeds > 1 else "")
    several = ", seed {}" if study.seeds > 1 else ""
    whose = {
        label: [f"client {by_seed[label, seed].client(k)}{several.format(seed)}" for seed, k in of]
        for label, of in study.rates().items()
    }
    first = figure(
        "clients",
        f"{measure.capital} of the clients",
        lambda width: violins(rates, worst, classes, width, measure, whose),
        table,
        f"{tenth}: {study.compared}. {words}",
    )
    explained = "The further right, the better; where a line leaves the ground is the worst client."
    if measure.lower:
        explained = "The further left, the better; where a line reaches the top is the worst client."
    up_to = f"Share of clients up to {measure.indefinite}"
    second = figure("cdf", up_to, lambda width: cumulative(rates, classes, width, measure), table, explained)
    return join([first, second])


def listing(study: Study, label: str) -> Html:
    """Return one method's clients as a table, folded, for a page on which no verdict lists them."""
    measure = study.tested_by
    header = ("client", *(("seed",) if study.seeds > 1 else ()), measure.heading(), "test samples")
    by_seed = {run.seed: run for run in study.runs[label]}
    rows = []
    for (seed, k), rate in study.rates()[label].items():
        run, seeds = by_seed[seed], (seed,) if study.seeds > 1 else ()
        rows.append((run.client(k), *seeds, measure.text(rate, 1), run.last["samples"].get(k, "")))
    head = tag("tr", *(tag("th", text, scope="col") for text in header))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows[:LISTED]]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *body)), cls="scroll")
    more = f" (the first {LISTED:,} of {len(rows):,})" if len(rows) > LISTED else ""
    links = tag("div", download("CSV", csv(header, rows), "clients.csv"), cls="gets")
    return tag("details", tag("summary", f"Every client with {label}{more}"), links, table, id="every-client")


def _worst(rates: Mapping[Unit, float], measure: Measure) -> float:
    """Return the mean over seeds of the worst tenth's mean, as it is shown."""
    by_seed: dict[int, list[float]] = {}
    for (seed, _), rate in rates.items():
        by_seed.setdefault(seed, []).append(rate)
    return measure.factor * float(np.mean([worst_tenth(of, measure.lower) for of in by_seed.values()]))


def density(values: Floats, at: Floats, share: bool = True) -> Floats:
    """Return the Gaussian kernel density by Silverman's rule; of a share reflected at 0 and 100 %, where it ends."""
    deviation = float(np.std(values))
    quartiles = float(np.subtract(*np.percentile(values, (75, 25)))) / 1.34
    least = 0.6 if share else 0.01 * (float(np.ptp(values)) or 1.0)
    width = max(0.9 * min(deviation, quartiles or deviation) * len(values) ** -0.2, least)
    mirrored = np.concatenate([values, -values, 200 - values]) if share else values
    kernel = np.exp(-0.5 * ((at[:, None] - mirrored[None, :]) / width) ** 2)
    return np.asarray(kernel.sum(1) / (len(values) * width * math.sqrt(2 * math.pi)))


def _range(rates: dict[str, Floats], share: bool = True) -> tuple[float, float]:
    least, most = min(float(of.min()) for of in rates.values()), max(float(of.max()) for of in rates.values())
    if not share:
        margin = 0.04 * (most - least or abs(most) or 1.0)
        return least - margin, most + margin
    margin = max(1.0, 0.04 * (most - least))
    return max(0.0, least - margin), min(100.0, most + margin) if most < 100 else 100.0


def violins(
    rates: dict[str, Floats],
    worst: dict[str, float],
    classes: Styles,
    width: int,
    measure: Measure = ACCURACY,
    whose: Mapping[str, Sequence[str]] | None = None,
) -> Html:
    """Draw a row for each method; `whose` are the clients of its numbers, in words."""
    narrow = width <= NARROW
    letters = 14 if narrow else 24
    left = max(length(shortened(label, letters)) for label in rates) + 16
    height = 26 + ROW * len(rates) + 44
    frame = Frame.of(
        width, int(height), _range(rates, measure.share), (len(rates), 0.0), left=left, right=50, top=8, bottom=44
    )
    parts = [frame.x_axis(f"test {measure.heading()}, each client on its own data", grid=True)]
    form, mark = (".1f", " %") if measure.share else (".4g", "")
    reach = 3 if measure.share else 0.04 * (frame.x.high - frame.x.low)
    for row, (label, of) in enumerate(rates.items()):
        y = frame.y(row + 0.5)
        p25, median, p75 = np.percentile(of, (25, 50, 75))
        mean = float(of.mean())
        tip = f"{label}: mean {mean:{form}}{mark}, median {median:{form}}, quartiles {p25:{form}} to {p75:{form}}, "
        tip += f"worst 10 % {worst[label]:{form}}, worst client {of.max() if measure.lower else of.min():{form}}"
        at = np.linspace(max(frame.x.low, of.min() - reach), min(frame.x.high, of.max() + reach), GRID)
        heights = density(of, at, measure.share)
        heights = heights / heights.max() * 0.44 * ROW
        upper = [(frame.x(float(a)), y - float(h)) for a, h in zip(at, heights, strict=True)]
        lower = [(frame.x(float(a)), y + float(h)) for a, h in zip(at, heights, strict=True)]
        marks: list[object] = [tag("path", d=path([*upper, *reversed(lower)], close=True), cls="violin")]
        if len(of) <= DOTS:
            offsets = (np.arange(len(of)) * 0.6180339887 % 1 - 0.5) * 0.42 * ROW  # spread evenly, the same every time
            tips = [f"{label}, {who}: " for who in (whose or {}).get(label, [])] or [""] * len(of)
            marks += [
                tag(
                    "circle",
                    cx=round(frame.x(float(a)), 1),
                    cy=round(y + float(o), 1),
                    r=1.8,
                    cls="each",
                    data_tip=f"{who}{a:{form}}{mark}",
                )
                for a, o, who in zip(of, offsets, tips, strict=True)
            ]
        marks.append(
            tag(
                "rect",
                x=round(frame.x(p25), 1),
                y=y - 4,
                width=round(max(1.0, frame.x(p75) - frame.x(p25)), 1),
                height=8,
                cls="box",
            )
        )
        marks.append(
            tag("line", x1=round(frame.x(median), 1), x2=round(frame.x(median), 1), y1=y - 7, y2=y + 7, cls="median")
        )
        tail = frame.x(worst[label])
        marks.append(
            tag("path", d=path([(tail, y - 1), (tail - 5, y + 8), (tail + 5, y + 8)], close=True), cls="worst")
        )
        centre = frame.x(mean)
        marks.append(
            tag(
                "path",
                d=path([(centre, y - 6), (centre + 6, y), (centre, y + 6), (centre - 6, y)], close=True),
                cls="mean",
            )
        )
        parts.append(tag("g", *marks, cls=f"row {classes[label]}", data_tip=tip))
        parts.append(tag("text", shortened(label, letters), x=left - 8, y=y + 4, text_anchor="end", cls="name ink"))
        parts.append(tag("text", f"{mean:{form}}", x=frame.x.end + 8, y=y + 4, cls="value ink"))
    return svg(width, height, f"{measure.capital} of the clients", *parts)


def cumulative(rates: dict[str, Floats], classes: Styles, width: int, measure: Measure = ACCURACY) -> Html:
    """Draw the share of clients with at most each accuracy, or other number."""
    narrow = width <= NARROW
    named = coloured(classes)
    lines_of_names = math.ceil(len(named) / (2 if narrow else 5))
    top = 30 + 18 * lines_of_names
    frame = Frame.of(
        width,
        (260 if narrow else 320) + 18 * lines_of_names,
        _range(rates, measure.share),
        (0.0, 100.0),
        left=38,
        right=14,
        top=top,
    )
    parts = [frame.y_axis("% of clients"), frame.x_axis(f"test {measure.heading()}, each client on its own data")]
    grey = [label for label in rates if label not in named]
    for label in [*grey, *reversed(named)]:
        ordered = np.sort(rates[label])
        steps = [(frame.x.start, frame.y(0.0))]
        for i, value in enumerate(ordered):
            x = frame.x(float(value))
            steps += [(x, steps[-1][1]), (x, frame.y(100 * (i + 1) / len(ordered)))]
        steps.append((frame.x.end, frame.y(100.0)))
        parts.append(tag("path", d=path(steps), cls=f"line {classes[label]}", data_series=label))
    across = 2 if narrow else 5
    for i, label in enumerate(named):
        x, y = 8 + (width - 16) / across * (i % across), 14 + 18 * (i // across)
        parts.append(tag("path", d=path([(x, y - 4), (x + 20, y - 4)]), cls=f"line {classes[label]}"))
        parts.append(tag("text", shortened(label, 18), x=x + 26, y=y, cls="name ink", data_series=label))
    return svg(
        width,
        frame.height,
        f"Share of clients up to {measure.indefinite}",
        *parts,
        data_curves=frame.corners(),
        data_x=measure.mark,
        data_y="of clients",
    )
