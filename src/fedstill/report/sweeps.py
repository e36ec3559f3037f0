"""Pictures of a sweep: the score against the value of one field, or a heat map over the values of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.metric import Measure
from ..run.evaluate import Evaluation
from .figures import COLOURS, INK, begin, footnote, save, unit_of
from .text import UNKNOWN, Facts, facts_line, own_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..run.result import Run

Points = Mapping[tuple[Any, ...], Sequence["Run"]]  # by the values of the fields: runs that differ in their seeds


def sweep_figure(fields: Sequence[str], points: Points, path: str | Path, facts: Facts = UNKNOWN) -> None:
    """Draw the run's contract by the values of one field (± std over seeds), or of two; what did not finish is left empty."""
    contract = Evaluation.by(next(iter(points.values()))[0].training)
    measure = contract.measure(next(iter(points.values()))[0].history)
    scores = {values: [s for s in map(_score, runs) if s is not None] for values, runs in points.items()}
    scores = {values: found for values, found in scores.items() if found}
    figure = begin(6.4 if len(fields) == 1 else 7.2, 4.6 if len(fields) == 1 else 5.2)
    axes = figure.subplots()
    if len(fields) == 1:
        _curve(axes, fields[0], {values[0]: found for values, found in scores.items()}, measure)
    else:
        _heat(axes, fields, {(values[0], values[1]): found for values, found in scores.items()}, measure)
    most = max(map(len, points.values()))
    seeds = f"; mean over {most} seeds" if most > 1 else ""
    origin = facts_line(facts)
    footnote(figure, f"Score: {contract}{seeds}" + (f"\n{origin}" if origin else ""))
    method = next(iter(points.values()))[0].method.id
    axes.set_title(f"{method}: {measure.title} by {' and '.join(fields)}", loc="left", fontsize=12, color=INK)
    save(figure, path)


def _score(run: Run) -> float | None:
    own = own_score(run)
    return Evaluation().of(run.kept) if own is None and Evaluation.by(run.training) == Evaluation() else own


def _curve(axes: Axes, field: str, scores: Mapping[Any, Sequence[float]], measure: Measure) -> None:
    """Draw mean and spread; numbers stand at their places, on a logarithmic axis where they span more than a decade."""
    values = list(scores)
    k = measure.factor
    means = [k * float(np.mean(found)) for found in scores.values()]
    spread = [k * float(np.std(found, ddof=1)) if len(found) > 1 else 0.0 for found in scores.values()]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = values if numeric else list(range(len(values)))
    order = np.argsort(places, kind="stable")
    x, y, e = (np.array(column, dtype=float)[order] for column in (places, means, spread))
    axes.errorbar(x, y, yerr=e if e.any() else None, color=COLOURS[0], marker="o", linewidth=2, capsize=3)
    if numeric and min(x) > 0 and max(x) / min(x) > 10:
        axes.set_xscale("log")
    axes.set_xticks(x, [str(values[i]) for i in order])
    axes.minorticks_off()
    axes.set_xlabel(field)
    axes.set_ylabel(unit_of(measure))
    axes.grid(axis="y", color="#e6e6e6")


def _heat(
    axes: Axes, fields: Sequence[str], scores: Mapping[tuple[Any, Any], Sequence[float]], measure: Measure
) -> None:
    """Draw one cell a combination, with its number in it; the first field goes up, the second to the right."""
    rows, columns = (list(dict.fromkeys(values[i] for values in scores)) for i in (0, 1))
    table = np.full((len(rows), len(columns)), np.nan)
    for (row, column), found in scores.items():
        table[rows.index(row), columns.index(column)] = measure.factor * float(np.mean(found))
    image = axes.imshow(table, cmap="viridis_r" if measure.lower else "viridis", origin="lower", aspect="auto")
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    for (i, j), value in np.ndenumerate(table):
        if not np.isnan(value):
            level = high - value if measure.lower else value - low
            pale = level < 0.6 * (high - low) or low == high
            axes.text(
                j,
                i,
                f"{value:.2f}" if measure.share else f"{value:.4g}",
                ha="center",
                va="center",
                color="white" if pale else "black",
                fontsize=10,
            )
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_ylabel(fields[0])
    axes.set_xlabel(fields[1])
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(unit_of(measure))
