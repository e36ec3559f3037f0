"""Training in simulated time: drop-outs, late and folded replies, refusals, abandoned rounds; resumed and side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill import methods
from fedstill.core import tree
from fedstill.core.errors import CannotStack
from fedstill.run import together
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.server.sampler import SAMPLERS
from fedstill.timing.clock import LATENCY
from fedstill.timing.schedule import MERGE

from ..problems import (
    SETTINGS,
    WIRED,
    Spy,
    Watch,
    cut_and_resumed,
    distance,
    finish,
    identical,
    make,
    ragged,
    run,
    states,
)

NEW = {"time", "asked", "late", "dropped", "refused", "folded", "busy", "abandoned", "timeline", "losses"}
SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1), (8, 2), (6, 3), (9, 2))


def prepared(method: fs.Method, engine: str = "one", **changes) -> Simulation:
    training = Training(**{**SETTINGS, "engine": engine, **changes})
    return prepare(method, make("plain"), ragged(SIZES), None, training)


def simulated(method: fs.Method, engine: str = "one", transport=None, **changes) -> fs.Run:
    return finish(prepared(method, engine, **changes), transport)


def with_cohorts(method: fs.Method, cohorts: list[list[int]], engine: str = "one", **changes) -> fs.Run:
    """A run without simulated time that asks these clients, round by round."""
    session = start([Start(prepared(method, engine, **changes))])
    session.coordinators[0].sampler = lambda scene, wanted: cohorts[scene.round - 1]
    (run,) = session.run()
    return run


def devices(folder: Path, seconds: list[float]) -> str:
    """A profile by which the clients take so long for a round of two epochs, sending for nothing."""
    file = folder / "devices.csv"
    rows = [f"{2 * n / s},1e18,1e18,0" for s, (n, _) in zip(seconds, SIZES, strict=False)]
    file.write_text("\n".join(["speed,uplink,downlink,latency", *rows]) + "\n")
    return f"file:{file}"


# ---- nothing changes where nothing is asked for ------------------------------------------------------------------------
def test_without_a_profile_records_say_nothing_of_time() -> None:
    for record in run(fs.PFedSD()).history:
        assert not NEW & record.keys()


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_time_alone_changes_no_result(engine: str) -> None:
    plain, timed = simulated(fs.PFedSD(), engine), simulated(fs.PFedSD(), engine, profile="lognormal:1")
    assert identical(states(plain), states(timed))
    for a, b in zip(plain.history, timed.history, strict=True):
        assert {**{k: v for k, v in b.items() if k not in NEW}, **{k: a[k] for k in a if "seconds" in k}} == a
        assert b["dropped"] == b["late"] == b["refused"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"drop": 0.1},
        {"availability": 0.5},
        {"deadline": 3},
        {"over_select": 1.3},
        {"late": "fold"},
        {"min_battery": 0.2},
    ],
)
def test_what_belongs_to_time_wants_a_profile(changes: dict) -> None:
    with pytest.raises(fs.InputError, match="without a profile"):
        Training(**changes)
    Training(**changes, profile="uniform")


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(fs.InputError, match="another without a profile"):
        Training(sampler="available")
    with pytest.raises(fs.InputError, match="sampler = 'siez': should be 'size'"):
        Training(sampler="siez")
    with pytest.raises(fs.InputError, match="minimum = 6: should be at most 5"):
        prepared(fs.FedAvg(), minimum=6)  # 60 % of 8


# ---- bytes and phases --------------------------------------------------------------------------------------------------
def test_the_timeline_of_a_method_with_two_models_by_hand() -> None:
    """Plain has 4·6 + 6 + 6·3 + 3 = 51 float64 weights: 408 bytes each way; one generic epoch, then three personal ones."""
    method = fs.SpectralCoDistillation(generic_epochs=1, personal_epochs=3)
    found = simulated(method, profile="uniform", participation=1.0, rounds=1).history[0]
    line = found["timeline"]
    for i, (n, _) in enumerate(SIZES):
        assert line["download"][i] == LATENCY + 408 / 5e6
        assert line["generic"][i] == n / 500
        assert line["personal"][i] == 3 * (n / 500)
        assert line["upload"][i] == LATENCY + 408 / 1e6
    assert line["closed"] == pytest.approx(2 * LATENCY + 408 * 1.2e-6 + 4 * 13 / 500)
    assert found["time"] == line["end"] == pytest.approx(line["closed"] + 8 * 408 / MERGE, abs=1e-12)


# ---- drop-outs ---------------------------------------------------------------------------------------------------------
MEMORIES = [fs.FedAvg(), fs.PFedSD(), fs.SCAFFOLD(), fs.SpectralCoDistillation(), fs.FedRep()]


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", MEMORIES, ids=lambda m: m.id)
def test_drop_outs_equal_the_run_whose_cohorts_were_the_survivors(method: fs.Method, engine: str) -> None:
    how = dict(rounds=6, participation=1.0)
    dropping = simulated(method, engine, **how, profile="lognormal:0.5", drop=0.3)
    assert len(dropping.history) == 6
    survivors = [record["participants"] for record in dropping.history]
    lost = sum(len(record["dropped"]) for record in dropping.history)
    assert 5 < lost < 25  # 48 were asked
    assert all(r["missing"] == r["dropped"] == sorted(set(range(8)) - set(r["participants"])) for r in dropping.history)
    assert identical(states(dropping), states(with_cohorts(method, survivors, engine, **how)))


def test_who_drops_out_is_not_trained() -> None:
    spy = Spy()
    found = simulated(fs.PFedSD(), transport=spy.transport, profile="uniform", drop=0.5, participation=1.0)
    trained = [(reply.round, reply.client) for reply in spy.trained()]
    assert trained == [(r["round"], k) for r in found.history for k in r["participants"]]


def test_a_round_without_replies_leaves_the_model_and_the_run_ends() -> None:
    found = simulated(fs.PFedSD(), profile="uniform", drop=1.0)
    initial = {name: value for name, value in make("plain").state_dict().items()}
    assert identical({"m": found.generic()}, {"m": initial})
    assert all(r["abandoned"] and r["participants"] == [] for r in found.history)
    with pytest.raises(fs.InputError):
        found.score(clients="participants")
    assert found.score() >= 0
    assert "pfedsd" in found.table()


def test_below_the_minimum_a_round_is_abandoned() -> None:
    found = simulated(fs.FedAvg(), profile="uniform", drop=0.4, participation=1.0, minimum=6, rounds=8)
    kept = [r["participants"] for r in found.history if not r["abandoned"]]
    assert 0 < len(kept) < 8
    assert all(r["abandoned"] == (len(r["participants"]) < 6) for r in found.history)
    watch = Watch()
    finish(
        prepared(fs.FedAvg(), profile="uniform", drop=0.4, participation=1.0, minimum=6, rounds=8), callbacks=[watch]
    )
    for record, before, after in zip(found.history[1:], watch.servers, watch.servers[1:], strict=False):
        assert identical(before, after) == record["abandoned"]


# ---- late replies ------------------------------------------------------------------------------------------------------
def test_late_replies_are_counted_and_dropped_but_the_client_keeps_what_it_learned(tmp_path: Path) -> None:
    profile = devices(tmp_path, [1, 1, 1, 1, 1, 1, 1, 4])  # client 7 is asked in rounds 1 and 4
    how = dict(profile=profile, deadline=2.0, participation=1.0, rounds=5)
    found = simulated(fs.FedAvg(), **how)
    assert [r["late"] for r in found.history] == [[7], [], [], [7], []]  # the rounds end after 2, 3, 4, 6 and 7 s
    assert all(7 not in r["participants"] for r in found.history)
    assert found.history[0]["time"] == pytest.approx(2.0, abs=1e-6)
    cohorts = [r["participants"] for r in found.history]
    assert identical(states(found), states(with_cohorts(fs.FedAvg(), cohorts, participation=1.0, rounds=5)))
    own = simulated(fs.PFedSD(), **how)
    never = with_cohorts(fs.PFedSD(), cohorts, participation=1.0, rounds=5)
    assert not identical({"m": own.personal(7)}, {"m": never.personal(7)})  # it did train
    assert identical({"m": never.personal(7)}, {"m": never.generic()})
    assert identical({"m": own.generic()}, {"m": never.generic()})  # nobody else sees it


@pytest.mark.parametrize("method", [fs.SCAFFOLD(), fs.FedDyn(), fs.L2GD()], ids=lambda m: m.id)
def test_what_must_agree_with_the_server_is_as_if_a_late_client_had_not_been_asked(
    method: fs.Method, tmp_path: Path
) -> None:
    profile = devices(tmp_path, [1, 1, 1, 1, 1, 1, 1, 4])
    found = simulated(method, profile=profile, deadline=2.0, participation=1.0, rounds=5)
    assert sum(record["late"] == [7] for record in found.history) > 0
    cohorts = [record["participants"] for record in found.history]
    never = with_cohorts(method, cohorts, participation=1.0, rounds=5)
    assert identical({"": tree.flatten(found.server)}, {"": tree.flatten(never.server)})
    for k in range(8):
        ours, theirs = found.memory(k), never.memory(k)
        assert ours.keys() >= method.coupled
        for name in method.coupled:
            assert identical({"": tree.flatten({"": ours[name]})}, {"": tree.flatten({"": theirs[name]})})


def test_folded_replies_are_merged_where_they_arrive_with_their_own_weights(tmp_path: Path) -> None:
    profile = devices(tmp_path, [1, 1, 1, 1, 1, 1, 1, 3])
    how = dict(profile=profile, deadline=2.0, late="fold", participation=1.0, rounds=2)
    spy = Spy()
    found = simulated(fs.FedAvg(), transport=spy.transport, **how)
    assert [r["late"] for r in found.history] == [[7], []]
    assert [r["folded"] for r in found.history] == [[], [7]]
    assert found.history[1]["participants"] == list(range(8))
    assert found.history[1]["asked"] == list(range(7))
    ups = {(r.round, r.client): r.up["params"] for r in spy.trained()}
    merged = [(n, ups[1 if k == 7 else 2, k]) for k, (n, _) in enumerate(SIZES)]
    for name, value in found.generic().items():
        by_hand = sum(n * up[name] for n, up in merged) / sum(n for n, _ in merged)
        torch.testing.assert_close(value, by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [fs.CD2PFed(p=0.6), fs.FedFomo(m=2)], ids=lambda m: m.id)
def test_a_folded_reply_is_read_by_what_its_client_was_sent(method: fs.Method, tmp_path: Path) -> None:
    """CD2-pFed's uploads have other sizes in other rounds; FedFomo credits the models that a client was sent."""
    profile, spy = devices(tmp_path, [1, 1, 1, 1, 1, 1, 1, 3]), Spy()
    how = dict(profile=profile, deadline=2.0, late="fold", participation=1.0, rounds=6)
    found = simulated(method, transport=spy.transport, **how)
    assert sum(len(record["folded"]) for record in found.history) > 1
    assert tree.finite(found.server)
    if method.id == "fedfomo":
        sent = {(order.round, order.client): order.down["who"] for order in spy.orders if order.kind == "train"}
        credit = torch.zeros(8, 8, dtype=torch.float64)
        for reply in spy.trained():
            taken = reply.client in found.history[reply.round - 1]["participants"]
            folded = any(reply.client in record["folded"] for record in found.history[reply.round :][:2])
            if taken or folded:
                for m, weight in zip(sent[reply.round, reply.client].tolist(), reply.up["weights"], strict=True):
                    credit[reply.client, m] += weight if m >= 0 else 0
        assert credit[7].sum() > 0  # of folded replies alone
        for client, row in found.server["affinity"].items():
            assert torch.allclose(credit[int(client), : len(row)], row, atol=1e-12)
            assert credit[int(client), len(row) :].abs().sum() == 0


