"""partition.json: who was dealt which samples, with a hash that is the same on every machine."""

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
    """A partition and what it came from. `samples` is the number of samples the indices point into."""

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
        return lists_hash([np.array(hand, np.int64) for hand in self.indices])

    def as_dict(self) -> dict[str, Any]:
        """What partition.json holds."""
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
            "indices": [list(hand) for hand in self.indices],
        }


def lists_hash(hands: Sequence[Ints]) -> str:
    """SHA-256 over each list's length and entries as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for hand in hands:
        digest.update(len(hand).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(hand, dtype="<i8").tobytes())
    return digest.hexdigest()


def save_record(record: dict[str, Any], path: str | Path) -> None:
    """Write partition.json: a temporary file, then a rename, so that there is never half a file."""
    to = Path(path)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        os.replace(part, to)
    finally:
        part.unlink(missing_ok=True)


def load_record(path: str | Path) -> Record:
    """Read partition.json and refuse one whose hash, counts or indices do not agree."""

    def wrong(right: str) -> InputError:
        return InputError("partition file", str(path), right)

    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"a readable partition.json ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"a whole partition.json ({error})") from None
    types = {"kind": str, "clients": int, "seed": int, "source": str, "samples": int, "hash": str, "indices": list}
    types |= {"pool": str, "split": str}
    if not isinstance(found, dict) or found.get("format") != 1:
        raise wrong("a partition.json of format 1")
    for name, kind in types.items():
        if not isinstance(found.get(name), kind) or isinstance(found[name], bool):
            raise wrong(f"a partition.json with the field {name} ({kind.__name__})")
    hands = found["indices"]
    if not all(isinstance(hand, list) and all(type(i) is int for i in hand) for hand in hands):
        raise wrong("a partition.json whose indices are lists of whole numbers")
    if len(hands) != found["clients"]:
        raise wrong(f"a partition.json with {found['clients']} index lists (it has {len(hands)})")
    flat = [i for hand in hands for i in hand]
    if not flat or min(flat) < 0 or max(flat) >= found["samples"] or len(set(flat)) < len(flat):
        raise wrong(f"a partition.json whose indices are below {found['samples']} and each dealt once")
    record = Record(
        found["kind"],
        found.get("parameter"),
        found["clients"],
        found["seed"],
        found["source"],
        found["samples"],
        tuple(tuple(hand) for hand in hands),
        found["pool"],
        found["split"],
    )
    if record.hash != found["hash"]:
        raise wrong(f"a partition.json whose indices have the hash {found['hash'][:12]}… that it states")
    return record
