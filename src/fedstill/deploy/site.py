"""A site's station: answers the hub's orders with the same edge as a simulation, for one client, and outlives its process.

    runs/RUN/state.bin           what is kept for the client, and the last reply, written before the reply leaves
    runs/RUN/round-000003.bin    the same as it was when the hub had kept that round; the newest two
    runs/RUN/half.bin            the work under way (`savepoint`)
    runs/RUN/personal.safetensors    the model that serves the site, as it was last scored

An order that comes again, because the site or the hub was restarted, is answered by the reply that was kept: it is carried out
once. A hub that goes on after round t has the site go back to what it kept then, and the rounds after it come out the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..core import files
from ..core.errors import InputError, Shown, TrainingError, first_line
from ..core.memory import available
from ..core.secret import Secret
from ..core.settings import values_of
from ..core.version import __version__
from ..edge.edge import Edge
from ..edge.monitor import Monitor
from ..run.experiment import Experiment
from ..run.prepare import Simulation, from_experiment
from ..run.session import edge_of
from ..transport import wire
from ..transport.messages import Order, Reply
from .chain import AUDIT, LOG, ORDERS, Chain, digest, read
from .data import Own
from .hidden import SiteBooks, check_local, spent_at
from .meanwhile import Meanwhile
from .savepoint import Kept, Often, Savepoint, seal, unseal

KEEP = 2  # rounds, as many as the hub keeps checkpoints
WORKING = ("train", "begin", "idle")  # orders that change what is kept
Log = Callable[[str], None]
OPENING = (
    "run",
    "attempt",
    "round",
    "client",
    "clients",
    "classes",
    "experiment",
    "pending",
)  # what the hub says of a run
Talk: TypeAlias = Callable[[Mapping[str, Any], bytes], tuple[dict[str, Any], bytes]]
"""Sends the hub a message, a header and bytes, and returns its answer; raises `Unreachable`."""
PAUSE = 0.5  # seconds before a hub that could not be reached is asked again


class Unreachable(ConnectionError):
    """The hub does not answer: it is away, or the network is."""


class Station:
    """One site's client in one run at a time."""

    def __init__(
        self,
        folder: Path,
        own: Own,
        *,
        device: str = "auto",
        monitor: Monitor | None = None,
        log: Log = lambda line: None,
        audit: bool = False,
        often: Often | None = None,
        secret: Secret | None = None,
        max_epsilon: float = 0.0,
    ) -> None:
        """Keep everything under `folder`; train on `device` whatever the hub's experiment says.

        With `audit` all orders are kept, so that every round can be done again. `often` says when work under way is kept.
        Noise of differential privacy is drawn from `secret`; without one there is none. `max_epsilon` is what the site's
        runs may cost together, and then all must have privacy "local"; 0: what each run says.
        """
        self.secret, self.max_epsilon = secret, max_epsilon
        self.audit, self.often = audit, often or Often()
        self.folder, self.own, self.device, self.monitor, self.log = folder, own, device, monitor, log
        self.key: tuple[str, int] | None = (
            None  # of the run that is open: its id, and which of the hub's attempts at it
        )
        self._edge: Edge | None = None
        self.meanwhile: Meanwhile = None  # type: ignore[assignment]  # of the run that is open
        self._kept: Order | None = None  # the last order that changed what is kept, without what it sent
        self._last = (0, b"")  # the id of the last order that was carried out, and the reply
        self._trained = False  # whether what is kept is that of a client that has been asked to train

    def open(self, about: Mapping[str, Any]) -> None:
        """Set up the client of the run that the hub describes, and go on from what was kept of it in the same attempt."""
        run, attempt, client = str(about["run"]), int(about["attempt"]), int(about["client"])
        if not run.isalnum():
            raise InputError("run", run, "letters and digits")
        checksum = self.own.about()["checksum"]
        if about.get("checksum", checksum) != checksum:
            raise InputError(
                "data", checksum, f"{about['checksum']}, as when the run began: the site's data has changed"
            )
        experiment = Experiment.from_values(tomllib.loads(str(about["experiment"])))
        # what the hub says of data and machines does not hold here: nothing but the site's own data is read
        here: dict[str, Any] = {"engine": "one", "workers": 1, "device": self.device}
        experiment = dataclasses.replace(experiment, data="digits", data_root="", external="", **here)
        federation = self.own.among(client, int(about["clients"]), int(about["classes"]))
        sim, _ = from_experiment(experiment, federation)
        hidden = self._hidden(about, sim, checksum)
        bench = dataclasses.replace(sim.trainer.bench, hidden=hidden)
        sim = dataclasses.replace(sim, trainer=sim.trainer.over(bench, together=1))
        self._sim, self._client, self._protected = sim, client, hidden is not None
        audit = self.folder / run / AUDIT
        entries, _ = read(audit / LOG) if (audit / LOG).exists() else ([], [])
        self._logged = next((entry["order"] for entry in reversed(entries) if entry["what"] == "reply"), 0)
        self._chain = Chain(audit / LOG)
        self._chain.add("open", about={name: about[name] for name in OPENING if name in about})
        self._run, self.key, self._last = self.folder / run, (run, attempt), (0, b"")
        files.make_folder(self._run)
        self._reset()
        kept = unseal(self._run / "state.bin")
        pending, began = about.get("pending", (0, 0))  # an order of an earlier attempt that the hub still waits for
        if kept is not None and kept[0]["attempt"] == attempt:
            self._put(kept)
            self._last = int(kept[0]["order"]), kept[2]
            self._kept = Order("train", int(kept[0]["round"]), client, id=self._last[0])
            self.log(f"run {run}: goes on from what was kept")
        elif pending and kept is not None and int(kept[0]["order"]) == pending:
            self._put(kept)  # it will come again, and is answered by the reply that was kept
            self._last = pending, kept[2]
        elif pending or int(about["round"]):
            self._go_back(int(began) - 1 if pending else int(about["round"]), kept)

    def _hidden(self, about: Mapping[str, Any], sim: Simulation, checksum: str) -> SiteBooks | None:
        """Return what noise is drawn from; refuse a run that would reveal more than it says, or than the owner allows."""
        training = sim.training
        if training.privacy != "local":
            if self.max_epsilon:
                raise InputError("privacy", training.privacy, "'local': this site's owner has set a bound for ε")
            return None
        if self.secret is None:
            raise InputError("privacy", "local", "'off' at a site without a secret, from which its noise is drawn")
        check_local(sim.method, sim.task)
        folder, run = self.folder / str(about["run"]), str(about["run"])
        most = 0.0
        if self.max_epsilon:
            others = sum(spent_at(path) for path in self.folder.glob("*") if path.name != run)
            most = self.max_epsilon - others
            if most <= 0:
                raise InputError(
                    "privacy", "local", f"more than ε {others:.4g}, which this site's other runs have cost"
                )
        assert sim.experiment is not None
        work = {**values_of(training), "method": sim.method.id, **values_of(sim.method)}
        work |= {"model": sim.experiment.model, "head": sim.experiment.head, "data": checksum}
        bound = {"run": run, **{name: int(about[name]) for name in ("client", "clients", "classes")}}
        bound["work"] = json.dumps(work, sort_keys=True, default=str)
        return SiteBooks(folder, self.secret, bound, training, training.batch_size, most)

    def handle(self, data: bytes) -> bytes:
        """Carry out an order, once, and return the reply."""
        order, self.meanwhile.ended = wire.decode(data, Order), None
        answer = self._last[1] if order.id == self._last[0] else self._carry_out(order)
        if order.id != self._logged:
            self._note(order, data, answer)
        return answer

    def _note(self, order: Order, data: bytes, answer: bytes) -> None:
        """Log an order and the reply, before it leaves."""
        if self.audit:
            files.write(self._run / AUDIT / ORDERS / f"{order.id}.bin", data)
        about: dict[str, Any] = {"kind": order.kind, "round": order.round, "order": order.id}
        refused = bool(wire.decode(answer, Reply).refusal)
        if self.meanwhile.on and not refused:
            about["personal"] = self.meanwhile.told
        elif self.meanwhile.ended is not None:
            about["ended"] = self.meanwhile.ended
        self._chain.add("reply", **about, refused=refused, asked=digest(data), digest=digest(answer), durable=True)
        self._logged = order.id

    def _carry_out(self, order: Order) -> bytes:
        """Carry out an order that has not come before."""
        if order.client != self._client or order.run:
            return _refuse(order, "the order is to another client")
        if order.kind == "restore":
            return self._restore(order)
        if order.kind == "model":
            return _refuse(order, "the personal model stays at the site")
        protected = self._protected and (order.watch or order.kind not in ("train", "score", "state"))
        if protected or (self._protected and order.kind == "score" and order.split == "train"):
            return _refuse(order, f"{order.kind} would reveal more than privacy 'local' counts")
        assert self._edge is not None
        if order.kind in ("train", "begin") and order.taken and self._lost():
            return _refuse(order, f"what it kept of this run is gone, though its round {order.taken} has counted")
        try:
            if self.meanwhile.before(order) and self._kept is not None:
                self._keep(self._kept, self._last[1])
            (reply,) = [self.meanwhile.idle(order)] if order.kind == "idle" else self._edge.handle([order])
            reply = self.meanwhile.after(order, reply)
        except (TrainingError, InputError, RuntimeError, MemoryError) as error:
            self.log(f"round {order.round}: {order.kind} failed: {error}")
            return _refuse(order, f"it failed: {first_line(error)}")
        if order.kind == "state":
            self._snapshot(order.round, reply)
            return wire.encode(dataclasses.replace(reply, up={}))
        answer = wire.encode(reply)
        if order.kind in WORKING and not reply.refusal:
            self._keep(order, answer)
        elif order.kind == "score" and order.split == "test":
            self._export(order)
        return answer

    # ---- what is kept ------------------------------------------------------------------------------------------------
    def _reset(self) -> None:
        """Have the client begin anew."""
        self._edge = edge_of([self._sim]).edge
        self._edge.monitors = [self.monitor]
        if self.meanwhile is not None:
            self.meanwhile.abandon()
        self.meanwhile, self._kept = Meanwhile(self._edge, self._sim, self._client), None
        self._trained = False
        self._edge.savepoint = self._savepoint

    def _lost(self) -> bool:
        """Return whether the client has not trained as far as is known here, where that matters."""
        assert self._edge is not None
        return not self._trained and (self._protected or bool(self._edge.store.read(self._client)))

    def _savepoint(self, order: Order) -> Savepoint | None:
        """Return what keeps an order's work while it goes on."""
        assert self.key is not None
        about = {"order": order.id, "round": order.round}  # a hub that was restarted gives the same order out again
        return Savepoint(self._run / "half.bin", about, self._sim.device, self.often, self.log)

    def _state(self) -> Reply:
        """Return all that is kept for the client."""
        assert self._edge is not None
        (state,) = self._edge.handle([Order("state", 0, self._client)])
        report = {**state.report, "personal_steps": float(self.meanwhile.untold)} if self.meanwhile.on else state.report
        return dataclasses.replace(state, report=report)

    def _put(self, saved: Kept) -> None:
        """Put back what a file has of the client."""
        kept, self._trained = wire.decode(saved[1], Reply, self._sim.device), bool(saved[0]["trained"])
        self.meanwhile.untold = int(kept.report.get("personal_steps", 0))
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in kept.report.items()}
        assert self._edge is not None
        list(self._edge.handle([Order("restore", 0, self._client, {**kept.up, "report": numbers})]))

    def _keep(self, order: Order, answer: bytes) -> None:
        """Write what is kept now, with the reply that made it so."""
        self._last, self._kept = (order.id, answer), dataclasses.replace(order, down={})
        self._trained = self._trained or order.kind in ("train", "begin")
        assert self.key is not None
        about = {"attempt": self.key[1], "order": order.id, "round": order.round, "trained": self._trained}
        seal(self._run / "state.bin", about, wire.encode(self._state()), answer)
        (self._run / "half.bin").unlink(missing_ok=True)

    def _snapshot(self, round: int, state: Reply) -> None:
        """Keep what is kept now as that of a round."""
        assert self.key is not None
        about = {"attempt": self.key[1], "round": round, "trained": self._trained}
        seal(self._run / f"round-{round:06d}.bin", about, wire.encode(state), b"")
        for old in sorted(self._run.glob("round-*.bin"))[:-KEEP]:
            old.unlink()

    def _go_back(self, round: int, kept: Kept | None) -> None:
        """Have what was kept when the hub's round `round` was over, since it goes on from there.

        A site that was away when that round was kept has nothing of its name: what it had last is as old, or older.
        """
        named = unseal(self._run / f"round-{round:06d}.bin")
        if named is None and kept is not None and int(kept[0]["round"]) <= round:
            named = kept
        for file in sorted(self._run.glob("round-*.bin"), reverse=True):
            if named is None and int(file.stem.removeprefix("round-")) < round:
                named = unseal(file)
        if named is not None:
            self._put(named)

    def _restore(self, order: Order) -> bytes:
        """Go back to what was kept at the end of a round."""
        kept = unseal(self._run / f"round-{order.round:06d}.bin")
        if kept is None and self._lost():
            return _refuse(order, f"what it kept of round {order.round} is not there any more, or damaged")
        for later in self._run.glob("round-*.bin"):
            if int(later.stem.removeprefix("round-")) > order.round:
                later.unlink()
        self._reset()
        if kept is not None:
            self._put(kept)
        answer = wire.encode(Reply("restore", order.round, order.client, run=order.run, order=order.id))
        self._keep(order, answer)
        self.log(f"round {order.round}: back to what was kept")
        return answer

    def _export(self, order: Order) -> None:
        """Write the model that serves the site as it was scored."""
        from safetensors.torch import save

        assert self._edge is not None
        model = self._edge.served(order)
        tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in model.items()}
        about = {"round": str(order.round), "model": self._sim.experiment.model if self._sim.experiment else ""}
        files.write(self._run / "personal.safetensors", save(tensors, about))


