"""Accuracy against rounds, megabytes and seconds: a line for each method, a band over seeds, names at the lines' ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.metric import ACCURACY, Measure
from ...run.evaluate import Evaluation
from .markup import Html, csv, join, tag
from .read import Result, Study
from .style import Styles, coloured
from .svg import BOLD, NARROW, Drawing, Frame, length, number, panes, path, shortened, spread, svg

POINTS = 240  # of a line at most
LEAST = 2.0  # points that the axis of accuracy spans at least
SETTLED = 0.25  # the share of the rounds after which every point is in sight
PERSONAL = Evaluation()
GENERIC = "generic model"  # drawn beside the personal ones of a single method
AXES = {
    "rounds": "communication round",
    "megabytes": "megabytes sent, all clients, down + up",
    "seconds": "seconds",
    "simulated seconds": "simulated seconds",
}


@dataclass(frozen=True)
class Curve:
    """One method: mean and deviation over seeds at every scored round, and where that is on each axis."""

    rounds: Sequence[int]
    mean: Sequence[float]  # as it is shown: a share in per cent
    deviation: Sequence[float] | None
    at: Mapping[str, Sequence[float]]


def curve(runs: Sequence[Result], contract: Evaluation = PERSONAL) -> Curve:
    """Return the curve of runs that differ in their seed, over the rounds that all have scored."""
    by_round = [dict(contract.by_round([*map(dict, run.history)])) for run in runs]
    rounds = sorted(set.intersection(*map(set, by_round)))
    factor = contract.measure(runs[0].history).factor
    values = factor * np.array([[of[t] for t in rounds] for of in by_round])
    at: dict[str, list[float]] = {"rounds": [float(t) for t in rounds]}
    for axis, key, size in (("megabytes", "bytes_total", 1e6), ("seconds", "seconds", 1.0)):
        sums = [np.cumsum([float(record.get(key, 0.0)) for record in run.history]) / size for run in runs]
        at[axis] = np.mean([[total[t - 1] for t in rounds] for total in sums], axis=0).tolist()
    if all("time" in record for run in runs for record in run.history):
        times = [[float(run.history[t - 1]["time"]) for t in rounds] for run in runs]
        at["simulated seconds"] = np.mean(times, axis=0).tolist()
    deviation = values.std(axis=0, ddof=1).tolist() if len(runs) > 1 else None
    return Curve(rounds, values.mean(axis=0).tolist(), deviation, at)


def generic_of(study: Study) -> Evaluation:
    """Return the contract of the generic model as the table has it: on the common test set, else by sample."""
    if "generic_common" in study.first.last:
        return replace(PERSONAL, model="generic", clients="common")
    return replace(PERSONAL, model="generic", mean="sample")


def curves(study: Study, classes: Styles) -> Html:
    """Return the figure."""
    contract = drawn(study)
    measure = contract.measure([dict(study.first.last)])
    by_label = {
        label: curve(study.runs[label], contract) for label in study.labels if _has(study.runs[label], contract)
    }
    lines, left = by_label, [label for label in study.labels if label not in by_label]
    classes = {label: cls for label, cls in classes.items() if label in lines}
    if (
        len(study.runs) == 1
        and contract == PERSONAL
        and "generic_clients" in study.first.last
        and not study.first.generic_only
    ):
        lines = {**by_label, GENERIC: curve(study.runs[study.best], generic_of(study))}
        classes = {**classes, GENERIC: "s1"}
    axes = [axis for axis in AXES if all(axis in line.at for line in lines.values())]
    low, high, hidden = in_sight(lines, coloured(classes), measure)
    drawings = {axis: _drawing(lines, classes, axis, low, high, measure) for axis in axes}
    band = "; band: ± standard deviation over seeds" if study.seeds > 1 else ""
    words = "Personal model, mean per client, on the clients' own test data"
    notes = [f"{words if contract == PERSONAL else f'Every round by itself: {_stated(contract)}'}{band}."]
    notes += [f"Without such a model: {', '.join(left)}."] if left else []
    if GENERIC in lines:
        common = generic_of(study).clients == "common"
        where = "on the common test set" if common else "on all clients' test samples, each counting alike"
        notes.append(f"Generic model: {where}.")
    if hidden:
        points = f"{hidden} points of early rounds lie" if hidden > 1 else "1 point of an early round lies"
        if measure.lower:
            notes.append(f"The axis ends at {high:.4g}; {points} above it.")
        else:
            edge = f"{number(round(low, 1))} %" if measure.share else f"{low:.4g}"
            notes.append(f"The axis begins at {edge}; {points} below it.")
    grey = len(classes) - len(coloured(classes))
    if grey:
        notes.append(f"In colour: the best, the baselines and those asked for; grey: {grey} others (point at a line).")
    rows = [
        (
            label,
            t,
            line.mean[i],
            line.deviation[i] if line.deviation else None,
            *(line.at[axis][i] for axis in axes[1:]),
        )
        for label, line in lines.items()
        for i, t in enumerate(line.rounds)
    ]
    table = csv(("method", "round", measure.heading(), "std over seeds", *axes[1:]), rows)
    return panes("curves", f"{measure.capital} as training goes on", drawings, table, " ".join(notes))


def drawn(study: Study) -> Evaluation:
    """Return what is drawn: the study's contract where some method has it in several rounds, else the default one."""
    contract = replace(study.contract, round="last")
    seen = [
        run for runs in study.runs.values() for run in runs if len(contract.by_round([*map(dict, run.history)])) > 1
    ]
    return contract if seen else PERSONAL


