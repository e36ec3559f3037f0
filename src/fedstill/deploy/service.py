"""The hub's service: answers sites, and has a thread that runs the experiments that were handed in, one after another.

status.json    who is here and what goes on, for `fedstill hub status`; the runs' files are in `jobs`
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import files, reading
from ..core.errors import InputError, TrainingError, first_line
from ..core.version import __version__
from ..run.experiment import Experiment
from ..server.coordinator import Record
from . import hub as hubs
from .canary import canary
from .folders import Hub
from .hub_server import HubServer, Log
from .jobs import EXPERIMENT, JOB, OUTCOME, RUN, STATUS
from .privacy_log import secret_in
from .process import UP

EVERY = 0.2  # seconds between two looks at the folder
MARGIN, START = 3.0, 10.0  # of `auto`: times what the slowest site took, and seconds besides
GONE = 30.0  # seconds after which a site that says nothing counts as away


class HubService:
    """Answers the sites of one hub, and runs what was handed in."""

    def __init__(self, hub: Hub, log: Log) -> None:
        self.hub, self.log = hub, log
        self.hub_server = HubServer(log)
        self.current_run: dict[str, Any] = {}  # the run that goes on
        self._revoked: tuple[float, set[str]] = (0.0, set())

    def open(self) -> None:
        """Begin to work."""
        threading.Thread(target=self._work, name="runs", daemon=True).start()
        threading.Thread(target=self._report, name="status", daemon=True).start()
        files.write(self.hub.folder / UP, b"")

    def answer(self, site: str, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a site, unless it was revoked or is unknown."""
        if site in self.revoked() or site not in self.hub.sites():
            self.hub_server.refuse(
                site, "its certificate was revoked" if site in self.revoked() else "nobody approved it"
            )
            return {"do": "refused", "why": f"the hub does not let {site} take part"}, b""
        return self.hub_server.answer(site, header, body)

    def revoked(self) -> set[str]:
        """Return the sites that were revoked, read again where the list has changed."""
        at = (self.hub.folder / "revoked.json").stat().st_mtime_ns
        if at != self._revoked[0]:
            self._revoked = at, self.hub.revoked()
        return self._revoked[1]

    # ---- runs --------------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            for job in sorted((self.hub.folder / "runs").glob(f"*/{JOB}")):
                if not (job.parent / OUTCOME).exists():
                    self._run(job.parent)
            time.sleep(EVERY)

    def _run(self, folder: Path) -> None:
        """Run a job to its end, and write how it ended."""
        try:
            job = reading.read_json(folder / JOB)
            experiment = Experiment.from_toml(folder / EXPERIMENT)
            outcome = self._carry_out(folder, job, experiment)
        except (InputError, TrainingError, reading.Unreadable) as error:
            outcome = {"ok": False, "why": str(error)}
        except Exception as error:
            traceback.print_exc()
            outcome = {"ok": False, "why": f"{type(error).__name__}: {first_line(error)}"}
        self.current_run = {}
        self.log(f"run {folder.name}: {'done' if outcome['ok'] else outcome['why']}")
        files.write(folder / OUTCOME, (json.dumps(outcome, indent=2) + "\n").encode())

    def _carry_out(self, folder: Path, job: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
        names = [str(name) for name in job["sites"]]
        self.current_run = {"run": folder.name, "round": 0, "rounds": experiment.rounds, "sites": names}
        self.log(f"run {folder.name}: waits for {', '.join(names)}")
        away = self.hub_server.wait_for(names, float(job["wait"]))
        if job.get("canary"):
            found = canary(self.hub_server, experiment, names, folder / RUN, secret_in(self.hub.folder))
            return {"ok": not found["wrong"], "why": "; ".join(found["wrong"]), **found}
        if away:
            return {"ok": False, "why": f"these sites are not here: {', '.join(away)}"}

        def progress(record: Record) -> None:
            self.current_run = {**self.current_run, "round": record["round"], "personal": record.get("personal")}

        deadline = (
            self._auto(folder, experiment, names) if job["deadline"] == "auto" else float(job["deadline"]) or None
        )
        audit = bool(job.get("audit"))
        secret = secret_in(self.hub.folder)
        run = hubs.run(
            self.hub_server,
            experiment,
            names,
            folder / RUN,
            deadline=deadline,
            progress=progress,
            audit=audit,
            secret=secret,
        )
        never = hubs.roster(run.history, names)
        if never:
            return {"ok": False, "why": f"the run is over, but these sites never counted: {', '.join(never)}"}
        return {"ok": True, "rounds": len(run.history)}

    def _auto(self, folder: Path, experiment: Experiment, names: list[str]) -> float:
        """Return a deadline that the slowest site meets with a margin, from a first round that all sites make."""
        file = folder / "deadline.json"
        if not file.exists():
            found = canary(self.hub_server, experiment, names, folder / "canary", secret_in(self.hub.folder))
            if found["wrong"]:
                raise TrainingError("; ".join(found["wrong"]))
            slowest = max(row["seconds"] for row in found["rows"])
            seconds = MARGIN * slowest + START
            files.write(file, (json.dumps({"deadline": seconds, "slowest": slowest}) + "\n").encode())
        return float(json.loads(file.read_text())["deadline"])

    # ---- status ------------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Return who is here and what goes on."""
        now, open_run = time.time(), self.hub_server.open_run
        sites = {}
        for name in self.hub.sites():
            seen = self.hub_server.sites.get(name)
            box = open_run.transport.boxes.get(name) if open_run is not None else None
            sent, received = self.hub_server.traffic.get(name, (0, 0))
            sites[name] = {
                "state": "never seen" if seen is None else "here" if now - seen.at < GONE else "away",
                "seen": None if seen is None else round(seen.at, 1),
                "samples": None if seen is None else seen.about["sizes"].get("train"),
                "works": bool(box and box.orders),
                "sent": sent + (box.sent if box else 0),
                "received": received + (box.received if box else 0),
            }
        head = {"hub": self.hub.name, "version": __version__, "at": round(now, 1)}
        return {**head, "run": self.current_run, "sites": sites, "refused": self.hub_server.refusals[-20:]}

    def _report(self) -> None:
        while True:
            try:
                files.write(self.hub.folder / STATUS, (json.dumps(self.status(), indent=2) + "\n").encode())
            except OSError as error:
                self.log(f"the status could not be written: {error}")
            time.sleep(1.0)
