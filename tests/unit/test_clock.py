"""Simulated time without training: profiles, what ends a round, late replies, samplers, monitors."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.core import plan
from fedstill.core.plan import Plan
from fedstill.edge import monitor
from fedstill.edge.monitor import Policy, Status, SystemMonitor
from fedstill.server.sampler import SAMPLERS, Memory, sampler
from fedstill.timing import clock
from fedstill.timing.clock import Clock, Devices
from fedstill.timing.monitor import SimulatedMonitor
from fedstill.timing.schedule import MERGE, Outcome, Schedule, Trigger, rehearse


def devices(profile: str = "uniform", clients: int = 4, seed: int = 0, **more: float) -> Devices:
    return Devices.of(profile, clients, seed, **more)


def schedule(
    profile: str = "uniform", clients: int = 4, trigger: Trigger | None = None, late: str = "drop", seed: int = 0,
    samples: list[int] | None = None, **more: float,
) -> Schedule:  # fmt: skip
    sizes = np.array(samples or [100] * clients)
    return Schedule(Clock(devices(profile, clients, seed, **more), seed, sizes), trigger or Trigger(), late)  # type: ignore[arg-type]


def rounds(of: Schedule, number: int, goal: int, seed: int = 0, **more) -> list[Outcome]:
    return list(rehearse(of, Plan(seed, 16), number, goal, **more))


# ---- profiles --------------------------------------------------------------------------------------------------------
def test_a_lognormal_profile_has_its_median_and_spread() -> None:
    found = devices("lognormal:0.5", 20_000, 3)
    for values, middle in ((found.speed, clock.SPEED), (found.uplink, clock.UPLINK), (found.downlink, clock.DOWNLINK)):
        logs = np.log(values / middle)
        assert abs(np.median(logs)) < 0.02
        assert logs.std() == pytest.approx(0.5, rel=0.02)
    assert abs(np.corrcoef(np.log(found.speed), np.log(found.uplink))[0, 1]) < 0.03
    assert (devices("lognormal:0", 5).speed == clock.SPEED).all()


def test_a_client_has_the_same_device_whoever_else_there_is() -> None:
    few, many = devices("lognormal:1", 3), devices("lognormal:1", 50)
    assert (few.speed == many.speed[:3]).all()
    assert (few.speed != devices("lognormal:1", 3, seed=1).speed).all()


def test_a_file_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,speed,uplink,downlink,drop\n1,20,2e6,3e6,0.5\n\n0,10,1e6,1e6,0\n2,1,1,1,1\n")
    found = devices(f"file:{file}", 2, drop=0.9, availability=0.7)
    assert found.speed.tolist() == [10, 20]
    assert found.uplink.tolist() == [1e6, 2e6]
    assert found.drop.tolist() == [0, 0.5]  # the file's own go first
    assert found.availability.tolist() == [0.7, 0.7]
    assert found.latency.tolist() == [clock.LATENCY] * 2
    file.write_text("speed,downlink,uplink\n5,1,2\n6,3,4\n")
    assert devices(f"file:{file}", 2).speed.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line names speed"),
        ("speed,uplink\n1,2\n", "line 1 = speed, uplink: should be with the column downlink"),
        ("speed,uplink,downlink,colour\n", "line 1, column = 'colour': should be one of these"),
        ("speed,uplink,downlink,speed\n", "line 1, column = 'speed'"),
        ("speed,uplink,downlink\n1,2,3\n1,2\n", "line 3 = 2 cells: should be 3 cells"),
        ("speed,uplink,downlink\n1,2,fast\n", "line 2, column downlink = 'fast': should be a number above 0"),
        ("speed,uplink,downlink\n1,2,0\n", "line 2, column downlink = '0': should be a number above 0"),
        ("speed,uplink,downlink,drop\n1,2,3,1.5\n", "column drop = '1.5': should be a number at least 0 and at most 1"),
        ("speed,uplink,downlink\n1,2,nan\n", "column downlink = 'nan'"),
        ("client,speed,uplink,downlink\n-1,1,1,1\n", "line 2, column client = '-1'"),
        ("client,speed,uplink,downlink\n0,1,1,1\n0,1,1,1\n", "line 3, column client = 0: should be another: line 2"),
        ("speed,uplink,downlink\n1,2,3\n", "a line for each of the 2 clients .client 1 has none"),
    ],
)
def test_a_bad_file_is_refused_by_file_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text(text)
    with pytest.raises(fs.InputError, match=message) as refused:
        devices(f"file:{file}", 2)
    assert "devices.csv" in str(refused.value)


@pytest.mark.parametrize(
    "profile", ["uniform:1", "lognormal", "lognormal:-1", "lognormal:x", "file:", "phones", "lognormal:nan"]
)
def test_a_bad_profile_is_refused(profile: str) -> None:
    with pytest.raises(fs.InputError, match="profile"):
        fs.Training(profile=profile)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(fs.InputError, match="a file that exists"):
        devices("file:nowhere.csv")


# ---- a round by hand -------------------------------------------------------------------------------------------------
def test_spans_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    file.write_text("speed,uplink,downlink,latency\n10,100,200,0.5\n20,50,400,0\n")
    found = Clock(devices(f"file:{file}", 2), 0, np.array([30, 60])).spans(np.array([0, 1]), 1000.0, 500.0, (2.0, 3.0))
    assert found.download.tolist() == [0.5 + 5, 2.5]
    assert found.generic.tolist() == [6.0, 6.0]
    assert found.personal.tolist() == [9.0, 9.0]
    assert found.upload.tolist() == [0.5 + 5, 10.0]
    assert found.arrival.tolist() == [26.0, 27.5]


SLOW = "speed,uplink,downlink,latency\n" + "".join(f"{100 / s},1e9,1e9,0\n" for s in (1, 2, 3, 10))  # so many seconds


@pytest.fixture
def slow(tmp_path: Path) -> str:
    file = tmp_path / "slow.csv"
    file.write_text(SLOW)
    return f"file:{file}"


def test_all_goal_and_deadline_by_hand(slow: str) -> None:
    first = rounds(schedule(slow), 1, 4)[0]
    assert (first.closed, first.state) == (10.0, ["merged"] * 4)
    first = rounds(schedule(slow, trigger=Trigger(over_select=2.0)), 1, 2)[0]
    assert (first.closed, first.state) == (2.0, ["merged", "merged", "late", "late"])
    assert first.busy == {2: 3.0, 3: 10.0}
    first = rounds(schedule(slow, trigger=Trigger(deadline=2.5)), 1, 4)[0]
    assert (first.closed, first.of("merged"), first.of("late")) == (2.5, [0, 1], [2, 3])
    first = rounds(schedule(slow, trigger=Trigger(deadline=50.0)), 1, 4)[0]
    assert first.closed == 10.0  # all are in: nobody waits for the deadline
    first = rounds(schedule(slow, trigger=Trigger(deadline=0.5)), 1, 4)[0]
    assert (first.closed, first.of("late")) == (0.5, [0, 1, 2, 3])


def test_a_reply_at_the_deadline_is_in_time(slow: str) -> None:
    assert rounds(schedule(slow, trigger=Trigger(deadline=3.0)), 1, 4)[0].of("merged") == [0, 1, 2]


def test_equal_arrivals_are_taken_by_client() -> None:
    found = rounds(schedule(clients=6, trigger=Trigger(over_select=1.5)), 1, 4)[0]
    assert found.of("merged") == [0, 1, 2, 3]
    assert found.of("late") == [4, 5]
    assert found.busy == {}  # they are done when the round ends


def test_who_drops_out_is_waited_for_until_the_deadline_only(slow: str) -> None:
    now = schedule(slow, trigger=Trigger(deadline=50.0))
    assert now.close(1, [0, 1, 2], 3, (1.0, 0.0), 0.0, 0.0, gone=[1]).closed == 50.0
    now = schedule(slow)
    found = now.close(1, [0, 1, 2], 3, (1.0, 0.0), 0.0, 0.0, gone=[2])
    assert (found.closed, found.state) == (2.0, ["merged", "merged", "dropped"])
    assert found.spans.generic.tolist() == [1.0, 2.0, 0.0]  # nobody knows how far it came
    now = schedule(slow, trigger=Trigger(deadline=50.0))
    assert now.close(1, [0, 1, 2], 2, (1.0, 0.0), 0.0, 0.0, gone=[2]).closed == 2.0  # the goal is met


def test_who_refuses_says_so_and_nobody_waits(slow: str) -> None:
    now = schedule(slow, trigger=Trigger(deadline=50.0))
    found = now.close(1, [0, 3], 2, (1.0, 0.0), 2e9, 0.0, refused=[3])
    assert (found.closed, found.state) == (3.0, ["merged", "refused"])
    found = now.close(2, [3], 2, (1.0, 0.0), 2e9, 0.0, refused=[3])
    assert found.closed - found.start == 2.0


def test_the_server_merges_and_time_goes_on(slow: str) -> None:
    now = schedule(slow)
    first, second = (now.close(t, [0, 1], 2, (1.0, 0.0), 0.0, 1e9) for t in (1, 2))
    assert first.closed == 3.0
    assert first.end == pytest.approx(3.0 + 2e9 / MERGE)
    assert second.start == first.end


def test_who_is_late_is_busy_until_its_reply_is_in(slow: str) -> None:
    """Client 3 takes 10 s; rounds end after 3. It is asked in rounds 1 and 5 (from 12 s on), when it is done with the first."""
    found = rounds(schedule(slow, trigger=Trigger(deadline=3.0)), 6, 4)
    assert [3 in outcome.asked for outcome in found] == [True, False, False, False, True, False]
    assert [outcome.folded for outcome in found] == [[]] * 6
    found = rounds(schedule(slow, trigger=Trigger(deadline=3.0), late="fold"), 6, 4)
    assert [3 in outcome.asked for outcome in found] == [True, False, False, False, True, False]
    assert [outcome.folded for outcome in found] == [[], [], [], [3], [], []]
    assert found[3].closed == 12.0


def test_folded_replies_and_new_ones_of_a_client_never_meet() -> None:
    """A method's merge is given every client once."""
    found = rounds(schedule("lognormal:1", 50, Trigger(deadline=1.0, over_select=1.5), "fold", drop=0.1), 60, 20)
    assert sum(len(outcome.folded) for outcome in found) > 50
    for outcome in found:
        assert not set(outcome.folded) & set(outcome.asked)
    late = sum(len(outcome.of("late")) for outcome in found)
    assert late == sum(len(outcome.folded) for outcome in found) + len(found[-1].busy)  # none is lost


