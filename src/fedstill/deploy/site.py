"""A site's client: carries out the hub's orders with the same edge as a simulation, and outlives its process.

    runs/RUN/*.bin                   the client's state (`state_files`)
    runs/RUN/personal.safetensors    the model that serves the site, as it was last scored

An order that comes again, because the site or the hub was restarted, is answered with the saved reply: it is carried out once.
When the hub continues after round t, the site goes back to its state of round t, and the rounds after it come out the same.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core import files
from ..core.errors import InputError, Shown, TrainingError, first_line
from ..core.reading import Unreadable, field, items, parse_json
from ..core.secret import Secret
from ..data.preprocess import Preparation
from ..edge.edge import Edge
from ..edge.monitor import Monitor
from ..run.experiment import Experiment
from ..run.prepare import from_experiment
from ..run.session import edge_of
from ..transport import wire
from ..transport.messages import Order, Reply
from .background import BackgroundTraining
from .chain import AUDIT, LOG, ORDERS, Chain, digest, read
from .data import SiteData
from .preparation import Agreed
from .privacy_log import open_site_log
from .savepoint import SaveEvery, Savepoint
from .state_files import Saved, StateFiles, read_saved

CHANGING = ("train", "begin", "idle")  # orders that change the client's state
RUN_FIELDS = (
    "run",
    "attempt",
    "round",
    "client",
    "clients",
    "classes",
    "experiment",
    "pending",
    "preparation",
)  # of a run, for the log
Log = Callable[[str], None]


class SiteClient:
    """One site's client in one run at a time."""

    def __init__(
        self,
        folder: Path,
        data: SiteData,
        *,
        device: str = "auto",
        monitor: Monitor | None = None,
        log: Log = lambda line: None,
        audit: bool = False,
        often: SaveEvery | None = None,
        secret: Secret | None = None,
        max_epsilon: float = 0.0,
    ) -> None:
        """Keep everything under `folder`; train on `device` whatever the hub's experiment says.

        With `audit` all orders are saved, so that every round can be done again. `often` says when training under way is saved.
        Noise of differential privacy is drawn from `secret`; without one there is none. `max_epsilon` is what the site's
        runs may cost together, and then all must have privacy "local"; 0: what each run says.
        """
        self.secret, self.max_epsilon = secret, max_epsilon
        self.audit, self.often = audit, often or SaveEvery()
        self.folder, self.data, self.device, self.monitor, self.log = folder, data, device, monitor, log
        self._preparation: Preparation | None = None  # how the samples of the run that is open were made
        self.key: tuple[str, int] | None = None  # the run that is open: its id, and the hub's attempt at it
        # the rest belongs to the run that is open
        self._edge: Edge | None = None
        self.background: BackgroundTraining = None  # type: ignore[assignment]
        self._last_change: Order | None = None  # the last order that changed the client's state, without its tensors
        self._last = (0, b"")  # the id of the order that was answered last, and the reply
        self._trained = False  # whether the state is that of a client that has been asked to train

    def open(self, about: Mapping[str, Any]) -> None:
        """Set up the client of the run that the hub describes, with the state that was saved of it."""
        run, attempt, client = str(about["run"]), int(about["attempt"]), int(about["client"])
        if not run.isalnum():
            raise InputError("run", run, "letters and digits")
        checksum = self.data.about()["checksum"]
        if about.get("checksum", checksum) != checksum:
            raise InputError(
                "data", checksum, f"{about['checksum']}, as when the run began: the site's data has changed"
            )
        experiment = Experiment.from_values(tomllib.loads(str(about["experiment"])))
        # what the hub says of data and machines does not hold here: nothing but the site's own data is read
        here: dict[str, Any] = {"engine": "one", "workers": 1, "device": self.device, "objective": "auto"}
        experiment = dataclasses.replace(experiment, data="digits", data_root="", external="", **here)
        data = self.data.under(about.get("preparation"))
        federation = data.among(client, int(about["clients"]), int(about["classes"]))
        self._preparation = data.preparation
        sim, _ = from_experiment(experiment, federation)
        ours = sim.net.fixed.digest()
        theirs = str(about.get("constants", ours))
        if ours != theirs:
            right = f"with the hub's frozen weights ({theirs[:12] or 'none'}): both make the model from the same file"
            raise InputError("model", Shown(ours[:12] or "nothing frozen"), right)
        privacy_log = open_site_log(about, sim, checksum, self.folder, self.secret, self.max_epsilon)
        measures = dataclasses.replace(sim.trainer.bench.measures, rows=False)  # nothing of single samples leaves
        bench = dataclasses.replace(sim.trainer.bench, hidden=privacy_log, measures=measures)
        sim = dataclasses.replace(sim, trainer=sim.trainer.over(bench, together=1))
        self._sim, self._client, self._protected = sim, client, privacy_log is not None
        audit = self.folder / run / AUDIT
        entries, _ = read(audit / LOG) if (audit / LOG).exists() else ([], [])
        self._logged = next((entry["order"] for entry in reversed(entries) if entry["what"] == "reply"), 0)
        self._chain = Chain(audit / LOG)
        self._chain.add("open", about={name: about[name] for name in RUN_FIELDS if name in about})
        self._run, self.key, self._last = self.folder / run, (run, attempt), (0, b"")
        self._files = StateFiles(self._run)
        self._reset()
        self._resume(int(about["round"]), *about.get("pending", (0, 0)))

    def _resume(self, round: int, pending: int, pending_round: int) -> None:
        """Load the state with which the hub goes on after `round`.

        `pending` is the id of an order of an earlier attempt (of the round `pending_round`) that the hub still awaits; 0: none.
        """
        assert self.key is not None
        latest = read_saved(self._files.latest)
        if latest is not None and latest.about["attempt"] == self.key[1]:  # this process was restarted, the hub was not
            self._load(latest)
            self._last = int(latest.about["order"]), latest.reply
            self._last_change = Order("train", int(latest.about["round"]), self._client, id=self._last[0])
            self.log(f"run {self.key[0]}: goes on from what was kept")
        elif pending and latest is not None and int(latest.about["order"]) == pending:
            self._load(latest)  # the order will come again, and is answered with the saved reply
            self._last = pending, latest.reply
        else:
            saved = self._files.at_or_before(pending_round - 1 if pending else round) if pending or round else None
            if saved is not None:
                self._load(saved)
            # what was saved after that belongs to rounds that the hub does again: a later attempt must not find it
            self._files.remove_after(round)
            about = self._about(int(saved.about["round"]) if saved is not None else 0)
            self._files.write_latest({**about, "order": 0}, wire.encode(self._state()), b"")

    def prepare(self, asked: bytes) -> bytes:
        """Return what the hub is given to make all sites' samples alike: numbers of samples, and sums over training samples."""
        if self.data.raw is None:
            raise InputError("data", Shown("arrays"), "read from a file: the run prepares its samples")
        try:
            question = parse_json(asked)
            agreed = Agreed.from_dict(field(question, "agreed", dict))
            mean = items(question, "mean", float) if "mean" in question else None
        except Unreadable as error:
            raise InputError("question", Shown("of the hub"), str(error)) from None
        ready = self.data.raw.under(agreed)
        told = ready.tells(mean)
        if told and self.max_epsilon:
            right = "0: sums of training samples are nothing that ε counts, nor is which categories they have"
            raise InputError("max_epsilon", self.max_epsilon, right)
        answer = ready.answer(mean)
        self.log(f"the hub is given the numbers of samples{f', and {told}' if told else ''}")
        return json.dumps(answer).encode()

    def handle(self, data: bytes) -> bytes:
        """Carry out an order, once, and return the reply."""
        order, self.background.ended = wire.decode(data, Order), None
        again = bool(self._last[1]) and order.id == self._last[0]
        answer = self._last[1] if again else self._carry_out(order)
        if order.id != self._logged:
            self._log_reply(order, data, answer)
        return answer

    def _log_reply(self, order: Order, data: bytes, answer: bytes) -> None:
        """Log an order and the reply, before it leaves."""
        if self.audit:
            files.write(self._run / AUDIT / ORDERS / f"{order.id}.bin", data)
        about: dict[str, Any] = {"kind": order.kind, "round": order.round, "order": order.id}
        refused = bool(wire.decode(answer, Reply).refusal)
        if self.background.on and not refused:
            about["personal"] = self.background.reported
        elif self.background.ended is not None:
            about["ended"] = self.background.ended
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
        if self._protected and _reveals(order):
            return _refuse(order, f"{order.kind} would reveal more than privacy 'local' counts")
        assert self._edge is not None
        if order.kind in ("train", "begin") and order.taken and self._lost():
            return _refuse(order, f"what it kept of this run is gone, though its round {order.taken} has counted")
        try:
            if self.background.before(order) and self._last_change is not None:
                self._save(self._last_change, self._last[1])
            (reply,) = [self.background.idle(order)] if order.kind == "idle" else self._edge.handle([order])
            reply = self.background.after(order, reply)
        except (TrainingError, InputError, RuntimeError, MemoryError) as error:
            self.log(f"round {order.round}: {order.kind} failed: {error}")
            return _refuse(order, f"it failed: {first_line(error)}")
        if order.kind == "state":
            self._files.write_round(order.round, self._about(order.round), wire.encode(reply))
            return wire.encode(dataclasses.replace(reply, up={}))
        answer = wire.encode(reply)
        if order.kind in CHANGING and not reply.refusal:
            self._save(order, answer)
        elif order.kind == "score" and order.split == "test":
            self._export(order)
        return answer

    # ---- the client's state ------------------------------------------------------------------------------------------
    def _reset(self) -> None:
        """Give the client its initial state."""
        self._edge = edge_of([self._sim]).edge
        self._edge.monitors = [self.monitor]
        if self.background is not None:
            self.background.cancel()
        self.background, self._last_change = BackgroundTraining(self._edge, self._sim, self._client), None
        self._trained = False
        self._edge.savepoint = self._savepoint

    def _stateful(self) -> bool:
        """Return whether a client of this run depends on what it has saved."""
        assert self._edge is not None
        return self._protected or bool(self._edge.store.read(self._client))

    def _lost(self) -> bool:
        """Return whether the state is that of a client that was never asked to train, though it matters."""
        return not self._trained and self._stateful()

    def _savepoint(self, order: Order) -> Savepoint | None:
        """Return what saves an order's training while it goes on."""
        about = {"order": order.id, "round": order.round}  # a hub that was restarted gives the same order out again
        return Savepoint(self._files.half, about, self._sim.device, self.often, self.log)

    def _about(self, round: int) -> dict[str, Any]:
        """Return what a state file says of itself."""
        assert self.key is not None
        return {"attempt": self.key[1], "round": round, "trained": self._trained}

    def _save(self, order: Order, answer: bytes) -> None:
        """Save the client's state, with the reply to the order that has changed it."""
        self._last, self._last_change = (order.id, answer), dataclasses.replace(order, down={})
        self._trained = self._trained or order.kind in ("train", "begin")
        self._files.write_latest({**self._about(order.round), "order": order.id}, wire.encode(self._state()), answer)
        self._files.half.unlink(missing_ok=True)

    def _state(self) -> Reply:
        """Return the client's state, with the steps of background training that no reply has reported."""
        assert self._edge is not None
        (state,) = self._edge.handle([Order("state", 0, self._client)])
        more = {"personal_steps": float(self.background.unreported)} if self.background.on else {}
        return dataclasses.replace(state, report={**state.report, **more})

    def _load(self, saved: Saved) -> None:
        """Give the client the state of a file."""
        state, self._trained = wire.decode(saved.state, Reply, self._sim.device), bool(saved.about["trained"])
        self.background.unreported = int(state.report.get("personal_steps", 0))
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in state.report.items()}
        assert self._edge is not None
        list(self._edge.handle([Order("restore", 0, self._client, {**state.up, "report": numbers})]))

    def _restore(self, order: Order) -> bytes:
        """Go back to the state of a round; a client without a state has nothing to go back to."""
        saved = self._files.of_round(order.round)
        if saved is None and self._stateful():
            return _refuse(order, f"what it kept of round {order.round} is not there any more, or damaged")
        self._files.remove_after(order.round)
        self._reset()
        if saved is not None:
            self._load(saved)
        answer = wire.encode(Reply("restore", order.round, order.client, run=order.run, order=order.id))
        self._save(order, answer)
        self.log(f"round {order.round}: back to what was kept")
        return answer

    def _export(self, order: Order) -> None:
        """Write the model that serves the site as it was scored."""
        from safetensors.torch import save

        assert self._edge is not None
        tensors = self._sim.net.export(self._edge.served(order))
        about = {"round": str(order.round), "model": self._sim.experiment.model if self._sim.experiment else ""}
        if self._preparation is not None:
            about["preprocessing"] = json.dumps(self._preparation.to_dict(), ensure_ascii=False)
        files.write(self._run / "personal.safetensors", save(tensors, about))


def _reveals(order: Order) -> bool:
    """Return whether the reply would tell of training samples what differential privacy does not count."""
    if order.kind == "score":
        return order.split == "train"
    return order.kind not in ("train", "state") or order.watch


def _refuse(order: Order, reason: str) -> bytes:
    return wire.encode(
        Reply(order.kind, order.round, order.client, run=order.run, refusal=reason[:300], order=order.id)
    )
