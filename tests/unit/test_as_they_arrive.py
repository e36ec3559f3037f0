"""FedAsync and FedBuff where time is real: replies in a scripted order, and what the papers' formulas make of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.core.errors import TrainingError
from fedstill.edge.edge import Edge
from fedstill.engine.bench import Work
from fedstill.run import simulation
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.transport.messages import Order, Reply

from ..problems import SETTINGS, distance, finish, identical, make, ragged, states

SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1), (8, 2), (6, 3), (9, 2))
REAL = {"profile": "real", "staleness_a": 1.0}
LAST = (7, 0, 3, 3, 5, 7, 1, 0, 0, 6, 7, 2, 3, 4)  # who answers next, if it is at work; over and over


class Scripted:
    """A transport whose replies to `train` come in a scripted order, the others at once; a client trains when it answers."""

    seconds = 0.0

    def __init__(self, edge: Edge, script: Sequence[int] = LAST) -> None:
        self.edge, self.script = edge, itertools.cycle(script)
        self.out: dict[int, Order] = {}
        self.others: list[Order] = []

    def dispatch(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.kind == "train":
                assert order.client not in self.out  # nobody is asked twice
                self.out[order.client] = order
            else:
                # nor for what it keeps while it is at work
                assert order.client not in self.out or order.kind in ("score", "model")
                self.others.append(order)

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        while self.others or self.out:
            others, self.others = self.others, []
            yield from self.edge.handle(others)
            if self.out:
                order = self.out.pop(next(k for k in self.script if k in self.out))
                yield from self.edge.handle([order])

    def alive(self) -> Sequence[int]:
        return range(self.edge.clients)


def prepared(method: fs.Method, model: str = "normed", **changes) -> Simulation:
    training = Training(**{**SETTINGS, "engine": "one", **REAL, **changes})
    return prepare(method, make(model), ragged(SIZES), None, training)


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
@pytest.mark.parametrize("method", [fs.Ditto(), fs.FedPer(), fs.PFedSD()], ids=lambda m: m.id)
def test_the_formulas_of_the_papers_client_by_client(method: fs.Method, mode: str) -> None:
    """One client at a time, from a list of who is at work, with the papers' formulas on every tensor."""
    buffer, rounds = (1, 14) if mode == "fedasync" else (3, 6)
    changes = {"mode": mode, "rounds": rounds, "participation": 5 / 8, "buffer": 3 if mode == "fedbuff" else 0}
    changes |= {"mixing": 0.8, "staleness": "polynomial"}
    ready = prepared(method, "plain", **changes)
    run = finish(ready, Scripted)
    (coordinator,) = start([Start(prepared(method, "plain", **changes))], Scripted).coordinators
    bench, script = ready.trainer.bench, itertools.cycle(LAST)
    w = coordinator.state.server["params"]
    memories = {k: method.init_client(bench.task, ready.initial) for k in range(8)}
    lasts: dict[int, int] = {}  # by client the version from which it trained last
    at_work: dict[int, tuple[int, dict]] = {}  # by client the version that it has, and what it was sent
    for t in range(1, rounds + 1):
        coordinator.rounds.orders = dict.fromkeys(at_work)  # who is asked is the sampler's affair
        for k in coordinator.sample(t):
            at_work[k] = t, method.send(dataclasses.replace(bench.task, round=t), {"params": w}, k)
        assert len(at_work) == 5
        answered: dict[int, tuple[int, dict]] = {}
        while len(answered) < buffer:
            k = next(k for k in script if k in at_work)
            answered[k] = at_work.pop(k)
        fresh = {}
        for k, (version, down) in answered.items():
            (done,) = ready.trainer.train(version, [Work(k, down, memories[k], last=lasts.get(k, 0))])
            memories[k], lasts[k] = done.memory, version
            s = 1 / (t - version + 1)
            fresh[k] = {
                n: (1 - 0.8 * s) * w[n] + 0.8 * s * v if mode == "fedasync" else w[n] + s * (v - down["params"][n])
                for n, v in done.up["params"].items()
            }
        w = {**w, **{n: sum(part[n] for part in fresh.values()) / buffer for n in next(iter(fresh.values()))}}
        record = run.history[t - 1]
        assert record["answered"] == list(answered)
        assert record["participants"] == sorted(answered)
        assert record["at_work"] == sorted(at_work)
        assert record["staleness"] == {str(k): t - answered[k][0] for k in sorted(answered)}
        scored = set(range(8)) - (set(at_work) if t < rounds else set())
        assert set(record["personal_clients"]) == {str(k) for k in scored}
    assert max(v for record in run.history for v in record["staleness"].values()) > 1  # or less is shown
    assert distance({"": w}, {"": run.server["params"]}) < 1e-12


UNIFORM = [fs.FedAvg(mean="uniform"), fs.Ditto(mean="uniform"), fs.SpectralCoDistillation(mean="uniform")]


