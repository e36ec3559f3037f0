"""Folders of results: which ones may be written to or replaced, and the summary and the picture beside the runs."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..core.files import PART, write
from ..core.reading import Unreadable, field, read_json
from ..report import figures, sweeps
from ..report.html import page
from ..report.html.page import REPORT
from ..report.summary import is_summary, summary
from ..report.text import Facts
from ..run.experiment import Experiment
from ..run.lock import LOCK, is_free
from ..run.result import Run

SUMMARY, FIGURE, RUN = "summary.json", "figure.png", "experiment.toml"
SWEPT = "sweep.png"
DEMO = "demo"  # the command that may replace what it made
FILES = (  # what a run writes into its folder
    RUN, LOCK, SUMMARY, FIGURE, REPORT, "partition.json", "data.json", "environment.json", "metrics.jsonl", "metrics.csv",
    "scores.json", "answers.json",
    "choices.json", "failed.json", "timeline.jsonl", "timeline.png",
    "checkpoints/round-*.safetensors", "checkpoints/round-*.json",
)  # fmt: skip


def is_demo(out: Path) -> bool:
    """Return whether this folder is an earlier demo, which may be replaced; refuse a folder with any other contents.

    What a demo leaves that was stopped before it had begun is none, and may be run into.
    """
    if not out.is_dir() or is_free(out):
        return False
    try:
        record: Any = read_json(out / SUMMARY)
    except Unreadable:
        record = None
    made = is_summary(record) and record.get("command") == DEMO
    patterns = _patterns(record["methods"]) if made else []
    foreign = sorted(
        entry.relative_to(out).as_posix() for entry in out.rglob("*") if not _belongs(entry, out, patterns)
    )
    if foreign or not made or out.is_symlink():
        reason = "this is a link" if out.is_symlink() else f"{foreign[0]} is not part of one" if made else "it is none"
        if not made and (out / "job.json").is_file():
            reason = f"'fedstill resume {out}' goes on with what it holds"
        raise InputError("out", str(out), f"a folder that is new, empty, or an earlier demo ({reason})")
    return True


def _patterns(methods: Sequence[str]) -> list[str]:
    """Return patterns of all files that a demo of these methods may hold; a kill may leave a file's `.part`."""
    runs = [f"{label}/{seed}{file}" for label in methods for seed in ("", "seed-*/") for file in FILES]
    names = (SUMMARY, FIGURE, SWEPT, REPORT, "job.json", "groups.json", LOCK, *runs)
    return [name + suffix for name in names for suffix in ("", PART)]


def _belongs(entry: Path, out: Path, patterns: Sequence[str]) -> bool:
    """Return whether a demo makes such a file or folder; False for links."""
    if entry.is_symlink():
        return False
    name = entry.relative_to(out).as_posix()
    if entry.is_dir():
        return any(_match(name, pattern.rpartition("/")[0]) for pattern in patterns)
    return entry.is_file() and any(_match(name, pattern) for pattern in patterns)


def _match(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern folder by folder, so that * does not reach into a folder."""
    names, patterns = name.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def remove(out: Path) -> None:
    """Remove an earlier demo (see `is_demo`). The summary, which says that it is one, goes last: a kill leaves a demo."""
    for entry in out.iterdir():
        if entry.name != SUMMARY:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(out)


def save(
    out: Path,
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Sequence[tuple[Path, Run]]],
    facts: Facts,
    failed: Mapping[str, str] | None = None,
    command: str = "",
    line: str = "",
) -> None:
    """Write summary.json."""
    relative = {label: [(f.relative_to(out).as_posix(), run) for f, run in done] for label, done in runs.items()}
    record = summary(experiments, relative, facts, failed or {}, command, line)
    write(out / SUMMARY, (json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def draw(out: Path, runs: Mapping[str, Sequence[Run]], facts: Facts) -> str:
    """Draw the picture; return the line that says where it is, or how to get one."""
    if not figures.available():
        return figures.MISSING
    figures.compare_figure(runs, out / FIGURE, facts)
    return f"picture: {out / FIGURE}"


def draw_sweep(
    out: Path, varied: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Sequence[Run]], facts: Facts
) -> str:
    """Draw a sweep's score by the values of its fields; return the line that says where it is, or how to get one."""
    if not figures.available():
        return figures.MISSING
    points = {tuple(column[label] for column in varied.values()): done for label, done in runs.items()}
    sweeps.sweep_figure(list(varied), points, out / SWEPT, facts)
    return f"by value: {out / SWEPT}"


def report(out: Path) -> str:
    """Write the page of results; return the line that says where it is."""
    return f"report: {page.write([out])}"


def line_of(out: Path) -> str:
    """Return the command that made a folder, as it was typed; "" where that is not known."""
    try:
        return field(read_json(out / SUMMARY), "line", str, "")
    except Unreadable:
        return ""


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs inside the folder of several."""
    return sorted(file.parent for pattern in (f"*/{RUN}", f"*/*/{RUN}") for file in folder.glob(pattern))
