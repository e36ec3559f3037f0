"""The run folder: all results of a run, written so that a kill at any moment loses at most the last rounds.

    experiment.toml    all settings, defaults included              environment.json   versions and device
    partition.json     who has which samples, with its hash         metrics.jsonl      one record a round
    timeline.jsonl     with simulated time: what each client did and when, one line a round
    scores.json        scores after the federation                  failed.json        why the run could not go on
    choices.json       measured choices (kernels, clients at once); a resumed run uses them again
    checkpoints/       the newest two states (safetensors, with checksums; many clients in several files); `fedstill resume
                       FOLDER` continues from the newest

Files are replaced atomically: written to a temporary name, flushed to the disk, renamed. No file is a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import files, tree
from ..core.errors import InputError
from ..core.files import write
from ..core.tree import Tree
from ..core.version import __version__
from ..nn.kernels.autotune import Choices
from .experiment import FORMAT
from .lock import FolderLock, check_free

KEEP = 2  # number of checkpoints to keep: a kill while one is written leaves the one before
FILE_BYTES = 256 * 2**20  # bytes of clients' memories in one file
CLIENTS = "clients"
FAILED, SCORES = "failed.json", "scores.json"


class Journal:
    """Writes and reads one run folder; `begin` creates it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.timeline = self.folder / "metrics.jsonl", self.folder / "timeline.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self._lock: FolderLock | None = None

    def begin(self, experiment: str, partition: Mapping[str, Any], device: torch.device, threads: int = 0) -> None:
        """Create the folder, which must be new or empty, and write the files that determine the run.

        `threads` is how many clients train on (0: as many as torch is set to), on which last bits may depend.
        """
        self.hold()
        check_free(self.folder)
        contents = {
            "partition.json": json.dumps(partition),
            "environment.json": json.dumps(environment(device, threads), indent=2),
            "experiment.toml": experiment,  # last: a folder without it holds no run yet
        }
        try:
            files.make_folder(self.checkpoints)
            for name, text in contents.items():
                write(self.folder / name, text.encode())
        except BaseException:
            with contextlib.suppress(OSError):
                for name in reversed(contents):
                    (self.folder / name).unlink(missing_ok=True)
                self.checkpoints.rmdir()
            raise

    def hold(self) -> None:
        """Take the folder's lock, where it is not held yet; refuse a folder in which another process is at work."""
        if self._lock is None:
            self._lock = FolderLock(self.folder)

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Take the folder's lock, and keep it where nothing fails within."""
        self.hold()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def check_partition(self, partition: Mapping[str, Any]) -> None:
        """Refuse to continue if the data is divided differently than at the start of the run."""
        before = json.loads((self.folder / "partition.json").read_text(encoding="utf-8"))
        now = json.loads(json.dumps(partition))
        changed = [name for name in {**before, **now} if name != "indices" and before.get(name) != now.get(name)]
        if changed:
            name = changed[0]
            right = f"{before.get(name)}, as when the run began: the data or its division has changed"
            raise InputError(f"partition {name}", now.get(name), right)

    def record(self, record: Mapping[str, Any]) -> None:
        """Append a round's record; its `timeline`, if any, goes to a separate file."""
        if "timeline" in record:
            _append(self.timeline, record["timeline"])
        _append(self.metrics, {name: value for name, value in record.items() if name != "timeline"})

    def write_choices(self, choices: Choices) -> None:
        """Write the measured choices if they have changed."""
        entries = choices.to_dict()
        if entries and entries != self.choices():
            write(self.folder / "choices.json", (json.dumps(entries, indent=2) + "\n").encode())

    def choices(self) -> dict[str, Any]:
        """Return the choices measured before the run was interrupted."""
        try:
            entries = json.loads((self.folder / "choices.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def history(self, upto: int | None = None) -> list[dict[str, Any]]:
        """Return the records up to a round; skip a last line that a kill cut short."""
        return _lines(self.metrics, upto)

    def timelines(self, upto: int | None = None) -> list[dict[str, Any]]:
        """Return the timelines up to a round, one for each round; none without simulated time."""
        return _lines(self.timeline, upto)

    def save(self, round: int, state: Tree, clients: Iterable[tuple[int, Tree]] = ()) -> None:
        """Write a checkpoint: the state after a round and the clients' states, one after another."""
        checkpoint = CheckpointWriter(self, round, state)
        for client, client_state in clients:
            checkpoint.add(client, client_state)
        checkpoint.close()

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / "experiment.toml").is_file()

    def amend(self, experiment: str) -> None:
        """Replace the run's settings by those with which it goes on."""
        write(self.folder / "experiment.toml", experiment.encode())

    def fail(self, reason: str) -> None:
        """Note why the run cannot go on."""
        write(self.folder / FAILED, (json.dumps({"reason": reason}) + "\n").encode())

    def failure(self) -> str:
        """Return why the run could not go on; "" where it has not failed."""
        try:
            return str(json.loads((self.folder / FAILED).read_text(encoding="utf-8"))["reason"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Write the scores after the federation, where any were asked for."""
        if scores:
            write(self.folder / SCORES, (json.dumps(scores, indent=2) + "\n").encode())

    def scores(self) -> dict[str, Any] | None:
        """Return the scores that were written; None where there are none."""
        try:
            scores = json.loads((self.folder / SCORES).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return scores if isinstance(scores, dict) else None

    def rounds(self, device: torch.device) -> list[int]:
        """Return the rounds of the checkpoints that a run can go on from, ascending."""
        numbers = sorted(int(file.stem.removeprefix("round-")) for file in self.checkpoints.glob("round-*.json"))
        return [number for number in numbers if self.load(device, number) is not None]

    def load(self, device: torch.device, round: int | None = None) -> Checkpoint | None:
        """Return the newest complete checkpoint whose rounds are all recorded, or that of a given round; None without one."""
        name = "round-*.json" if round is None else f"round-{round:06d}.json"
        for index_file in sorted(self.checkpoints.glob(name), reverse=True):
            try:
                index = json.loads(index_file.read_text(encoding="utf-8"))
                entries = index["parts"]
                parts = tuple((self.checkpoints / entry["file"], entry["outline"]) for entry in entries)
                complete = all(_checksum(self.checkpoints / entry["file"]) == entry["sha256"] for entry in entries)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # cut short by a kill
            if complete and len(self.history(upto=index["round"])) == index["round"]:
                return Checkpoint(index["round"], parts, device)
        return None

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Drop the records after a round; return the others, with their timelines."""
        records, lines = self.history(upto=round), self.timelines(upto=round)
        write(self.metrics, "".join(json.dumps(r) + "\n" for r in records).encode())
        if self.timeline.exists():
            write(self.timeline, "".join(json.dumps(line) + "\n" for line in lines).encode())
        (self.folder / FAILED).unlink(missing_ok=True)
        by_round = {line["round"]: {"timeline": line} for line in lines}
        return [{**record, **by_round.get(record["round"], {})} for record in records]


class CheckpointWriter:
    """Writes a checkpoint in files of about 256 MiB, so that no more than that is in memory at once.

    The index (the list of files with their checksums) is written last: a checkpoint without it is incomplete. Then all but the
    newest two checkpoints are removed.
    """

    def __init__(self, journal: Journal, round: int, state: Tree) -> None:
        self.journal, self.round, self.name = journal, round, f"round-{round:06d}"
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
        folder = self.journal.checkpoints
        write(folder / f"{self.name}.json", json.dumps({"round": self.round, "parts": self.entries}).encode())
        for old in sorted(folder.glob("round-*.json"))[:-KEEP]:
            old.unlink()
            for file in (*folder.glob(f"{old.stem}.*"), *folder.glob(f"{old.stem}-*")):
                file.unlink()

    def _flush(self) -> None:
        """Write the states collected so far to a file."""
        from safetensors.torch import save

        chunk, self._chunk, self._size = self._chunk, {CLIENTS: {}}, 0
        data = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.leaves(chunk)})
        file = f"{self.name}-{len(self.entries)}.safetensors" if self.entries else f"{self.name}.safetensors"
        write(self.journal.checkpoints / file, data)
        digest = hashlib.sha256(data).hexdigest()
        self.entries.append({"file": file, "sha256": digest, "outline": tree.outline(chunk)})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; its files are read on demand."""

    round: int
    files: tuple[tuple[Path, Any], ...]  # each with its outline
    device: torch.device

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


def _checksum(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as a line of JSON and flush it to the disk."""
    files.append(path, (json.dumps(record, allow_nan=False) + "\n").encode())


def _lines(path: Path, upto: int | None) -> list[dict[str, Any]]:
    """Return the records of a file up to a round; skip a last line that a kill cut short."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if upto is None or record["round"] <= upto:
            records.append(record)
    return records


def environment(device: torch.device, threads: int = 0) -> dict[str, Any]:
    """Return versions and device, which may make numbers differ in the last bits."""
    return {
        "fedstill": __version__,
        "format": FORMAT,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": threads or torch.get_num_threads(),
    }
