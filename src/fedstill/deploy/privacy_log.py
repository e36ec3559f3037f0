"""The secrets of a deployment under differential privacy, and the log of what was drawn from them.

HUB/secret.key, SITE/secret.key      32 random bytes, made once, never sent; readable by their owner alone
runs/…/privacy.jsonl                 the log of a run: the secret's digest, and each piece of work that noise was drawn for

A site draws batches and noise of DP-SGD from a secret that follows from its own and from all that its upload follows from: the
run, what was sent, what it keeps, its data. So work that is done again after a kill comes to the same upload, which tells nothing
new; and whatever differs, if only in a bit, has other noise and costs ε again. A hub draws cohorts and the noise of its
merges in the same way; it does not give away a second mean of a round.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core import files
from ..core.errors import InputError, Shown, TrainingError
from ..core.method import Method
from ..core.protection import Privacy
from ..core.secret import SIZE, Secret, digest_of
from ..core.settings import values_of
from ..core.task import Task
from ..core.tree import Tree
from ..core.version import __version__
from ..engine.bench import Work
from ..run.prepare import Simulation
from ..server.privacy import epsilon
from .chain import Chain, read

FILE, PRIVACY_LOG = "secret.key", "privacy.jsonl"


def secret_in(folder: Path) -> Secret:
    """Return the secret of a hub's or site's folder; where there is none, make one."""
    path = folder / FILE
    if not path.exists():
        files.make_folder(folder)
        part = path.with_name(f"{FILE}{files.PART}")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(Secret.new().key)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        files.sync_folder(folder)
    key = path.read_bytes()
    if len(key) != SIZE:
        raise InputError("secret", str(path), f"a file of {SIZE} bytes, as it was made: noise cannot be drawn from it")
    return Secret(key)


class PrivacyLog:
    """A run's privacy log, whose lines are only added, the first with the digest of the secret that is drawn from."""

    def __init__(self, folder: Path, secret: Secret, begun: bool) -> None:
        """Open the log of a run's folder; `begun`: the run has saved something, so there must be one."""
        path = folder / PRIVACY_LOG
        self._chain = Chain(path)  # drops a last line that a kill has cut short: what it was for did not begin
        entries, wrong = read(path) if path.exists() else ([], [])
        if wrong:
            raise InputError("privacy", Shown(str(path)), f"as it was written: {wrong[0]}")
        if begun and not entries:
            raise InputError("privacy", Shown(str(path)), "there, as when the run began: without it ε is not known")
        self.entries = entries
        if entries and entries[0].get("secret") != secret.digest():
            right = f"that with which the run began: its noise was drawn from another {FILE}"
            raise InputError("secret", Shown("another"), right)
        if not entries:
            self.add("secret", secret=secret.digest())

    def add(self, what: str, **about: Any) -> None:
        """Add a line durably."""
        self._chain.add(what, durable=True, **about)
        self.entries.append({"what": what, **about})


# ---- a site ----------------------------------------------------------------------------------------------------------
def check_local(method: Method, task: Task) -> None:
    """Refuse a method whose personal model is trained without noise: a deployment sends its score to the hub."""
    phases = method.phases(dataclasses.replace(task, round=1))
    if "personal" in method.scores and any(phase.model != "params" for phase in phases):
        right = "one whose personal model is what DP-SGD trains, as pfedsd or fedper: the hub is sent its score"
        raise InputError("method", method.id, f"{right} (privacy 'local')")


