"""The verdict for every client: how many should join, the gain of each with its interval, and all of it as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.metric import Measure
from ..verdict import LEVEL, Side, Verdict, counts, verdict, verdict_of_scores
from .markup import Html, csv, download, join, tag
from .read import Study
from .svg import LETTER, NARROW, Frame, figure, length, number, shortened, svg

SIDES: Mapping[Side, tuple[str, str]] = {  # class and words
    "join": ("join", "better in the federation: join"),
    "undecided": ("open", "undecided by its test samples"),
    "stay local": ("stay", "better alone: stay local"),
}
ROW = 26.0
NAMED = 6  # letters of a client's name below its bar, where there is room for as many
SHOWN = 400  # clients in the figure at most
LISTED = 1000  # rows of the table at most; the CSV has all


def verdicts(study: Study, label: str) -> list[Verdict]:
    """Return the verdict for every client of every seed that a local run stands beside, on the same samples."""
    found: list[Verdict] = []
    if study.local is None:
        return found
    alone = {run.seed: run for run in study.runs[study.local]}
    for run in study.runs[label]:
        base = alone.get(run.seed)
        if base is None or base.divided != run.divided:
            continue
        answers = [{} if one.answers is None else one.answers.right for one in (base, run)]
        tests = run.last["samples"]
        for k, rate in run.last["personal_clients"].items():
            if k in base.last["personal_clients"] and base.last["samples"].get(k) == tests[k]:
                bits = answers[0].get(int(k)), answers[1].get(int(k))
                rates = float(base.last["personal_clients"][k]), float(rate)
                if "objective" not in run.last:
                    found.append(verdict(run.client(k), run.seed, int(tests[k]), rates, bits))
                elif (one := verdict_of_scores(run.client(k), run.seed, rates, bits, study.plain)) is not None:
                    found.append(one)
    return found


def all_verdicts(study: Study) -> dict[str, list[Verdict]]:
    """Return the verdicts by method, best first; without the local one, and methods that stand beside no local run."""
    found = {label: verdicts(study, label) for label in study.labels if label != study.local}
    return {label: of for label, of in found.items() if of}


def section(study: Study, found: Mapping[str, list[Verdict]], label: str) -> Html:
    """Return the figures and the table; `label` is the method whose clients are shown one by one."""
    rows = [(method, *_cells(one, study.seeds > 1)) for method, of in found.items() for one in of]
    header = ("method", *_header(study.seeds > 1, study.plain))
    table = csv(header, rows)
    of = sorted(found[label], key=lambda one: (-one.gain, one.client))
    paired = all(one.paired for one in of)
    how = (
        "Tango's score interval for paired proportions, from the same test samples under both models"
        if paired and "objective" not in study.first.last
        else "Student's interval of the mean difference, from the same test samples under both models"
        if paired
        else "Newcombe's interval from two accuracies, since it is not known for all clients which samples were right"
    )
    chance = (1 - LEVEL) * len(of)
    seeds = len({one.seed for one in of})
    each = f"{len(of):,} clients" if seeds == 1 else f"{len(of) / seeds:g} clients in each of {seeds} seeds"
    first = figure(
        "verdicts",
        "Clients by method",
        lambda width: bars(found, width),
        table,
        f"The model that serves a client after the last round, compared with that of its local training, {each}. Decided: the "
        f"{100 * LEVEL:g} % interval of its gain does not hold 0. "
        f"If federation changed nothing, about {chance:.0f} of {len(of)} would be decided all the same.",
    )
    second = figure(
        "gains",
        f"Gain of every client from {label}",
        lambda width: gains(of[:SHOWN], width),
        csv(_header(study.seeds > 1, study.plain), [_cells(one, study.seeds > 1) for one in of]),
        f"{_compared(study.plain, label)}, best first; bars: "
        f"{100 * LEVEL:g} % interval ({how}). "
        "The interval is about these two models on other samples of the client, not about another training.",
    )
    return join([first, second, listing(of, label, study.seeds > 1)])


def listing(of: Sequence[Verdict], label: str, several_seeds: bool) -> Html:
    """Return the table of one method's verdicts, folded."""
    header = tag(
        "tr",
        *(tag("th", text, cls="" if i else "first") for i, text in enumerate(_header(several_seeds, of[0].measure))),
    )
    rows = [
        tag(
            "tr",
            *(
                tag("td", _shown(cell, one.measure.share), cls="" if i else "first")
                for i, cell in enumerate(_cells(one, several_seeds))
            ),
            cls=SIDES[one.side][0],
        )
        for one in of[:LISTED]
    ]
    table = tag("div", tag("table", tag("thead", header), tag("tbody", *rows)), cls="scroll")
    text = csv(_header(several_seeds, of[0].measure), [_cells(one, several_seeds) for one in of])
    links = tag("div", download("CSV", text, "clients.csv"), cls="gets")
    more = f" (the first {LISTED:,} of {len(of):,})" if len(of) > LISTED else ""
    return tag("details", tag("summary", f"Every client's verdict on {label}{more}"), links, table, id="every-client")


def _compared(measure: Measure, label: str) -> str:
    if measure.lower:
        return f"{measure.title} of a client's model trained alone minus that of the model that {label} gives it"
    unit = ", in points" if measure.share else ""
    return f"{measure.capital} of the model that {label} gives a client minus that of its model trained alone{unit}"


