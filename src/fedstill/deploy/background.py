"""Wait-free training at a site: the personal model trains in a thread between an upload and the next order that needs it.

    fixed            as many steps as the method defines; an order that needs the personal model waits for them
    until-download   steps until the next order arrives, at most the cap; scores are those of a copy after the steps so far

Training under way is not saved: where a kill or a hub's restart ends it, it begins again from the state after the upload. Once an
order has ended it, `SiteClient` saves the result before the order's own work begins, and the reply reports the number of steps.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from ..core.errors import TrainingError, first_line
from ..edge.edge import Edge
from ..engine.bench import Done, threads
from ..engine.paced import MOST, Paced
from ..run.prepare import Simulation
from ..transport.messages import Order, Reply

FAILED = -1  # in place of a number of steps: personal training ended with an error
ENDING = ("train", "begin", "idle")  # orders that end personal training


class BackgroundTraining:
    """One client's personal training, from one upload to the next order."""

    def __init__(self, edge: Edge, sim: Simulation, client: int) -> None:
        self.edge, self.client, self.trainer = edge, client, sim.trainer
        self.until = sim.training.wait_free == "until-download"
        self.on = sim.training.wait_free != "off"
        self.most = sim.training.personal_cap or MOST
        self.exactly: int | None = None  # steps to make, where the past is done again
        self.unreported = 0  # steps that have ended up in the client's state, and that no reply has reported
        self.reported = 0  # steps that the last reply reported
        self.ended: int | None = None  # steps of the personal training that the last order ended; FAILED: it had failed
        self._paced: Paced | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # whose holder works: the thread for one step, or an order
        self._stop = threading.Event()
        self._waiting = threading.Event()  # an order waits for its turn
        self._error: BaseException | None = None
        self._done: Done | None = None
        self._finite, self._loss = True, 0.0  # of the last one that ended

    def start(self) -> None:
        """Train from now on, if there is anything to train."""
        if not self.on or self._thread is not None or self.client not in self.edge.begun:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="personal training", daemon=True)
        self._thread.start()

    def before(self, order: Order) -> bool:
        """Prepare for an order; return whether personal steps have changed the client's state."""
        self.edge.copies.clear()
        if not self.on or self.client not in self.edge.begun:
            return False
        if order.kind == "score" and self.until:
            self._score_copy()
        elif order.kind in ENDING or order.kind in ("score", "tune"):
            return self._end()
        return False

    def after(self, order: Order, reply: Reply) -> Reply:
        """Return the reply with the number of personal steps since the last one."""
        if not self.on or order.kind not in ENDING or reply.refusal:
            return reply
        self.reported, self.unreported = self.unreported, 0
        report = {**reply.report, "personal_steps": float(self.reported)}
        if not self._finite:
            report["finite"], self._finite = 0.0, True
        return dataclasses.replace(reply, report=report)

    def idle(self, order: Order) -> Reply:
        """Answer an order to end personal training."""
        report = {"loss": self._loss, "steps": float(self.unreported), "finite": 1.0}
        return Reply(order.kind, order.round, order.client, {}, report, run=order.run, order=order.id)

    def cancel(self) -> None:
        """Stop, and drop what was made."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _new(self) -> Paced:
        begun = self.edge.begun[self.client]
        return Paced(self.trainer.bench, begun.round, self.edge.idle_work(self.client), self.most)

    def _work(self) -> None:
        """Train, as a thread: a step, then whoever waits has a turn."""
        try:
            with threads(self.trainer.training_threads):
                if not self.until:
                    self._done = self._fixed()
                    return
                with self._turn:
                    self._paced = self._new()
                more = True
                while more and not self._stop.is_set():
                    with self._turn:
                        more = self._paced.step()
                    while self._waiting.is_set() and not self._stop.is_set():
                        self._stop.wait(0.001)
        except BaseException as error:
            self._error = error

    def _fixed(self) -> Done:
        """Make the steps that the method defines."""
        bench, begun = self.trainer.bench, self.edge.begun[self.client]
        ((_, phase, _),) = bench.part("idle", begun.round)
        epochs = bench.task.epochs if phase.epochs is None else phase.epochs
        steps = bench.plan.steps(bench.data.train.sizes[self.client], epochs)
        (done,) = self.trainer.train(begun.round, [self.edge.idle_work(self.client, steps)])
        return done

    def _score_copy(self) -> None:
        """Have the client scored as it would be if it ended now."""
        self._waiting.set()
        try:
            with self._turn:
                paced = self._paced or self._new() if self.exactly is None else self._repeat(self.exactly)
                done, round = paced.result(), self.edge.begun[self.client].round
        finally:
            self._waiting.clear()
        self.reported = done.steps
        if done.steps or self.edge.begun[self.client].local:
            self.edge.copies[self.client] = done.memory, round

    def _repeat(self, steps: int) -> Paced:
        """Return personal training after so many steps."""
        paced = self._new()
        with torch.enable_grad():
            for _ in range(steps):
                paced.step()
        return paced

    def _end(self) -> bool:
        """End personal training, and put its result into the client's state."""
        if self.until:
            self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        paced, self._paced = self._paced, None
        done, self._done = self._done, None
        begun = self.edge.begun[self.client]
        if self.exactly == FAILED:
            del self.edge.begun[self.client]
            return False
        if error is not None:
            self.ended = FAILED
            del self.edge.begun[self.client]
            raise TrainingError(f"personal training of round {begun.round}: {first_line(error)}")
        if self.until:
            made = self._repeat(self.exactly) if self.exactly is not None else paced or self._new()
            done = made.result()
        elif done is None:
            done = self._fixed()
        self._loss, self.ended = done.loss, done.steps
        changed = bool(done.steps or begun.local)
        self.edge.keep(self.client, done if changed else None)
        self.unreported, self._finite = self.unreported + done.steps, self._finite and done.finite
        return changed
