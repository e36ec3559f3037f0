"""Logs to which lines are only added, each with the digest of the line before: a change shows in all that follow.

HUB/runs/NAME/run/audit/log.jsonl     every order, reply and finished round, with digests of their bytes
HUB/runs/NAME/run/audit/replies/      with `--audit`: the replies themselves
SITE/runs/RUN/audit/log.jsonl         every order that the site carried out, and its reply, with digests
SITE/runs/RUN/audit/orders/           with `--audit`: the orders themselves
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import files, reading

AUDIT, LOG, REPLIES, ORDERS = "audit", "log.jsonl", "replies", "orders"
FIRST = "0" * 64


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


class Chain:
    """A log to which lines are added, each with the digest of the one before."""

    def __init__(self, path: Path) -> None:
        """Go on with a log; a last line that a kill cut short is dropped."""
        self.path = path
        files.make_folder(path.parent)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        self._before = digest(whole.splitlines()[-1]) if whole else FIRST
        self._adding = threading.Lock()

    def add(self, what: str, *, durable: bool = False, **fields: Any) -> None:
        """Add a line; with `durable` it, and all before, are on the disk afterwards."""
        with self._adding:  # replies arrive while a round's end is logged
            line = json.dumps({"what": what, **fields, "before": self._before}, sort_keys=True).encode()
            with self.path.open("ab", buffering=0) as file:
                file.write(line + b"\n")
                if durable:
                    os.fsync(file.fileno())
            self._before = digest(line)


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a log's entries, and what is wrong with it."""
    if not path.exists():
        return [], [f"{path.name} is not there"]
    entries: list[dict[str, Any]] = []
    before, wrong = FIRST, []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = reading.parse_json(line)
        except reading.Unreadable:
            return entries, [f"line {number} of {path.name} is damaged"]
        if entry.get("before") != before:
            wrong.append(f"line {number - 1} of {path.name} was changed, or a line beside it left out")
        before = digest(line)
        entries.append(entry)
    return entries, wrong


def reply_file(folder: Path, attempt: int, round: int, kind: str, site: str) -> Path:
    """Return the file of a saved reply."""
    return folder / REPLIES / f"{round:06d}-{attempt:04d}-{kind}-{site}.bin"


def record_digest(record: Mapping[str, Any]) -> str:
    """Return the digest of a round's record."""
    return digest(json.dumps(record, sort_keys=True).encode())
