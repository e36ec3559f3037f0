"""Audit: check the logs of a run (`chain`), and replay it from the saved orders and replies.

All that is random comes from (seed, round, client), so a hub that is given the same
replies merges to the same bits, and a site that is given the same orders answers with the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import reading, tree
from ..core.errors import InputError, TrainingError
from ..core.secret import Secret
from ..edge.edge import Edge
from ..run import simulation
from ..run.experiment import Experiment
from ..run.journal import Journal
from ..run.prepare import Simulation
from ..transport import wire
from ..transport.messages import Order, Reply
from .chain import AUDIT, LOG, ORDERS, REPLIES, digest, read, record_digest, reply_file
from .data import SiteData, skeleton
from .privacy_log import HubPrivacyLog
from .site import SiteClient


# ---- at the hub ------------------------------------------------------------------------------------------------------
class Replay:
    """Makes a transport that answers with saved replies (`run/session.Elsewhere`)."""

    seconds = 0.0
    live = True

    def __init__(
        self,
        names: Sequence[str],
        saved: Mapping[tuple[int, str, int], bytes],
        arrivals: Sequence[int] = (),
        privacy_log: HubPrivacyLog | None = None,
    ) -> None:
        """`arrivals` are the clients whose replies to `train` were merged as they arrived, in that order, over all rounds."""
        self.names, self.saved, self._privacy_log = names, saved, privacy_log
        self._arrivals = deque(arrivals)
        self._trained: dict[int, Reply] = {}
        self._others: deque[Reply] = deque()

    def share(self, clients: int) -> frozenset[int]:
        """Return the clients that this process holds: none."""
        return frozenset()

    def open(self, edge: Edge, simulations: Sequence[Simulation]) -> Replay:
        """Return the transport."""
        return self

    def hidden(self) -> HubPrivacyLog | None:
        """Return what the hub's noise is drawn from."""
        return self._privacy_log

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Answer with the saved replies; an order that nobody answered then is not answered now."""
        for order in orders:
            data = self.saved.get((order.round, order.kind, order.client))
            if data is None and not (self._arrivals and order.kind == "train"):
                continue
            reply = Reply("train", order.round, order.client, fault="its reply was not kept")
            if data is not None:
                reply = wire.decode(data, Reply)
            answer = Reply(order.kind, reply.round, reply.client, reply.up, reply.report, order=order.id)
            answer = dataclasses.replace(answer, refusal=reply.refusal, fault=reply.fault)
            if order.kind == "train":
                self._trained[order.client] = answer
            else:
                self._others.append(answer)

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield the replies, those to `train` in the order in which they were merged where that is known."""
        while self._others or self._trained:
            if self._others:
                yield self._others.popleft()
            else:
                yield self._trained.pop(self._arrivals.popleft() if self._arrivals else next(iter(self._trained)))

    def alive(self) -> Sequence[int]:
        """Return every site."""
        return range(len(self.names))


