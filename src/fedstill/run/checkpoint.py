"""Checkpoints: the state after a round in safetensors files, and an index that is written last.

The index has a checksum of its own. It has the sizes and checksums of its files, the checksum of the run that it belongs to, and
that of the records up to its round: a checkpoint loads as it was written, into the run that wrote it, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core import files, tree
from ..core.files import Damaged
from ..core.tree import Tree

KEEP = 2  # number of checkpoints to keep: a kill while one is written leaves the one before
FILE_BYTES = 256 * 2**20  # bytes of clients' memories in one file
CLIENTS = "clients"
NAME = re.compile(r"round-(\d{6,})(-\d+)?\.(json|safetensors)")


@dataclass(frozen=True)
class Bound:
    """What a checkpoint belongs to."""

    run: str  # checksum of the settings and the division of the data
    records: Mapping[str, str]  # of each file of records: the checksum up to the round


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; its files are read on demand."""

    round: int
    files: tuple[tuple[Path, Any], ...]  # each with its outline
    device: torch.device
    choices: Mapping[str, Any] = field(default_factory=dict)  # measured ones, which a resumed run uses again

    def state(self) -> Tree:
        """Return the state without the clients' memories."""
        return {name: value for name, value in self._read(0).items() if name != CLIENTS}

    def clients(self) -> Iterator[tuple[int, Tree]]:
        """Yield each client's memory; one file is in memory at a time."""
        for number in range(len(self.files)):
            for client, memory in self._read(number).get(CLIENTS, {}).items():
                yield int(client), memory

    def _read(self, number: int) -> Tree:
        """Read one of the files."""
        from safetensors.torch import load

        file, outline = self.files[number]
        return tree.to(tree.fill(outline, load(file.read_bytes())), self.device)


@dataclass
class Checkpoints:
    """The checkpoints of one run's folder."""

    folder: Path
    keep: int = KEEP
    kept: list[int] = field(
        default_factory=list
    )  # rounds of whole ones that this process has found or written, ascending
    best: int = 0  # a round whose checkpoint stays besides the newest; 0: none

    def rounds(self) -> list[int]:
        """Return the rounds that have an index, ascending; none of them is checked."""
        return sorted({round for file, round in self._files() if file.suffix == ".json"})

    def unfinished(self) -> list[int]:
        """Return the rounds whose checkpoints were not finished, ascending."""
        return sorted({round for _, round in self._files()} - set(self.rounds()))

    def load(self, round: int, bound: Bound, device: torch.device) -> Checkpoint:
        """Return the checkpoint of a round; raise `Damaged`, with the name of the file, where it is not as it was written."""
        name = f"round-{round:06d}.json"
        try:
            index = files.unseal(self.folder / name)
            if index["round"] != round or index["run"] != bound.run:
                raise Damaged("it belongs to another run")
            if index["records"] != bound.records:
                raise Damaged("the records up to its round are not those that it was written with")
            parts = []
            for entry in index["parts"]:
                name = f"round-{round:06d}.json"
                part = NAME.fullmatch(entry["file"])
                if part is None or int(part[1]) != round or part[3] != "safetensors":
                    raise Damaged("it names a file that is none of its own")
                name = entry["file"]
                _check(self.folder / name, entry["bytes"], entry["sha256"])
                parts.append((self.folder / name, entry["outline"]))
            return Checkpoint(round, tuple(parts), device, dict(index["choices"]))
        except Damaged as error:
            raise Damaged(f"{name}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Damaged(f"{name}: it is none of this version") from None

    def write(
        self, round: int, state: Tree, clients: Iterable[tuple[int, Tree]], bound: Bound, choices: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint: the state after a round and the clients' states, one after another."""
        writer = CheckpointWriter(self, round, state, bound, choices)
        for client, client_state in clients:
            writer.add(client, client_state)
        writer.close()

    def prune(self, kept: Iterable[int]) -> None:
        """Remove all checkpoints but those of these rounds, of which the newest two stay, and that of the best round."""
        rounds = sorted(set(kept))
        self.kept = [round for round in rounds if round in rounds[-self.keep :] or round == self.best]
        old = [(file, round) for file, round in self._files() if round not in self.kept]
        for file, _ in sorted(old, key=lambda pair: pair[0].suffix != ".json"):  # an index goes before what it names
            file.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int]]:
        """Return the files of all checkpoints, with their rounds; also those that are being written."""
        found = []
        for file in self.folder.glob("round-*"):
            name = NAME.fullmatch(file.name.removesuffix(files.PART))
            if name is not None:
                found.append((file, int(name[1])))
        return found


class CheckpointWriter:
    """Writes a checkpoint in files of about 256 MiB, so that no more than that is in memory at once.

    The index is written last: a checkpoint without it is incomplete. Then older checkpoints are removed.
    """

    def __init__(
        self, checkpoints: Checkpoints, round: int, state: Tree, bound: Bound, choices: Mapping[str, Any]
    ) -> None:
        self.checkpoints, self.round, self.name = checkpoints, round, f"round-{round:06d}"
        self.bound, self.choices = bound, choices
        self.entries: list[dict[str, Any]] = []
        self._chunk: Tree = {**state, CLIENTS: {}}
        self._size = 0

    def add(self, client: int, state: Tree) -> None:
        """Add a client's state."""
        if self._size >= FILE_BYTES:
            self._flush()
        self._chunk[CLIENTS][str(client)] = state
        self._size += sum(leaf.nbytes for _, leaf in tree.leaves(state))

    def close(self) -> None:
        """Write the last file, then the index; remove older checkpoints."""
        self._flush()
        index = {
            "round": self.round,
            "run": self.bound.run,
            "records": dict(self.bound.records),
            "choices": dict(self.choices),
            "parts": self.entries,
        }
        self._write(f"{self.name}.json", files.seal(index))
        kept = [round for round in self.checkpoints.kept if round < self.round]
        self.checkpoints.prune([*kept, self.round])

    def _flush(self) -> None:
        """Write the states collected so far to a file."""
        from safetensors.torch import save

        chunk, self._chunk, self._size = self._chunk, {CLIENTS: {}}, 0
        data = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.leaves(chunk)})
        file = f"{self.name}-{len(self.entries)}.safetensors" if self.entries else f"{self.name}.safetensors"
        self._write(file, data)
        about = {"file": file, "bytes": len(data), "sha256": files.digest(data), "outline": tree.outline(chunk)}
        self.entries.append(about)

    def _write(self, name: str, data: bytes) -> None:
        """Write a file; where that fails, as on a full disk, remove those before it, which are of no use alone."""
        try:
            files.write(self.checkpoints.folder / name, data)
        except OSError:
            for entry in self.entries:
                (self.checkpoints.folder / entry["file"]).unlink(missing_ok=True)
            raise


def _check(file: Path, size: int, digest: str) -> None:
    """Refuse a file that is not as it was written."""
    try:
        if file.is_symlink() or not file.is_file():
            raise Damaged("it is missing")
        if file.stat().st_size != size:
            raise Damaged(f"it has {file.stat().st_size} bytes in place of {size}")
        if files.digest_of(file) != digest:
            raise Damaged("its checksum is wrong")
    except OSError as error:
        raise Damaged(f"it cannot be read ({error.strerror})") from None
