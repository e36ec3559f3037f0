"""Tables as the papers arrange them: in each cell the published number, ours ± std, and the difference with its verdict."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from ..papers import METRICS, Exhibit, Panel
from ..report.costs import NONE
from ..run.evaluate import FIXED, WORDS
from .reading import Reading, rankings
from .scale import Scale
from .verdict import Sample

SHORT = {
    "within": "noise",
    "better": "better",
    "worse": "worse",
    "one seed": "1 seed",
    "holds": "as stated",
    "fails": "not so",
    "differs": "differs",
    "scaled": "scaled",
}
GAP = "  "
HEADS = ("published", "ours", "difference")  # of a cell's lines


def text(exhibit: Exhibit, readings: Sequence[Reading], scale: Scale, width: int = 80) -> str:
    """Return an exhibit's chosen cells as plain text; what does not fit the width is continued below."""
    lines = textwrap.wrap(f"{exhibit.name}: {exhibit.title} ({exhibit.where})", width)
    lines += [] if scale.whole else textwrap.wrap(scale.words(), width)
    for panel in exhibit.panels:
        own = [reading for reading in readings if reading.cell.panel == panel.id]
        if own:
            lines += ["", *([panel.title] if panel.title else []), *_panel(panel, own, width)]
    notes = notes_of(exhibit, readings, scale)
    return "\n".join([*lines, "", *(line for note in notes for line in _wrapped(note, width))])


def _wrapped(note: str, width: int) -> list[str]:
    indent = len(note) - len(note.lstrip())
    return textwrap.wrap(note, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)) or [""]


def _panel(panel: Panel, readings: Sequence[Reading], width: int) -> list[str]:
    """Return a panel as lines, three for each row."""
    cells = {(reading.cell.row, reading.cell.column): reading for reading in readings}
    rows = [row for row in panel.rows if any(place[0] == row for place in cells)]
    columns = [column for column in panel.columns if any(place[1] == column for place in cells)]
    blocks = {column: [_stack(cells.get((row, column))) for row in rows] for column in columns}
    wide = {column: max(len(column), *(len(line) for stack in blocks[column] for line in stack)) for column in columns}
    names = [textwrap.wrap(row, 18) or [""] for row in rows]
    first = max((len(part) for name in names for part in name), default=0)
    left = first + len(GAP) + len(HEADS[-1])
    lines: list[str] = []
    while columns:
        taken, used = 1, left + len(GAP) + wide[columns[0]]
        while taken < len(columns) and used + len(GAP) + wide[columns[taken]] <= width:
            used += len(GAP) + wide[columns[taken]]
            taken += 1
        shown, columns = columns[:taken], columns[taken:]
        lines += [""] if lines else []
        if any(shown):
            lines.append((" " * left + GAP + GAP.join(column.rjust(wide[column]) for column in shown)).rstrip())
        lines.append("─" * used)
        for number, name in enumerate(names):
            parts = [blocks[column][number] for column in shown]
            texts = []
            for i, head in enumerate(HEADS):
                line = GAP.join(stack[i].rjust(wide[column]) for stack, column in zip(parts, shown, strict=True))
                if any(stack[i] not in ("", NONE) for stack in parts):
                    texts.append(f"{head:<{len(HEADS[-1])}}{GAP}{line}")
            for label, line in itertools.zip_longest(name, texts, fillvalue=""):
                lines.append(f"{label:<{first}}{GAP}{line}".rstrip())
    return lines


def _stack(reading: Reading | None) -> tuple[str, str, str]:
    """Return a cell's three lines: published, ours, difference and verdict."""
    if reading is None:
        return "", "", ""
    return printed(reading), ours(reading), judged(reading)


def printed(reading: Reading) -> str:
    """Return the published number as the paper prints it."""
    cell = reading.cell
    if cell.published is None:
        return NONE
    relation = "" if cell.relation == "=" else f"{cell.relation} "
    return relation + _pm(cell.published, cell.spread)


def ours(reading: Reading) -> str:
    """Return our number, or what there is in its place."""
    if reading.counts is not None:
        return f"{reading.counts.sum():,} samples"
    if reading.ours is not None:
        return _pm(reading.ours.mean, reading.ours.std)
    return "failed" if reading.problem else "not run"


def judged(reading: Reading) -> str:
    """Return the difference and the verdict."""
    if reading.verdict is None:
        return (
            ""
            if not reading.values or len(reading.values) == reading.seeds
            else f"{len(reading.values)} of {reading.seeds} seeds"
        )
    difference = f"{reading.verdict.difference:+.2f}".replace("-", "−")
    return f"{difference} {SHORT[reading.verdict.kind]}"


def _pm(mean: float, spread: float | None) -> str:
    number = f"{mean:.2f}" if abs(mean) < 10_000 else f"{mean:,.0f}"
    return number if spread is None else f"{number} ± {spread:.2f}"


