"""What the texts of a site's table tell: the hub learns every text of a column. Which are refused, and what the owner is told."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..core.errors import InputError, Shown
from ..data.dataset import Dataset
from ..data.rules import as_flag

FEWEST = 5  # rows that a text must have, and values that a site gives a sum of
SHOWN = 6  # texts of a column in a line


def check_texts(data: Dataset, named: Collection[str]) -> None:
    """Refuse columns with texts that fewer than `FEWEST` rows have, as names and numbers of patients are.

    Columns in `named` are the owner's own decision.
    """
    if data.columns is None:
        return
    for j, (name, kinds) in enumerate(zip(data.columns.names, data.columns.categories, strict=True)):
        if kinds is None or name in named:
            continue
        values = data.x[:, j]
        rows = np.bincount(values[~np.isnan(values)].astype(np.int64), minlength=len(kinds))
        rare = int((rows < FEWEST).sum())
        if rare:
            has = "text that fewer" if rare == 1 else f"of its {len(kinds):,} texts that fewer"
            right = (
                f"left out (--ignore {as_flag(name)}) or named (--encode onehot:{as_flag(name)}): "
                "the hub is told all texts of a column, and such texts may tell who a patient is"
            )
            raise InputError(f"column {name!r}", Shown(f"{rare:,} {has} than {FEWEST} rows have"), right)


def told(data: Dataset) -> list[str]:
    """Return a line for what was left out, and for each column whose texts the hub is told."""
    lines = list(data.notes)
    if data.columns is not None:
        pairs = zip(data.columns.names, data.columns.categories, strict=True)
        lines += [
            f"the hub is told the texts of {name}: {_listed(kinds)}" for name, kinds in pairs if kinds is not None
        ]
    if data.labels:
        lines.append(f"the hub is told the names of {_listed(data.labels)} as what is learned")
    return lines


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
