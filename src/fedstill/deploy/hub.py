"""Run an experiment whose clients are sites."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import files, reading, tree
from ..core.errors import InputError, Shown
from ..core.own import is_reference
from ..core.secret import Secret
from ..core.training import REAL
from ..core.version import __version__
from ..data import Federation
from ..edge.edge import Edge
from ..run import simulation
from ..run.callbacks import Progress
from ..run.experiment import Experiment
from ..run.journal import Journal
from ..run.legal import check_statistics
from ..run.prepare import Simulation
from ..run.result import Run
from ..server.coordinator import Record
from ..timing.live import orders_of
from ..transport.messages import Order
from ..transport.sites import Sites
from .chain import AUDIT, LOG, Chain, digest, read, record_digest, reply_file
from .data import problems, skeleton
from .hub_server import HubServer
from .preparation import Prepared, agree, prepare
from .privacy_log import HubPrivacyLog, check_local

DEPLOYMENT = "deployment.json"  # in a run's folder: its id, its sites, and how often the hub has started or resumed it
ANSWER = 600.0  # seconds in which sites give the sums that their samples are prepared by
LARGEST = 1 << 28  # bytes of a deployment.json
SLACK = 8 << 20  # bytes that a reply may have beside its tensors
LOCAL_ONLY = {  # fields that only a simulation can have, and why
    "attack": "sites are real",
    "patience": "sites keep the models of their newest rounds",
    **dict.fromkeys(("new", "averaged", "external", "newcomers"), "each site scores on its own data"),
}


class Deployment:
    """Makes the transport of one run whose clients are sites (`run/session.Elsewhere`)."""

    live = True

    def __init__(
        self,
        hub_server: HubServer,
        names: Sequence[str],
        folder: Path,
        deadline: float | None = None,
        audit: bool = False,
        secret: Secret | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """Run in `folder` with the sites `names`; a round waits for `deadline` seconds, None: for all sites.

        With `audit` all replies are saved, so that the run can be merged again. Noise is drawn from `secret`. `prepared` is how
        the sites' samples are made.
        """
        self.prepared = prepared
        self.secret = secret
        self._privacy_log: HubPrivacyLog | None = None
        self.hub_server, self.names, self.folder = hub_server, tuple(names), folder
        self.deadline, self.audit = deadline, audit
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
        sites = Sites(
            self.names,
            limit=8 * largest + SLACK,
            patience=self.deadline,
            refused=self.hub_server.refuse,
            noted=self._log_message,
            standing=sim.training.mode != "sync",
        )
        about = {"experiment": sim.experiment.to_toml(), "clients": len(self.names), "classes": self._classes}
        about["constants"] = sim.net.fixed.digest()
        if self.prepared is not None:
            about["preparation"] = self.prepared.for_sites()
        sums = [self.hub_server.sites[name].about["checksum"] for name in self.names]
        pending = {str(k): [order.id, order.round] for k, order in self._pending.items()}
        self.hub_server.open(sites, {**begun, **about, "checksums": sums, "pending": pending})
        return sites

    def hidden(self) -> HubPrivacyLog | None:
        """Return what the hub's cohorts and noise are drawn from, where the run has any."""
        return self._privacy_log

    def federation(self) -> Federation:
        """Return the federation as the sites have described theirs."""
        made = skeleton(self.names, self._abouts(), self.prepared)
        self._classes = made.classes
        return made

    def _abouts(self) -> list[dict[str, Any]]:
        """Return how the sites have described their samples, as they are once they are made."""
        abouts = [self.hub_server.sites[name].about for name in self.names]
        return abouts if self.prepared is None else [self.prepared.about(about, k) for k, about in enumerate(abouts)]

    def _begin(self, noisy: bool) -> dict[str, Any]:
        """Count one more attempt at the run of this folder, new or begun."""
        file = self.folder / DEPLOYMENT
        if file.exists():
            about = json.loads(file.read_text())
            if about["sites"] != list(self.names):
                right = f"{', '.join(about['sites'])}, as when the run began"
                raise InputError("sites", Shown(", ".join(self.names)), right)
        else:
            about = {"run": secrets.token_hex(8), "sites": list(self.names), "attempt": 0, "abouts": self._abouts()}
            if self.prepared is not None:
                about["preparation"] = self.prepared.to_dict()
        if noisy:
            if self.secret is None:
                raise InputError("privacy", "central", "'off' at a hub without a secret, from which its noise is drawn")
            self._privacy_log = HubPrivacyLog(self.folder, self.secret, about["run"], begun="secret" in about)
            about["secret"] = self._privacy_log.secret.digest()
        about["attempt"] += 1
        files.write(file, (json.dumps(about, indent=2) + "\n").encode())
        journal, self._attempt = Journal(self.folder), int(about["attempt"])
        checkpoint = journal.load(torch.device("cpu"))
        round = checkpoint.round if checkpoint else 0
        timing = checkpoint.state().get("timing", {}) if checkpoint else {}
        self._pending = orders_of(timing)  # under way at the checkpoint: they will be given out again
        self._begin_log(journal.history()[:round])
        return {"run": about["run"], "attempt": about["attempt"], "round": round}

    # ---- the log -----------------------------------------------------------------------------------------------------
    def _begin_log(self, history: Sequence[Record]) -> None:
        """Go on with the log; a round that was saved before a kill, and not logged any more, is logged now."""
        path = self.folder / AUDIT / LOG
        entries, _ = read(path) if path.exists() else ([], [])
        self._chain = Chain(path)
        logged = {entry["round"] for entry in entries if entry["what"] == "round"}
        for record in history:
            if record["round"] not in logged:
                self._chain.add("round", round=record["round"], attempt=self._attempt - 1, record=record_digest(record))
        self._chain.add("attempt", durable=True, attempt=self._attempt, after=len(history), version=__version__)

    def _log_message(self, what: str, site: str, order: Order, data: bytes) -> None:
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
    for name in experiment.metrics:
        if is_reference(name):
            why = "a site runs no code on a hub's word"
            raise InputError("metrics", name, f"one that comes with fedstill in a deployment: {why}")
    check_statistics(experiment, experiment.preprocessing())
    for name in ("label", "ignore"):
        if getattr(experiment, name):
            right = f"left out in a deployment: a site's owner says it (fedstill site start --{name})"
            raise InputError(name, getattr(experiment, name), right)
    if experiment.preprocessing().as_texts:
        right = "'onehot' in a deployment: a site's owner names columns (fedstill site start --encode onehot:COLUMN)"
        raise InputError("encode", experiment.encode, right)
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
    hub_server: HubServer,
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
    """Run an experiment with these sites, all of which have introduced themselves.

    A folder that holds it is continued, with `rounds` to that many.
    """
    experiment = check(experiment)
    check_deadline(experiment, deadline)
    prepared = prepared_of(hub_server, experiment, names, folder)
    deployment = Deployment(hub_server, names, folder, deadline, audit, secret, prepared)
    federation = deployment.federation()
    journal = Journal(folder)

    def over(record: Record) -> None:
        deployment.over(record)
        if progress is not None:
            progress(record)

    try:
        if journal.begun:
            changes = {} if rounds is None else {"rounds": rounds}
            start = simulation.continued(
                folder, changes=changes, federation=federation, progress=over, transport=deployment
            )
            return simulation.finish(start, deployment)
        return simulation.run(experiment, out=folder, federation=federation, progress=over, transport=deployment)
    finally:
        hub_server.close()


def prepared_of(hub_server: HubServer, experiment: Experiment, names: Sequence[str], folder: Path) -> Prepared | None:
    """Return how the sites' samples are made: as it was kept with the run, else by asking them. None: nothing is to be done."""
    file = folder / DEPLOYMENT
    if file.exists():
        kept = reading.read_json(file, LARGEST).get("preparation")
        return None if kept is None else Prepared.from_dict(kept)
    abouts = [hub_server.sites[name].about for name in names]
    for problem in problems(names, abouts):
        raise problem
    agreed = agree(experiment.preprocessing(), names, abouts)
    return None if agreed is None else prepare(agreed, names, lambda body: hub_server.question(names, body, ANSWER))


def roster(history: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Return the sites that never counted in a run."""
    counted = {k for record in history for k in record["participants"]}
    return [name for k, name in enumerate(names) if k not in counted]
