"""Folders of results: which may be used, and the summary and the picture that stand beside the runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InputError
from ..experiment import Experiment
from ..journal import Journal, write
from ..report import figures
from ..report.summary import ours, summary
from ..report.text import Facts
from ..simulation import Run

SUMMARY, FIGURE, RUN = "summary.json", "figure.png", "experiment.toml"


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
    known = {SUMMARY, FIGURE, *found["methods"]} if ours(found) else set()
    strange = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
    if strange or out.is_symlink():
        reason = f"{strange[0]} is not part of one" if strange else "this is a link"
        raise InputError("out", str(out), f"a folder that is new, empty, or an earlier demo ({reason})")
    return True


def remove(out: Path) -> None:
    """Remove a folder that `is_demo`."""
    shutil.rmtree(out)


def save(
    out: Path,
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Sequence[tuple[Path, Run]]],
    facts: Facts,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write summary.json."""
    named = {label: [(f.relative_to(out).as_posix(), run) for f, run in done] for label, done in runs.items()}
    record = summary(experiments, named, facts, failed or {})
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