@pytest.mark.parametrize("method", UNIFORM, ids=lambda m: m.id)
@pytest.mark.parametrize("script", [range(8), range(7, -1, -1)], ids=["cohort", "reverse"])
def test_a_buffer_as_large_as_the_cohort_is_the_synchronous_run(method: fs.Method, script: Sequence[int]) -> None:
    how = {"participation": 0.5, "rounds": 4}
    sync = finish(prepared(method, **how))
    live = dataclasses.replace(method, mean="weighted")
    buffered = finish(prepared(live, mode="fedbuff", buffer=4, **how), lambda edge: Scripted(edge, script))
    assert identical(states(sync), states(buffered))
    numbers = ("participants", "personal_clients", "loss", "steps")
    assert [[r[n] for n in numbers] for r in sync.history] == [[r[n] for n in numbers] for r in buffered.history]
    assert all(set(r["staleness"].values()) == {0} for r in buffered.history)


class Refusing(Scripted):
    """Client 3 refuses whatever it is asked; the reply of client 5 never has the right form."""

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        for reply in super().replies(timeout):
            if reply.kind == "train" and reply.client == 3:
                reply = dataclasses.replace(reply, up={}, report={}, refusal="battery at 5%")
            if reply.kind == "train" and reply.client == 5:
                reply = dataclasses.replace(reply, up={"params": {}})
            yield reply


def test_refusals_are_none_of_the_k_and_wrong_uploads_are_named() -> None:
    run = finish(prepared(fs.FedAvg(), mode="fedbuff", buffer=2, rounds=8), Refusing)
    refused = [r for r in run.history if 3 in r.get("refused", ())]
    assert refused
    assert all(len(r["answered"]) == 2 + (3 in r.get("refused", ())) for r in run.history)
    rejected = [r for r in run.history if "5" in r.get("rejected", {})]
    assert rejected
    assert all(len(r["participants"]) == 1 and 5 not in r["participants"] for r in rejected)


def test_nobody_left_ends_the_run() -> None:
    class Gone(Scripted):
        def replies(self, timeout: float | None = None) -> Iterator[Reply]:
            return iter(())

    with pytest.raises(TrainingError, match="5 clients are at work, and nobody answers"):
        finish(prepared(fs.FedAvg(), mode="fedasync"), Gone)


# ---- a server that is stopped and goes on ----------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_orders_under_way_are_given_out_again_with_their_ids(mode: str, tmp_path: Path) -> None:
    """With the same arrivals the run that was stopped ends with the bits of the one that was not."""
    experiment = fs.Experiment(
        method=fs.Ditto(), rounds=9, epochs=1, clients=8, partition="iid", checkpoint_every=2, batch_size=32,
        participation=0.75, mode=mode, buffer=2 if mode == "fedbuff" else 0, device="cpu", engine="one", **REAL,
    )  # fmt: skip
    ids: list[dict[int, int]] = []

    def carried(skip: int) -> Callable[[Edge], Scripted]:
        """A transport whose script goes on where that of the first process was at the checkpoint."""

        class Noting(Scripted):
            def dispatch(self, orders: Sequence[Order]) -> None:
                super().dispatch(orders)
                ids.append({order.client: order.id for order in orders if order.kind == "train"})

        return lambda edge: Noting(edge, [*LAST[skip % len(LAST) :], *LAST[: skip % len(LAST)]])

    whole = fs.run(experiment, out=tmp_path / "whole", transport=carried(0))
    out = tmp_path / "cut"

    def stop(record) -> None:
        if record["round"] == 7:
            raise KeyboardInterrupt

    taken: list[int] = []  # of the script when the last checkpoint was kept, that of round 6

    class Counting(Scripted):
        used = 0

        def __init__(self, edge: Edge) -> None:
            super().__init__(edge)
            counted = iter(self.script)

            def count() -> Iterator[int]:
                for k in counted:
                    Counting.used += 1
                    yield k

            self.script = count()

        def dispatch(self, orders: Sequence[Order]) -> None:
            super().dispatch(orders)
            if any(order.kind == "state" for order in orders):
                taken.append(Counting.used)
            ids.append({order.client: order.id for order in orders if order.kind == "train"})

    with pytest.raises(KeyboardInterrupt):
        fs.run(experiment, out=out, transport=Counting, progress=stop)
    first = {k: number for some in ids for k, number in some.items()}
    ids.clear()
    resumed = fs.resume(out, transport=carried(taken[-1]))
    again = next(some for some in ids if some)
    under_way = resumed.history[5]["at_work"]
    assert under_way
    assert all(again[k] == first[k] for k in under_way)
    assert [r["answered"] for r in whole.history] == [r["answered"] for r in resumed.history]
    assert identical({"": whole.server["params"]}, {"": resumed.server["params"]})
    assert [r["staleness"] for r in whole.history] == [r["staleness"] for r in resumed.history]


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_real_seconds_are_refused_where_clients_are_simulated() -> None:
    with pytest.raises(fs.InputError, match=r"profile = 'real': should be 'uniform'.*fedstill hub run"):
        fs.run(fs.Experiment(method=fs.FedAvg(), mode="fedasync", profile="real"))
    with pytest.raises(fs.InputError, match=r"drop = 0\.1: should be 0\.0 with profile 'real'"):
        Training(profile="real", drop=0.1)
    with pytest.raises(fs.InputError, match=r"without a profile .*in a deployment: real"):
        Training(mode="fedbuff")
    with pytest.raises(fs.InputError, match="sampler = 'available'"):
        Training(profile="real", sampler="available")
    assert simulation.partition_record(ragged(), "real") == simulation.partition_record(ragged(), "")
