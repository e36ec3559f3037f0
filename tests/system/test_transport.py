"""A second transport: clients in two worker processes, every message as bytes. Nothing else changes, not even a bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.edge.edge import Edge
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from ..problems import cut, identical, needed, states

RUNNING: list[multiprocessing.Process] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End the workers of a test with it: a run keeps its clients as long as it may be asked for their models."""
    yield
    for work in RUNNING:
        work.kill()
        work.join()
    RUNNING.clear()


class Processes:
    """A transport whose clients live in two processes, by the parity of their numbers."""

    def __init__(self, edge: Edge) -> None:
        self.clients, self.seconds, self.pipes, self.out = edge.clients, 0.0, [], [0, 0]
        for _ in range(2):
            here, there = multiprocessing.Pipe()
            work = multiprocessing.get_context("fork").Process(target=serve, args=(edge, there), daemon=True)
            work.start()
            there.close()
            self.pipes.append(here)
            RUNNING.append(work)

    def dispatch(self, orders: Sequence[Order]) -> None:
        for number, pipe in enumerate(self.pipes):
            messages = [wire.encode(order) for order in orders if order.client % 2 == number]
            self.out[number] += len(messages)
            pipe.send_bytes(len(messages).to_bytes(4, "big"))
            for message in messages:
                pipe.send_bytes(message)

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        for number, pipe in enumerate(self.pipes):
            while self.out[number]:
                self.out[number] -= 1
                yield wire.decode(pipe.recv_bytes(), Reply)

    def alive(self) -> Sequence[int]:
        return range(self.clients)


def serve(edge: Edge, pipe: Connection) -> None:
    while True:
        count = int.from_bytes(pipe.recv_bytes(), "big")
        orders = [wire.decode(pipe.recv_bytes(), Order) for _ in range(count)]
        for reply in edge.handle(orders):
            pipe.send_bytes(wire.encode(reply))


SMALL = {
    "clients": 5, "rounds": 3, "epochs": 1, "participation": 0.6, "engine": "one", "workers": 1, "device": "cpu",
    "checkpoint_every": 1, "batch_size": 32,
}  # fmt: skip
FURTHER = {"new": True, "averaged": True, "forgetting": True, "fine_tune": 1, "newcomers": 1, "join_epochs": 1}


def experiment(method: str, **changes) -> fs.Experiment:
    chosen = fs.METHODS[method]()
    return fs.Experiment(method=chosen, **{**SMALL, **needed(chosen), **changes})


def records(run: fs.Run) -> list[dict]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.history]


def same(ours: fs.Run, theirs: fs.Run) -> bool:
    assert records(ours) == records(theirs)
    assert ours.after == theirs.after
    assert {"new", "fine_tuned", "newcomers_before", "newcomers_after"} <= set(ours.after)
    assert identical(states(ours), states(theirs))
    assert all(
        identical({"": fs.tree.flatten(ours.memory(k))}, {"": fs.tree.flatten(theirs.memory(k))}) for k in range(5)
    )
    assert ours.cost.flops == theirs.cost.flops
    return True


@pytest.mark.parametrize("method", fs.METHODS)
def test_every_number_and_model_is_the_same(method: str, tmp_path: Path) -> None:
    """History, generic and personal models, further scores, checkpoints; and a run that is cut and resumed on it."""
    one = experiment(method, **FURTHER)
    local = fs.run(one, out=tmp_path / "local")
    wired = fs.run(one, out=tmp_path / "wired", transport=Processes)
    assert same(local, wired)
    for name in ("round-000002", "round-000003"):
        ours, theirs = (tmp_path / kind / "checkpoints" / f"{name}.safetensors" for kind in ("local", "wired"))
        assert ours.read_bytes() == theirs.read_bytes()
    cut(one, tmp_path / "cut", 2)
    assert same(local, fs.resume(tmp_path / "cut", transport=Processes))


@pytest.mark.parametrize(
    ("method", "timing"),
    [
        ("scaffold", {"over_select": 1.5, "late": "fold"}),
        ("feddyn", {"drop": 0.3, "deadline": 20.0}),
        ("pfedsd", {"mode": "fedbuff", "buffer": 2}),
        ("ditto", {"wait_free": "until-download", "personal_cap": 4}),
    ],
)
def test_simulated_time_is_the_same(method: str, timing: dict, tmp_path: Path) -> None:
    one = experiment(method, profile="lognormal:1", rounds=4, **timing)
    local, wired = fs.run(one), fs.run(one, transport=Processes)
    assert records(local) == records(wired)
    assert identical(states(local), states(wired))
    cut(one, tmp_path / "cut", 2)
    assert identical(states(local), states(fs.resume(tmp_path / "cut", transport=Processes)))