def unit_line(exhibit: Exhibit, readings: Sequence[Reading]) -> str:
    """Say what the numbers are: the metrics, models, means and rounds of the contracts."""
    words: dict[str, None] = {}
    for reading in readings:
        contract = reading.cell.contract
        what = METRICS[contract.metric]
        unit = f" ({what.unit})" if what.unit else ""
        if contract.metric in ("accuracy", "improvement", "rounds-to-target", "rounds-speedup", "time-speedup"):
            mean = {"client": "mean per client", "sample": "mean per sample", "training": "mean by training size"}
            whose = {"common": "common test set", "all": f"all clients, {mean[contract.mean]}"}
            clients = whose.get(str(contract.clients), f"{contract.clients}, {mean[contract.mean]}")
            if not isinstance(contract.clients, str):
                clients = f"client {contract.clients}"
            if contract.model in FIXED and contract.clients != "common":
                clients = WORDS[contract.model].rpartition(", ")[2]  # their mean is the same whatever a contract says
            of_round = {"last": "last round", "mean10": "mean of the last 10", "best-test": "best round ON TEST DATA"}
            round = of_round.get(str(contract.round), f"round {contract.round}")
            words[f"{what.what.partition(' of a model')[0]}{unit}: {contract.model} model, {clients}, {round}"] = None
        elif contract.metric == "megabytes":
            words["MB: 10⁶ numbers sent, down and up, as the paper counts them (float32: 4 bytes each)"] = None
        elif contract.metric == "flops":
            words["GFLOPs: 10⁹ multiply-adds, a training step as three forward passes, as the paper counts"] = None
        else:
            words[f"{contract.metric}: {what.what}{unit}"] = None
    return "; ".join(words)


def notes_of(exhibit: Exhibit, readings: Sequence[Reading], scale: Scale) -> list[str]:
    """Return the lines below a table: what the numbers are, noise, rankings, failures, provenance."""
    lines = [unit_line(exhibit, readings)]
    numbers = [reading for reading in readings if reading.ours is not None]
    compared = [reading for reading in numbers if reading.verdict is not None]
    seeds = sorted({len(reading.values) for reading in numbers})
    if numbers:
        over = " or ".join(map(str, seeds))
        spread = {"seeds": f"{exhibit.seeds} seeds", "unstated": "what, the paper does not say", "": ""}[exhibit.spread]
        theirs = f"; published ± over {spread}" if spread and any(r.cell.spread is not None for r in readings) else ""
        lines.append(f"ours: mean ± standard deviation (n − 1) over {over} seed{'s' if seeds != [1] else ''}{theirs}")
    if compared:
        kinds = [reading.verdict.kind for reading in compared if reading.verdict is not None]
        tally = ", ".join(f"{SHORT[kind]} {kinds.count(kind)}" for kind in SHORT if kind in kinds)
        none = "SCALED: differences from the whole, of which there are no verdicts"
        lines.append(f"verdicts: {tally}, of {len(compared)} cells" if scale.whole else none)
        if any(kind in ("within", "better", "worse") for kind in kinds):
            lines.append(
                "noise: at most t₉₅ standard errors of the difference, of both spreads and numbers of seeds (Welch)"
            )
        if "one seed" in kinds:
            lines.append("1 seed: no noise known")
    for ranking in rankings(exhibit, list(readings)):
        lines += ranking.lines(scaled=not scale.whole)
    problems: dict[str, list[str]] = {}
    for reading in readings:
        if reading.problem:
            problems.setdefault(reading.problem, []).append(reading.cell.id)
    lines += [f"{', '.join(ids)}: {problem}" for problem, ids in problems.items()]
    missing = [reading for reading in readings if reading.state in ("missing", "partial")]
    if missing:
        lines.append(f"{len(missing)} of {len(readings)} cells have not been run with all their seeds")
    results = [result for reading in readings for result in reading.results]
    if results:
        about = sorted({(r.environment or {}).get("device", "?") for r in results})
        versions = sorted({f"fedstill {(r.environment or {}).get('fedstill')}" for r in results})
        torch = sorted({f"torch {(r.environment or {}).get('torch')}" for r in results})
        dates = sorted({r.date[:10] for r in results})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"{', '.join([*versions, *torch])}, on {' and '.join(about)}, {when}")
    if exhibit.unstated:
        lines.append(f"not stated by the paper, ours: {', '.join(exhibit.unstated)}")
    if exhibit.note:
        lines.append(" ".join(exhibit.note.split()))
    return lines


def markdown(exhibit: Exhibit, readings: Sequence[Reading], scale: Scale) -> str:
    """Return the same as a page of Markdown."""
    lines = [f"# {exhibit.name}", "", f"{exhibit.title} ({exhibit.where}).", ""]
    lines += [] if scale.whole else [f"**{scale.words()}.**", ""]
    for panel in exhibit.panels:
        own = {(r.cell.row, r.cell.column): r for r in readings if r.cell.panel == panel.id}
        if not own:
            continue
        rows = [row for row in panel.rows if any(place[0] == row for place in own)]
        columns = [column for column in panel.columns if any(place[1] == column for place in own)]
        lines += [f"**{panel.title}**", ""] if panel.title else []
        lines += [_row(["", *columns]), _row(["---"] * (len(columns) + 1))]
        for row in rows:
            stacks = [_stack(own.get((row, column))) for column in columns]
            texts = ["<br>".join(part for part in (p, f"**{o}**" if o else "", j) if part) for p, o, j in stacks]
            lines.append(_row([row, *texts]))
        lines.append("")
    lines += ["Each cell: published, **ours**, difference and verdict.", ""]
    lines += [f"- {note.strip()}" for note in notes_of(exhibit, readings, scale)]
    return "\n".join(lines) + "\n"


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def summary_of(sample: Sample | None) -> str:
    """Return a mean with its standard deviation in a few characters."""
    return "" if sample is None else _pm(sample.mean, sample.std)