class SitePrivacyLog:
    """Gives each piece of a site's work its secret, and stops it before it costs more than a budget (`engine.bench.Hidden`)."""

    def __init__(
        self, folder: Path, secret: Secret, about: Mapping[str, Any], settings: Privacy, batch_size: int, most: float
    ) -> None:
        """Go on with the log in a run's folder, whose work follows from `about` too; `most` is ε at most, 0: any."""
        begun = any(folder.glob("*.bin"))
        self.log = PrivacyLog(folder, secret.child("run", str(about["run"])), begun)
        versions = f"{__version__} {torch.__version__}"
        words = [word for item in sorted(about.items()) for word in item]
        self._secret = secret.child("site", versions, *words)
        self._settings, self._batch_size = settings, batch_size
        self._most = min(most or math.inf, settings.privacy_budget or math.inf)
        self._logged = {entry["work"] for entry in self.log.entries if entry["what"] == "work"}

    def of(self, round: int, work: Work, samples: int, steps: int) -> Secret:
        """Return the secret of a client's work, once it is in the log."""
        inputs = {"down": work.down, "memory": work.memory, "local": work.local}
        own = self._secret.child(round, work.part, work.last, work.steps, digest_of(inputs))
        name = own.digest()
        if name not in self._logged:
            size = min(self._batch_size, samples)
            spent = {size / samples: steps + sum(int(entry.get("steps", 0)) for entry in self.log.entries)}
            s = self._settings
            now = epsilon(spent, s.noise_multiplier, s.privacy_delta, s.accountant)
            if not now <= self._most:
                raise TrainingError(f"ε would be {now:.4g}, above this site's {self._most:g}; nothing was sent")
            self.log.add("work", work=name, round=round, steps=steps, epsilon=now)
            self._logged.add(name)
        return own


def open_site_log(
    about: Mapping[str, Any], sim: Simulation, checksum: str, folder: Path, secret: Secret | None, max_epsilon: float
) -> SitePrivacyLog | None:
    """Return the privacy log of a run at a site, None without privacy "local".

    Refuse a run that would reveal more than it says, or cost more than the site's owner allows. `about` is the hub's description
    of the run, `checksum` that of the site's data, `folder` the one with all runs of the site.
    """
    training = sim.training
    if training.privacy != "local":
        if max_epsilon:
            raise InputError("privacy", training.privacy, "'local': this site's owner has set a bound for ε")
        return None
    if secret is None:
        raise InputError("privacy", "local", "'off' at a site without a secret, from which its noise is drawn")
    check_local(sim.method, sim.task)
    run, left = str(about["run"]), 0.0
    if max_epsilon:
        others = sum(spent_at(path) for path in folder.glob("*") if path.name != run)
        left = max_epsilon - others
        if left <= 0:
            right = f"more than ε {others:.4g}, which this site's other runs have cost"
            raise InputError("privacy", "local", right)
    assert sim.experiment is not None
    work = {**values_of(training), "method": sim.method.id, **values_of(sim.method)}
    work |= {"model": sim.experiment.model, "head": sim.experiment.head, "data": checksum}
    bound = {"run": run, **{name: int(about[name]) for name in ("client", "clients", "classes")}}
    bound["work"] = json.dumps(work, sort_keys=True, default=str)
    return SitePrivacyLog(folder / run, secret, bound, training, training.batch_size, left)


def spent_at(folder: Path) -> float:
    """Return ε of a site's run, from its log; 0 without any."""
    entries, _ = read(folder / PRIVACY_LOG) if (folder / PRIVACY_LOG).exists() else ([], [])
    return max((float(entry.get("epsilon", 0.0)) for entry in entries), default=0.0)


# ---- the hub ---------------------------------------------------------------------------------------------------------
class HubPrivacyLog:
    """What the hub draws cohorts and noise from (`server.privacy.Hidden`)."""

    def __init__(self, folder: Path, secret: Secret, run: str, begun: bool = False) -> None:
        """Go on with the log in a run's folder."""
        self.secret = secret.child("hub", run)
        self.log = PrivacyLog(folder, self.secret, begun)
        self._given = {int(entry["round"]): entry["inputs"] for entry in self.log.entries if entry["what"] == "mean"}

    def release(self, round: int, inputs: Tree) -> Secret:
        """Return what the noise of a round is drawn from, once the log says of which inputs a mean is given away."""
        own = self.secret.child("mean", round, digest_of(inputs))
        name = own.digest()
        if self._given.setdefault(round, name) != name:
            what = "its noisy mean was given away before the hub was stopped, and now the uploads are others"
            raise TrainingError(f"round {round}: {what}; ε counts one mean a round, so no second one leaves the hub")
        if not any(entry.get("round") == round for entry in self.log.entries):
            self.log.add("mean", round=round, inputs=name)
        return own