def _has(runs: Sequence[Result], contract: Evaluation) -> bool:
    return all(contract.by_round([*map(dict, run.history)]) for run in runs)


def _stated(contract: Evaluation) -> str:
    return str(contract).rpartition(", ")[0]


def in_sight(
    lines: Mapping[str, Curve], chosen: Sequence[str], measure: Measure = ACCURACY
) -> tuple[float, float, int]:
    """Return the axis of accuracy, which early rounds do not squeeze, and how many points of the chosen lie beyond it.

    They lie below it, of errors above it.
    """
    if measure.lower:
        mirrored = {k: replace(line, mean=[-value for value in line.mean]) for k, line in lines.items()}
        low, high, hidden = in_sight(mirrored, chosen, replace(measure, lower=False))
        return -high, -low, hidden
    settled, everything = [], []
    for label in chosen:
        line = lines[label]
        first = min(len(line.mean) - 1, math.ceil(SETTLED * len(line.mean)))
        below = line.deviation or [0.0] * len(line.mean)
        settled += [m - d for m, d in zip(line.mean[first:], below[first:], strict=True)]
        everything += [m + s * d for m, d in zip(line.mean, below, strict=True) for s in (-1, 1)]
    if not measure.share:
        high, low = max(everything), min(settled)
        low = min(everything) if min(everything) >= low - 0.35 * (high - low) else low
        margin = 0.06 * (high - low or abs(high) or 1.0)
        low, high = low - margin, high + margin
        return low, high, sum(value < low for label in chosen for value in lines[label].mean)
    high, low = min(100.0, max(everything)), max(0.0, min(settled))
    margin = 0.06 * max(high - low, 1.0)
    low = max(0.0, min(everything)) if min(everything) >= low - 0.35 * (high - low) else low
    missing = max(margin, (LEAST - high + low) / 2)  # so that a level's ticks stay short
    low, high = max(0.0, low - missing), min(100.0, high + missing)
    hidden = sum(value < low for label in chosen for value in lines[label].mean)
    return low, high, hidden


def _drawing(
    lines: Mapping[str, Curve], classes: Styles, axis: str, low: float, high: float, measure: Measure
) -> Drawing:
    return lambda width: draw(lines, classes, axis, (low, high), width, measure.heading())


