"""A sweep: the score against the values of one field, or over the values of two as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.metric import ACCURACY, Measure
from .markup import Html, csv, tag
from .read import Study
from .svg import LETTER, NARROW, Frame, figure, number, path, shortened, svg

Cell = tuple[float, float | None, str]  # mean and deviation as they are shown (shares in per cent), and the label


def sweep(study: Study) -> Html | None:
    """Return the figure of a sweep over one or two fields; None where the runs differ otherwise."""
    varying = study.varying
    methods = {runs[0].method for runs in study.runs.values()}
    if (
        len(methods) > 1
        or len(varying) not in (1, 2)
        or len(study.runs) < 3
        or any(not _plain(of) for of in varying.values())
    ):
        return None
    names = [name.removeprefix("method.") for name in varying]
    columns = list(varying.values())
    cells, measure = {}, study.measure
    for i, label in enumerate(study.runs):
        stat = study.score(label)
        if stat is None:
            return None
        cells[tuple(column[i] for column in columns)] = (
            measure.factor * stat.value,
            measure.factor * stat.spread if stat.spread is not None and study.seeds > 1 else None,
            label,
        )
    if len(cells) < len(study.runs):
        return None
    rows = [(*key, mean, deviation) for key, (mean, deviation, _) in cells.items()]
    table = csv((*names, measure.heading(), "std over seeds"), rows)
    best = max(cells, key=lambda key: measure.rank(cells[key][0]))
    words = ", ".join(f"{name} = {_word(value)}" for name, value in zip(names, best, strict=True))
    stated = str(study.contract)
    caption = f"{stated[0].upper()}{stated[1:]}{'; mean over seeds' if study.seeds > 1 else ''}. Best: {words}."
    if len(names) == 1:
        line = {key[0]: cell for key, cell in cells.items()}
        title = f"{measure.capital} by {names[0]}"
        return figure("sweep", title, lambda width: _line(names[0], line, width, measure), table, caption)
    return figure(
        "sweep",
        f"{measure.capital} by {names[0]} and {names[1]}",
        lambda width: heat(names, cells, width, measure),
        table,
        caption,
    )


def _plain(values: Sequence[Any]) -> bool:
    return all(isinstance(value, bool | int | float | str) for value in values)


def _word(value: Any) -> str:
    return (
        {True: "on", False: "off"}.get(value, str(value))
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values, numbers by size."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if all(isinstance(v, int | float) for v in distinct) else distinct


def _line(name: str, cells: dict[Any, Cell], width: int, measure: Measure = ACCURACY) -> Html:
    """Draw the score of every value, evenly spaced, since values are often powers."""
    values = _ordered([*cells])
    low = min(mean - (deviation or 0.0) for mean, deviation, _ in cells.values())
    high = max(mean + (deviation or 0.0) for mean, deviation, _ in cells.values())
    margin = max(0.3, 0.1 * (high - low)) if measure.share else 0.1 * (high - low or abs(high) or 1.0)
    bottom, top = (
        (max(0.0, low - margin), min(100.0, high + margin)) if measure.share else (low - margin, high + margin)
    )
    height = 260 if width <= NARROW else 320
    frame = Frame.of(width, height, (-0.5, len(values) - 0.5), (bottom, top), left=44, top=24)
    parts = [frame.y_axis(measure.heading())]
    points = [(frame.x(i), frame.y(cells[value][0])) for i, value in enumerate(values)]
    if all(isinstance(value, int | float) for value in values):
        parts.append(tag("path", d=path(points), cls="line s0"))
    best = max(values, key=lambda value: measure.rank(cells[value][0]))
    for i, value in enumerate(values):
        mean, deviation, _ = cells[value]
        x = round(frame.x(i), 1)
        if deviation is not None:
            parts.append(
                tag(
                    "line",
                    x1=x,
                    x2=x,
                    y1=round(frame.y(mean + deviation), 1),
                    y2=round(frame.y(mean - deviation), 1),
                    cls="whisker s0",
                    stroke_width=2,
                )
            )
        tip = f"{name} = {_word(value)}: {_number(mean, deviation, measure)}"
        parts.append(
            tag(
                "circle",
                cx=x,
                cy=round(points[i][1], 1),
                r=6 if value == best else 4.5,
                cls="dot s0" if value != best else "dot s1",
                data_tip=tip,
            )
        )
        parts.append(tag("text", _word(value), x=x, y=height - 25, text_anchor="middle"))
    parts.append(tag("line", x1=frame.x.start, x2=frame.x.end, y1=frame.y.start, y2=frame.y.start, cls="axis"))
    parts.append(
        tag("text", name, x=(frame.x.start + frame.x.end) / 2, y=height - 6, text_anchor="middle", cls="label")
    )
    return svg(width, height, f"{measure.capital} by {name}", *parts)


def _number(mean: float, deviation: float | None, measure: Measure) -> str:
    form, mark = (".2f", " %") if measure.share else (".4g", "")
    return f"{mean:{form}}{mark}" + (f" ± {deviation:{form}}" if deviation is not None else "")


def heat(names: Sequence[str], cells: dict[Any, Cell], width: int, measure: Measure = ACCURACY) -> Html:
    """Draw a cell for each pair of values: the better the score, the stronger the colour."""
    down, across = _ordered([key[0] for key in cells]), _ordered([key[1] for key in cells])
    letters = max(len(_word(value)) for value in down)
    left = max(letters * LETTER + 14, 30)
    step = min((width - left - 8) / len(across), 96.0)
    row = min(44.0, max(28.0, step * 0.6))
    top = 30.0
    means = [mean for mean, _, _ in cells.values()]
    low, span = min(means), max(means) - min(means) or 1.0
    parts: list[Html] = [tag("text", f"{names[0]} down, {names[1]} across", x=2, y=14, cls="label")]
    for i, a in enumerate(down):
        y = top + row * i
        parts.append(tag("text", shortened(_word(a), 14), x=left - 8, y=round(y + row / 2 + 4, 1), text_anchor="end"))
        for j, b in enumerate(across):
            if (a, b) not in cells:
                continue
            mean, deviation, _ = cells[a, b]
            strength = (low + span - mean if measure.lower else mean - low) / span
            x = round(left + step * j, 1)
            tip = f"{names[0]} = {_word(a)}, {names[1]} = {_word(b)}: {_number(mean, deviation, measure)}"
            box = tag(
                "rect",
                x=x + 1,
                y=round(y + 1, 1),
                width=round(step - 2, 1),
                height=round(row - 2, 1),
                rx=3,
                cls="heat",
                fill_opacity=round(0.06 + 0.94 * strength, 3),
            )
            ink = "on-heat" if strength > 0.5 else "ink"
            text = tag(
                "text",
                f"{mean:.1f}" if measure.share else f"{mean:.3g}",
                x=round(x + step / 2, 1),
                y=round(y + row / 2 + 4, 1),
                text_anchor="middle",
                cls=f"{ink} strong" if strength == 1 else ink,
            )
            parts.append(tag("g", box, text, data_tip=tip))
    base = top + row * len(down) + 16
    for j, b in enumerate(across):
        parts.append(
            tag(
                "text",
                shortened(_word(b), max(4, int(step / LETTER))),
                x=round(left + step * (j + 0.5), 1),
                y=base,
                text_anchor="middle",
            )
        )
    scale = f"{number(round(low, 1))} % (pale) to {number(round(max(means), 1))} % (strong)"
    if not measure.share:
        pale, strong = (max(means), low) if measure.lower else (low, max(means))
        scale = f"{pale:.4g} (pale) to {strong:.4g} (strong)"
    parts.append(tag("text", scale, x=left, y=base + 22))
    return svg(width, base + 30, f"{measure.capital} by {names[0]} and {names[1]}", *parts)
