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
from .dataset import Ints


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
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"a readable partition.json ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"a whole partition.json ({error})") from None
    types = {"kind": str, "clients": int, "seed": int, "source": str, "samples": int, "hash": str, "indices": list}
    types |= {"pool": str, "split": str}
    if not isinstance(content, dict) or content.get("format") != 1:
        raise wrong("a partition.json of format 1")
    for name, kind in types.items():
        if not isinstance(content.get(name), kind) or isinstance(content[name], bool):
            raise wrong(f"a partition.json with the field {name} ({kind.__name__})")
    lists = content["indices"]
    if not all(isinstance(own, list) and all(type(i) is int for i in own) for own in lists):
        raise wrong("a partition.json whose indices are lists of whole numbers")
    if len(lists) != content["clients"]:
        raise wrong(f"a partition.json with {content['clients']} index lists (it has {len(lists)})")
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
    )
    if record.hash != content["hash"]:
        raise wrong(f"a partition.json whose indices have the hash {content['hash'][:12]}… that it states")
    return record