def test_time_goes_on_where_nobody_can_be_asked(slow: str) -> None:
    found = rounds(schedule(slow, trigger=Trigger(deadline=0.6)), 4, 4)
    assert [len(outcome.asked) for outcome in found] == [4, 0, 1, 0]  # client 0 is done after 1 s
    assert found[-1].end == pytest.approx(2.4)
    now = schedule(slow)
    now.busy = {k: 7.0 for k in range(4)}
    assert rounds(now, 2, 4)[0].closed == 7.0


# ---- the promises ----------------------------------------------------------------------------------------------------
def test_the_same_profile_and_seed_give_the_same_timeline_to_the_bit() -> None:
    def timeline(seed: int) -> list[dict]:
        now = schedule(
            "lognormal:0.7", 200, Trigger(deadline=3.0, over_select=1.2), "fold", seed, drop=0.1, availability=0.8
        )
        return [o.timeline() for o in rounds(now, 30, 50, seed, down=1e6, up=1e6, epochs=(1.0, 3.0))]

    assert timeline(4) == timeline(4)
    assert timeline(4) != timeline(5)


def test_over_selection_meets_its_goal() -> None:
    """130 % of 50 asked, each of whom drops out with probability 0.1: P(Bin(65, 0.9) < 50) is about 0.0005."""
    now = schedule("lognormal:0.5", 1000, Trigger(over_select=1.3), drop=0.1)
    found = rounds(now, 1000, 50)
    assert all(len(outcome.asked) == 65 for outcome in found)
    assert np.mean([len(outcome.of("merged")) == 50 for outcome in found]) >= 0.99
    dropped = np.mean([len(outcome.of("dropped")) for outcome in found]) / 65
    assert dropped == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / 65_000))


