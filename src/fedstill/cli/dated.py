"""The folder for the results of a command without `--out`: a new one under `runs/`, named by date and method."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ..core.errors import InputError

VARIABLE, RUNS = "FEDSTILL_RUNS", "runs"  # where these folders are made; the variable names another place
NOWHERE = "none"  # as --out, or in the variable: nothing is written


def parent() -> Path | None:
    """Return the folder in which dated folders are made; None where nothing is to be written."""
    text = os.environ.get(VARIABLE, "") or RUNS
    return None if text == NOWHERE else Path(text)


@contextlib.contextmanager
def reserved(name: str) -> Iterator[Path | None]:
    """Within, a new folder is there, which commands that start in the same minute do not share; empty, it is removed again."""
    under = parent()
    if under is None:
        yield None
        return
    stem = under / f"{datetime.now():%Y-%m-%d-%H%M}-{name}"
    made = [above for above in (under, *under.parents) if not above.exists()]
    try:
        under.mkdir(parents=True, exist_ok=True)
        folder = next(path for path in _names(stem) if _make(path))
    except OSError as error:
        raise InputError("--out", str(stem), f"a folder that can be written ({error.strerror}); or --no-out") from None
    try:
        yield folder
    finally:
        for path in (folder, *made):
            with contextlib.suppress(OSError):  # of a run that has begun it is not empty
                path.rmdir()


def _names(stem: Path) -> Iterator[Path]:
    yield stem
    yield from (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))


def _make(folder: Path) -> bool:
    """Make a folder; return False where there is one already."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
