"""The hub's desk: answers what sites say, and runs experiments whose clients they are."""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core import files, tree
from ..core.errors import InputError, Shown, TrainingError
from ..core.secret import Secret
from ..core.training import REAL
from ..core.version import __version__
from ..data import Federation
from ..edge.edge import Edge
from ..run import simulation
from ..run.callbacks import Progress
from ..run.experiment import Experiment
from ..run.journal import Journal
from ..run.prepare import Simulation
from ..run.result import Run
from ..server.coordinator import Record
from ..timing.live import orders_of
from ..transport.messages import Order
from ..transport.sites import Sites
from .chain import AUDIT, LOG, Chain, digest, read, record_digest, reply_file
from .data import problems, skeleton
from .hidden import HubBooks, check_local

DEPLOYMENT = (
    "deployment.json"  # in a run's folder: its id, its sites, and how often the hub has begun or gone on with it
)
SLACK = 8 << 20  # bytes that a reply may have beside its tensors
LOCAL_ONLY = {  # fields that only a simulation can have, and why
    "attack": "sites are real",
    **dict.fromkeys(("new", "averaged", "external", "newcomers"), "each site scores on its own data"),
}
HOLD = 5.0  # seconds for which a site that asks is kept waiting for an order
Log = Callable[[str], None]


@dataclass
class Seen:
    """What a site has told of itself, and when it last did."""

    about: dict[str, Any]
    at: float
    skew: float = 0.0  # seconds by which its clock is ahead


@dataclass
class Open:
    """The run that is open."""

    sites: Sites
    about: dict[str, Any]
    key: list[Any] = field(default_factory=list)


