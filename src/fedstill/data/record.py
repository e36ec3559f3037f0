"""partition.json: each client's sample indices, with a hash that is the same on every machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..core.reading import Unreadable, field, items, read_json
from .dataset import Ints

LARGEST = 1 << 30  # bytes of a partition.json: 10⁸ samples


@dataclass(frozen=True)
class Record:
    """A partition and its origin. `samples` is the number of samples that the indices point into."""

    kind: str
    parameter: float | int | str | None
    clients: int
    seed: int
    source: str
    samples: int
    indices: tuple[tuple[int, ...], ...]
    pool: str = "all"
    split: str = "80/20"
    names: tuple[str, ...] = ()  # the clients', where each is one owner or domain that has a name
    labels: tuple[str, ...] = ()  # the classes', where the source has them

    @property
    def hash(self) -> str:
        """The hash of the index lists."""
        return lists_hash([np.array(own, np.int64) for own in self.indices])

    def to_dict(self) -> dict[str, Any]:
        """Return the content of partition.json."""
        return {
            "format": 1,
            "kind": self.kind,
            "parameter": self.parameter,
            "clients": self.clients,
            "seed": self.seed,
            "source": self.source,
            "samples": self.samples,
            "pool": self.pool,
            "split": self.split,
            "hash": self.hash,
            **({"names": list(self.names)} if self.names else {}),
            **({"labels": list(self.labels)} if self.labels else {}),
            "indices": [list(own) for own in self.indices],
        }


def lists_hash(lists: Sequence[Ints]) -> str:
    """Return the SHA-256 of each list's length and entries as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for entries in lists:
        digest.update(len(entries).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(entries, dtype="<i8").tobytes())
    return digest.hexdigest()


def save_record(record: dict[str, Any], path: str | Path) -> None:
    """Write partition.json atomically: a temporary file, then a rename."""
    to = Path(path)
    partial = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        partial.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        os.replace(partial, to)
    finally:
        partial.unlink(missing_ok=True)


def load_record(path: str | Path) -> Record:
    """Read partition.json; refuse one whose hash, counts or indices do not agree."""

    def wrong(right: str) -> InputError:
        return InputError("partition file", str(path), right)

    try:
        content = read_json(path, LARGEST)
    except Unreadable as error:
        raise wrong(f"a whole partition.json, {error}") from None
    if content.get("format") != 1 or isinstance(content["format"], bool):
        raise wrong("a partition.json of format 1")
    try:
        for name in ("kind", "source", "hash", "pool", "split"):
            field(content, name, str)
        for name in ("clients", "samples", "seed"):
            field(content, name, int, least=0, most=(1 << 63) - 1)
        lists = items(content, "indices", list)
        names, labels = (items(content, name, str) if name in content else [] for name in ("names", "labels"))
    except Unreadable as error:
        raise wrong(f"a partition.json, {error}") from None
    if not all(type(i) is int for own in lists for i in own):
        raise wrong("a partition.json whose indices are lists of whole numbers")
    if not isinstance(content.get("parameter"), float | int | str | None):
        raise wrong("a partition.json whose parameter is a number or a text")
    if len(lists) != content["clients"]:
        raise wrong(f"a partition.json with {content['clients']} index lists (it has {len(lists)})")
    if names and len(names) != len(lists):
        raise wrong(f"a partition.json with {len(lists)} names (it has {len(names)})")
    flat = [i for own in lists for i in own]
    if not flat or min(flat) < 0 or max(flat) >= content["samples"] or len(set(flat)) < len(flat):
        raise wrong(f"a partition.json whose indices are below {content['samples']} and each dealt once")
    record = Record(
        content["kind"],
        content.get("parameter"),
        content["clients"],
        content["seed"],
        content["source"],
        content["samples"],
        tuple(tuple(own) for own in lists),
        content["pool"],
        content["split"],
        tuple(names),
        tuple(labels),
    )
    if record.hash != content["hash"]:
        raise wrong(f"a partition.json whose indices have the hash {content['hash'][:12]}… that it states")
    return record
