"""The distribution of classes over clients, drawn as bubbles in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fit import cells_of, cut, padded

Counts = NDArray[Any]

LONGEST = 20  # cells of a name
SIZES = "·•●⬤"  # up to 1/16, 1/4, 9/16 and all of the largest count: the area grows with the count


def glyph(count: int, largest: int) -> str:
    """Return a bubble whose area is proportional to the count; a blank for none."""
    if count <= 0:
        return " "
    return SIZES[min(len(SIZES) - 1, int(np.ceil(len(SIZES) * np.sqrt(count / largest))) - 1)]


def bubbles(
    counts: Counts, width: int = 100, most: int = 40, names: Sequence[str] = (), labels: Sequence[str] = ()
) -> list[str]:
    """Draw a line per client and a column per class, each by its name where it has one; a last line counts what does not fit."""
    clients, classes = counts.shape
    largest = int(counts.max())
    heads = [cut(name, LONGEST) for name in names[:most]] or [
        f"client {k:>{len(str(clients - 1))}}" for k in range(clients)
    ][:most]
    head = max(len("class"), *map(cells_of, heads))
    available = width - head - len("   ") - len("  samples")
    step = 3 if classes * 3 <= available else 2
    shown = max(1, min(classes, available // step))
    header = "".join(f"{c:>{step}}" if step > len(str(c)) else f"{str(c)[-1]:>{step}}" for c in range(shown))
    lines = [f"{'class':>{head}} {header}  samples"]
    for k, name in enumerate(heads):
        row = "".join(f"{glyph(int(count), largest):>{step}}" for count in counts[k, :shown])
        lines.append(f"{padded(name, head, left=True)} {row}  {int(counts[k].sum()):>7,}")
    hidden = [f"{clients - most:,} more clients"] if clients > most else []
    hidden += [f"{classes - shown:,} more classes"] if classes > shown else []
    if hidden:
        lines.append(f"… {' and '.join(hidden)}")
    if labels and list(labels) != [str(c) for c in range(classes)]:
        listed = ", ".join(f"{c} {cut(label, LONGEST)}" for c, label in enumerate(labels[:shown]))
        lines += textwrap.wrap(f"classes: {listed}", width, subsequent_indent="  ")
    edges = [max(1, int(np.floor(largest * ((i + 1) / len(SIZES)) ** 2))) for i in range(len(SIZES))]
    scale = dict(zip(edges, SIZES, strict=True))  # with few samples some sizes coincide
    lines.append("samples of a class: " + "   ".join(f"{mark} up to {edge:,}" for edge, mark in scale.items()))
    return lines


def sizes(counts: Counts) -> str:
    """Describe the sizes of the clients."""
    totals, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    return (
        f"samples a client: {totals.min():,} at least, {totals.mean():,.1f} on average, {totals.max():,} at most; "
        f"classes a client: {classes.min()} to {classes.max()}"
    )
