"""Results as figures (matplotlib; drawn without a display and without global state)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.metric import Measure
from ..run.evaluate import Evaluation
from .bubbles import Counts
from .fit import cut
from .html.curves import Curve, in_sight
from .html.svg import spread
from .text import UNKNOWN, Facts, facts_line, own_score, scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..run.result import Run

MISSING = "pip install 'fedstill[figures]' draws pictures (matplotlib is not installed)"
# Okabe & Ito's colours, which readers with any colour vision can tell apart; yellow left out: too pale for a line
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINESTYLES = ("-", "--", ":", "-.")  # the next one when the colours are used up
INK, PALE = "#222222", "#8a8a8a"
GREY = "#b9c0c8"  # of methods that are not drawn in colour
MOST, BEST = (
    7,
    4,
)  # methods in colour, where there are more; of these the best ones, beside baselines and those asked for
BASELINES = ("local", "fedavg")
LONGEST = 24  # cells of a name
CLIENTS = 100  # the most in a bubble chart


def compare_figure(
    runs: Mapping[str, Sequence[Run]], path: str | Path, facts: Facts = UNKNOWN, asked: Sequence[str] = ()
) -> None:
    """Draw a comparison of methods; where there are many, the best, the baselines and those `asked` for are in colour.

    Left: personal accuracy by round, with a band of ± std where there are several seeds. Right: the clients of the last
    round, each a dot, on a box of their quartiles; best mean on top. Next to them the forgetting gap by round, where it was
    measured.
    """
    watched = {label: seeds for label, seeds in runs.items() if all(_gaps(run) for run in seeds)}
    figure = begin(16.0 if watched else 11.5, max(4.6, 2.2 + 0.42 * len(runs)))
    left, right, *third = figure.subplots(1, 3 if watched else 2, width_ratios=(1.25, 1, 1) if watched else (1.25, 1))
    contract = Evaluation.by(next(iter(runs.values()))[0].training)
    final = {label: float(np.mean([Evaluation().of(run.kept) for run in seeds])) for label, seeds in runs.items()}
    history = next(iter(runs.values()))[0].history
    measure, plain = contract.measure(history), Evaluation().measure(history)
    order = sorted(runs, key=lambda label: -plain.rank(final[label]))
    styles = _styles(runs, order, asked)
    hidden = _curves(left, runs, order, styles, contract, measure)
    _clients(right, runs, order, styles, final, plain)
    if watched:
        _forgetting(third[0], {label: watched[label] for label in order if label in watched}, styles, plain)
    most_seeds = max(map(len, runs.values()))
    origin = facts_line(facts)
    where = f" on {facts.data}, {facts.clients} clients" if facts.data else ""
    methods = {run.method.id for seeds in runs.values() for run in seeds}
    kind = f"Personal {plain.title}" if contract == Evaluation() else measure.capital
    title = f"{kind}{where}" if len(methods) > 1 else f"{methods.pop()}: {kind[0].lower()}{kind[1:]}{where}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
    best = {label: [value for run in runs[label] if (value := own_score(run)) is not None] for label in order}
    shown = "; ".join(f"{label} {measure.words(float(np.mean(v)))}" for label, v in best.items() if v)
    lines = [f"Score: {contract}: {shown}"] if shown else []
    lines += [
        f"{'Clients' if shown else 'Score'}: {Evaluation()}, each on its own test data"
        + (f"; {most_seeds} seeds" if most_seeds > 1 else "")
    ]
    grey = sum(colour == GREY for colour, _ in styles.values())
    lines += [f"In colour: the best, the baselines and those asked for; grey: {grey} others"] if grey else []
    lines += (
        [f"{hidden} point{'s' if hidden > 1 else ''} of early rounds {'above' if measure.lower else 'below'} the axis"]
        if hidden
        else []
    )
    footnote(figure, "\n".join([*lines, *([origin] if origin else [])]))
    save(figure, path)


def _styles(
    runs: Mapping[str, Sequence[Run]], order: Sequence[str], asked: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Return each label's colour and line."""
    chosen = list(runs)
    if len(runs) > MOST:
        baselines = [label for label in runs if runs[label][0].method.id in BASELINES][: len(BASELINES)]
        chosen = list(dict.fromkeys([*(label for label in asked if label in runs), *order[:BEST], *baselines]))[:MOST]
    return {label: (COLOURS[chosen.index(label)], "-") if label in chosen else (GREY, "-") for label in runs}


