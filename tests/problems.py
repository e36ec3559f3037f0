"""Small federations and models that the tests share.

Ragged on purpose: sizes differ, batches are partial, one client has one sample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill as fs
from fedstill.core import terms, tree
from fedstill.core.batch import Batch
from fedstill.core.settings import values_of
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.edge.edge import Edge
from fedstill.engine import pool
from fedstill.engine.trainer import Tuning
from fedstill.nn.kernels import winograd
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation
from fedstill.run.session import Session, Start, Transports, start
from fedstill.server.coordinator import Coordinator
from fedstill.testing import problems
from fedstill.testing.problems import ADAPTED as ADAPTED
from fedstill.testing.problems import CLASSES as CLASSES
from fedstill.testing.problems import MODELS as MODELS
from fedstill.testing.problems import SIZES as SIZES
from fedstill.testing.problems import Convolved as Convolved
from fedstill.testing.problems import Normed as Normed
from fedstill.testing.problems import Plain as Plain
from fedstill.testing.problems import distance as distance
from fedstill.testing.problems import identical as identical
from fedstill.testing.problems import make, needed, ragged
from fedstill.testing.problems import states as states
from fedstill.testing.spy import Spy as Spy
from fedstill.transport.local import LocalTransport
from fedstill.transport.messages import Reply

SETTINGS = dict(problems.SETTINGS)  # a dictionary of the tests' own, which a fixture may change


def run(
    method: fs.Method, model: str | nn.Module = "plain", data: fs.Federation | None = None, trainer: dict | None = None,
    **changes,
) -> fs.Run:  # fmt: skip
    """A short float64 run of the shared problem; `trainer` is what `Trainer` takes besides a run's settings."""
    settings = {**SETTINGS, "engine": "one", **needed(method), **changes}
    module = make(model) if isinstance(model, str) else model
    if trainer is None:
        return fs.simulate(method, model=module, data=data or ragged(), **settings)
    ready = simulation.prepare(method, module, data or ragged(), None, Training(**settings))
    return finish(retuned(ready, **trainer))


EAGER = Tuning(pool.Limits(call=0, start=0), winograd.Limits(0, 0, 0, 0))  # faster ways take the smallest problems, too


def retuned(ready: simulation.Simulation, **changes) -> simulation.Simulation:
    """The same run with a trainer that differs, by what `Trainer` takes."""
    return dataclasses.replace(ready, trainer=ready.trainer.over(ready.trainer.bench, **changes))


# ---- quadratic clients: loss_k(w) = a_k/2·(w − b_k)², so that fixed points are known by algebra -----------------------
A, B = (0.2, 1.0, 4.0), (-3.0, 4.0, 0.5)
COUNTS = (2, 5, 3)  # samples of each client, all alike: only the weights of the mean see them


class Offset(nn.Module):
    """Adds one parameter to everything."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


class Point(nn.Module):
    """One parameter in the body and one in the head; their sum is w, and both logits."""

    head_modules = "head"

    def __init__(self, w: float = 4.0) -> None:
        super().__init__()
        self.body, self.head = Offset(w), Offset(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, :2] * 0))


class QuadraticFit:
    """A mixin that replaces cross-entropy by the client's quadratic; x holds (a, b)."""

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        w = params["body.w"] + params["head.w"]
        return terms.mean(0.5 * batch.x[:, 0] * (w - batch.x[:, 1]) ** 2, batch)


def on_quadratics(method: fs.Method, only: int | None = None, **changes) -> fs.Run:
    """Run a method on the quadratic clients, or on one of them: full batches, full participation."""
    kind = type(method)
    quadratic = dataclass(frozen=True, kw_only=True)(type(f"Quadratic{kind.__name__}", (QuadraticFit, kind), {}))
    fields = values_of(method)
    clients = [
        (np.tile([a, b], (n, 1)), np.zeros(n, dtype=int), np.array([[a, b]]), np.zeros(1, dtype=int))
        for a, b, n in zip(A, B, COUNTS, strict=True)
    ]
    clients = clients if only is None else [clients[only]]
    settings = dict(
        rounds=400, epochs=5, batch_size=100, lr=0.1, momentum=0.0, dtype="float64", engine="one", eval_every=2000
    )
    training = Training(**{**settings, **changes})
    return until_still(
        simulation.prepare(quadratic(**fields), Point(), fs.Federation.from_arrays(clients), None, training)
    )


def until_still(ready: Simulation, every: int = 20) -> fs.Run:
    """Run to the end, or until neither the server nor any client has moved by more than 1e-14 in so many rounds."""
    session = start([Start(ready)])
    (coordinator,) = session.coordinators
    store, before = session.driver.transport.edge.store, {}
    for number, _ in enumerate(session.rounds(), start=1):
        if number % every == 0:
            memories = {str(k): store.get(k) for k in range(coordinator.task.clients)}
            now = tree.flatten(tree.clone({"server": coordinator.state.server, **memories}))
            if before and all(float((now[n] - before[n]).abs().max()) <= 1e-14 for n in now if now[n].numel()):
                break
            before = now
    return fs.Run.of(ready, coordinator, session.driver, session.trainer.name, 0.0)


def point(params: Params) -> float:
    """w = body + head."""
    return float(params["body.w"] + params["head.w"])


def cut_and_resumed(experiment: fs.Experiment, folder: Path, after: int) -> tuple[fs.Run, fs.Run]:
    """A whole run in `folder`/whole, and one that was stopped after a round and went on, in `folder`/cut."""
    uninterrupted = fs.run(experiment, out=folder / "whole")
    cut(experiment, folder / "cut", after)
    return uninterrupted, fs.resume(folder / "cut")


def cut(experiment: fs.Experiment, out: Path, after: int) -> None:
    """A run that is stopped after a round."""

    def stop(record) -> None:
        if record["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(experiment, out=out, progress=stop)


# ---- ways to run and to watch ----------------------------------------------------------------------------------------
WIRED = functools.partial(LocalTransport, through_wire=True)  # a transport whose messages become bytes and back


def finish(sim: Simulation, transport: Transports | None = None, **options: Any) -> fs.Run:
    """Run what `prepare` made to its end; `options` are those of a `Start`."""
    return simulation.finish(Start(sim, **options), transport)


def rows(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's records without the seconds that it took."""
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in history]


class Tampered:
    """A transport whose replies pass through a function: it may change them, or drop them by returning None."""

    def __init__(self, change: Callable[[Reply], Reply | None]) -> None:
        self.change = change

    def __call__(self, edge: Edge) -> LocalTransport:
        """Return the transport."""
        change = self.change

        class Carrier(LocalTransport):
            def replies(self, timeout: float | None = None) -> Iterator[Reply]:
                for reply in super().replies(timeout):
                    changed = change(reply)
                    if changed is not None:
                        yield changed

        return Carrier(edge)


class Watch:
    """A callback that keeps a copy of the server's state after every round."""

    def __init__(self) -> None:
        self.servers: list[Tree] = []
        self.coordinator: Coordinator

    def on_start(self, coordinator: Coordinator) -> None:
        """Note whose run it is."""
        self.coordinator = coordinator

    def on_round(self, coordinator: Coordinator, record: dict[str, Any]) -> None:
        """Copy the state."""
        self.servers.append(tree.clone(coordinator.state.server))

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing."""


def first_rounds(session: Session, rounds: int = 1) -> None:
    """Carry out some rounds of a session's runs by hand, and stop there."""
    for coordinator in session.coordinators:
        for t in range(1, rounds + 1):
            session.driver.run({coordinator.run: coordinator.round(dataclasses.replace(coordinator.task, round=t))})
