"""Further scores by round: what a shorter run would end with, without any effect on training; and the contract on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedstill as fs

from ..problems import SETTINGS, WIRED, cut_and_resumed, identical, make, ragged, rows, run, states

ASKED: dict[str, Any] = {"new": True, "averaged": True, "fine_tune": 2, "newcomers": 1, "join_epochs": 1}
ENTRIES = {
    "new",
    "averaged",
    "fine_tuned",
    "fine_tuned_sample",
    "fine_tuned_clients",
    "newcomers_before",
    "newcomers_after",
}


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", [fs.FedRep(head_epochs=1), fs.PFedSD(), fs.SCAFFOLD()], ids=lambda m: m.id)
def test_a_round_has_the_scores_that_a_shorter_run_ends_with(method: fs.Method, engine: str) -> None:
    how = {"engine": engine, **ASKED}
    found = run(method, further_every=1, **how)
    for t in (1, 2, 3):
        short = run(method, rounds=t, **how)
        entries = found.history[t - 1]
        assert {name: entries[name] for name in short.after} == short.after
        assert short.after.keys() >= ENTRIES - (
            {"averaged"} if method.trains_generic and "generic" in method.scores else set()
        )
    assert found.after == {name: found.history[-1][name] for name in found.after}


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("model", ["plain", "normed"])
def test_they_change_nothing(engine: str, model: str) -> None:
    plain = run(fs.PFedSD(), model, engine=engine, newcomers=1)
    asked = run(fs.PFedSD(), model, engine=engine, further_every=1, **ASKED)
    assert identical(states(plain), states(asked))
    for a, b in zip(rows(plain.history), rows(asked.history), strict=True):
        assert {name: b[name] for name in a} == a


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "fedbuff", "profile": "lognormal:0.5", "buffer": 2},
        {"profile": "lognormal:0.5", "wait_free": "until-download", "personal_cap": 3},
        {"profile": "lognormal:0.5", "late": "fold", "deadline": 0.5},
    ],
    ids=["fedbuff", "wait-free", "late"],
)
def test_in_simulated_time_neither(changes: dict) -> None:
    plain, asked = run(fs.Ditto(), **changes), run(fs.Ditto(), **changes, further_every=1, fine_tune=1, new=True)
    assert identical(states(plain), states(asked))
    assert all("new" in record and "fine_tuned" in record for record in asked.history)
    for a, b in zip(rows(plain.history), rows(asked.history), strict=True):
        assert {name: b[name] for name in a} == a


def test_only_in_the_rounds_that_were_asked_for() -> None:
    found = run(fs.PFedSD(), rounds=5, eval_every=1, further_every=2, new=True)
    assert [record["round"] for record in found.history if "new" in record] == [2, 4, 5]
    assert ["further_seconds" in record for record in found.history] == [False, True, False, True, True]
    assert not any("new" in record for record in run(fs.PFedSD(), new=True).history)
    with pytest.raises(fs.InputError, match=r"further_every = 3: should be a multiple of eval_every \(2\)"):
        run(fs.PFedSD(), eval_every=2, further_every=3)


def test_a_resumed_run_goes_on_with_them(tmp_path) -> None:
    experiment = fs.Experiment(
        method=fs.FedPer(), rounds=4, epochs=1, clients=5, batch_size=64, checkpoint_every=1, device="cpu", further_every=2,
        new=True, fine_tune=1, averaged=True,
    )  # fmt: skip
    whole, cut = cut_and_resumed(experiment, tmp_path, after=1)
    assert rows(whole.history) == rows(cut.history)
    assert whole.after == cut.after
    assert [record["round"] for record in cut.history if "new" in record] == [2, 4]


def test_seeds_side_by_side_have_their_own() -> None:
    experiments = [
        fs.Experiment(
            method=fs.PFedSD(), rounds=2, epochs=1, clients=5, batch_size=64, device="cpu", dtype="float64", seed=seed,
            engine="stacked", further_every=1, new=True, fine_tune=1,
        )
        for seed in (0, 1)
    ]  # fmt: skip
    together, alone = fs.run_together(experiments), [fs.run(one) for one in experiments]
    for a, b in zip(together, alone, strict=True):
        for x, y in zip(a.history, b.history, strict=True):
            assert {name: x[name] for name in ("new", "fine_tuned_clients")} == {
                name: y[name] for name in ("new", "fine_tuned_clients")
            }
    assert together[0].history[0]["new"] != together[1].history[0]["new"]


def test_over_the_wire_too() -> None:
    from fedstill.run import simulation
    from fedstill.run.experiment import Training

    from ..problems import finish

    settings = Training(**SETTINGS, engine="one", further_every=1, **ASKED)
    sim = simulation.prepare(fs.FedRep(head_epochs=1), make("normed"), ragged(), None, settings)
    assert rows(finish(sim).history) == rows(finish(sim, WIRED).history)


# ---- the contract on them -----------------------------------------------------------------------------------------------
def record(t: int, **more: Any) -> dict[str, Any]:
    return {
        "round": t, "participants": [0], "samples": {"0": 10, "1": 30}, "train_samples": {"0": 3, "1": 1},
        "personal_clients": {"0": 0.1 * t, "1": 0.5}, **more,
    }  # fmt: skip


HISTORY = [
    record(1, new=0.2, new_common=0.1, fine_tuned_clients={"0": 0.4, "1": 0.8}, newcomers_after=0.3, external=0.9),
    record(2),
    record(3, new=0.6, new_common=0.4, fine_tuned_clients={"0": 0.6, "1": 0.8}, newcomers_after=0.2, external=0.7),
]


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ({"model": "new"}, 0.6),
        ({"model": "new", "round": "mean10"}, 0.4),
        ({"model": "new", "clients": "common"}, 0.4),
        ({"model": "external", "round": "best-test"}, 0.9),
        ({"model": "newcomers", "round": "best-test"}, 0.3),
        ({"model": "fine-tuned"}, 0.7),
        ({"model": "fine-tuned", "round": "mean10"}, (0.6 + 0.7) / 2),
        ({"model": "fine-tuned", "mean": "sample"}, (10 * 0.6 + 30 * 0.8) / 40),
        ({"model": "fine-tuned", "mean": "training"}, (3 * 0.6 + 0.8) / 4),
        ({"model": "fine-tuned", "clients": "participants"}, 0.6),
    ],
)
def test_the_contract(contract: dict, expected: float) -> None:
    assert fs.Evaluation(**contract).of(HISTORY) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("contract", "says"),
    [
        ({"model": "fine-tuned", "clients": "common"}, "model = 'fine-tuned': should be 'generic'"),
        ({"model": "external", "clients": "common"}, "clients = 'common': should be 'all' with the model 'external'"),
        ({"model": "new", "clients": "participants"}, "should be 'all' or 'common' with the model 'new'"),
        ({"model": "new", "round": "best-val"}, "new is not scored on validation data"),
        ({"model": "averaged"}, "a model that this run scored"),
    ],
)
def test_what_cannot_be_is_refused(contract: dict, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        fs.Evaluation(**contract).of(HISTORY)


def test_one_score_at_the_end_is_no_best_round() -> None:
    found = run(fs.PFedSD(), fine_tune=1)
    assert found.score(model="fine-tuned") == pytest.approx(found.after["fine_tuned"])
    assert found.score(model="fine-tuned", mean="sample") == pytest.approx(found.after["fine_tuned_sample"])
    for when in ("best-test", "mean10"):
        with pytest.raises(fs.InputError, match="'last': fine-tuned was scored once"):
            found.score(model="fine-tuned", round=when)
    by_round = run(fs.PFedSD(), fine_tune=1, further_every=1)
    assert by_round.score(model="fine-tuned", round="mean10") == pytest.approx(
        np.mean([record["fine_tuned"] for record in by_round.history])
    )


# ---- rounds to a target -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("contract", "target", "expected"),
    [
        ({}, 0.3, 1),  # (0.1 + 0.5) / 2, exactly
        ({}, 0.31, 2),
        ({}, 0.4, 3),
        ({}, 0.41, None),
        ({"round": "best-test"}, 0.31, 2),  # which round counts has no part in it
        ({"mean": "sample"}, 0.42, 2),  # 0.4, then 0.425
        ({"clients": "participants"}, 0.25, 3),
        ({"model": "new"}, 0.5, 3),  # not scored in round 2
        ({"model": "new"}, 0, 1),
        ({"model": "new"}, 1, None),
    ],
)
def test_rounds_to(contract: dict, target: float, expected: int | None) -> None:
    assert fs.Evaluation(**contract).rounds_to(HISTORY, target) == expected


def test_rounds_to_of_a_run() -> None:
    found = run(fs.PFedSD(), rounds=4, eval_every=2)
    first, last = (record["personal"] for record in found.history if "personal" in record)
    assert found.rounds_to(max(first, last)) == (2 if first >= last else 4)
    assert found.rounds_to(0.0) == 2  # the first that was scored
    assert found.rounds_to(0.0, fs.Evaluation(model="generic", mean="sample")) == 2
    for target in (-0.1, 50, True, "half"):
        with pytest.raises(fs.InputError, match="an accuracy from 0 to 1"):
            found.rounds_to(target)  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match=r"a fedstill\.Evaluation"):
        found.rounds_to(0.5, {"model": "generic"})  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match="a model that this run scored"):
        found.rounds_to(0.5, fs.Evaluation(model="new"))
