"""The files in which a site saves its client's state, each with a checksum.

state.bin           the client's state and the last reply, written before the reply leaves
round-000003.bin    the state when the hub saved its checkpoint of that round; the newest two
half.bin            training under way (`savepoint`)
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core import files

MAGIC = b"fedstill-state-1"
KEEP = 2  # rounds, as many as the hub keeps checkpoints


class Saved(NamedTuple):
    """The content of a state file."""

    about: dict[str, Any]  # the hub's attempt, the round, the order's id, whether the client has been asked to train
    state: bytes  # the client's state, as a reply to `state` on the wire
    reply: bytes  # the last reply, as it was sent; empty in a round's file


def write_saved(path: Path, about: Mapping[str, Any], state: bytes, reply: bytes) -> None:
    """Write a state file durably: in full, or not at all."""
    head = json.dumps({**about, "state": len(state), "reply": len(reply)}).encode()
    body = struct.pack("<Q", len(head)) + head + state + reply
    files.write(path, MAGIC + hashlib.sha256(body).digest() + body)


def read_saved(path: Path) -> Saved | None:
    """Return what `write_saved` wrote; None where the file is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    begin = len(MAGIC) + 32
    body = memoryview(data)[begin:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : begin]:
        return None
    (length,) = struct.unpack_from("<Q", body)
    about = json.loads(bytes(body[8 : 8 + length]))
    rest = bytes(body[8 + length :])
    return Saved(about, rest[: about["state"]], rest[about["state"] :])


class StateFiles:
    """The state files of one run at a site."""

    def __init__(self, folder: Path) -> None:
        """Use a run's folder, which is made if it is not there."""
        self.folder, self.latest, self.half = folder, folder / "state.bin", folder / "half.bin"
        files.make_folder(folder)

    def of_round(self, round: int) -> Saved | None:
        """Return the state that was saved with the hub's checkpoint of a round."""
        return read_saved(self._path(round))

    def at_or_before(self, round: int) -> Saved | None:
        """Return the newest state that is not newer than a round of the hub.

        A site that was away when the hub saved the round has no file of that round: what it saved last is as old, or older.
        """
        latest, named = read_saved(self.latest), self.of_round(round)
        if named is None and latest is not None and int(latest.about["round"]) <= round:
            named = latest
        for number in reversed(self._rounds()):
            if named is None and number < round:
                named = self.of_round(number)
        return named

    def write_latest(self, about: Mapping[str, Any], state: bytes, reply: bytes) -> None:
        """Save the client's state, with the reply to the order that has changed it."""
        write_saved(self.latest, about, state, reply)

    def write_round(self, round: int, about: Mapping[str, Any], state: bytes) -> None:
        """Save the state as that of a round, and remove those of older rounds."""
        write_saved(self._path(round), about, state, b"")
        for number in self._rounds()[:-KEEP]:
            self._path(number).unlink()

    def remove_after(self, round: int) -> None:
        """Remove the states of rounds that the hub does again."""
        for number in self._rounds():
            if number > round:
                self._path(number).unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.bin"

    def _rounds(self) -> list[int]:
        """Return the rounds of which there is a file, ascending."""
        return sorted(int(file.stem.removeprefix("round-")) for file in self.folder.glob("round-*.bin"))
