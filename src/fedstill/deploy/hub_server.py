"""The hub's side of the messages that sites send: who is there, which run is open, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import reading
from ..core.errors import TrainingError
from ..core.objective import OBJECTIVES
from ..core.reading import items
from ..core.version import __version__
from ..data.columns import LONGEST_NAME, Columns
from ..transport.sites import Sites

LARGEST_ANSWER = 32 << 20  # bytes of what a site answers before a run
HOLD = 5.0  # seconds for which a site that asks has to wait for an order
Log = Callable[[str], None]


@dataclass
class SiteInfo:
    """What a site has said of itself, and when it last said anything."""

    about: dict[str, Any]  # as `parse_about` returned it
    at: float
    skew: float = 0.0  # seconds by which its clock is ahead


@dataclass
class OpenRun:
    """The run that is open."""

    transport: Sites
    about: dict[str, Any]  # what sites need to set it up
    key: list[Any] = field(default_factory=list)  # its id, and the number of this attempt at it


@dataclass
class Asked:
    """A question to sites before a run, which they answer once."""

    id: int
    names: tuple[str, ...]
    body: bytes
    answers: dict[str, bytes] = field(default_factory=dict)
    failed: str = ""


class HubServer:
    """Answers the messages of sites (`polling`). Whoever carries the bytes names the site, and has authenticated that name."""

    def __init__(self, log: Log = lambda line: None, hold: float = HOLD) -> None:
        self.log, self.hold = log, hold
        self.sites: dict[str, SiteInfo] = {}
        self.refusals: list[dict[str, Any]] = []  # messages that were refused, newest last
        self.open_run: OpenRun | None = None
        self.asked: Asked | None = None
        self.train_seconds: dict[str, float] = {}  # by site, of its last training in the last run
        self.traffic: dict[str, tuple[int, int]] = {}  # by site, bytes sent and received in runs that are over
        self._changed = threading.Condition()
        self._questions = 0

    def answer(self, site: str, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a message of a site: it says who it is, asks for an order, or sends a reply."""
        do = header.get("do")
        if do == "hello":
            return self._hello(site, header), b""
        if site not in self.sites:
            return {"do": "hello"}, b""
        self.sites[site].at = time.time()
        if do == "ask":
            return self._ask(site, header)
        if do == "reply":
            run = self.open_run
            if run is None or site not in run.transport.boxes or header.get("run") != run.key:
                return {"taken": False, "why": "no such run is open"}, b""
            why = run.transport.take(site, body)
            return {"taken": not why, "why": why}, b""
        if do == "prepared":
            return self._prepared(site, header, body)
        if do == "failed":
            self.refuse(site, f"it cannot take part: {str(header.get('why'))[:300]}")
            with self._changed:
                if self.asked is not None and site in self.asked.names:
                    self.asked.failed = f"site {site}: {str(header.get('why'))[:300]}"
                    self._changed.notify_all()
            if self.open_run is not None:
                self.open_run.transport.close(f"site {site}: {str(header.get('why'))[:300]}")
            return {}, b""
        self.refuse(site, "it sent a message of an unknown kind")
        return {"error": "unknown"}, b""

    def refuse(self, site: str, reason: str) -> None:
        """Note a message of a site that was refused."""
        self.refusals = [*self.refusals[-199:], {"at": time.time(), "site": site, "reason": reason}]
        self.log(f"refused {site}: {reason}")

    def wait_for(self, names: Sequence[str], seconds: float) -> list[str]:
        """Wait until all these sites have introduced themselves; return those that have not."""
        end = time.monotonic() + seconds
        with self._changed:
            while [n for n in names if n not in self.sites] and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
        return [name for name in names if name not in self.sites]

    def _hello(self, site: str, header: Mapping[str, Any]) -> dict[str, Any]:
        version = header.get("version")
        if version != __version__:
            self.refuse(site, f"it has fedstill {str(version)[:40]}, the hub {__version__}")
            return {"refused": f"the hub has fedstill {__version__}, this site {str(version)[:40]}: install the same"}
        about = header.get("about")
        try:
            checked = parse_about(about)
        except (TypeError, KeyError, ValueError):
            self.refuse(site, "what it tells of itself cannot be read")
            return {"refused": "what it tells of itself cannot be read"}
        with self._changed:
            new = site not in self.sites
            self.sites[site] = SiteInfo(checked, time.time(), checked["machine"]["clock"] - time.time())
            self._changed.notify_all()
        if new:
            self.log(f"site {site} is here: {checked['sizes']} samples, shape {checked['shape']}")
        return {"welcome": True, "clock": time.time()}

    def question(self, names: Sequence[str], body: bytes, seconds: float) -> dict[str, bytes]:
        """Ask sites something before a run; return what each has answered. Raises `TrainingError` if one does not."""
        end = time.monotonic() + seconds
        with self._changed:
            self._questions += 1
            asked = self.asked = Asked(self._questions, tuple(names), body)
            self._changed.notify_all()
            while len(asked.answers) < len(names) and not asked.failed and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
            self.asked = None
        missing = [name for name in names if name not in asked.answers]
        if missing:
            raise TrainingError(asked.failed or f"no sums from {', '.join(missing)} in {seconds:.0f} s")
        return asked.answers

    def _prepared(self, site: str, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        with self._changed:
            asked = self.asked
            if asked is None or site not in asked.names or header.get("id") != asked.id or len(body) > LARGEST_ANSWER:
                why = "it sent sums that nobody has asked for"
            else:
                asked.answers.setdefault(site, body)
                self._changed.notify_all()
                return {}, b""
        self.refuse(site, why)
        return {}, b""

    def _ask(self, site: str, header: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        asked = self.asked
        if asked is not None and site in asked.names and site not in asked.answers:
            return {"do": "prepare", "id": asked.id}, asked.body
        run = self.open_run
        if run is None or site not in run.transport.boxes:
            with self._changed:
                self._changed.wait(min(self.hold, 1.0))
            return {"do": "wait"}, b""
        if header.get("run") != run.key:
            k = run.transport.names.index(site)
            apart = ("checksums", "pending", "preparation")
            about = {name: value for name, value in run.about.items() if name not in apart}
            made = run.about.get("preparation")
            about["pending"] = run.about["pending"].get(str(k), [0, 0])  # the id and the round of the order under way
            body = b"" if made is None else json.dumps(made).encode()
            return {"do": "open", "about": {**about, "client": k, "checksum": run.about["checksums"][k]}}, body
        data = run.transport.next(site, self.hold)
        return ({"do": "wait"}, b"") if data is None else ({"do": "order", "run": run.key}, data)

    def open(self, transport: Sites, about: dict[str, Any]) -> None:
        """Have sites take part in a run from now on."""
        with self._changed:
            self.open_run = OpenRun(transport, about, [about["run"], about["attempt"]])
            self._changed.notify_all()

    def close(self) -> None:
        """Have sites take part in no run."""
        with self._changed:
            if self.open_run is not None:
                self.train_seconds = {name: box.train_seconds for name, box in self.open_run.transport.boxes.items()}
                for name, box in self.open_run.transport.boxes.items():
                    sent, received = self.traffic.get(name, (0, 0))
                    self.traffic[name] = sent + box.sent, received + box.received
                self.open_run.transport.close(
                    "the run is over"
                )  # sites that wait for an order may ask for the next run
            self.open_run = None
            self._changed.notify_all()


def parse_about(about: object) -> dict[str, Any]:
    """Return what a site says of itself, with types and limits checked; raise `TypeError`, `KeyError` or `ValueError`."""
    if not isinstance(about, dict):
        raise TypeError
    shape = [int(n) for n in about["shape"]]
    sizes = {str(name): int(size) for name, size in about["sizes"].items() if name in ("train", "test", "val")}
    labels = [str(name)[:200] for name in about["labels"]]
    dtype = about["dtype"]
    sane = 1 <= len(shape) <= 6 and all(1 <= n <= 1 << 20 for n in shape) and 1 <= int(about["classes"]) <= 100_000
    sane = sane and all(0 < sizes[name] < 1 << 40 for name in {"train", "test", *sizes})
    objective, target = str(about.get("objective", "classification")), [int(n) for n in about.get("target", ())]
    sane = sane and objective in OBJECTIVES and len(target) <= 1 and all(1 <= n <= 1 << 20 for n in target)
    if not sane or dtype not in ("float32", "float64", "int64"):
        raise ValueError
    numbers = {name: float(about["machine"][name]) for name in ("clock", "memory", "disk")}
    own = {"shape": shape, "dtype": dtype, "classes": int(about["classes"]), "labels": labels, "sizes": sizes}
    own |= {"objective": objective, "target": target}
    if "table" in about:
        own["table"] = _parse_table(about["table"], shape)
    return {**own, "checksum": str(about["checksum"])[:100], "machine": numbers}


def _parse_table(table: object, shape: list[int]) -> dict[str, Any]:
    """Return what a site says of its table's columns, checked."""
    if not isinstance(table, dict):
        raise TypeError
    columns, gaps = Columns.from_dict(table["columns"]), items(table, "gaps", int, least=0)
    if shape != [len(columns.names)] or len(gaps) != len(columns.names):
        raise ValueError
    label = [name[:LONGEST_NAME] for name in items(table, "label", str)]
    unlabelled = reading.field(table, "unlabelled", int, least=0, most=1 << 40) if "unlabelled" in table else 0
    return {"columns": columns.to_dict(), "gaps": gaps, "label": label, "unlabelled": unlabelled}
