"""A run's records as tables: plain numbers by round, and accuracies by round and client."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..data.outline import Outline

CLIENTS = "_clients"  # ends the name of an entry that has a number for every client


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record that are one number each; of those who took part how many there were."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "abandoned"}
    counts = {name: len(record[name]) for name in ("participants", "missing", "rejected") if name in record}
    return {**numbers, **counts}


def by_round(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each round, all with the same columns; None where a round has no such number."""
    rows = [plain(record) for record in history]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def by_client(history: Sequence[Mapping[str, Any]], outline: Outline | None = None) -> list[dict[str, Any]]:
    """Return a row for each scored round and client: its accuracies by model, and its numbers of samples."""
    rows = []
    for record in history:
        scored = {
            name: values for name, values in record.items() if name.endswith(CLIENTS) and isinstance(values, Mapping)
        }
        if not scored:
            continue
        for k in dict.fromkeys(k for values in scored.values() for k in values):
            own = {name.removesuffix(CLIENTS): values.get(k) for name, values in scored.items()}
            name = k if outline is None else outline.client(int(k))
            sizes = {"tests": record.get("samples", {}).get(k), "train_samples": record.get("train_samples", {}).get(k)}
            rows.append({"round": record["round"], "client": int(k), "name": name, **own, **sizes})
    return rows


def as_csv(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the plain numbers of all rounds as CSV."""
    return to_csv(by_round(history))


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV; the columns are those of the first one."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
