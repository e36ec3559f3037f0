"""FedAsync and FedBuff: the formulas by hand, the events by a slow simulation of their own, and what they must be equal to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill import methods
from fedstill.core import tree
from fedstill.core.errors import CannotStack
from fedstill.core.method import Upload
from fedstill.engine.bench import Work
from fedstill.run import together
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.timing.asynchronous import Asynchrony
from fedstill.timing.schedule import MERGE, epochs

from ..problems import (
    SETTINGS,
    WIRED,
    cut_and_resumed,
    distance,
    finish,
    first_rounds,
    identical,
    make,
    needed,
    ragged,
    states,
)

SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1), (8, 2), (6, 3), (9, 2))
SLOW = {"profile": "lognormal:0.8"}


def prepared(method: fs.Method, engine: str = "one", model: str = "normed", **changes) -> Simulation:
    training = Training(**{**SETTINGS, "engine": engine, **SLOW, **needed(method), **changes})
    return prepare(method, make(model), ragged(SIZES), None, training)


def simulated(method: fs.Method, engine: str = "one", model: str = "normed", **changes) -> fs.Run:
    return finish(prepared(method, engine, model, **changes))


# ---- the formulas ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "a", "b", "expected"),
    [
        ("constant", 3.0, 4, {0: 1.0, 9: 1.0}),
        ("hinge", 10.0, 4, {0: 1.0, 4: 1.0, 5: 1 / 11, 6: 1 / 21}),
        ("hinge", 0.5, 0, {0: 1.0, 1: 1 / 1.5, 2: 0.5}),
        ("polynomial", 0.5, 4, {0: 1.0, 3: 0.5, 8: 1 / 3}),
        ("polynomial", 2.0, 4, {0: 1.0, 1: 0.25, 3: 1 / 16}),
    ],
)
def test_how_the_weight_falls(kind: str, a: float, b: int, expected: dict[int, float]) -> None:
    how = Asynchrony("fedbuff", staleness=kind, a=a, b=b)
    assert {x: how.scale(x) for x in expected} == pytest.approx(expected, rel=1e-15)


@pytest.fixture
def setting():
    """A task, and trees of numbers in the shape of a model with BatchNorm: w, w_τ, and what two clients made of it."""
    task = prepared(fs.FedAvg()).trainer.bench.task
    g = torch.Generator().manual_seed(3)

    def drawn():
        start = task.net.initial()
        return {
            n: torch.rand(v.shape, generator=g, dtype=v.dtype) if v.is_floating_point() else v for n, v in start.items()
        }

    return task, [{"params": drawn()} for _ in range(4)]


def test_fedbuff_by_hand(setting) -> None:
    task, (w, base, one, two) = setting
    how = Asynchrony("fedbuff", buffer=2, lr=0.7, staleness="polynomial", a=1.0)
    method, server = fs.FedAvg(), {**w, "other": torch.ones(1)}
    rebased = [how.rebase(task, server, w, one, 0), how.rebase(task, server, base, two, 3)]
    assert rebased[0] is one["params"]
    uploads = [
        Upload(up, 1.0, k, down, new)
        for k, (up, down, new) in enumerate(zip((one, two), (w, base), rebased, strict=True))
    ]
    after = how.step(task, server, method.merge(task, server, uploads))
    for name in task.net.parameters:
        new = w["params"][name] + 0.7 / 2 * (
            (one["params"][name] - w["params"][name]) + 0.25 * (two["params"][name] - base["params"][name])
        )
        assert torch.allclose(after["params"][name], new, rtol=0, atol=1e-14)
    for name in task.net.buffers:
        if w["params"][name].is_floating_point():  # statistics: mixed, and moved without η
            mixed = 0.75 * w["params"][name] + 0.25 * two["params"][name]
            assert torch.allclose(after["params"][name], (one["params"][name] + mixed) / 2, rtol=0, atol=1e-14)
    assert after["other"] is server["other"]


def test_fedasync_by_hand(setting) -> None:
    task, (w, base, one, _) = setting
    how = Asynchrony("fedasync", mixing=0.6, staleness="hinge", a=10.0, b=4)
    for behind, share in ((0, 0.6), (4, 0.6), (5, 0.6 / 11)):
        new = how.rebase(task, w, base, one, behind)
        for name, value in new.items():
            if value.is_floating_point():
                expected = (1 - share) * w["params"][name] + share * one["params"][name]
                assert torch.allclose(value, expected, rtol=0, atol=1e-15)
    whole = dataclasses.replace(how, mixing=1.0).rebase(task, w, base, one, 2)
    assert identical({"": whole}, {"": one["params"]})


# ---- what it must be equal to ------------------------------------------------------------------------------------------
UNIFORM = [fs.FedAvg(mean="uniform"), fs.Ditto(mean="uniform"), fs.SpectralCoDistillation(mean="uniform")]


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", UNIFORM, ids=lambda m: m.id)
def test_fedbuff_with_the_whole_cohort_is_synchronous(method: fs.Method, engine: str) -> None:
    how = {"participation": 0.5, "rounds": 4}
    sync = simulated(method, engine, **how)
    buffered = simulated(dataclasses.replace(method, mean="weighted"), engine, mode="fedbuff", buffer=4, **how)
    assert identical(states(sync), states(buffered))
    assert [r["time"] for r in sync.history] == [r["time"] for r in buffered.history]
    assert all(set(r["staleness"].values()) == {0} for r in buffered.history)


@pytest.mark.parametrize("server", ["momentum", "adam"])
def test_a_server_rule_goes_with_it(server: str) -> None:
    how = {"participation": 0.5, "rounds": 3, "server": server}
    sync = simulated(fs.FedAvg(mean="uniform"), **how)
    assert identical(states(sync), states(simulated(fs.FedAvg(), mode="fedbuff", buffer=4, **how)))


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.Ditto(), fs.PFedSD()], ids=lambda m: m.id)
def test_fedasync_one_client_at_a_time_is_synchronous(method: fs.Method) -> None:
    how = {"participation": 1 / 8, "rounds": 6}
    sync = simulated(method, **how)
    assert identical(states(sync), states(simulated(method, mode="fedasync", mixing=1.0, **how)))


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
@pytest.mark.parametrize("method", [fs.Ditto(), fs.FedPer()], ids=lambda m: m.id)
def test_a_slow_simulation_gives_the_same(method: fs.Method, mode: str) -> None:
    """One client at a time, from a list of who is under way, with the papers' formulas on every tensor."""
    buffer, rounds = (1, 14) if mode == "fedasync" else (3, 6)
    changes = {"mode": mode, "rounds": rounds, "participation": 5 / 8, "buffer": 3 if mode == "fedbuff" else 0}
    ready = prepared(method, model="plain", mixing=0.8, staleness="polynomial", staleness_a=1.0, **changes)
    run = finish(ready)
    (coordinator,) = start([Start(prepared(method, model="plain", **changes))]).coordinators
    bench, clock = ready.trainer.bench, coordinator.rounds.clock
    w, now = coordinator.state.server["params"], 0.0
    memories = {k: method.init_client(bench.task, ready.initial) for k in range(8)}
    under_way: list[tuple[float, int, int, dict]] = []  # arrival, client, version, what it was sent
    for t in range(1, rounds + 1):
        coordinator.rounds.busy = {k: arrival for arrival, k, _, _ in under_way}  # who is asked is the sampler's affair
        for k in coordinator.sample(t):
            task = dataclasses.replace(bench.task, round=t)
            down = method.send(task, {"params": w}, k)
            sent = sum(v.nbytes for v in down["params"].values())
            (generic,), (own,) = epochs(method, task, clock.samples[[k]], bench.plan.batch_size)
            d = clock.devices
            work = (generic + own) * clock.samples[k] / d.speed[k]
            took = 2 * d.latency[k] + sent / d.downlink[k] + work + sent / d.uplink[k]
            under_way.append((now + took, k, t, down))
        under_way.sort(key=lambda one: one[:2])
        due, under_way = under_way[:buffer], under_way[buffer:]
        fresh = {}
        for arrival, k, version, down in due:
            (done,) = ready.trainer.train(version, [Work(k, down, memories[k])])
            memories[k] = done.memory
            s = 1 / (t - version + 1)
            fresh[k] = {
                n: (1 - 0.8 * s) * w[n] + 0.8 * s * v if mode == "fedasync" else w[n] + s * (v - down["params"][n])
                for n, v in done.up["params"].items()
            }
            now = arrival
        now += len(due) * sent / MERGE
        w = {**w, **{n: sum(part[n] for part in fresh.values()) / len(due) for n in next(iter(fresh.values()))}}
        record = run.history[t - 1]
        assert record["participants"] == sorted(fresh)
        assert record["time"] == pytest.approx(now, rel=1e-12)
        assert record["staleness"] == {str(k): t - version for _, k, version, _ in sorted(due, key=lambda one: one[1])}
    assert max(v for record in run.history for v in record["staleness"].values()) > 0  # or less is shown
    assert distance({"": w}, {"": run.server["params"]}) < 1e-12
    for k in range(8):
        assert distance({"": tree.flatten(memories[k])}, {"": tree.flatten(run.memory(k))}) < 1e-12


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_a_model_that_the_server_keeps_for_a_client_is_the_one_it_trained(mode: str, tmp_path: Path) -> None:
    """Stateless pFedSD has v_k at the server: what was uploaded, not what it was turned into for a later model."""
    file = tmp_path / "devices.csv"  # sending takes no time, so that both runs have the same events
    lines = [f"{speed},1e18,1e18,0" for speed in (10, 3, 2, 9, 4, 5, 7, 30)]
    file.write_text("\n".join(["speed,uplink,downlink,latency", *lines]) + "\n")
    changes = {"profile": f"file:{file}", "mode": mode, "rounds": 12, "participation": 5 / 8, "staleness": "polynomial"}
    changes["buffer"] = 2 if mode == "fedbuff" else 0
    stateful, stateless = (simulated(fs.PFedSD(stateless=way), **changes) for way in (False, True))
    assert [r["participants"] for r in stateful.history] == [r["participants"] for r in stateless.history]
    assert max(v for record in stateful.history for v in record["staleness"].values()) > 0  # or less is shown
    assert distance(states(stateful), states(stateless)) < 1e-12


