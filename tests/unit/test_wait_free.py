"""Wait-free training: the same weights in less time, or as many personal steps as fit until the next download."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstill as fs
from fedstill import methods
from fedstill.core import tree
from fedstill.core.errors import CannotStack
from fedstill.core.method import Upload
from fedstill.core.plan import Plan
from fedstill.engine.bench import Work
from fedstill.run import together
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.timing.clock import Clock, Devices
from fedstill.timing.schedule import MERGE, Schedule, Trigger, rehearse

from ..problems import (
    SETTINGS,
    WIRED,
    cut_and_resumed,
    finish,
    first_rounds,
    identical,
    make,
    needed,
    ragged,
    rows,
    states,
)

SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1), (8, 2))
SLOW = {"profile": "lognormal:0.8", "rounds": 4}
UNTIL = {"wait_free": "until-download"}
BOTH = [fs.SpectralCoDistillation(personal_epochs=2), fs.Ditto(), fs.FedRoD()]


def prepared(method: fs.Method, engine: str = "one", sizes=SIZES, **changes) -> Simulation:
    training = Training(**{**SETTINGS, "participation": 1.0, "engine": engine, **SLOW, **needed(method), **changes})
    return prepare(method, make("plain"), ragged(sizes), None, training)


def simulated(method: fs.Method, engine: str = "one", sizes=SIZES, **changes) -> fs.Run:
    return finish(prepared(method, engine, sizes, **changes))


def devices(folder: Path, rows: list[tuple[float, float, float]]) -> str:
    """A profile: (samples a second, seconds for a download, seconds for an upload) of each client."""
    file = folder / "devices.csv"
    sent = 8.0 * sum(p.numel() for p in make("plain").parameters())
    text = [f"{speed},{sent / up},{sent / down},0" for speed, down, up in rows]
    file.write_text("\n".join(["speed,uplink,downlink,latency", *text]) + "\n")
    return f"file:{file}"


# ---- a fixed number of personal steps ----------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", [*BOTH, fs.APFL()], ids=lambda m: m.id)
def test_the_same_weights_and_no_round_is_longer(method: fs.Method, engine: str) -> None:
    how = {"participation": 0.6, "rounds": 6, "drop": 0.1}
    waits = simulated(method, engine, **how)
    free = simulated(method, engine, **how, wait_free="fixed")
    assert identical(states(waits), states(free))
    lengths = [np.diff([0.0, *(record["time"] for record in run.history)]) for run in (waits, free)]
    assert (lengths[1] <= lengths[0] + 1e-12).all()
    assert lengths[1].sum() < lengths[0].sum()


def test_a_round_by_hand(tmp_path: Path) -> None:
    """Client 0: 10 samples at 10 a second, so a pass takes 1 s; client 1: 4 samples, 2 s. Two generic, three personal passes."""
    profile = devices(tmp_path, [(10, 0.5, 0.25), (2, 0.125, 1)])
    method = fs.SpectralCoDistillation(generic_epochs=2, personal_epochs=3)
    how = {"sizes": ((10, 2), (4, 2)), "profile": profile, "rounds": 3}
    sent = 8.0 * sum(p.numel() for p in make("plain").parameters())
    merging = 2 * sent / MERGE
    waits = simulated(method, **how)
    assert [r["time"] for r in waits.history] == pytest.approx([t * (0.125 + 10 + 1 + merging) for t in (1, 2, 3)])
    free = simulated(method, **how, wait_free="fixed")
    # Round 1 ends with client 1's upload at 0.125 + 4 + 1; its personal work goes on until 10.125, into round 2.
    first = 5.125 + merging
    # Round 2: its download is there at first + 0.125, it ends its personal work at 10.125, then 4 s of work and 1 s of sending.
    second = 15.125 + merging
    # Round 3: personal work of round 2 lasts until 14.125 + 6 = 20.125; then 4 + 1 again.
    third = 25.125 + merging
    assert [r["time"] for r in free.history] == pytest.approx([first, second, third], rel=1e-12)
    line = free.history[1]["timeline"]
    assert line["ahead"]
    assert line["hold"] == pytest.approx([0.0, 10.125 - first - 0.125])
    assert free.history[0]["free"] == pytest.approx({"0": 0.5 + 2 + 3, "1": 10.125})
    assert [record["ready"] for record in free.history] == pytest.approx([10.125, 20.125, 30.125])


@settings(max_examples=25, deadline=None)
@given(
    sigma=st.floats(0, 2), seed=st.integers(0, 99), personal=st.floats(0, 9), down=st.floats(0, 1e7), up=st.floats(0, 1e7),
    drop=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_no_round_is_longer_on_any_devices(sigma, seed, personal, down, up, drop) -> None:
    clock = Clock(Devices.of(f"lognormal:{sigma}", 12, seed, drop=drop), seed, np.arange(1, 13) * 9)
    times = []
    for ahead in (False, True):
        schedule = Schedule(clock, Trigger(), ahead=ahead)
        rounds = rehearse(schedule, Plan(seed, 8), 12, 5, epochs=(1.5, personal), down=down, up=up)
        times.append([(o.end - o.start, o.asked) for o in rounds])
    for (waits, asked), (free, also) in zip(*times, strict=True):
        assert asked == also
        assert free <= waits * (1 + 1e-9)


# ---- until the next download -------------------------------------------------------------------------------------------
def test_steps_by_hand(tmp_path: Path) -> None:
    """Clients of 16 samples in batches of 4, 4 steps a pass. Client 0: 16 samples a second; client 1: 8."""
    profile = devices(tmp_path, [(16, 0.5, 0.25), (8, 0.125, 1)])
    how = {"sizes": ((16, 2), (16, 2)), "profile": profile, "rounds": 2, "batch_size": 4, "epochs": 1}
    run = simulated(fs.Ditto(), **how, **UNTIL)
    sent = 8.0 * sum(p.numel() for p in make("plain").parameters())
    end = 0.125 + 2 + 1 + 2 * sent / MERGE
    assert [r["time"] for r in run.history] == pytest.approx([end, 2 * end])
    # From the upload (1.5 and 2.125) to the next download (end + 0.5, end + 0.125), at 4 and 2 steps a second.
    steps = [int((end + 0.5 - 1.5) * 4), int((end + 0.125 - 2.125) * 2)]
    assert run.history[0]["background"] == {"0": [1, pytest.approx(1.5)], "1": [1, pytest.approx(2.125)]}
    # The same by the engine's parts, with these numbers; after the last round personal training counts until its end.
    bench, trainer, method = run.trainer.bench, run.trainer, run.method
    server, initial = {"params": make_initial(run)}, make_initial(run)
    memory = {k: method.init_client(bench.task, initial) for k in (0, 1)}
    budgets = {1: steps, 2: [int((2 * end - (end + 1.5)) * 4), int((2 * end - (end + 2.125)) * 2)]}
    assert [record["personal_steps"] for record in run.history] == [0, sum(steps) + sum(budgets[2])]
    assert run.cost.steps == pytest.approx(4 + (sum(steps) + sum(budgets[2])) / 4)  # a client and round, of two and two
    assert run.cost.flops is None  # the method's own epochs are not what was trained
    assert "another number each time" in run.cost.uncounted
    assert "1 + as many as fit (v) local epochs" in run.table()
    for t in (1, 2):
        task = dataclasses.replace(bench.task, round=t)
        works = [Work(k, method.send(task, server, k), memory[k], part="generic") for k in (0, 1)]
        done = list(trainer.train(t, works))
        idle = [
            dataclasses.replace(work, part="idle", local=one.local, steps=budgets[t][work.client])
            for work, one in zip(works, done, strict=True)
        ]
        memory = {one.client: one.memory for one in trainer.train(t, idle)}
        server = method.merge(task, server, [Upload(one.up, 16.0, k) for k, one in enumerate(done)])
    assert identical({"": server["params"]}, {"": run.server["params"]})
    for k in (0, 1):
        assert identical({"": tree.flatten(memory[k])}, {"": tree.flatten(run.memory(k))})


def make_initial(run: fs.Run):
    return {name: value.clone() for name, value in run.task.net.initial().items()}


def test_with_time_to_spare_the_cap_is_a_fixed_number_of_steps(tmp_path: Path) -> None:
    profile = devices(tmp_path, [(1e9, 1, 1)] * 3)
    how = {"sizes": ((12, 2),) * 3, "profile": profile, "batch_size": 4, "epochs": 2}
    for method in (fs.Ditto(), fs.SpectralCoDistillation(personal_epochs=2), fs.FedRoD()):
        waits = simulated(method, **how)
        free = simulated(method, **how, **UNTIL, personal_cap=6)
        assert identical(states(waits), states(free))


EVERY = [
    {**UNTIL},
    {**UNTIL, "personal_cap": 3, "participation": 0.5},
    {**UNTIL, "unselected": "broadcast", "participation": 0.5},
    {**UNTIL, "unselected": "broadcast", "participation": 0.5, "drop": 0.3, "deadline": 1.0, "personal_cap": 9, "late": "fold"},
]  # fmt: skip


@pytest.mark.parametrize("changes", EVERY, ids=["all", "cap", "broadcast", "hard"])
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.id)
def test_scoring_changes_nothing_nor_does_the_wire(method: fs.Method, changes: dict) -> None:
    often = prepared(method, **changes, eval_every=1)
    plain = states(finish(often))
    assert identical(plain, states(simulated(method, **changes, eval_every=4)))
    assert identical(plain, states(finish(often, WIRED)))


@pytest.mark.parametrize("changes", EVERY, ids=["all", "cap", "broadcast", "hard"])
def test_a_run_that_stopped_goes_on_to_the_same_bits(changes: dict, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.Ditto(), rounds=6, epochs=1, clients=6, partition="iid", checkpoint_every=2, eval_every=3, batch_size=64,
        **{"profile": "lognormal:0.8", **changes},
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=5)
    assert identical(states(whole), states(resumed))
    for file in ("metrics.jsonl", "timeline.jsonl"):
        ours, theirs = (
            [json.loads(line) for line in (tmp_path / folder / file).read_text().splitlines()]
            for folder in ("whole", "cut")
        )
        assert rows(ours) == rows(theirs)


def test_who_is_not_asked() -> None:
    """With a cap nobody trains that was not asked; by broadcast everybody does, and everybody's download counts."""
    runs = {}
    for name in ("cap", "broadcast"):
        ready = prepared(fs.Ditto(), **UNTIL, unselected=name, personal_cap=5, participation=1 / 6, rounds=3)
        runs[name] = finish(ready)
    start = make_initial(runs["cap"])
    for name, run in runs.items():
        asked = {k for record in run.history for k in record["asked"]}
        assert 0 < len(asked) < 6
        moved = {k for k in range(6) if any(not torch.equal(v, start[n]) for n, v in run.memory(k)["v"].items())}
        assert moved == (asked if name == "cap" else set(range(6)))
    cap, broadcast = (runs[name].history[1]["bytes_total"] for name in ("cap", "broadcast"))
    assert broadcast == cap + 5 * runs["cap"].history[1]["bytes_down"]


