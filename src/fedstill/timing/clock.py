"""Simulated time: how fast each client computes and sends, when it can be asked, and whether it drops out.

A profile describes the devices; everything else is drawn from (seed, purpose, round, client), so the same profile and seed give
the same timeline to the bit on any machine and engine, in any order of calls. Nothing sleeps.

    uniform            all devices alike: SPEED, UPLINK, DOWNLINK, LATENCY
    lognormal:σ        speed, uplink and downlink each times exp(σ·z), z standard normal, drawn once for each client
    file:devices.csv   one line for each client, with the columns of COLUMNS

A client's round: download (latency + bytes / downlink), work (samples × epochs / speed; the generic model's phases, then the
personal model's), upload (latency + bytes / uplink). Then it waits for the next.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core import plan
from ..core.errors import InputError, Shown
from ..core.reading import Unreadable, read_bytes

Floats = NDArray[np.float64]
Epochs: TypeAlias = tuple[Floats | float, Floats | float]  # of the model that goes up, and of personal ones
Mask = NDArray[np.bool_]

SPEED, UPLINK, DOWNLINK, LATENCY = (
    500.0,
    1e6,
    5e6,
    0.05,
)  # samples/s, bytes/s, bytes/s, s; defaults for unmeasured devices
COLUMNS = {  # columns of a file of devices, each with its least and greatest value
    "speed": (0.0, math.inf),  # training samples a second
    "uplink": (0.0, math.inf),  # bytes a second
    "downlink": (0.0, math.inf),  # bytes a second
    "latency": (0.0, math.inf),  # seconds before the first byte, each way
    "availability": (0.0, 1.0),  # share of the rounds in which it can be asked
    "drop": (0.0, 1.0),  # probability of dropping out of a round
    "battery": (0.0, 1.0),  # charge, mean over rounds
    "load": (0.0, 1.0),  # share of the processor that others use, mean over rounds
    "memory": (0.0, 1.0),  # share of the memory that is free, mean over rounds
}
NEEDED = ("speed", "uplink", "downlink")
LEVELS = ("battery", "load", "memory")  # what a monitor checks
RATES = (*NEEDED, "availability")  # above 0
KINDS = "'uniform', 'lognormal:SIGMA' (for example lognormal:0.5) or 'file:devices.csv'"


@dataclass(frozen=True)
class Devices:
    """Properties of the clients' devices; arrays with an entry for each client."""

    speed: Floats
    uplink: Floats
    downlink: Floats
    latency: Floats
    availability: Floats
    drop: Floats
    battery: Floats
    load: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.speed)

    @classmethod
    def of(cls, profile: str, clients: int, seed: int, availability: float = 1.0, drop: float = 0.0) -> Devices:
        """Return the devices of a profile; a file's own columns override `availability` and `drop`."""
        kind, sigma, path = parse(profile)
        defaults = {"latency": LATENCY, "availability": availability, "drop": drop, **dict.fromkeys(LEVELS, 0.5)}
        values = {name: np.full(clients, value) for name, value in defaults.items()}
        if kind == "file":
            return cls(**{**values, **read(Path(path), clients)})
        for i, (name, median) in enumerate(zip(NEEDED, (SPEED, UPLINK, DOWNLINK), strict=True)):
            values[name] = np.full(clients, median)
            if kind == "lognormal":
                drawn = median * np.exp(sigma * _normal(seed, i, clients))
                # six digits: machines whose exp or log differ in the last bit still agree
                values[name] = np.array([float(f"{value:.6g}") for value in drawn])
        return cls(**values)


@dataclass(frozen=True)
class Spans:
    """Durations of the stages of a client's round, in seconds; arrays with an entry for each client."""

    download: Floats
    generic: Floats
    personal: Floats
    upload: Floats
    hold: Floats  # between download and work: the client finishes its personal work of an earlier round
    ahead: bool = False  # whether the upload leaves before personal work begins

    @property
    def arrival(self) -> Floats:
        """Seconds from the order to the arrival of the reply at the server."""
        without_personal = self.download + self.hold + self.generic + self.upload
        return np.asarray(without_personal if self.ahead else without_personal + self.personal)


@dataclass(frozen=True)
class Clock:
    """The devices and the seed of a run: computes all times that do not depend on training."""

    devices: Devices
    seed: int
    samples: NDArray[np.int64]  # training samples of each client

    def available(self, round: int, clients: NDArray[np.int64]) -> Mask:
        """Return for each client whether it can be asked in this round."""
        return np.asarray(self.uniform(plan.PRESENT, round, clients) < self.devices.availability[clients])

    def drops(self, round: int, clients: NDArray[np.int64]) -> Mask:
        """Return for each client whether it drops out of this round after it was asked."""
        return np.asarray(self.uniform(plan.DROP, round, clients) < self.devices.drop[clients])

    def uniform(self, purpose: int, round: int, clients: NDArray[np.int64], *words: int) -> Floats:
        """Draw a number in [0, 1) for each client."""
        return uniform(plan.keys(self.seed, purpose, round, clients.astype(np.uint64), *words))

    def spans(
        self,
        clients: NDArray[np.int64],
        down: Floats | float,
        up: Floats | float,
        epochs: Epochs,
    ) -> Spans:
        """Return the durations of the clients' round; `down` and `up` in bytes, `epochs` for all clients or for each."""
        d = self.devices
        epoch_seconds = self.samples[clients] / d.speed[clients]
        return Spans(
            d.latency[clients] + down / d.downlink[clients],
            epochs[0] * epoch_seconds,
            epochs[1] * epoch_seconds,
            d.latency[clients] + up / d.uplink[clients],
            np.zeros(len(clients)),
        )


