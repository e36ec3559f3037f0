"""Pages of measured results from kept results.json files: every number with its command, partition, versions and date.

docs/results/data/PAPER-EXHIBIT.json     kept copies of results.json (`keep`)
docs/results/PAPER.md, README.md         written from them; no number is typed by hand
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import papers
from ..core import files
from ..core.errors import InputError
from ..core.reading import Unreadable, read_json
from ..report.costs import NONE
from .reading import Reading
from .write import FORMAT, RESULTS, ranking_records

DATA = "data"
PLACES = ("--data-root", "--out")
BEGIN, END = "<!-- results: begin (benchmarks/results.py writes this) -->", "<!-- results: end -->"
SIGNS = {
    "within": "within the noise", "better": "better", "worse": "worse", "one seed": "one seed", "holds": "as stated",
    "fails": "not as stated", "differs": "differs",
}  # fmt: skip
Record = Mapping[str, Any]


def keep(results: Path, to: Path) -> list[Path]:
    """Copy the results.json of whole, finished exhibits under a folder of reproductions; cells that were kept before stay.

    A cell of the new file replaces the kept one where it has as many seeds or more; scaled results are not kept.
    """
    made = []
    for path in sorted(results.glob(f"*/*/{RESULTS}")):
        record = _read(path)
        done = [cell for cell in record["cells"] if cell["state"] in ("done", "partial") and cell["runs"]]
        if record["scale"] != 1 or not done:
            continue
        target = to / DATA / f"{record['exhibit'].replace('/', '-')}.json"
        before = _read(target)["cells"] if target.exists() else []
        cells = {cell["id"]: cell for cell in before}
        for cell in done:
            if len(cell["values"]) >= len(cells.get(cell["id"], {"values": ()})["values"]):
                cells[cell["id"]] = cell
        for cell in done:
            cell["runs"] = [{**run, "command": portable(run["command"])} for run in cell["runs"]]
        kept = {
            **record,
            "command": portable(record["command"]),
            "cells": list(cells.values()),
            "rankings": _rankings(record["exhibit"], list(cells.values())),
        }
        text = json.dumps(kept, indent=1, ensure_ascii=False)
        files.write(target, (text + "\n").encode())
        made.append(target)
    return made


def portable(command: str) -> str:
    """Return a command without the places of the machine that ran it: where its data and its results lay."""
    words = shlex.split(command)
    places = {i + n for i, word in enumerate(words) if word in PLACES for n in (0, 1)}
    return shlex.join(
        word for i, word in enumerate(words) if i not in places and not word.startswith(tuple(f"{p}=" for p in PLACES))
    )


def _rankings(name: str, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rankings over all cells that are kept."""
    exhibit = papers.exhibit(name)
    known = {cell.id: cell for cell in exhibit.cells}
    values = {cell["id"]: tuple(cell["values"]) for cell in cells if cell["id"] in known}
    return ranking_records(exhibit, [Reading(known[id], len(own), values=own) for id, own in values.items()])


def load(folder: Path) -> list[Record]:
    """Return the kept records, in the order of the papers and of their exhibits."""
    records = {record["exhibit"]: record for path in sorted((folder / DATA).glob("*.json")) for record in [_read(path)]}
    order = [exhibit.name for name in papers.names() for exhibit in papers.exhibits(name).values()]
    return [records[name] for name in order if name in records]


def _read(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path, limit=1 << 28, depth=100)
    except Unreadable as error:
        raise InputError("results", str(path), str(error)) from None
    if record.get("format") != FORMAT:
        raise InputError("results", str(path), f"in format {FORMAT}: 'fedstill reproduce' writes it again")
    return record


def pages(records: Sequence[Record]) -> dict[str, str]:
    """Return the pages by file name."""
    by_paper: dict[str, list[Record]] = {}
    for record in records:
        by_paper.setdefault(record["exhibit"].partition("/")[0], []).append(record)
    out = {f"{paper}.md": _page(paper, own) for paper, own in by_paper.items()}
    return {"README.md": _index(by_paper), **out}


def _index(by_paper: Mapping[str, Sequence[Record]]) -> str:
    """Return the page that lists what was measured."""
    lines = [
        "# Measured results", "",
        "The papers' tables run by `fedstill reproduce` on the real data, beside the published numbers. Every page is written by",
        "`benchmarks/results.py` from the results in `data/`: each number has its command, partition hash, versions and date.",
        "",
    ]  # fmt: skip
    if not by_paper:
        return "\n".join([*lines, "Nothing has been measured in full yet.", ""])
    lines += summary([record for own in by_paper.values() for record in own], link="")
    return "\n".join([*lines, ""])


