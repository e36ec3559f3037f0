"""The costs of a round, as columns beside the accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..run.accounting import Cost

NONE = "–"
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Means = dict[str, float | None]


def means(costs: Sequence[Cost]) -> Means:
    """Return the mean costs over seeds."""
    flops = [None if cost.flops is None else cost.flops.total for cost in costs]
    return {
        "steps": _mean([cost.steps for cost in costs]),
        "flops": _mean(flops),
        "bytes": _mean([cost.bytes for cost in costs]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def columns(rows: Sequence[Mapping[str, float | None]]) -> list[tuple[str, list[str]]]:
    """Return steps, FLOPs and bytes of a participant's round; a column of which no value is known is left out."""
    out = []
    for name, heading in (("steps", "steps"), ("flops", "FLOPs"), ("bytes", "B")):
        values = [row[name] for row in rows]
        if any(value is not None for value in values):
            out.append(scaled(heading, values, plain=name == "steps"))
    return out


def scaled(heading: str, values: Sequence[float | None], plain: bool = False) -> tuple[str, list[str]]:
    """Return a column in the largest unit that its largest number reaches: a heading such as MFLOPs, about three digits."""
    largest = max((value for value in values if value is not None), default=0.0)
    size, prefix = next(((s, p) for s, p in PREFIXES if largest >= s), (1.0, "")) if not plain else (1.0, "")
    return (prefix + heading).strip(), [NONE if value is None else short(value / size) for value in values]


def short(value: float) -> str:
    """Format a number with about three digits.

    >>> short(0), short(0.1034), short(25.13), short(1717.47)
    ('0', '0.10', '25.1', '1,717')
    """
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:,.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def duration(seconds: float) -> str:
    """Return a length of time in words, rounded up.

    >>> duration(4.2), duration(200), duration(4000)
    ('5 s', '3 min 20 s', '1 h 07 min')
    """
    rounded = int(-(-seconds // 1))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    minutes = -(-rounded // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def notes(costs: Mapping[str, Cost], rows: Sequence[Mapping[str, float | None]]) -> list[str]:
    """Explain the columns, and name what could not be counted."""
    headings = [heading for heading, _ in columns(rows)]
    if not headings:
        return []
    counts = "products and convolutions, client of mean size; bytes down + up"
    lines = [f"{', '.join(headings)}: one participant in a round; {counts}"]
    missing = [f"{label} ({cost.uncounted})" for label, cost in costs.items() if cost.uncounted]
    return [*lines, f"FLOPs could not be counted: {', '.join(missing)}"] if missing else lines