def of_hub(folder: Path, secret: Secret | None = None) -> list[str]:
    """Check a run folder of a hub: log, records, saved replies; merge again. Return what is wrong.

    `secret` is the hub's, without which a run with noise at the server cannot be merged again.
    """
    run, folder = folder, folder / AUDIT
    entries, wrong = read(folder / LOG)
    about = reading.read_json(run / "deployment.json")
    names = [str(name) for name in about["sites"]]
    rounds = {e["round"]: e for e in entries if e["what"] == "round"}  # of a round that was made twice the last
    records = [line for line in (run / "metrics.jsonl").read_bytes().splitlines() if line]
    for number, record in enumerate(records, 1):
        if number not in rounds:
            wrong.append(f"{LOG} says nothing of round {number}: its end is missing")
        elif rounds[number]["record"] != record_digest(json.loads(record)):
            wrong.append(f"the record of round {number} was changed")
    if not (folder / REPLIES).exists():
        return [*wrong, "no replies were kept ('fedstill hub run --audit' keeps them): nothing can be merged again"]
    arrived = [k for record in records for k in json.loads(record).get("answered", ())]  # asynchronous: in which order
    saved: dict[tuple[int, str, int], bytes] = {}
    for e in entries:
        if e["what"] != "reply" or e["kind"] not in ("train", "begin", "idle", "score", "state"):
            continue
        if arrived and e["kind"] == "train":
            pass  # the round in which it was given out says nothing of when it counted; of several the last one did
        elif e["round"] not in rounds or e["attempt"] != _attempt(e, rounds):
            continue
        file = reply_file(folder, e["attempt"], e["round"], e["kind"], e["site"])
        data = file.read_bytes() if file.exists() else b""
        if digest(data) != e["digest"]:
            wrong.append(f"the kept {e['kind']} reply of site {e['site']!r} in round {e['round']} was changed")
        else:
            saved[e["round"], e["kind"], names.index(e["site"])] = data
    if wrong:
        return wrong
    checkpoint = Journal(run).load(torch.device("cpu"))
    if checkpoint is None or checkpoint.round != len(records):
        return [f"the merged model of round {len(records)} is damaged"]
    experiment = Experiment.from_toml(run / "experiment.toml")
    with tempfile.TemporaryDirectory() as scratch:
        federation = skeleton(names, about["abouts"])
        privacy_log = None
        if experiment.privacy == "central":
            if secret is None or secret.child("hub", about["run"]).digest() != about.get("secret"):
                return ["the hub's secret is not that of the run: its noise cannot be drawn again"]
            privacy_log = HubPrivacyLog(Path(scratch) / "log", secret, about["run"])
        replay = Replay(names, saved, arrived, privacy_log)
        again = simulation.run(experiment, out=Path(scratch) / "run", federation=federation, transport=replay)
    merged = dict(tree.leaves(checkpoint.state()["server"]))
    for name, leaf in tree.leaves(again.server):
        if name not in merged or not torch.equal(merged[name], leaf):
            return [f"the merged model of round {len(records)} is not what the uploads give (it differs in {name})"]
    for number, (line, now) in enumerate(zip(records, again.history, strict=True), 1):
        if _numbers(json.loads(line)) != _numbers(now):
            return [f"the record of round {number} is not what the replies give"]
    return []


def _attempt(entry: Mapping[str, Any], rounds: Mapping[int, Mapping[str, Any]]) -> int:
    """Return in which attempt of the hub the round of an entry was finished. A checkpoint's states may be asked for again."""
    return int(entry["attempt"] if entry["kind"] == "state" else rounds[entry["round"]]["attempt"])


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says but for seconds and refusals."""
    own = {"missing", "refused", "rejected"}
    numbers = {k: v for k, v in record.items() if "seconds" not in k and k not in own}
    return dict(json.loads(json.dumps(numbers)))


# ---- at a site -------------------------------------------------------------------------------------------------------
def of_site(folder: Path, own: SiteData, device: str = "cpu", secret: Secret | None = None) -> list[str]:
    """Check a site's run: its log and the saved orders; carry them out again. Return what is wrong.

    `secret` is the site's, from which its noise was drawn.
    """
    folder = folder / AUDIT
    entries, wrong = read(folder / LOG)
    if not any((folder / ORDERS).glob("*")):
        return [*wrong, "no orders were kept ('fedstill site start --audit' keeps them): nothing can be trained again"]
    if wrong:
        return wrong
    with tempfile.TemporaryDirectory() as scratch:
        site_client = SiteClient(Path(scratch), own, device=device, secret=secret)
        for e in entries:
            if e["what"] == "open":
                site_client.open(e["about"])
            elif e["what"] == "reply" and (not e["refused"] or "ended" in e):
                file = folder / ORDERS / f"{e['order']}.bin"
                data = file.read_bytes() if file.exists() else b""
                if digest(data) != e["asked"]:
                    return [f"the kept {e['kind']} order of round {e['round']} was changed"]
                site_client.background.exactly = e.get("ended", e.get("personal", 0))
                if e["refused"]:  # personal training ended, and nothing else was done
                    site_client.background.before(wire.decode(data, Order))
                    continue
                try:
                    answer = site_client.handle(data)
                except (InputError, TrainingError) as error:
                    return [f"round {e['round']} cannot be done again: {error}"]
                if digest(answer) != e["digest"]:
                    return [f"round {e['round']}: the {e['kind']} reply is not what the site's data and the order give"]
    return []