def test_shares_are_rounded_up_but_not_by_rounding_errors() -> None:
    assert [Trigger(over_select=s).ask(n) for s, n in ((1.3, 50), (1.1, 10), (1.0, 7), (1.3, 5))] == [65, 11, 7, 7]


def test_availability_is_its_share() -> None:
    now = schedule(clients=1000, availability=0.3)
    present = [len(now.available(t, range(1000))) for t in range(1, 51)]
    assert np.mean(present) / 1000 == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / 50_000))
    assert now.available(1, range(1000)) != now.available(2, range(1000))


def test_ten_thousand_clients_take_seconds() -> None:
    now = schedule("lognormal:0.5", 10_000, Trigger(deadline=20.0), "fold", drop=0.1, availability=0.8)
    began = time.perf_counter()
    found = rounds(now, 100, 10_000, down=1e6, up=1e6)
    assert time.perf_counter() - began < 20  # 1.3 s on one core
    assert sum(len(outcome.asked) for outcome in found) > 700_000


# ---- samplers --------------------------------------------------------------------------------------------------------
def scene(
    round: int = 1, clients: int = 20, samples=None, availability=None, losses=None, asked=None, candidates: int = 0
):
    memory = Memory(losses or {}, asked or {})
    n = np.array(samples) if samples is not None else np.full(clients, 10)
    share = np.array(availability) if availability is not None else np.ones(clients)
    return memory.scene(Plan(7, 16), round, range(clients), n, share, candidates)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_takes_as_many_as_wanted_each_once_and_repeats_itself(name: str) -> None:
    for wanted in (1, 5, 20, 50):
        chosen = [int(k) for k in SAMPLERS[name](scene(), wanted)]
        assert len(chosen) == len(set(chosen))
        assert len(chosen) == min(wanted, 20) or name == "poisson"  # on average
        assert chosen == [int(k) for k in SAMPLERS[name](scene(), wanted)]
    assert len(SAMPLERS[name](scene(clients=0), 3)) == 0
    differ = [set(SAMPLERS[name](scene(t), 5)) != set(SAMPLERS[name](scene(1), 5)) for t in range(2, 5)]
    assert any(differ) or name == "round-robin"  # its rounds differ by who was asked before