def uniform(keys: NDArray[np.uint64]) -> Floats:
    """Return a number in [0, 1) for each key."""
    return np.asarray((keys >> np.uint64(11)).astype(np.float64) / 2**53)


def _normal(seed: int, stream: int, clients: int) -> Floats:
    """Draw a standard normal number for each client (Box and Muller)."""
    client = np.arange(clients, dtype=np.uint64)
    u, v = (uniform(plan.keys(seed, plan.DEVICE, stream, client, side)) for side in (0, 1))
    return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v))


def parse(profile: str) -> tuple[str, float, str]:
    """Split a profile into its kind, its σ (0 if none) and its path (empty if none).

    >>> parse("lognormal:0.5")
    ('lognormal', 0.5, '')
    """
    kind, colon, rest = profile.partition(":")
    if kind == "uniform" and not colon:
        return kind, 0.0, ""
    if kind == "file" and rest:
        return kind, 0.0, rest
    if kind == "lognormal":
        try:
            sigma = float(rest)
        except ValueError:
            sigma = -1.0
        if 0 <= sigma <= 10:
            return kind, sigma, ""
        raise InputError("profile", profile, "lognormal:SIGMA with a number from 0 to 10, for example lognormal:0.5")
    raise InputError("profile", profile, KINDS)


def record(profile: str) -> dict[str, str]:
    """Return the checksum of a profile that is a file, so that a resumed run can check that its devices are the same."""
    kind, _, path = parse(profile) if profile else ("", 0.0, "")
    return {"devices": hashlib.sha256(_bytes(Path(path))).hexdigest()} if kind == "file" else {}


def read(path: Path, clients: int) -> dict[str, Floats]:
    """Read the columns of a file of devices, by client; errors name the file, the line and the column."""
    try:
        text = _bytes(path).decode("utf-8-sig")
        rows = [(n, row) for n, row in enumerate(csv.reader(text.splitlines()), 1) if any(c.strip() for c in row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError("profile", f"file:{path}", f"a CSV file in UTF-8 ({error})") from None
    if not rows:
        raise InputError("profile", f"file:{path}", f"a CSV file whose first line names {', '.join(NEEDED)}, …")
    line, head = rows[0][0], [cell.strip().lower() for cell in rows[0][1]]
    _check_head(f"{path}, line {line}", head)
    columns = {name: np.full(clients, np.nan) for name in head if name != "client"}
    line_of: dict[int, int] = {}  # by client
    for number, (line, row) in enumerate(rows[1:]):
        where = f"{path}, line {line}"
        if len(row) != len(head):
            raise InputError(where, Shown(f"{len(row)} cells"), f"{len(head)} cells as in the first line")
        cells = dict(zip(head, row, strict=True))
        client = _client(where, cells["client"]) if "client" in cells else number
        if client in line_of:
            raise InputError(f"{where}, column client", client, f"another: line {line_of[client]} has it already")
        line_of[client] = line
        values = {name: _number(where, name, cell) for name, cell in cells.items() if name != "client"}
        for name, value in values.items() if client < clients else ():
            columns[name][client] = value
    missing = [k for k in range(clients) if k not in line_of]
    if missing:
        right = f"a line for each of the {clients} clients (client {missing[0]} has none)"
        raise InputError("profile", f"file:{path}", right)
    return columns


def _check_head(where: str, head: Sequence[str]) -> None:
    optional = ", ".join(name for name in COLUMNS if name not in NEEDED)
    known = f"{', '.join(NEEDED)} and optionally client, {optional}"
    for name in head:
        if name not in (*COLUMNS, "client") or head.count(name) > 1:
            raise InputError(f"{where}, column", name, f"one of these, once: {known}")
    for name in NEEDED:
        if name not in head:
            raise InputError(where, Shown(", ".join(head)), f"with the column {name}: columns are {known}")


def _client(where: str, cell: str) -> int:
    if not cell.strip().isdecimal() or len(cell) > 20:
        raise InputError(f"{where}, column client", cell, "a client's number, counted from 0")
    return int(cell)


def _number(where: str, name: str, cell: str) -> float:
    low, high = COLUMNS[name]
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)) or (name in RATES and value == 0):
        right = "a number" + (" above 0" if name in RATES else " at least 0") + (" and at most 1" if high == 1 else "")
        raise InputError(f"{where}, column {name}", cell, right)
    return value


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, 256 << 20)
    except Unreadable as error:
        raise InputError("profile", f"file:{path}", str(error)) from None