def test_over_selection_takes_the_first(tmp_path: Path) -> None:
    profile = devices(tmp_path, [1, 2, 3, 4, 5, 6, 7, 8])
    found = simulated(fs.FedAvg(), profile=profile, participation=0.5, over_select=2.0, rounds=1).history[0]
    assert found["asked"] == list(range(8))
    assert found["participants"] == [0, 1, 2, 3]
    assert found["late"] == found["missing"] == [4, 5, 6, 7]
    assert found["time"] == pytest.approx(4.0, abs=1e-6)


# ---- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_refusals_are_counted_and_the_round_goes_on(engine: str) -> None:
    how, spy = dict(rounds=5, participation=1.0), Spy()
    found = simulated(fs.PFedSD(), engine, spy.transport, **how, profile="uniform", min_battery=0.3, drop=0.1)
    assert sum(len(r["refused"]) for r in found.history) > 4
    for record in found.history:
        assert sorted(record["participants"] + record["refused"] + record["dropped"]) == list(range(8))
    trained = [(r.round, r.client) for r in spy.trained() if not r.refusal]
    assert {(r.round, r.client) for r in spy.trained() if r.refusal} == {
        (record["round"], k) for record in found.history for k in record["refused"]
    }
    assert trained == [(r["round"], k) for r in found.history for k in r["participants"]]
    cohorts = [r["participants"] for r in found.history]
    assert identical(states(found), states(with_cohorts(fs.PFedSD(), cohorts, engine, **how)))