def test_uniform_is_the_plans_cohort() -> None:
    assert SAMPLERS["uniform"](scene(3), 6) == Plan(7, 16).cohort(3, range(20), 6)


@pytest.mark.parametrize("name", ["size", "available"])
def test_weighted_samplers_draw_by_weight(name: str) -> None:
    weights = [1, 2, 3, 4]
    given = {"samples": weights} if name == "size" else {"availability": [w / 4 for w in weights]}
    counts = Counter(int(k) for t in range(20_000) for k in SAMPLERS[name](scene(t, 4, **given), 1))
    for k, weight in enumerate(weights):
        assert counts[k] / 20_000 == pytest.approx(weight / 10, abs=0.015)


def test_power_of_choice_takes_the_highest_losses_of_its_candidates() -> None:
    losses = {k: float(k) for k in range(20)}
    chosen = SAMPLERS["power-of-choice"](scene(losses=losses, candidates=20), 3)
    assert sorted(int(k) for k in chosen) == [17, 18, 19]
    del losses[4]  # never heard of: comes first
    assert 4 in SAMPLERS["power-of-choice"](scene(losses=losses, candidates=20), 3)
    few = [set(map(int, SAMPLERS["power-of-choice"](scene(t, losses=losses), 3))) for t in range(20)]
    assert len({frozenset(f) for f in few}) > 10  # of six candidates


def test_round_robin_asks_everybody_once_before_anybody_twice() -> None:
    memory, counts = Memory(), Counter()
    for t in range(1, 13):
        there = [k for k in range(10) if not (t <= 2 and k < 3)]  # three are away at first
        at = memory.scene(Plan(7, 16), t, there, np.full(10, 5), np.ones(10))
        chosen = [int(k) for k in SAMPLERS["round-robin"](at, 5)]
        memory.take({"asked": chosen})
        counts.update(chosen)
        if t > 2:
            assert max(counts.values()) - min(counts[k] for k in range(10)) <= 1
    assert set(counts.values()) == {6}