def summary(records: Sequence[Record], link: str = "docs/results/") -> list[str]:
    """Return a table of how many cells of each exhibit were measured and how they stand; the lines for the README."""
    if not records:
        return ["No table has been measured in full yet."]
    lines = ["| table or figure | cells measured | within the noise | better | worse | rankings that hold |"]
    lines.append("|---|---|---|---|---|---|")
    for record in records:
        paper, _, id = record["exhibit"].partition("/")
        total = len(papers.exhibits(paper)[id].cells) if id in papers.exhibits(paper) else len(record["cells"])
        kinds = [cell["verdict"] for cell in record["cells"]]
        counts = " | ".join(str(kinds.count(kind)) for kind in ("within", "better", "worse"))
        holds = [ranking["holds"] for ranking in record["rankings"]]
        rankings = f"{sum(holds)} of {len(holds)}" if holds else NONE
        name = f"[{record['exhibit']}]({link}{paper}.md)"
        lines.append(f"| {name} | {len(record['cells'])} of {total} | {counts} | {rankings} |")
    return lines


def _page(paper: str, records: Sequence[Record]) -> str:
    """Return the page of one paper."""
    about = papers.load(paper)
    lines = [f"# {about['title']}", "", f"{about['venue']}. Written by `benchmarks/results.py`.", ""]
    for record in records:
        lines += [f"## {record['exhibit']}: {record['title']}", "", f"{record['where']}.", ""]
        lines += ["| cell | published | ours ± std | seeds | difference | verdict |", "|---|---|---|---|---|---|"]
        lines += [_line(cell) for cell in record["cells"]]
        lines += [""]
        for ranking in record["rankings"]:
            tau = f"Kendall's τ {ranking['tau']:.2f} over {ranking['pairs']} pairs"
            lines.append(f"- ranking in {ranking['where']} {ranking['state']}: {tau}")
        lines += [*([""] if record["rankings"] else []), *_provenance(record["cells"]), ""]
    return "\n".join(lines)


def _line(cell: Record) -> str:
    published = NONE if cell["published"] is None else _pm(cell["published"], cell["published_spread"])
    ours = NONE if cell["mean"] is None else _pm(cell["mean"], cell["std"])
    difference = NONE if cell["difference"] is None else f"{cell['difference']:+.2f}".replace("-", "−")
    verdict = SIGNS.get(cell["verdict"] or "", NONE)
    return f"| {cell['id']} | {published} | {ours} | {len(cell['values'])} | {difference} | {verdict} |"


def _pm(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def _provenance(cells: Sequence[Record]) -> list[str]:
    """Return a line for each command, and a table of the runs' partitions, versions and dates."""
    commands = dict.fromkeys(run["command"] for cell in cells for run in cell["runs"])
    lines = ["Commands:", "", *(f"- `{command}`" for command in commands), ""]
    lines += ["<details><summary>partition hash, versions, device and date of every run</summary>", ""]
    lines += [
        "| cell | seed | partition | fedstill | torch | device | date | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for run in cell["runs"]:
            about = run["environment"]
            lines.append(
                f"| {cell['id']} | {run['seed']} | `{run['partition'][:12]}` | {about['fedstill']} | {about['torch']} | "
                f"{about['device']} | {run['date'][:10]} | {run['seconds']:.0f} |"
            )
    return [*lines, "", "</details>"]


def write(folder: Path, readme: Path | None = None) -> list[Path]:
    """Write all pages from what is kept, and the README's table between its marks; return what was written."""
    records = load(folder)
    made = []
    for name, text in pages(records).items():
        files.write(folder / name, text.encode())
        made.append(folder / name)
    if readme is not None:
        files.write(readme, with_table(readme.read_text(encoding="utf-8"), records).encode())
        made.append(readme)
    return made


def with_table(text: str, records: Sequence[Record]) -> str:
    """Return a README with the table of results between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError("README", "without marks", f"one with the lines {BEGIN} and {END}")
    return "\n".join([f"{before}{BEGIN}", "", *summary(records), "", f"{END}{after}"])