class Desk:
    """What sites talk to. Whoever carries the bytes says which site it is; that name has been authenticated."""

    def __init__(self, log: Log = lambda line: None, hold: float = HOLD) -> None:
        self.log, self.hold = log, hold
        self.known: dict[str, Seen] = {}
        self.refusals: list[dict[str, Any]] = []  # messages that were not taken, newest last
        self.opened: Open | None = None
        self.took: dict[str, float] = {}  # by site the seconds of its last training in the run that was open last
        self.traffic: dict[
            str, tuple[int, int]
        ] = {}  # by site the bytes sent to it and received, in runs that are over
        self._changed = threading.Condition()

    def answer(self, site: str, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a message of a site: it says who it is, asks for an order, or sends a reply."""
        do = header.get("do")
        if do == "hello":
            return self._hello(site, header), b""
        if site not in self.known:
            return {"do": "hello"}, b""
        self.known[site].at = time.time()
        if do == "ask":
            return self._ask(site, header)
        if do == "reply":
            now = self.opened
            if now is None or site not in now.sites.boxes or header.get("run") != now.key:
                return {"taken": False, "why": "no such run is open"}, b""
            why = now.sites.take(site, body)
            return {"taken": not why, "why": why}, b""
        if do == "failed":
            self.refuse(site, f"it cannot take part: {str(header.get('why'))[:300]}")
            if self.opened is not None:
                self.opened.sites.close(f"site {site}: {str(header.get('why'))[:300]}")
            return {}, b""
        self.refuse(site, "it sent a message of an unknown kind")
        return {"error": "unknown"}, b""

    def refuse(self, site: str, reason: str) -> None:
        """Note a message that was not taken."""
        self.refusals = [*self.refusals[-199:], {"at": time.time(), "site": site, "reason": reason}]
        self.log(f"refused {site}: {reason}")

    def wait_for(self, names: Sequence[str], seconds: float) -> list[str]:
        """Wait until all these sites have told of themselves; return those that have not."""
        end = time.monotonic() + seconds
        with self._changed:
            while [n for n in names if n not in self.known] and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
        return [name for name in names if name not in self.known]

    def _hello(self, site: str, header: Mapping[str, Any]) -> dict[str, Any]:
        version = header.get("version")
        if version != __version__:
            self.refuse(site, f"it has fedstill {str(version)[:40]}, the hub {__version__}")
            return {"refused": f"the hub has fedstill {__version__}, this site {str(version)[:40]}: install the same"}
        about = header.get("about")
        try:
            checked = _checked(about)
        except (TypeError, KeyError, ValueError):
            self.refuse(site, "what it tells of itself cannot be read")
            return {"refused": "what it tells of itself cannot be read"}
        with self._changed:
            new = site not in self.known
            self.known[site] = Seen(checked, time.time(), checked["machine"]["clock"] - time.time())
            self._changed.notify_all()
        if new:
            self.log(f"site {site} is here: {checked['sizes']} samples, shape {checked['shape']}")
        return {"welcome": True, "clock": time.time()}

    def _ask(self, site: str, header: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        now = self.opened
        if now is None or site not in now.sites.boxes:
            with self._changed:
                self._changed.wait(min(self.hold, 1.0))
            return {"do": "wait"}, b""
        if header.get("run") != now.key:
            k = now.sites.names.index(site)
            own = {name: value for name, value in now.about.items() if name not in ("checksums", "pending")}
            own["pending"] = now.about["pending"].get(str(k), [0, 0])  # the id and the round of the order under way
            return {"do": "open", "about": {**own, "client": k, "checksum": now.about["checksums"][k]}}, b""
        data = now.sites.next(site, self.hold)
        return ({"do": "wait"}, b"") if data is None else ({"do": "order", "run": now.key}, data)

    def open(self, sites: Sites, about: dict[str, Any]) -> None:
        """Have sites take part in a run from now on."""
        with self._changed:
            self.opened = Open(sites, about, [about["run"], about["attempt"]])
            self._changed.notify_all()

    def close(self) -> None:
        """Have sites take part in no run."""
        with self._changed:
            if self.opened is not None:
                self.took = {name: box.took for name, box in self.opened.sites.boxes.items()}
                for name, box in self.opened.sites.boxes.items():
                    sent, received = self.traffic.get(name, (0, 0))
                    self.traffic[name] = sent + box.sent, received + box.received
                self.opened.sites.close(
                    "the run is over"
                )  # whoever waits for an order of it may ask for the next run's
            self.opened = None
            self._changed.notify_all()


class Deployment:
    """Makes the transport of one run whose clients are sites (`run/session.Elsewhere`)."""

    live = True

    def __init__(
        self,
        desk: Desk,
        names: Sequence[str],
        folder: Path,
        deadline: float | None = None,
        audit: bool = False,
        secret: Secret | None = None,
    ) -> None:
        """Run in `folder` with the sites `names`; a round waits for `deadline` seconds, None: for all sites.

        With `audit` all replies are kept, so that the run can be merged again. Noise is drawn from `secret`.
        """
        self.secret = secret
        self._hidden: HubBooks | None = None
        self.desk, self.names, self.folder, self.deadline, self.audit = desk, tuple(names), folder, deadline, audit
        self._chain: Chain | None = None
        self._attempt = 0

    def share(self, clients: int) -> frozenset[int]:
        """Return the clients that the hub holds: none."""
        return frozenset()

    def open(self, edge: Edge, simulations: Sequence[Simulation]) -> Sites:
        """Have all sites set up their client of the run."""
        (sim,) = simulations
        assert sim.experiment is not None
        largest = sum(leaf.nbytes for _, leaf in tree.leaves(sim.initial))
        if sim.training.privacy == "local":
            check_local(sim.method, sim.task)
        begun = self._begin(sim.training.privacy == "central")
        limit = 8 * largest + SLACK
        standing = sim.training.mode != "sync"
        patience, desk = self.deadline, self.desk
        sites = Sites(
            self.names, limit=limit, patience=patience, refused=desk.refuse, noted=self._note, standing=standing
        )
        about = {"experiment": sim.experiment.to_toml(), "clients": len(self.names), "classes": self._classes}
        sums = [self.desk.known[name].about["checksum"] for name in self.names]
        pending = {str(k): [order.id, order.round] for k, order in self._pending.items()}
        self.desk.open(sites, {**begun, **about, "checksums": sums, "pending": pending})
        return sites

    def hidden(self) -> HubBooks | None:
        """Return what the hub's cohorts and noise are drawn from, where the run has any."""
        return self._hidden

    def federation(self) -> Federation:
        """Return the federation as the sites have described it."""
        abouts = [self.desk.known[name].about for name in self.names]
        made = skeleton(self.names, abouts)
        self._classes = made.classes
        return made

    def _begin(self, noisy: bool) -> dict[str, Any]:
        """Count one more attempt at the run of this folder, new or begun."""
        file = self.folder / DEPLOYMENT
        if file.exists():
            about = json.loads(file.read_text())
            if about["sites"] != list(self.names):
                right = f"{', '.join(about['sites'])}, as when the run began"
                raise InputError("sites", Shown(", ".join(self.names)), right)
        else:
            abouts = [self.desk.known[name].about for name in self.names]
            about = {"run": secrets.token_hex(8), "sites": list(self.names), "attempt": 0, "abouts": abouts}
        if noisy:
            if self.secret is None:
                raise InputError("privacy", "central", "'off' at a hub without a secret, from which its noise is drawn")
            self._hidden = HubBooks(self.folder, self.secret, about["run"], begun="secret" in about)
            about["secret"] = self._hidden.secret.digest()
        about["attempt"] += 1
        files.write(file, (json.dumps(about, indent=2) + "\n").encode())
        journal, self._attempt = Journal(self.folder), int(about["attempt"])
        checkpoint = journal.load(torch.device("cpu"))
        round = checkpoint.round if checkpoint else 0
        timing = checkpoint.state().get("timing", {}) if checkpoint else {}
        self._pending = orders_of(timing)  # under way when that was kept: they will be given out again
        self._begin_log(journal.history()[:round])
        return {"run": about["run"], "attempt": about["attempt"], "round": round}

    # ---- the log -----------------------------------------------------------------------------------------------------
    def _begin_log(self, history: Sequence[Record]) -> None:
        """Go on with the log; a round that was kept before a kill, and not logged any more, is logged now."""
        path = self.folder / AUDIT / LOG
        entries, _ = read(path) if path.exists() else ([], [])
        self._chain = Chain(path)
        logged = {entry["round"] for entry in entries if entry["what"] == "round"}
        for record in history:
            if record["round"] not in logged:
                self._chain.add("round", round=record["round"], attempt=self._attempt - 1, record=record_digest(record))
        self._chain.add("attempt", durable=True, attempt=self._attempt, after=len(history), version=__version__)

    def _note(self, what: str, site: str, order: Order, data: bytes) -> None:
        """Log an order or a reply."""
        assert self._chain is not None
        fields: dict[str, Any] = {
            "site": site,
            "kind": order.kind,
            "round": order.round,
            "id": order.id,
            "attempt": self._attempt,
        }
        if what == "reply" and self.audit:
            file = reply_file(self.folder / AUDIT, self._attempt, order.round, order.kind, site)
            files.make_folder(file.parent)
            file.write_bytes(data)
        self._chain.add(what, **fields, digest=digest(data))

    def over(self, record: Record) -> None:
        """Log a round that is over."""
        assert self._chain is not None
        self._chain.add(
            "round", durable=True, round=record["round"], attempt=self._attempt, record=record_digest(record)
        )


def check(experiment: Experiment) -> Experiment:
    """Return an experiment as a deployment runs it; refuse what only a simulation can do."""
    plain = Experiment()
    if experiment.simulates_time:
        raise InputError("profile", experiment.profile, f"{REAL!r} in a deployment, or left out: sites are real")
    if experiment.wait_free != "off" and experiment.method.personal_passes:
        why = (
            "its personal model takes its steps together with the one that goes up, so none is left when that has gone"
        )
        raise InputError("wait_free", experiment.wait_free, f"'off' for {experiment.method.id} in a deployment: {why}")
    if experiment.wait_free != "off" and experiment.privacy != "off":
        right = f"'off' with privacy {experiment.privacy!r}: a site tells no more than its uploads and scores"
        raise InputError("wait_free", experiment.wait_free, right)
    for name, why in LOCAL_ONLY.items():
        if getattr(experiment, name) != getattr(plain, name):
            raise InputError(name, getattr(experiment, name), f"{getattr(plain, name)!r} in a deployment: {why}")
    if experiment.privacy == "local" and experiment.fine_tune:
        right = "0 in a deployment with privacy 'local': sites would send scores of models trained without noise"
        raise InputError("fine_tune", experiment.fine_tune, right)
    here: dict[str, Any] = {
        "engine": "one",
        "workers": 1,
        "device": "cpu",
    }  # the hub merges; where sites train they decide themselves
    return dataclasses.replace(
        experiment, checkpoint_every=1, data="digits", data_root="", clients=0, partition="auto", **here
    )


def check_deadline(experiment: Experiment, deadline: float | str | None) -> None:
    """Refuse a deadline where ε assumes that nobody is left out for another's sake."""
    if deadline and experiment.privacy == "central":
        right = "0 with privacy 'central': who counts may depend on nothing but the sampling and the site itself"
        raise InputError("round_deadline", deadline, right)


def run(
    desk: Desk,
    experiment: Experiment,
    names: Sequence[str],
    folder: Path,
    *,
    deadline: float | None = None,
    progress: Progress | None = None,
    rounds: int | None = None,
    audit: bool = False,
    secret: Secret | None = None,
) -> Run:
    """Run an experiment with these sites, all of which have told of themselves.

    A folder that holds it is continued, with `rounds` to that many.
    """
    experiment = check(experiment)
    check_deadline(experiment, deadline)
    deployment = Deployment(desk, names, folder, deadline, audit, secret)
    federation = deployment.federation()
    journal = Journal(folder)

    def over(record: Record) -> None:
        deployment.over(record)
        if progress is not None:
            progress(record)

    try:
        if journal.begun:
            start = simulation.continued(
                folder, rounds=rounds, federation=federation, progress=over, transport=deployment
            )
            return simulation.finish(start, deployment)
        return simulation.run(experiment, out=folder, federation=federation, progress=over, transport=deployment)
    finally:
        desk.close()


CLOCK = 60.0  # seconds by which clocks may differ: certificates and logs depend on them
ROOM = 64 << 20  # bytes of memory and disk that a site needs beside the model's


def canary(
    desk: Desk, experiment: Experiment, names: Sequence[str], folder: Path, secret: Secret | None = None
) -> dict[str, Any]:
    """Look at all sites before the real run, then make one round of it: return a row for each site, and what is wrong."""
    here = [name for name in names if name in desk.known]
    wrong = [f"site {name!r} is not here" for name in names if name not in desk.known]
    wrong += [
        f"site {r['site']!r}: {r['reason']}" for r in desk.refusals if r["site"] in names and r["site"] not in here
    ]
    if here:
        wrong += [str(problem) for problem in problems(here, [desk.known[name].about for name in here])]
    for name in here:
        seen = desk.known[name]
        if abs(seen.skew) > CLOCK:
            wrong.append(f"the clock of site {name!r} is {seen.skew:+.0f} s off the hub's")
        for kind in ("memory", "disk"):
            if seen.about["machine"][kind] < ROOM:
                wrong.append(f"site {name!r} has {seen.about['machine'][kind] / 1e6:.0f} MB of {kind} free")
    rows: list[dict[str, Any]] = [
        {
            "site": name,
            "samples": desk.known[name].about["sizes"]["train"],
            "classes": desk.known[name].about["classes"],
            "shape": desk.known[name].about["shape"],
            "memory": desk.known[name].about["machine"]["memory"],
            "disk": desk.known[name].about["machine"]["disk"],
            "clock": round(desk.known[name].skew, 1),
        }
        for name in here
    ]
    if not wrong:
        try:
            everyone: dict[str, Any] = {"participation": 1.0, "sampler": "uniform", "mode": "sync", "wait_free": "off"}
            one_round = dataclasses.replace(experiment, rounds=1, **everyone)
            history = run(desk, one_round, names, folder, secret=secret).history
            away = set(range(len(names))) - set(history[0]["participants"])
            wrong += [f"site {names[k]!r} did not count: {_why(desk, names[k])}" for k in sorted(away)]
            rows = [{**row, "seconds": round(desk.took[row["site"]], 2)} for row in rows]
        except TrainingError as error:
            wrong.append(str(error))
    return {"rows": rows, "wrong": wrong}


def _why(desk: Desk, site: str) -> str:
    """Return what was noted last of a site."""
    return next((str(r["reason"]) for r in reversed(desk.refusals) if r["site"] == site), "no reply")


def roster(history: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Return the sites that never counted in a run."""
    counted = {k for record in history for k in record["participants"]}
    return [name for k, name in enumerate(names) if k not in counted]


def _checked(about: object) -> dict[str, Any]:
    """Return what a site has told of itself, bounded and typed."""
    if not isinstance(about, dict):
        raise TypeError
    shape = [int(n) for n in about["shape"]]
    sizes = {str(name): int(size) for name, size in about["sizes"].items() if name in ("train", "test", "val")}
    labels = [str(name)[:200] for name in about["labels"]]
    dtype = about["dtype"]
    sane = 1 <= len(shape) <= 6 and all(1 <= n <= 1 << 20 for n in shape) and 1 <= int(about["classes"]) <= 100_000
    sane = sane and all(0 < sizes[name] < 1 << 40 for name in {"train", "test", *sizes})
    if not sane or dtype not in ("float32", "float64"):
        raise ValueError
    numbers = {name: float(about["machine"][name]) for name in ("clock", "memory", "disk")}
    own = {"shape": shape, "dtype": dtype, "classes": int(about["classes"]), "labels": labels, "sizes": sizes}
    return {**own, "checksum": str(about["checksum"])[:100], "machine": numbers}