def test_a_new_sampler_is_a_function_of_a_few_lines() -> None:
    @sampler("largest")
    def largest(scene, wanted):
        return scene.clients[np.argsort(-scene.samples, kind="stable")[:wanted]]

    try:
        assert fs.Training(sampler="largest").sampler == "largest"
        from ..problems import run

        found = run(fs.FedAvg(), sampler="largest", participation=0.4)  # 13, 7, 1, 10 and 5 samples
        assert [record["participants"] for record in found.history] == [[0, 3]] * 3
    finally:
        del SAMPLERS["largest"]
    with pytest.raises(fs.InputError, match="sampler = 'largest'"):
        fs.Training(sampler="largest")


# ---- monitors --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status(), None),
        (Status(battery=0.1), "battery at 10%, below 20%"),
        (Status(load=0.95), "load at 95%, above 90%"),
        (Status(memory=0.04), "4% of the memory free, below 5%"),
        (Status(network=0.0), "no network"),
        (Status(0.2, 0.9, 0.05, 1.0), None),
    ],
)
def test_a_policy_accepts_or_says_why_not(status: Status, reason: str | None) -> None:
    assert Policy(0.2, 0.9, 0.05).refusal(status) == reason


def test_simulated_devices_refuse_by_their_share(tmp_path: Path) -> None:
    watch = SimulatedMonitor(schedule(clients=100).clock, Policy(battery=0.25))
    refused = [(t, k) for t in range(50) for k in range(100) if watch.refusal(t, k)]
    assert len(refused) / 5000 == pytest.approx(0.25, abs=4 * np.sqrt(0.1875 / 5000))  # drawn evenly from [0, 1)
    file = tmp_path / "d.csv"
    file.write_text("speed,uplink,downlink,battery,load\n1,1,1,1,0\n1,1,1,0,1\n1,1,1,0.9,0.2\n")
    watch = SimulatedMonitor(schedule(f"file:{file}", 3).clock, Policy(battery=0.5, load=0.5))
    assert all(watch.refusal(t, 0) is None for t in range(20))  # on the mains, idle
    assert all(watch.refusal(t, 1) for t in range(20))
    assert all(0.8 <= watch.status(t, 2).battery <= 1 and 0 <= watch.status(t, 2).load <= 0.4 for t in range(50))


def test_this_machine_is_read_with_and_without_psutil(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert 0 <= monitor.read().load <= 1
    assert monitor.read().battery == 1
    told = types.SimpleNamespace(
        sensors_battery=lambda: types.SimpleNamespace(power_plugged=False, percent=15),
        virtual_memory=lambda: types.SimpleNamespace(available=1, total=4),
        net_if_stats=lambda: {
            "lo": types.SimpleNamespace(isup=True, speed=0),
            "eth0": types.SimpleNamespace(isup=True, speed=80),
        },
        getloadavg=lambda: (3.0, 0, 0),
        cpu_count=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "psutil", told)
    assert monitor.read() == Status(0.15, 0.75, 0.25, 1e7)
    assert SystemMonitor(Policy(battery=0.2)).refusal(1, 0) == "battery at 15%, below 20%"
    told.net_if_stats = dict
    assert SystemMonitor(Policy()).refusal(1, 0) == "no network"


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="no /proc to compare with")
def test_this_machine_is_read() -> None:
    """With psutil itself, against what the kernel says."""
    assert importlib.util.find_spec("psutil") is not None  # the test environment has it
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, whole = (int(told[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    found = monitor.read()
    assert found.memory == pytest.approx(free / whole, abs=0.1)
    assert found.load == pytest.approx(min(1.0, os.getloadavg()[0] / os.cpu_count()), abs=0.1)
    assert 0 < found.battery <= 1
    assert SystemMonitor(Policy(memory=1.0)).refusal(1, 0) is not None


def test_streams_of_draws_do_not_meet() -> None:
    now = schedule(clients=2000).clock
    who = np.arange(2000)
    drawn = [now.uniform(purpose, 1, who) for purpose in (plan.PRESENT, plan.DROP, plan.MONITOR)]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