# ---- repeatable --------------------------------------------------------------------------------------------------------
HARD = {"mode": "fedbuff", "buffer": 2, "participation": 0.75, "drop": 0.2, "availability": 0.9, "rounds": 8}


def test_the_same_seed_gives_the_same_timeline_and_cohorts_may_be_smaller() -> None:
    runs = [simulated(fs.Ditto(), "stacked", **HARD, cohort=size) for size in (0, 0, 1)]
    assert identical(states(runs[0]), states(runs[1]))
    assert distance(states(runs[0]), states(runs[2])) < 1e-12
    lines = [[record["timeline"] for record in run.history] for run in runs]
    assert lines[0] == lines[1] == lines[2]
    assert any("dropped" in line["state"] for line in lines[0])
    assert any("under way" in line["state"] for line in lines[0])


def test_the_wire_changes_nothing() -> None:
    ready = prepared(fs.Ditto(), **HARD)
    assert identical(states(finish(ready)), states(finish(ready, WIRED)))


@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_a_run_that_stopped_goes_on_to_the_same_bits(mode: str, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.Ditto(), rounds=9, epochs=1, clients=8, partition="iid", checkpoint_every=2, eval_every=3, batch_size=32,
        participation=0.75, profile="lognormal:0.8", mode=mode, buffer=2 if mode == "fedbuff" else 0,
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=7)
    assert identical(states(whole), states(resumed))
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / folder / "timeline.jsonl").read_text().splitlines()]
        for folder in ("whole", "cut")
    )
    assert ours == theirs
    assert whole.history[5]["busy"]  # under way when the checkpoint of round 6 was made