def test_the_cap_holds_and_is_met() -> None:
    free, capped = (simulated(fs.Ditto(), **UNTIL, personal_cap=cap) for cap in (0, 4))
    assert free.history[1]["personal_steps"] > 6 * 4
    assert capped.history[1]["personal_steps"] == 6 * 4


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("unselected", ["cap", "broadcast"])
def test_who_has_not_begun_is_scored_as_it_was(unselected: str, engine: str, tmp_path: Path) -> None:
    """Client 0 answers in a second, client 1 takes 100 s to download or to train: the round has ended long before."""
    slow = (16, 100, 100) if unselected == "broadcast" else (0.16, 0.5, 0.25)
    how = {
        "sizes": ((16, 2), (16, 2)), "profile": devices(tmp_path, [(16, 0.5, 0.25), slow]), "rounds": 2, "batch_size": 4,
        "epochs": 1, "deadline": 3.0, "personal_cap": 5, "unselected": unselected,
    }  # fmt: skip
    run = simulated(fs.Ditto(), engine, **how, **UNTIL)
    for record in run.history:
        assert "1" in record["background"]
        assert record["background"]["1"][1] > record["time"]
        assert record["ready"] == record["time"]  # no personal step is left to be made
        assert "free" not in record
    initial = make_initial(run)
    assert not identical({"": run.memory(0)["v"]}, {"": initial})
    assert identical({"": run.memory(1)["v"]}, {"": initial})
    assert identical({"": run.personal(1)}, {"": run.generic()})


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_model_that_was_sent_in_vain_changes_nothing(engine: str, tmp_path: Path) -> None:
    """By broadcast clients have the next model before they have made a step from the last one."""
    profile = devices(tmp_path, [(0.01, 0.1, 0.1)] * 6)
    how = {"profile": profile, "deadline": 1.0, "unselected": "broadcast", "participation": 1 / 6}
    run = simulated(fs.Ditto(), engine, **how, **UNTIL)
    asked = {k for record in run.history for k in record["asked"]}
    assert len(asked) == 4  # who was asked is at it for a long time
    assert all(identical({"": run.memory(k)["v"]}, {"": make_initial(run)}) for k in range(6))
    assert all(record["personal_clients"] == record["generic_clients"] for record in run.history)