def test_all_may_refuse() -> None:
    found = simulated(fs.FedAvg(), profile="uniform", min_memory=1.0)
    assert all(r["abandoned"] and r["refused"] == r["asked"] for r in found.history)


def test_forgetting_is_watched_among_those_that_trained() -> None:
    found = simulated(fs.PFedSD(), profile="uniform", min_battery=0.3, drop=0.2, forgetting=True, rounds=4)
    for record in found.history:
        assert sorted(map(int, record.get("trained_clients", {}))) == record["participants"]


HARD = dict(
    profile="lognormal:0.8", drop=0.15, availability=0.8, min_battery=0.3, deadline=0.16, over_select=1.4, late="fold"
)


def test_the_wire_changes_nothing() -> None:
    ready = prepared(fs.SCAFFOLD(), **HARD, rounds=6)
    found = finish(ready)
    for what in ("late", "folded", "dropped", "refused"):
        assert any(record[what] for record in found.history), what  # or less is shown
    assert identical(states(found), states(finish(ready, WIRED)))


# ---- resumed -----------------------------------------------------------------------------------------------------------
EACH = [
    *({"sampler": name, "profile": "lognormal:0.5", "availability": 0.9} for name in SAMPLERS),
    {"sampler": "power-of-choice"},
    {"profile": "uniform", "drop": 0.3, "minimum": 2},
    {"profile": "lognormal:0.8", "over_select": 1.5},
    {"profile": "lognormal:0.8", "deadline": 0.5},
    {"profile": "lognormal:0.8", "deadline": 0.5, "late": "fold", "sampler": "power-of-choice", "drop": 0.1},
]