def _header(several_seeds: bool, measure: Measure) -> tuple[str, ...]:
    seed = ("seed",) if several_seeds else ()
    rates = (measure.heading("local"), measure.heading("federated"))
    return ("client", *seed, "verdict", f"gain ({measure.points})", "from", "to", *rates, "test samples")


def _cells(one: Verdict, several_seeds: bool) -> tuple[object, ...]:
    seed = (one.seed,) if several_seeds else ()
    numbers = [one.measure.factor * value for value in (one.gain, one.low, one.high, one.local, one.federated)]
    return (one.client, *seed, one.side, *numbers, one.tests)


def _shown(cell: object, share: bool) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1f}" if share else f"{cell:.4g}"


def bars(found: Mapping[str, list[Verdict]], width: int) -> Html:
    """Draw how many clients of each method are better, undecided and worse."""
    narrow = width <= NARROW
    letters = 12 if narrow else 24
    left = max(length(shortened(label, letters)) for label in found) + 16
    keys = 3 if narrow else 1
    above = 12 + 18 * keys
    height = above + ROW * len(found) + 8
    frame = Frame.of(width, int(height), (0.0, 1.0), (len(found), 0.0), left=left, right=14, top=above, bottom=8)
    parts: list[Html] = []
    x = 8.0
    for i, (cls, words) in enumerate(SIDES.values()):
        y = 14 + (18 * i if narrow else 0)
        parts += [tag("rect", x=x, y=y - 10, width=12, height=12, cls=cls), tag("text", words, x=x + 18, y=y)]
        x += 0 if narrow else len(words) * LETTER + 46
    for row, (label, of) in enumerate(found.items()):
        top, total, at = frame.y(row) + 3, counts(of), 0
        tip = f"{label}: " + ", ".join(f"{number(count)} {side}" for side, count in total.items())
        shown: list[Html] = []
        for side, (cls, _) in SIDES.items():
            share = total[side] / len(of)
            if share:
                start, end = frame.x(at / len(of)), frame.x(at / len(of) + share)
                shown.append(
                    tag(
                        "rect",
                        x=round(start, 1),
                        y=top,
                        width=round(max(0.5, end - start - 1), 1),
                        height=ROW - 6,
                        cls=cls,
                    )
                )
                if end - start > 9 * len(str(total[side])) + 4:
                    shown.append(
                        tag(
                            "text",
                            total[side],
                            x=round((start + end) / 2, 1),
                            y=top + 14,
                            text_anchor="middle",
                            cls=f"on-{cls}",
                        )
                    )
            at += total[side]
        parts.append(tag("g", *shown, data_tip=tip))
        parts.append(tag("text", shortened(label, letters), x=left - 8, y=top + 14, text_anchor="end", cls="name ink"))
    return svg(width, height, "Verdicts by method", *parts)


def _tip(one: Verdict, several_seeds: bool) -> str:
    who = f"client {one.client}{f', seed {one.seed}' if several_seeds else ''}"
    k, form = one.measure.factor, "+.1f" if one.measure.share else "+.4g"
    interval = f"{k * one.gain:{form}} {one.measure.points}, {k * one.low:{form}} to {k * one.high:{form}}"
    rates = f"alone {one.measure.words(one.local, 1)}, federated {one.measure.words(one.federated, 1)}"
    return f"{who}: {one.side}; {interval}; {rates}; {one.tests} test samples"


def gains(of: Sequence[Verdict], width: int) -> Html:
    """Draw every client's gain with its interval, in the order given."""
    several = len({one.seed for one in of}) > 1
    k, points = of[0].measure.factor, of[0].measure.points
    low, high = min(k * one.low for one in of), max(k * one.high for one in of)
    margin = 0.04 * (high - low)
    height = 260 if width <= NARROW else 340
    letters = int((width - 54) / len(of) / LETTER) if any(not one.client.isdecimal() for one in of) else 0
    below = 26 + (18 if letters >= NAMED else 0)  # a line of the clients' names
    frame = Frame.of(width, height, (-0.5, len(of) - 0.5), (low - margin, high + margin), left=40, top=24, bottom=below)
    parts = [frame.y_axis(points)]
    zero = frame.y(0.0)
    step = (frame.x.end - frame.x.start) / len(of)
    radius = max(1.2, min(4.0, 0.36 * step))
    for i, one in enumerate(of):
        x = round(frame.x(i), 1)
        tip = _tip(one, several)
        bar = tag(
            "line",
            x1=x,
            x2=x,
            y1=round(frame.y(k * one.high), 1),
            y2=round(frame.y(k * one.low), 1),
            cls="whisker",
            stroke_width=round(max(0.6, min(2.0, 0.3 * step)), 2),
        )
        dot = tag("circle", cx=x, cy=round(frame.y(k * one.gain), 1), r=round(radius, 2))
        parts.append(tag("g", bar, dot, cls=f"client {SIDES[one.side][0]}", data_tip=tip))
        if letters >= NAMED:
            name = shortened(one.client, letters)
            parts.append(tag("text", name, x=x, y=height - 26, text_anchor="middle", cls="label"))
    parts.append(tag("line", x1=frame.x.start, x2=frame.x.end, y1=zero, y2=zero, cls="zero"))
    parts.append(
        tag(
            "text",
            "clients, best gain first",
            x=(frame.x.start + frame.x.end) / 2,
            y=height - 6,
            text_anchor="middle",
            cls="label",
        )
    )
    return svg(width, height, "Gain of every client", *parts)
