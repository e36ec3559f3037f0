"""Who has what: samples of each class at each client, as bubbles whose areas are the numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .markup import Html, csv, tag
from .read import Result
from .svg import NARROW, figure, length, shortened, svg

CLIENTS, CLASSES = 100, 60  # drawn at most
ON_A_PHONE = 40  # clients


def holdings(run: Result) -> Html | None:
    """Return the figure for a run's data; None where its folder does not say who has what."""
    counts = {} if run.answers is None else dict(run.answers.classes)
    if not counts or run.last.get("objective") == "regression":  # samples of no class
        return None
    classes = len(next(iter(counts.values())))
    names = run.partition.get("labels")
    labels = (
        [str(name) for name in names]
        if isinstance(names, list) and len(names) == classes
        else [str(c) for c in range(classes)]
    )
    rows = [(run.client(str(k)), labels[c], n) for k, of in counts.items() for c, n in enumerate(of) if n]
    totals = [sum(of) for of in counts.values()]
    held = [sum(n > 0 for n in of) for of in counts.values()]
    hidden = [f"the first {CLIENTS} of {len(counts):,} clients"] if len(counts) > CLIENTS else []
    hidden += [f"the first {CLASSES} of {classes:,} classes"] if classes > CLASSES else []
    shown = f" Shown: {', '.join(hidden)}." if hidden else ""
    caption = (
        f"Training, validation and test samples of seed {run.seed}. A client has {min(totals):,} to {max(totals):,} samples "
        f"of {min(held)} to {max(held)} classes.{shown}"
    )
    first = {k: of[:CLASSES] for k, of in list(counts.items())[:CLIENTS]}
    clients = {k: run.client(str(k)) for k in first}
    table = csv(("client", "class", "samples"), rows)
    return figure(
        "holdings",
        "Samples of each class at each client",
        lambda width: draw(first, clients, labels, width),
        table,
        caption,
    )


def draw(counts: Mapping[int, list[int]], clients: Mapping[int, str], labels: list[str], width: int) -> Html:
    """Draw the bubbles: a column for each client; on a phone a row."""
    narrow = width <= NARROW
    number = len(next(iter(counts.values())))
    across, down = [*counts], [*range(number)]
    if narrow:
        across, down = down, across[:ON_A_PHONE]
    name_across = (lambda i: labels[i]) if narrow else (lambda i: clients[i])
    name_down = (lambda i: clients[i]) if narrow else (lambda i: labels[i])
    letters = 9 if narrow else 16
    left = max(*(length(shortened(name_down(i), letters)) + 14 for i in down), 26.0)
    named = max(length(shortened(name_across(i), letters)) for i in across) + 10
    step = min((width - left - 10) / len(across), max(34.0, named))
    row = max(min(step, 22.0 if narrow else 34.0), 12.0)
    top = 12.0
    largest = max(max(of) for of in counts.values()) or 1
    most = 0.48 * min(step, row)
    parts: list[Html] = []
    for i, b in enumerate(down):
        y = top + row * (i + 0.5)
        parts.append(
            tag("line", x1=left, x2=round(left + step * len(across), 1), y1=round(y, 1), y2=round(y, 1), cls="grid")
        )
        parts.append(tag("text", shortened(name_down(b), letters), x=left - 8, y=round(y + 4, 1), text_anchor="end"))
    for j, a in enumerate(across):
        for i, b in enumerate(down):
            k, c = (b, a) if narrow else (a, b)
            n = counts[k][c]
            if n:
                parts.append(
                    tag(
                        "circle",
                        cx=round(left + step * (j + 0.5), 1),
                        cy=round(top + row * (i + 0.5), 1),
                        r=round(max(0.5, most * math.sqrt(n / largest)), 2),
                        cls="bubble",
                        data_tip=f"client {clients[k]}, class {labels[c]}: {n:,}",
                    )
                )
    base = top + row * len(down) + 14
    every = max(1, math.ceil((named - 4) / step))
    for j, a in enumerate(across):
        if j % every == 0:
            parts.append(
                tag(
                    "text",
                    shortened(name_across(a), letters),
                    x=round(left + step * (j + 0.5), 1),
                    y=base,
                    text_anchor="middle",
                )
            )
    words = "class across, client down" if narrow else "client across, class down"
    if narrow and len(list(clients)) > len(down):
        words += f" (the first {len(down)} clients)"
    sizes = f"the largest bubble: {largest:,} samples"
    texts = [words, sizes] if narrow else [f"{words}; {sizes}"]
    key = [tag("text", text, x=4, y=round(base + 22 + 16 * i, 1), cls="label") for i, text in enumerate(texts)]
    return svg(width, base + 14 + 16 * len(texts), "Samples of each class at each client", *parts, *key)