@pytest.mark.parametrize("changes", EACH, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("name", ["fedavg", "pfedsd"])
def test_a_run_that_stopped_goes_on_to_the_same_bits(name: str, changes: dict, tmp_path: Path) -> None:
    how = dict(rounds=6, epochs=1, clients=8, partition="iid", checkpoint_every=2, eval_every=3, batch_size=32)
    experiment = fs.Experiment(method=methods.get(name)(), **how, participation=0.5, **changes)
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=5)
    assert identical(states(whole), states(resumed))
    for file in ("metrics.jsonl", "timeline.jsonl"):
        both = [(tmp_path / folder / file) for folder in ("whole", "cut")]
        if "profile" not in changes and file == "timeline.jsonl":
            assert not both[0].exists()
            continue
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in both]
        lines = [[{k: v for k, v in line.items() if "seconds" not in k} for line in part] for part in lines]
        assert lines[0] == lines[1]
        assert [line["round"] for line in lines[0]] == [1, 2, 3, 4, 5, 6]
        assert all("timeline" not in line for line in lines[0])
    ours, theirs = ([{k: v for k, v in r.items() if "seconds" not in k} for r in x.history] for x in (whole, resumed))
    assert ours == theirs
    if changes.get("late") == "fold":
        assert sum(len(record["folded"]) for record in whole.history) > 0
        assert whole.history[3]["busy"]  # under way when the checkpoint of round 4 was made


def test_resume_notices_other_devices(tmp_path: Path) -> None:
    profile = devices(tmp_path, [1.0] * 8)
    how = dict(rounds=2, epochs=1, clients=5, partition="iid", checkpoint_every=1)
    fs.run(fs.Experiment(method=fs.FedAvg(), **how, profile=profile), out=tmp_path / "run")
    devices(tmp_path, [2.0] * 8)
    with pytest.raises(fs.InputError, match="devices"):
        fs.resume(tmp_path / "run")


# ---- side by side ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [fs.PFedSD(), fs.SCAFFOLD()], ids=lambda m: m.id)
@pytest.mark.parametrize(
    "changes", [{"profile": "uniform", "drop": 0.6}, HARD, {"sampler": "round-robin"}], ids=["drop", "hard", "robin"]
)
def test_seeds_in_one_stack_equal_separate_runs(method: fs.Method, changes: dict) -> None:
    def sims() -> list[Simulation]:
        return [prepared(method, "stacked", seed=seed, rounds=6, **changes) for seed in (2, 3, 4)]

    alone = [finish(sim) for sim in sims()]
    for a, b in zip(alone, together.run_starts([Start(sim) for sim in sims()]), strict=True):
        assert distance(states(a), states(b)) < 1e-10
        for x, y in zip(a.history, b.history, strict=True):
            assert {k: x[k] for k in (NEW - {"losses"}) & x.keys()} == {k: y[k] for k in (NEW - {"losses"}) & y.keys()}
            assert x["participants"] == y["participants"]


def test_a_round_in_which_all_of_one_run_drop_out_does_not_stop_the_others() -> None:
    def sims() -> list[Simulation]:
        return [
            prepared(fs.FedAvg(), "stacked", seed=s, rounds=6, participation=0.2, profile="uniform", drop=0.5)
            for s in (2, 3)
        ]

    runs = together.run_starts([Start(sim) for sim in sims()])
    empty = [[not record["participants"] for record in one.history] for one in runs]
    assert any(a != b for a, b in zip(*empty, strict=True))
    for sim, other in zip(sims(), runs, strict=True):
        assert distance(states(finish(sim)), states(other)) < 1e-10


def test_power_of_choice_is_not_stacked() -> None:
    sims = [prepared(fs.FedAvg(), "stacked", seed=seed, sampler="power-of-choice") for seed in (2, 3)]
    with pytest.raises(CannotStack, match="power-of-choice"):
        together.run_starts([Start(sim) for sim in sims])
