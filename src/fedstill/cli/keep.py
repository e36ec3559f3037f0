"""Folders of results: which may be used, and the summary and the picture that stand beside the runs."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import InputError
from ..report import figures
from ..report.summary import is_summary, summary
from ..report.text import Facts
from ..run.experiment import Experiment
from ..run.journal import Journal, write
from ..run.result import Run

SUMMARY, FIGURE, RUN = "summary.json", "figure.png", "experiment.toml"
DEMO = "demo"  # the command that may replace what it made
FILES = (  # what a run leaves in its folder, or, killed while it wrote, a part of
    RUN, SUMMARY, FIGURE, "partition.json", "environment.json", "metrics.jsonl", "scores.json",
    "timeline.jsonl", "timeline.png",
    "checkpoints/round-*.safetensors", "checkpoints/round-*.json",
)  # fmt: skip


def check(out: Path) -> None:
    """Refuse a folder that holds something or that cannot be made; leaves nothing behind."""
    Journal(out).check_free()
    if importlib.util.find_spec("safetensors") is None:
        raise InputError("out", str(out), "left out: checkpoints want 'pip install safetensors'")
    new = [folder for folder in (out.absolute(), *out.absolute().parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".part").touch()
        (out / ".part").unlink()
    except OSError as error:
        raise InputError("out", str(out), f"a folder that can be written ({error.strerror})") from None
    finally:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def is_demo(out: Path) -> bool:
    """Whether this is an earlier demo, which may be replaced; refuses a folder that holds anything else."""
    if not out.is_dir() or not any(out.iterdir()):
        return False
    try:
        found = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    made = is_summary(found) and found.get("command") == DEMO
    known = _files(found["methods"]) if made else []
    strange = sorted(entry.relative_to(out).as_posix() for entry in out.rglob("*") if not _belongs(entry, out, known))
    if strange or not made or out.is_symlink():
        reason = "this is a link" if out.is_symlink() else f"{strange[0]} is not part of one" if made else "it is none"
        raise InputError("out", str(out), f"a folder that is new, empty, or an earlier demo ({reason})")
    return True


def _files(methods: Sequence[str]) -> list[str]:
    """Patterns of all files that a demo of these methods may hold."""
    runs = [f"{label}/{seed}{file}" for label in methods for seed in ("", "seed-*/") for file in FILES]
    return [name + part for name in (SUMMARY, FIGURE, *runs) for part in ("", ".part")]


def _belongs(entry: Path, out: Path, known: Sequence[str]) -> bool:
    """Whether a file or folder is one that a demo makes; a link never is."""
    if entry.is_symlink():
        return False
    name = entry.relative_to(out).as_posix()
    if entry.is_dir():
        return any(_match(name, pattern.rpartition("/")[0]) for pattern in known)
    return entry.is_file() and any(_match(name, pattern) for pattern in known)


def _match(name: str, pattern: str) -> bool:
    """Part by part, so that * does not reach into a folder."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def remove(out: Path) -> None:
    """Remove a folder that `is_demo`."""
    shutil.rmtree(out)


def save(
    out: Path,
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Sequence[tuple[Path, Run]]],
    facts: Facts,
    failed: Mapping[str, str] | None = None,
    command: str = "",
) -> None:
    """Write summary.json."""
    named = {label: [(f.relative_to(out).as_posix(), run) for f, run in done] for label, done in runs.items()}
    record = summary(experiments, named, facts, failed or {}, command)
    write(out / SUMMARY, (json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def draw(out: Path, runs: Mapping[str, Sequence[Run]], facts: Facts) -> str:
    """Draw the picture; the line that says where it is, or how to get one."""
    if not figures.available():
        return figures.MISSING
    figures.compare_figure(runs, out / FIGURE, facts)
    return f"picture: {out / FIGURE}"


def run_folders(folder: Path) -> list[Path]:
    """The runs beneath a folder of several."""
    return sorted(found.parent for pattern in (f"*/{RUN}", f"*/*/{RUN}") for found in folder.glob(pattern))
