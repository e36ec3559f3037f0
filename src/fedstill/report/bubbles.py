"""Who has what: clients × classes drawn as bubbles in a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[Any]

SIZES = "·•●⬤"  # up to 1/16, 1/4, 9/16 and all of the largest count: the area grows with the count


def glyph(count: int, largest: int) -> str:
    """A bubble whose area goes with the count; a blank for none."""
    if count <= 0:
        return " "
    return SIZES[min(len(SIZES) - 1, int(np.ceil(len(SIZES) * np.sqrt(count / largest))) - 1)]


def bubbles(counts: Counts, width: int = 100, most: int = 40) -> list[str]:
    """A line for each client, a column for each class; what does not fit is counted in words."""
    clients, classes = counts.shape
    largest = int(counts.max())
    name = len(str(clients - 1))
    room = width - name - len("client   ") - len("  samples")
    step = 3 if classes * 3 <= room else 2
    shown = max(1, min(classes, room // step))
    head = "".join(f"{c:>{step}}" if step > len(str(c)) else f"{str(c)[-1]:>{step}}" for c in range(shown))
    lines = [f"{'class':>{name + 7}} {head}  samples"]
    for k in range(min(clients, most)):
        row = "".join(f"{glyph(int(count), largest):>{step}}" for count in counts[k, :shown])
        lines.append(f"client {k:>{name}} {row}  {int(counts[k].sum()):>7,}")
    hidden = [f"{clients - most:,} more clients"] if clients > most else []
    hidden += [f"{classes - shown:,} more classes"] if classes > shown else []
    if hidden:
        lines.append(f"… {' and '.join(hidden)}")
    edges = [max(1, int(np.floor(largest * ((i + 1) / len(SIZES)) ** 2))) for i in range(len(SIZES))]
    scale = dict(zip(edges, SIZES, strict=True))  # with few samples, sizes that nothing has fall together
    lines.append("samples of a class: " + "   ".join(f"{mark} up to {edge:,}" for edge, mark in scale.items()))
    return lines


def sizes(counts: Counts) -> str:
    """How large the clients are, in words."""
    totals, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    return (
        f"samples a client: {totals.min():,} at least, {totals.mean():,.1f} on average, {totals.max():,} at most; "
        f"classes a client: {held.min()} to {held.max()}"
    )
