"""Simulated rounds: what each client did when, from a run's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..timeline import MARKS, NAMES, STAGES, chosen_clients, summary
from .markup import Html, csv, tag
from .read import Result
from .svg import NARROW, Frame, figure, number, svg

FIRST = 5  # rounds
Line = Mapping[str, Any]
CLASSES = {"download": "s4", "generic": "s0", "personal": "s3", "upload": "s5"}


def timeline(run: Result, label: str) -> Html | None:
    """Return the figure of a run in simulated time; None for another."""
    lines = run.timeline[:FIRST]
    if not lines:
        return None
    header = ("round", "client", "state", "start", *STAGES, "round's end")
    rows = [
        (
            line["round"],
            run.client(str(k)),
            line["state"][i],
            line["start"],
            *(line[name][i] for name in STAGES),
            line["end"],
        )
        for line in run.timeline
        for i, k in enumerate(line["clients"])
    ]
    sentences = summary(run.timeline, str(run.settings.get("late", "drop")), str(run.settings.get("mode", "sync")))
    shown = f"The first {len(lines)} rounds of {label}, seed {run.seed}; fastest client on top."
    caption = " ".join([shown, *(f"{text[0].upper()}{text[1:]}." for text in sentences)])
    return figure(
        "timeline",
        "Who worked and waited when, in simulated time",
        lambda width: draw(run, lines, width),
        csv(header, rows),
        caption,
    )


def draw(run: Result, lines: Sequence[Line], width: int) -> Html:
    """Draw a row for each client, with bars for what it did."""
    order = chosen_clients(lines)
    row = {k: i for i, k in enumerate(order)}
    narrow = width <= NARROW
    step = 12.0 if len(order) > 25 else 15.0
    keys = [(f"bar {CLASSES[name]}", NAMES[name]) for name in STAGES if any(any(line[name]) for line in lines)]
    keys += [("bar wait", "waiting")] + [
        (f"mark {state}", words)
        for state, (_, _, words) in MARKS.items()
        if any(state in line["state"] for line in lines)
    ]
    across = 2 if narrow else 4
    top = 24 + 18 * -(-len(keys) // across)
    end = max(line["end"] for line in lines)
    height = int(top + step * len(order) + 44)
    frame = Frame.of(width, height, (lines[0]["start"], end), (len(order), 0.0), left=44, right=14, top=top, bottom=44)
    parts: list[Html] = []
    for i, (cls, words) in enumerate(keys):
        x, y = 8 + (width - 16) / across * (i % across), 12 + 18 * (i // across)
        parts += [
            tag("rect", x=round(x, 1), y=y - 9, width=12, height=10, cls=cls),
            tag("text", words, x=round(x + 18, 1), y=y),
        ]
    for line in lines:
        parts.append(
            tag(
                "line",
                x1=round(frame.x(line["end"]), 1),
                x2=round(frame.x(line["end"]), 1),
                y1=top - 4,
                y2=frame.y.start,
                cls="round",
            )
        )
        parts.append(
            tag(
                "text",
                line["round"],
                x=round(frame.x((line["start"] + line["end"]) / 2), 1),
                y=top - 6,
                text_anchor="middle",
                cls="label",
            )
        )
        for i, k in enumerate(line["clients"]):
            if k in row:
                parts.append(_client(run, line, i, frame, frame.y(row[k]) + 1.5, step - 3))
    every = 1 if len(order) <= 25 else 2
    for k, i in row.items():
        if i % every == 0:
            parts.append(
                tag("text", run.client(str(k))[:6], x=36, y=round(frame.y(i) + step / 2 + 4, 1), text_anchor="end")
            )
    return svg(width, height, "Timeline", *parts, frame.x_axis("simulated seconds (rounds numbered on top)"))


def _client(run: Result, line: Line, i: int, frame: Frame, y: float, height: float) -> Html:
    """Draw what one client did in a round."""
    at, state, parts = float(line["start"]), str(line["state"][i]), []
    ahead = bool(line.get("ahead"))
    for name in STAGES:
        if ahead and name == "generic":
            at += float(line["hold"][i])
        length = float(line[name][i])
        last = min(at + length, frame.x.high)
        if length and last > at:
            thin = height / 2 if ahead else height
            low = y + height / 2 if ahead and name in ("generic", "personal") else y
            parts.append(
                tag(
                    "rect",
                    x=round(frame.x(at), 1),
                    y=round(low, 1),
                    width=round(max(0.4, frame.x(last) - frame.x(at)), 1),
                    height=round(thin, 1),
                    cls=f"bar {CLASSES[name]}",
                )
            )
        at += 0.0 if ahead and name == "personal" else length
    if state == "merged" and line["end"] > at:
        width = round(frame.x(line["end"]) - frame.x(at), 1)
        half = round(height / 2 if ahead else height, 1)  # wait-free: messages above, work below
        parts.append(tag("rect", x=round(frame.x(at), 1), y=round(y, 1), width=width, height=half, cls="bar wait"))
    if state in MARKS:
        parts.append(
            tag(
                "rect",
                x=round(min(frame.x(at), frame.x.end - 5), 1),
                y=round(y, 1),
                width=5,
                height=round(height, 1),
                cls=f"mark {state}",
            )
        )
    spent = ", ".join(f"{NAMES[name]} {number(round(line[name][i], 4))} s" for name in STAGES if line[name][i])
    word = MARKS[state][2] if state in MARKS else state
    return tag(
        "g",
        *parts,
        data_tip=f"round {line['round']}, client {run.client(str(line['clients'][i]))}: {word}{'; ' if spent else ''}{spent}",
    )