def _curves(
    axes: Axes,
    runs: Mapping[str, Sequence[Run]],
    order: Sequence[str],
    styles: Mapping[str, Any],
    contract: Evaluation,
    measure: Measure,
) -> int:
    """Draw the contract's number by round, names at the lines' ends; return how many points lie below the axis.

    A method without such a number has no line. A single method's generic model is drawn beside it, as the table has it.
    """
    own = contract != Evaluation()
    lines: dict[str, Curve] = {}
    for label in order:
        rounds, values = _by_contract(runs[label], contract) if own else _by_round(runs[label], "personal")
        if rounds:
            lines[label] = _curve(rounds, measure.factor * values)
    if not own and len(runs) == 1 and "personal" in runs[order[0]][0].method.scores:
        key = next((key for key in ("generic_common", "generic") if key in scored(runs[order[0]][0])), "")
        if key:
            name = f"generic model, {'common test set' if key == 'generic_common' else 'per sample'}"
            rounds, values = _by_round(runs[order[0]], key)
            lines[name] = _curve(rounds, measure.factor * values)
            styles = {**styles, name: (PALE, "--")}
    for label, line in lines.items():
        colour, linestyle = styles[label]
        grey = colour == GREY
        mark, width = "o" if len(line.rounds) == 1 else "", 1.0 if grey else 2.0
        axes.plot(
            line.rounds,
            line.mean,
            color=colour,
            linestyle=linestyle,
            linewidth=width,
            marker=mark,
            zorder=1 + (not grey),
        )
        if line.deviation and not grey:
            mean, over = np.array(line.mean), np.array(line.deviation)
            axes.fill_between(line.rounds, mean - over, mean + over, color=colour, alpha=0.18, linewidth=0)
    band = ", band: ± std over seeds" if max(map(len, runs.values())) > 1 else ""
    what = str(contract).rsplit(", ", 1)[0].capitalize() if own else "Mean over clients"
    axes.set_title(f"{what}{band}", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("communication round")
    axes.set_ylabel(unit_of(measure))
    _integer_ticks(axes)
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e6e6e6")
    named = [label for label in lines if styles[label][0] != GREY]
    if not named:
        return 0
    low, high, hidden = in_sight(lines, named, measure)
    axes.set_ylim(low, high)
    _names(axes, {label: lines[label] for label in named}, styles)
    return hidden


def _curve(rounds: Sequence[int], values: NDArray[np.float64]) -> Curve:
    deviation = values.std(axis=0, ddof=1).tolist() if len(values) > 1 else None
    return Curve(rounds, values.mean(axis=0).tolist(), deviation, {})


def _names(axes: Axes, lines: Mapping[str, Curve], styles: Mapping[str, Any]) -> None:
    """Write every line's name beside its end, one under another where they are close."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.17 / (axes.figure.bbox.height / axes.figure.dpi * 0.68)  # 0.17 inches, of about so many
    ends = [min(max(line.mean[-1], low), high) for line in lines.values()]
    for (label, line), end, at in zip(lines.items(), ends, spread(ends, low, high, gap), strict=True):
        axes.annotate(
            label, (line.rounds[-1], end), xytext=(1.03, (at - low) / (high - low)), textcoords="axes fraction", va="center",
            fontsize=9.5, color=styles[label][0], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": styles[label][0], "linewidth": 0.7, "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip


def unit_of(measure: Measure) -> str:
    """Return what an axis shows."""
    return f"test {measure.title} (%)" if measure.share else f"test {measure.title}"


def _forgetting(axes: Axes, runs: Mapping[str, Sequence[Run]], styles: Mapping[str, Any], measure: Measure) -> None:
    """Draw the gap by round, averaged over the seeds that have one in that round."""
    for label, seeds in runs.items():
        colour, linestyle = styles[label]
        rounds = sorted({t for run in seeds for t in _gaps(run)})
        means = [measure.factor * float(np.mean([_gaps(run)[t] for run in seeds if t in _gaps(run)])) for t in rounds]
        mark = "o" if len(rounds) == 1 else ""
        axes.plot(rounds, means, color=colour, linestyle=linestyle, linewidth=2, marker=mark)
    axes.axhline(0, color=PALE, linewidth=0.8)
    axes.set_title(
        "Forgetting: " + ("download − last own model" if measure.lower else "last own model − download"),
        loc="left",
        fontsize=11,
        color=INK,
    )
    axes.set_xlabel("communication round")
    axes.set_ylabel(f"test {measure.title}{' (points)' if measure.share else ''}, mean over participants")
    _integer_ticks(axes)
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#e6e6e6")


def _gaps(run: Run) -> dict[int, float]:
    """Return the forgetting gap by round, where it was measured."""
    return {int(record["round"]): float(record["forgetting"]) for record in run.history if "forgetting" in record}


def _by_round(runs: Sequence[Run], key: str) -> tuple[list[int], NDArray[np.float64]]:
    """Return the rounds that every run has scored, and a row of numbers for each run."""
    values = [{int(record["round"]): float(record[key]) for record in run.history if key in record} for run in runs]
    rounds = sorted(set.intersection(*(set(each) for each in values)))
    return rounds, np.array([[each[t] for t in rounds] for each in values])


def _by_contract(runs: Sequence[Run], contract: Evaluation) -> tuple[list[int], NDArray[np.float64]]:
    """Return the rounds in which every run has the contract's number, and a row of numbers for each run."""
    values = [dict(contract.by_round(run.history)) for run in runs]
    rounds = sorted(set.intersection(*(set(each) for each in values)))
    return rounds, np.array([[each[t] for t in rounds] for each in values])


def _clients(
    axes: Axes,
    runs: Mapping[str, Sequence[Run]],
    order: Sequence[str],
    styles: Mapping[str, Any],
    final: Mapping[str, float],
    measure: Measure,
) -> None:
    k = measure.factor
    for row, label in enumerate(reversed(order)):
        colour, _ = styles[label]
        rates = k * np.array([rate for run in runs[label] for rate in scored(run)["personal_clients"].values()])
        p10, p25, median, p75, p90 = np.percentile(rates, (10, 25, 50, 75, 90))
        axes.hlines([row, row], [p10, p75], [p25, p90], color=colour, linewidth=1.2)
        axes.barh(row, p75 - p25, left=p25, height=0.56, color=colour, alpha=0.16)
        axes.vlines(median, row - 0.28, row + 0.28, color=colour, linewidth=1.4)
        # a low-discrepancy sequence instead of random jitter, so that the same run gives the same figure
        spread = (np.arange(len(rates)) * 0.6180339887 % 1 - 0.5) * 0.44
        dense = len(rates) > 400
        axes.scatter(
            rates, row + spread, s=4 if dense else 16, color=colour, alpha=0.35 if dense else 0.6, linewidths=0
        )
        _name_ends(axes, runs[label], row, rates, colour)
        axes.scatter([k * final[label]], [row], marker="D", s=44, color=colour, edgecolors="white", zorder=5)
        axes.annotate(
            measure.text(final[label], 1), (1.015, row), xycoords=("axes fraction", "data"), va="center", fontsize=9.5,
            color=PALE if colour == GREY else colour, fontweight="normal" if colour == GREY else "bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(order)), list(reversed(order)))
    centre, margin = (len(order) - 1) / 2, max(len(order), 3) / 2 + 0.1
    axes.set_ylim(centre - margin, centre + margin)
    axes.set_title("Clients after the last round", loc="left", fontsize=11, color=INK)
    axes.set_xlabel(f"{unit_of(measure)}: dots clients, diamond mean,\nbox quartiles, line median, whiskers 10–90 %")
    axes.grid(axis="x", color="#e6e6e6")
    axes.tick_params(axis="y", length=0)


def _name_ends(axes: Axes, runs: Sequence[Run], row: int, rates: NDArray[Any], colour: str) -> None:
    """Write the name of the client with the lowest number below a row and of the highest above, where clients have names."""
    numbers = [(run, int(k)) for run in runs for k in scored(run)["personal_clients"]]
    for end, place in ((int(rates.argmin()), -1), (int(rates.argmax()), 1)):
        run, k = numbers[end]
        if run.outline is None or k >= len(run.outline.names):
            return
        axes.annotate(
            plain(run.outline.names[k], k), (rates[end], row + 0.3 * place), fontsize=7, color=colour,
            ha="left" if place < 0 else "right", va="top" if place < 0 else "bottom", annotation_clip=False,
        )  # fmt: skip


def plain(name: str, number: int) -> str:
    """Return a client's or class's name as matplotlib draws it as it is, shortened; its number where the font lacks a sign.

    >>> plain("a$b$", 0), plain("Charité – Universitätsmedizin Berlin, Campus Mitte", 1)
    ('a\\\\$b\\\\$', 'Charité – Universitätsm…')
    """
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
    if any(ord(sign) not in known for sign in name):
        return str(number)
    return cut(name, LONGEST).replace("$", r"\$")  # which would begin a formula


def bubbles(
    counts: Counts,
    path: str | Path,
    title: str = "",
    note: str = "",
    names: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> None:
    """Draw clients × classes, each by its name where it has one; a bubble's area is proportional to the number of samples."""
    total, classes = counts.shape
    counts = counts[:CLIENTS]
    clients = len(counts)
    cell = min(0.36, 14 / max(clients, classes))  # inches
    heads = [plain(name, k) for k, name in enumerate(names[:clients])] if clients <= 40 else []
    upright = max(map(len, heads), default=0) if any(len(head) > 3 for head in heads) else 0
    figure = begin(max(5.5, 2.0 + cell * clients), max(2.6, 1.3 + cell * classes + 0.09 * upright))
    axes = figure.subplots()
    largest = int(counts.max())
    client, label = np.nonzero(counts)
    area = (0.92 * 72 * cell) ** 2  # of the largest bubble, in square points: it just fits its cell
    axes.scatter(client, label, s=area * counts[client, label] / largest, color=COLOURS[0], alpha=0.85, linewidths=0)
    axes.set_xlim(-0.8, clients - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    axes.set_xticks(range(0, clients, 1 if clients <= 40 else 5))
    axes.set_yticks(range(0, classes, 1 if classes <= 40 else 5))
    if heads:
        axes.set_xticklabels(heads, rotation=90 if upright else 0)
    if labels and classes <= 40:
        axes.set_yticklabels([plain(label, c) for c, label in enumerate(labels[:classes])])
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_axisbelow(True)
    axes.grid(color="#efefef")
    shown = f" (the first {clients} of {total:,} clients)" if total > clients else ""
    axes.set_title(f"{title or 'Samples of each class at each client'}{shown}", loc="left", fontsize=12, color=INK)
    steps = sorted({max(1, round(largest * share)) for share in (0.1, 0.5, 1.0)})
    marks = [axes.scatter([], [], s=area * n / largest, color=COLOURS[0], alpha=0.85, linewidths=0) for n in steps]
    axes.legend(
        marks, [f"{n:,}" for n in steps], title="samples", frameon=False, loc="upper left", bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0, labelspacing=0.5 + 3 * cell, handletextpad=0.4 + 2 * cell,
    )  # fmt: skip
    if note:
        footnote(figure, note)
    save(figure, path)


def available() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _integer_ticks(axes: Axes) -> None:
    """Put only integers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def footnote(figure: Figure, text: str) -> None:
    """Small print at the bottom left."""
    figure.supxlabel(text, x=0.012, ha="left", fontsize=8.5, color="#555555")


def begin(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure atomically; one made without pyplot draws with Agg (or the format's own backend)."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#bbbbbb")
        axes.tick_params(colors="#444444", labelsize=9.5)
        axes.set_axisbelow(True)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
