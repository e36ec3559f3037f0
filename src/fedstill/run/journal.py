"""The run folder: everything a run leaves behind, written so that a kill at any moment loses at most the last rounds.

    experiment.toml    all settings, no default left unsaid         environment.json   versions and device
    partition.json     who has which samples, with its hash         metrics.jsonl      one record a round
    timeline.jsonl     with simulated time: what each client did when, one line a round
    choices.json       what was measured and chosen on the way (kernels, clients at once); a resumed run uses it again
    checkpoints/       the newest two states (safetensors, with checksums; many clients in several files); `fedstill resume
                       FOLDER` goes on from them

Files appear whole or not at all: written to a temporary name, flushed to the disk, renamed. Nothing is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import tree
from ..core.errors import InputError
from ..core.tree import Tree
from ..core.version import __version__
from ..nn.kernels.autotune import Choices
from .experiment import FORMAT

KEEP = 2  # checkpoints kept: a kill while one is written leaves the one before
PART = 256 * 2**20  # bytes of clients' memories in one file
CLIENTS = "clients"


class Journal:
    """Writes and reads one run folder. Nothing is created before `begin`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.timeline = self.folder / "metrics.jsonl", self.folder / "timeline.jsonl"
        self.checkpoints = self.folder / "checkpoints"

    def begin(self, experiment: str, partition: Mapping[str, Any], device: torch.device) -> None:
        """Make the folder, which must be new or empty, and write what determines the run."""
        self.check_free()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write(self.folder / "partition.json", json.dumps(partition).encode())
        write(self.folder / "environment.json", json.dumps(environment(device), indent=2).encode())
        write(self.folder / "experiment.toml", experiment.encode())

    def check_free(self) -> None:
        """Refuse a folder that holds something already."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(
                "out", str(self.folder), "a folder that is new or empty ('fedstill resume FOLDER' goes on with a run)"
            )

    def check_partition(self, partition: Mapping[str, Any]) -> None:
        """Refuse to go on when the data is divided otherwise than when the run began."""
        before = json.loads((self.folder / "partition.json").read_text(encoding="utf-8"))
        now = json.loads(json.dumps(partition))
        changed = [name for name in {**before, **now} if name != "indices" and before.get(name) != now.get(name)]
        if changed:
            name = changed[0]
            right = f"{before.get(name)}, as when the run began: the data or its division has changed"
            raise InputError(f"partition {name}", now.get(name), right)

    def record(self, record: Mapping[str, Any]) -> None:
        """Append a round's record; its `timeline`, if it has one, to a file of its own."""
        if "timeline" in record:
            _append(self.timeline, record["timeline"])
        _append(self.metrics, {name: value for name, value in record.items() if name != "timeline"})

    def write_choices(self, choices: Choices) -> None:
        """Write what was measured, where that is news."""
        found = choices.to_dict()
        if found and found != self.choices():
            write(self.folder / "choices.json", (json.dumps(found, indent=2) + "\n").encode())

    def choices(self) -> dict[str, Any]:
        """What an earlier part of the run measured."""
        try:
            found = json.loads((self.folder / "choices.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def history(self, upto: int | None = None) -> list[dict[str, Any]]:
        """The records so far, up to a round; a last line that a kill cut short is left out."""
        return _lines(self.metrics, upto)

    def timelines(self, upto: int | None = None) -> list[dict[str, Any]]:
        """What each client did when, round by round, where time was simulated."""
        return _lines(self.timeline, upto)

    def save(self, round: int, state: Tree, clients: Iterable[tuple[int, Tree]] = ()) -> None:
        """Write the state after a round and the clients' states, one after another."""
        checkpoint = CheckpointWriter(self, round, state)
        for client, kept in clients:
            checkpoint.add(client, kept)
        checkpoint.close()

    def load(self, device: torch.device) -> Checkpoint | None:
        """The newest whole checkpoint whose rounds are all recorded; None where there is none."""
        for about_file in sorted(self.checkpoints.glob("round-*.json"), reverse=True):
            try:
                about = json.loads(about_file.read_text(encoding="utf-8"))
                listed = about["parts"]
                parts = tuple((self.checkpoints / part["file"], part["outline"]) for part in listed)
                whole = all(_checksum(self.checkpoints / part["file"]) == part["sha256"] for part in listed)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # cut short by a kill
            if whole and len(self.history(upto=about["round"])) == about["round"]:
                return Checkpoint(about["round"], parts, device)
        return None

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Cut the records back to a round, and return them, with their timelines."""
        records, lines = self.history(upto=round), self.timelines(upto=round)
        write(self.metrics, "".join(json.dumps(r) + "\n" for r in records).encode())
        if self.timeline.exists():
            write(self.timeline, "".join(json.dumps(line) + "\n" for line in lines).encode())
        by_round = {line["round"]: {"timeline": line} for line in lines}
        return [{**record, **by_round.get(record["round"], {})} for record in records]


class CheckpointWriter:
    """Writes a checkpoint in files of about 256 MiB, so that no more than that is in memory at once.

    The list of files, with their checksums, is written last: a checkpoint without it does not count. Then older checkpoints than
    the newest two go.
    """

    def __init__(self, journal: Journal, round: int, state: Tree) -> None:
        self.journal, self.round, self.name = journal, round, f"round-{round:06d}"
        self.listed: list[dict[str, Any]] = []
        self._chunk: Tree = {**state, CLIENTS: {}}
        self._size = 0

    def add(self, client: int, kept: Tree) -> None:
        """Add a client's state."""
        if self._size >= PART:
            self._flush()
        self._chunk[CLIENTS][str(client)] = kept
        self._size += sum(leaf.nbytes for _, leaf in tree.leaves(kept))

    def close(self) -> None:
        """Write what is left, then the list; remove older checkpoints."""
        self._flush()
        folder = self.journal.checkpoints
        write(folder / f"{self.name}.json", json.dumps({"round": self.round, "parts": self.listed}).encode())
        for old in sorted(folder.glob("round-*.json"))[:-KEEP]:
            old.unlink()
            for gone in (*folder.glob(f"{old.stem}.*"), *folder.glob(f"{old.stem}-*")):
                gone.unlink()

    def _flush(self) -> None:
        from safetensors.torch import save

        chunk, self._chunk, self._size = self._chunk, {CLIENTS: {}}, 0
        data = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.leaves(chunk)})
        file = f"{self.name}-{len(self.listed)}.safetensors" if self.listed else f"{self.name}.safetensors"
        write(self.journal.checkpoints / file, data)
        digest = hashlib.sha256(data).hexdigest()
        self.listed.append({"file": file, "sha256": digest, "outline": tree.outline(chunk)})


@dataclass(frozen=True)
class Checkpoint:
    """A state that was kept, read when it is asked for."""

    round: int
    parts: tuple[tuple[Path, Any], ...]  # files, each with its outline
    device: torch.device

    def state(self) -> Tree:
        """All but the clients' memories."""
        return {name: value for name, value in self._part(0).items() if name != CLIENTS}

    def clients(self) -> Iterator[tuple[int, Tree]]:
        """The clients' memories, one after another."""
        for number in range(len(self.parts)):
            for client, memory in self._part(number).get(CLIENTS, {}).items():
                yield int(client), memory

    def _part(self, number: int) -> Tree:
        from safetensors.torch import load

        file, outline = self.parts[number]
        return tree.to(tree.fill(outline, load(file.read_bytes())), self.device)


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path, upto: int | None) -> list[dict[str, Any]]:
    """The records of a file, up to a round; a last line that a kill cut short is left out."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if upto is None or record["round"] <= upto:
            records.append(record)
    return records


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device: what may make numbers differ in the last bits."""
    return {
        "fedstill": __version__,
        "format": FORMAT,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
    }