def test_a_client_under_way_has_learned_nothing_yet() -> None:
    session = start([Start(prepared(fs.Ditto(), mode="fedasync", participation=1.0))])
    first_rounds(session)
    (first,), edge = session.coordinators[0].state.history, session.driver.transport.edge
    initial = session.starts[0].simulation.initial
    (done,) = first["participants"]
    assert edge.last == {done: 1}
    assert not identical({"": edge.store.get(done)["v"]}, {"": initial})
    waiting = [int(k) for k in first["busy"]]
    assert len(waiting) == 7
    assert all(identical({"": edge.store.get(k)["v"]}, {"": initial}) for k in waiting)


# ---- refusals ----------------------------------------------------------------------------------------------------------
def test_a_method_whose_merge_is_no_mean_is_refused() -> None:
    for name in methods.METHODS:
        method = methods.get(name)()
        if method.averages:
            continue
        with pytest.raises(fs.InputError, match=f"mode = 'fedasync': should be 'sync' for {name}"):
            prepared(method, mode="fedasync")
    carried = [name for name in methods.METHODS if methods.get(name).averages]
    assert {"fedavg", "fedprox", "ditto", "spectral", "fedrod", "pfedsd", "fedper"} <= set(carried)


@pytest.mark.parametrize("name", [name for name in methods.METHODS if methods.get(name).averages])
def test_every_other_is_carried(name: str) -> None:
    run = simulated(methods.get(name)(), mode="fedbuff", buffer=2, participation=0.75, rounds=3)
    assert tree.finite(run.server)
    assert any(record["busy"] for record in run.history)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(fs.InputError, match="without a profile"):
        Training(mode="fedbuff")
    with pytest.raises(fs.InputError, match=r"deadline = 2\.0: should be 0\.0 with mode 'fedasync'"):
        Training(mode="fedasync", deadline=2.0, **SLOW)
    with pytest.raises(fs.InputError, match="buffer = 5: should be at most 4, the clients at work"):
        prepared(fs.FedAvg(), mode="fedbuff", buffer=5, participation=0.5)


def test_what_is_said_of_it() -> None:
    assert "fedbuff, K 4, η 1" in simulated(fs.FedAvg(), mode="fedbuff", participation=0.5).table()
    prepared(fs.FedAvg(), mode="fedasync", buffer=9, participation=0.5)  # FedAsync has no buffer to be too large


def test_seeds_go_one_after_another() -> None:
    sims = [prepared(fs.FedAvg(), "stacked", mode="fedasync", seed=seed) for seed in (1, 2)]
    with pytest.raises(CannotStack, match="as they arrive"):
        together.run_starts([Start(sim) for sim in sims])


def test_one_run_is_not_told_that_runs_cannot_be_stacked(capfd) -> None:
    how = {"rounds": 2, "epochs": 1, "clients": 6, "engine": "stacked", "mode": "fedasync", **SLOW}
    experiments = [fs.Experiment(method=fs.FedAvg(), seed=seed, **how) for seed in (0, 1)]
    for some, lines in ((experiments[:1], 0), (experiments, 1)):
        together.run_together(some)
        assert "".join(capfd.readouterr()).count("the runs go one after another") == lines