def test_what_waits_for_personal_work_is_no_part_of_a_stack() -> None:
    session = start([Start(prepared(fs.Ditto(), "stacked", **UNTIL))])
    first_rounds(session)
    begun = session.driver.transport.edge.begun
    assert len(begun) == 6
    for work in begun.values():
        for _, leaf in tree.leaves(work.local):
            assert leaf.untyped_storage().nbytes() == leaf.nbytes


# ---- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(methods.METHODS))
def test_who_can(name: str) -> None:
    method = methods.get(name)()
    for kind, can in (
        ("fixed", ("spectral", "ditto", "fedrod", "apfl")),
        ("until-download", ("spectral", "ditto", "fedrod")),
    ):
        if name in can:
            prepared(method, wait_free=kind)
            continue
        with pytest.raises(fs.InputError, match=f"wait_free = '{kind}': should be 'off' for {name}"):
            prepared(method, wait_free=kind)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(fs.InputError, match="without a profile"):
        Training(wait_free="fixed")
    with pytest.raises(fs.InputError, match="wait_free = 'until-download': should be 'off' without a profile"):
        Training(**UNTIL, participation=0.5)
    with pytest.raises(
        fs.InputError, match="personal_cap = 0: should be a number of steps for clients that are not asked"
    ):
        Training(**UNTIL, participation=0.5, profile="uniform")
    with pytest.raises(fs.InputError, match="wait_free = 'fixed': should be 'off' with mode 'fedasync'"):
        Training(wait_free="fixed", mode="fedasync", profile="uniform")
    with pytest.raises(fs.InputError, match="forgetting = True: should be false with wait_free"):
        prepared(fs.Ditto(), **UNTIL, forgetting=True)
    with pytest.raises(fs.InputError, match="'off' for fedrod"):
        prepared(fs.FedRoD(personal_head=False), wait_free="fixed")
    with pytest.raises(CannotStack, match="next download"):
        together.run_starts([Start(prepared(fs.Ditto(), "stacked", **UNTIL, seed=seed)) for seed in (1, 2)])
