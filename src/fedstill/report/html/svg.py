"""Scales, axes and marks in SVG. Colours come from classes, so that a figure follows the page's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .markup import Html, download, escape, join, tag

WIDE, NARROW = 960, 350  # widths that every figure is drawn in: for a screen, and for a phone
LETTER = 6.7  # mean width of a letter at the figures' size of 12
BOLD = 7.6  # of a bold letter
WIDER = 1.25  # a capital, or m and w, is so much wider
LINE = 15.0  # least distance of labels
COLOURS = 7  # classes s0 … s6
Drawing = Callable[[int], Html]  # of a width


@dataclass(frozen=True)
class Scale:
    """A linear map from values to positions."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return where a value is."""
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round numbers within."""
        return ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from low to high.

    >>> ticks(0, 10, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * m for m in (1, 2, 5, 10) if raw <= power * m * 1.3), power * 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Format a tick.

    >>> number(2000.0), number(0.25), number(1e-6)
    ('2,000', '0.25', '1e−06')
    """
    return (f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}").replace("-", "−")


@dataclass(frozen=True)
class Frame:
    """The rectangle within a figure in which values are drawn, with its scales."""

    width: int
    height: int
    x: Scale
    y: Scale

    @classmethod
    def of(
        cls,
        width: int,
        height: int,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        left: float = 46,
        right: float = 12,
        top: float = 10,
        bottom: float = 42,
    ) -> Frame:
        """Return a frame with margins."""
        return cls(width, height, Scale(*x, left, width - right), Scale(*y, height - bottom, top))

    def x_axis(self, label: str, grid: bool = False, whole: bool = False) -> Html:
        """Draw ticks, their numbers and the label below; with `whole` at whole numbers alone."""
        base, top = self.y.start, self.y.end
        room = max(2, int((self.x.end - self.x.start) / 70))
        parts = []
        for value in self.x.ticks(room):
            if whole and value != int(value):
                continue
            x, ends = round(self.x(value), 1), (top, base) if grid else (base, base + 4)
            parts.append(tag("line", x1=x, x2=x, y1=ends[0], y2=ends[1], cls="grid" if grid else "tick"))
            parts.append(tag("text", number(value), x=x, y=base + 17, text_anchor="middle"))
        middle = (self.x.start + self.x.end) / 2
        name = tag("text", label, x=middle, y=self.height - 6, text_anchor="middle", cls="label")
        return join([*parts, tag("line", x1=self.x.start, x2=self.x.end, y1=base, y2=base, cls="axis"), name])

    def y_axis(self, label: str) -> Html:
        """Draw lines across, their numbers, and the label on top of them."""
        parts = []
        for value in self.y.ticks(5):
            y = round(self.y(value), 1)
            parts.append(tag("line", x1=self.x.start, x2=self.x.end, y1=y, y2=y, cls="grid"))
            parts.append(tag("text", number(value), x=self.x.start - 7, y=y + 4, text_anchor="end"))
        return join([*parts, tag("text", label, x=2, y=self.y.end - 12, cls="label")])

    def corners(self) -> str:
        """Return both scales as the page's script reads them."""
        ends = [(s.low, s.high, s.start, s.end) for s in (self.x, self.y)]
        return " ".join(f"{value:.6g}" for scale in ends for value in scale)

    def clip(self, name: str) -> Html:
        """Return a clipping path of the frame."""
        box = tag(
            "rect", x=self.x.start, y=self.y.end, width=self.x.end - self.x.start, height=self.y.start - self.y.end
        )
        return tag("clipPath", box, id=name)


def svg(width: int, height: float, title: str, *children: object, **attributes: object) -> Html:
    """Return a figure."""
    box = f"0 0 {width} {math.ceil(height)}"
    return tag(
        "svg",
        *children,
        view_box=box,
        cls="fig",
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
        **attributes,
    )


def path(points: Sequence[tuple[float, float]], close: bool = False) -> str:
    """Return the data of a path through points, in steps, with tenths."""
    if not points:
        return ""
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    steps = [f"{_tenth(b[0] - a[0])} {_tenth(b[1] - a[1])}" for a, b in pairwise(tenths)]
    line = f"l{' '.join(steps)}" if steps else "h0"
    return f"M{_tenth(tenths[0][0])} {_tenth(tenths[0][1])}{line}{'z' if close else ''}".replace(" -", "-")


def _tenth(value: int) -> str:
    text = f"{value / 10:g}"
    return text.replace("0.", ".", 1) if abs(value) < 10 and value else text


def spread(positions: Sequence[float], low: float, high: float, gap: float = LINE) -> list[float]:
    """Return positions near these, in their order, at least `gap` apart and within bounds where they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [0.0] * len(positions)
    at = -math.inf
    for i in order:
        at = max(positions[i], at + gap, low)
        placed[i] = at
    at = math.inf
    for i in reversed(order):
        at = min(placed[i], at - gap, high)
        placed[i] = at
    return placed


def shortened(text: str, letters: int) -> str:
    """Cut a text to a number of letters.

    >>> shortened("spectral", 6)
    'spect…'
    """
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


def length(text: str, letter: float = LETTER) -> float:
    """Return about how wide a text is.

    >>> round(length("local")), round(length("MLP"))
    (34, 25)
    """
    return letter * sum(WIDER if c.isupper() or c in "mw%@—…" else 1.0 for c in text)


def figure(name: str, title: str, draw: Drawing, csv: str, caption: object = "") -> Html:
    """Return a figure in both widths, with its title, caption and the links to its data and to itself."""
    return panes(name, title, {"": draw}, csv, caption)


def panes(name: str, title: str, drawings: dict[str, Drawing], csv: str, caption: object = "") -> Html:
    """Return a figure of several panes, of which one is shown; their names are buttons."""
    buttons = [
        tag("button", words, type="button", data_pane=f"{name}-{i}", aria_pressed="true" if i == 0 else "false")
        for i, words in enumerate(drawings)
    ]
    shown = [
        tag(
            "div",
            tag("div", draw(WIDE), cls="wide"),
            tag("div", draw(NARROW), cls="narrow"),
            id=f"{name}-{i}",
            cls="pane",
            hidden=i > 0,
        )
        for i, draw in enumerate(drawings.values())
    ]
    links = tag(
        "div",
        download("CSV", csv, f"{name}.csv"),
        tag("button", "SVG", type="button", cls="get", data_svg=name),
        cls="gets",
    )
    choice = tag("div", *buttons, cls="choice", role="group") if len(buttons) > 1 else ""
    head = tag("div", tag("h3", title), choice, links, cls="head")
    note = tag("figcaption", escape(caption)) if caption else ""
    return tag("figure", head, *shown, note, id=name)