def draw(
    lines: Mapping[str, Curve],
    classes: Styles,
    axis: str,
    y: tuple[float, float],
    width: int,
    unit: str = "accuracy %",
    name: str = "curves",
) -> Html:
    """Draw the lines against one axis."""
    named = coloured(classes)
    narrow = width <= NARROW
    letters = 14 if narrow else 26
    wide = max(length(shortened(name, letters), BOLD) for name in named)
    height = 300 if narrow else 400
    last = max((line.at[axis][-1] for line in lines.values()), default=1.0) or 1.0
    first = min(line.at[axis][0] for line in lines.values()) if axis == "rounds" else 0.0
    first = first if first < last else 0.0
    frame = Frame.of(
        width,
        height,
        (first, last),
        y,
        left=38,
        right=wide + 30,
        top=24,
    )
    clip = f"clip-{name}-{axis.replace(' ', '-')}-{width}"
    grey = [label for label in lines if label not in named]
    marks: list[Html] = []
    ends: list[tuple[str, float, float]] = []
    for label in [*grey, *reversed(named)]:
        drawn, end = _line(label, lines[label], classes[label], axis, frame)
        marks.append(drawn)
        if label in named:
            ends.append((label, *end))
    at = spread([min(max(y, frame.y.end), frame.y.start) for _, _, y in ends], frame.y.end + 2, frame.y.start)
    names = [
        _name(label, classes[label], (x, y), place, frame, letters)
        for (label, x, y), place in zip(ends, at, strict=True)
    ]
    return svg(
        width,
        height,
        f"{_named(unit)} against {axis}",
        tag("defs", frame.clip(clip)),
        frame.y_axis(unit),
        frame.x_axis(AXES[axis], whole=axis == "rounds"),
        tag("g", *marks, clip_path=f"url(#{clip})"),
        *names,
        data_curves=frame.corners(),
        data_x=axis.removeprefix("simulated ").removesuffix("s").replace("megabyte", "MB"),
    )


def _named(unit: str) -> str:
    name = unit.removesuffix(" %")
    return name[:1].upper() + name[1:]


def _name(label: str, cls: str, end: tuple[float, float], y: float, frame: Frame, letters: int) -> Html:
    """Return a method's name beside its line's end, with a stub of its colour."""
    x = frame.x.end
    inside = min(max(end[1], frame.y.end), frame.y.start)
    leader = tag("path", d=path([(end[0] + 2, inside), (x + 8, y)]), cls=f"leader {cls}")
    stub = tag("line", x1=round(x + 8, 1), x2=round(x + 17, 1), y1=round(y, 1), y2=round(y, 1), cls=f"stub {cls}")
    text = tag(
        "text", shortened(label, letters), x=round(x + 21, 1), y=round(y + 4, 1), cls=f"name {cls}", data_series=label
    )
    return join([leader, stub, text])


def _line(label: str, line: Curve, cls: str, axis: str, frame: Frame) -> tuple[Html, tuple[float, float]]:
    """Return a line with its band, and where it ends."""
    step = math.ceil(len(line.mean) / POINTS)
    rows = [*range(0, len(line.mean) - 1, step), len(line.mean) - 1]
    if not line.at[axis][-1]:  # it sends nothing: a level to compare with
        y = frame.y(line.mean[-1])
        level = path([(frame.x.start, y), (frame.x.end, y)])
        return tag("path", d=level, cls=f"line level {cls}", data_series=label), (frame.x.end, y)
    points = [(frame.x(line.at[axis][i]), frame.y(line.mean[i])) for i in rows]
    parts = []
    if line.deviation and cls != "sx":
        over = [(frame.x(line.at[axis][i]), frame.y(line.mean[i] + line.deviation[i])) for i in rows]
        under = [(frame.x(line.at[axis][i]), frame.y(line.mean[i] - line.deviation[i])) for i in rows]
        parts.append(tag("path", d=path([*over, *reversed(under)], close=True), cls=f"band {cls}"))
    parts.append(tag("path", d=path(points), cls=f"line {cls}", data_series=label))
    if len(points) == 1:
        parts.append(tag("circle", cx=round(points[0][0], 1), cy=round(points[0][1], 1), r=4, cls=f"dot {cls}"))
    return join(parts), points[-1]