def attend(station: Station, talk: Talk, stop: threading.Event, on_known: Callable[[], object] = lambda: None) -> None:
    """Ask the hub for orders and send it the replies, until `stop` is set; raises `InputError` if the hub refuses this site.

    `on_known` is called whenever the hub has come to know the site.
    """
    greeted = False
    while not stop.is_set():
        try:
            asking = {"do": "ask", "run": None if station.key is None else list(station.key)}
            known: tuple[dict[str, Any], bytes] = {"do": "hello"}, b""  # its data may be new to the hub
            answer, body = talk(asking, b"") if greeted else known
            do = answer.get("do")
            if do == "hello":
                about = {**station.own.about(), "machine": machine()}
                answer, _ = talk({"do": "hello", "version": __version__, "about": about}, b"")
                why = answer.get("refused") or (answer.get("why") if answer.get("do") == "refused" else "")
                if why:
                    raise InputError("site", Shown("refused by the hub"), str(why)[:300])
                greeted = True
                station.log("the hub knows this site")
                on_known()
            elif do == "open":
                try:
                    station.open(answer["about"])
                    station.meanwhile.start()
                except (InputError, TrainingError) as error:
                    station.log(f"cannot take part: {error}")
                    talk({"do": "failed", "why": str(error)}, b"")
                    stop.wait(PAUSE)
            elif do == "order":
                reply, taken = station.handle(body), False
                while not taken and not stop.is_set():  # a hub that is away for a while gets it when it is back
                    try:
                        told, _ = talk({"do": "reply", "run": answer["run"]}, reply)
                        taken = True
                        if told.get("why"):
                            station.log(f"the hub did not take a reply: {told['why']}")
                    except Unreachable:
                        stop.wait(PAUSE)
                station.meanwhile.start()
            elif do == "refused":
                raise InputError("site", Shown("refused by the hub"), str(answer.get("why")))
            elif do != "wait":
                raise InputError("hub", Shown(str(answer)[:100]), f"one of fedstill {__version__}")
        except Unreachable:
            stop.wait(PAUSE)


def machine() -> dict[str, Any]:
    """Return what the hub is told of this machine: its clock, free memory and disk."""
    return {"clock": time.time(), "memory": available(), "disk": shutil.disk_usage(".").free}


def _refuse(order: Order, reason: str) -> bytes:
    return wire.encode(
        Reply(order.kind, order.round, order.client, run=order.run, refusal=reason[:300], order=order.id)
    )
