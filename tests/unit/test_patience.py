"""Early stopping: when a run ends, which round's models it keeps, and that nothing else of it changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.core.errors import InputError
from fedstill.deploy import hub
from fedstill.report.html import page
from fedstill.report.html.read import read
from fedstill.run.patience import Patience
from fedstill.run.together import try_together

from ..problems import WIRED, cut, distance, identical, ragged, rows, run, states

ON_TEST = {"patience": 2, "score_round": "best-test", "score_mean": "sample"}
MANY = ((13, 9), (7, 8), (2, 7), (10, 9), (5, 8), (8, 8))
PROBLEM: dict[str, Any] = {"rounds": 14, "lr": 0.15, "participation": 0.35, "seed": 4}
LONG = fs.Experiment(
    method=fs.PFedSD(), clients=5, rounds=12, epochs=1, participation=0.6, lr=0.1, split="70/10/20", patience=2,
    score_round="best-val", engine="one", workers=1, dtype="float64", device="cpu",
)  # fmt: skip


def slow(values: Sequence[float], patience: int) -> tuple[int, int]:
    """Return the last round that is run and the best one, by looking at all values again after every round."""
    for t in range(1, len(values) + 1):
        best = values.index(max(values[:t])) + 1
        if t - best >= patience:
            return t, best
    return len(values), values.index(max(values)) + 1


def stopped(method: fs.Method, **changes: Any) -> tuple[fs.Run, fs.Run, fs.Run]:
    """A run of all rounds, the same with patience, and one whose last round is the best round of that."""
    settings = {**PROBLEM, "data": ragged(MANY, seed=3), **changes}
    whole = run(method, **settings)
    patient = run(method, **{**settings, **ON_TEST})
    return whole, patient, run(method, **{**settings, "rounds": patient.task.round})


def without_notes(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without seconds and without what patience adds."""
    return [{k: v for k, v in r.items() if k not in ("best_round", "stopped")} for r in rows(history)]


def test_the_rule_by_hand() -> None:
    """An equal score is no better one, a round that was not scored does not count, and a later, better one begins anew."""
    scores = fs.Experiment(patience=2, score_round="best-test")
    values = [0.5, 0.6, None, 0.6, 0.7, 0.1, 0.7]
    patience = Patience.of(scores)
    assert patience is not None
    seen = []
    for t, value in enumerate(values, start=1):
        record: dict[str, Any] = {"round": t, "participants": [0]}
        if value is not None:
            record |= {"personal_clients": {"0": value}, "samples": {"0": 1}}
        patience.take(record)
        seen.append((patience.best, patience.over))
    assert seen == [(1, False), (2, False), (2, False), (2, False), (5, False), (5, False), (5, True)]
    assert Patience.of(fs.Experiment()) is None


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("method", [fs.SCAFFOLD(), fs.PFedSD(lam=0.5), fs.FedRep()], ids=lambda m: m.id)
def test_a_run_ends_where_the_scores_say_and_keeps_the_best_rounds_models(method: fs.Method, engine: str) -> None:
    whole, patient, best = stopped(method, engine=engine)
    values = [value for _, value in fs.Evaluation(mean="sample").by_round(whole.history)]
    last, kept = slow(values, 2)
    assert kept < last < len(values), "the problem shows nothing"
    assert (len(patient.history), patient.task.round, patient.stopped) == (last, kept, True)
    later = {k for r in patient.history[kept:] for k in r["participants"]}
    before = {k for r in patient.history[:kept] for k in r["participants"]}
    assert later & before or later - before
    assert without_notes(patient.history) == without_notes(whole.history[:last])
    assert identical(states(patient), states(best))
    assert patient.score() == best.score() == patient.history[kept - 1]["personal"]
    assert patient.score(round="best-test", mean="sample") == max(values[:last])


def test_clients_that_began_after_the_best_round_are_as_before_they_began() -> None:
    """Most clients take part late; a kept round before that has their initial models."""
    settings: dict[str, Any] = {**PROBLEM, "participation": 0.17, "rounds": 30, "data": ragged(MANY, seed=3)}
    found = 0
    for seed in range(6):
        patient = run(fs.FedRep(), **{**settings, **ON_TEST, "seed": seed})
        begun = {k for r in patient.kept for k in r["participants"]}
        since = {k for r in patient.history[patient.task.round :] for k in r["participants"]} - begun
        found += bool(since)
        if since:
            best = run(fs.FedRep(), **{**settings, "seed": seed, "rounds": patient.task.round})
            assert identical(states(patient), states(best))
    assert found, "no client began late"


@pytest.mark.parametrize(
    "timing",
    [
        {"mode": "fedbuff", "buffer": 2, "profile": "lognormal:1"},
        {"deadline": 0.5, "late": "fold", "profile": "lognormal:1"},
    ],
    ids=["fedbuff", "late"],
)
def test_simulated_time(timing: dict[str, Any]) -> None:
    """Orders under way and late replies belong to the state of a round, too."""
    whole, patient, best = stopped(fs.FedAvg(), participation=0.7, **timing)
    assert patient.task.round < len(patient.history)
    assert without_notes(patient.history) == without_notes(whole.history[: len(patient.history)])
    assert identical(states(patient), states(best))


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the best round is the last or an earlier one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for rounds in (1, PROBLEM["rounds"]):
        run(fs.FedAvg(), **{**PROBLEM, "data": ragged(MANY, seed=3), **ON_TEST, "rounds": rounds})
        assert list(tmp_path.iterdir()) == []


def test_on_any_transport() -> None:
    settings = {**PROBLEM, "data": ragged(MANY, seed=3), **ON_TEST}
    here, wired = run(fs.SCAFFOLD(), **settings), run(fs.SCAFFOLD(), **settings, transport=WIRED)
    assert here.stopped
    assert identical(states(here), states(wired))


def test_validation_data_choose_and_a_folder_keeps_it_through_a_stop(tmp_path: Path) -> None:
    """What was cut and goes on ends as what was not; the folder gives back the best models, and goes on with patience 0."""
    whole = fs.run(LONG, out=tmp_path / "whole")
    values = [r["val_personal"] for r in whole.history]
    assert (len(values), whole.task.round) == slow(values, 2)
    assert whole.task.round < len(values) < LONG.rounds
    cut(LONG, tmp_path / "cut", after=len(values) - 1)
    resumed = fs.resume(tmp_path / "cut")
    assert rows(resumed.history) == rows(whole.history)
    assert identical(states(resumed), states(whole))
    loaded = fs.load(tmp_path / "cut")
    assert loaded.task.round == whole.task.round
    assert identical(states(loaded), states(whole))
    assert loaded.score() == whole.score()
    again = fs.resume(tmp_path / "cut")
    assert len(again.history) == len(values), "what has stopped early stays so"
    more = fs.resume(tmp_path / "cut", patience=0)
    everything = fs.run(fs.Experiment(**{**vars(LONG), "patience": 0}))
    assert without_notes(more.history) == without_notes(everything.history)
    assert identical(states(more), states(everything))


def test_a_growing_share_is_that_of_the_kept_round(tmp_path: Path) -> None:
    """CD²-pFed's personal model depends on the round and on all rounds; so does what is loaded."""
    changes = {"method": fs.CD2PFed(), "patience": 1, "rounds": 9, "split": "60/20/20"}
    patient = fs.run(fs.Experiment(**{**vars(LONG), **changes}), out=tmp_path / "run")
    assert patient.stopped
    assert identical(states(fs.load(tmp_path / "run")), states(patient))
    right = {k: sum(bits) for k, bits in read([tmp_path / "run"]).first.answers.right.items()}
    kept = patient.history[patient.task.round - 1]
    assert right == {int(k): round(v * kept["samples"][k]) for k, v in kept["personal_clients"].items()}


def test_the_best_rounds_checkpoint_must_be_there(tmp_path: Path) -> None:
    cut(LONG, tmp_path, after=4)
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = history[-1]["best_round"]
    kept = {int(file.stem.partition("-")[2]) for file in (tmp_path / "checkpoints").glob("*.json")}
    assert best in kept
    if best == max(kept):
        pytest.fail("the best round is the newest, so this shows nothing")
    (tmp_path / "checkpoints" / f"round-{best:06d}.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"checkpoint of round {best}, the best so far"):
        fs.resume(tmp_path)
    assert len(fs.resume(tmp_path, patience=0).history) == LONG.rounds


def test_seeds_side_by_side_stop_each_after_its_own_round(tmp_path: Path) -> None:
    """Three seeds in one stack end as each alone; stopped when one of them was over, they go on to the same bits."""
    changes = {"engine": "stacked", "method": fs.FedAvg()}
    seeds = [fs.Experiment(**{**vars(LONG), **changes, "seed": seed}) for seed in range(3)]
    beside = fs.run_together(seeds)
    ends = [len(run.history) for run in beside]
    assert len(set(ends)) > 1, "the seeds show nothing"
    for seed, together in zip(seeds, beside, strict=True):
        alone = fs.run(seed)
        assert (len(alone.history), alone.task.round) == (len(together.history), together.task.round)
        assert distance(states(alone), states(together)) < 1e-10
    outs = [tmp_path / str(number) for number in range(3)]
    longest = ends.index(max(ends))

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == min(ends) + 1:
            raise KeyboardInterrupt

    follow = [stop if number == longest else None for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        try_together(seeds, outs=outs, progress=follow)
    for whole, again in zip(beside, try_together(seeds, outs=outs, resume=True), strict=True):
        assert isinstance(again, fs.Run)
        assert rows(again.history) == rows(whole.history)
        assert identical(states(again), states(whole))


def test_outputs_name_the_round_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs.run(LONG, out=tmp_path / "run")
    history = fs.load(tmp_path / "run").history
    kept, last = history[-1]["best_round"], len(history)
    assert history[-1]["stopped"]
    assert not any("stopped" in record for record in history[:-1])
    line = f"pfedsd: stopped after round {last} of 12; models and numbers are those of round {kept}"
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert line in shown
    assert "best round on validation data, patience 2" in shown
    assert "not finished" not in shown
    text = page.render(read([tmp_path / "run"]))
    assert line in text
    assert "not finished" not in text


def test_a_stop_by_test_data_is_labelled(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["run", "fedavg", "--clients", "5", "--epochs", "1", "--patience", "1", "--score-round", "best-test"]) == 0
    )
    assert "best round ON TEST DATA, patience 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score_round": "last"}, "best-val"),
        ({"score_round": "mean10"}, "best-val"),
        ({"split": "80/20"}, "70/10/20"),
        ({"wait_free": "fixed", "profile": "uniform"}, "wait_free"),
        ({"patience": -1}, "at least 0"),
        ({"method": fs.Local(), "score_model": "generic"}, "it has no generic model"),
        ({"privacy": "central", "method": fs.FedAvg(mean="uniform"), "sampler": "poisson"}, "not protected"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_training(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        fs.run(fs.Experiment(**{**vars(LONG), **changes}), progress=lambda record: pytest.fail("it trained"))
    assert "\n" not in str(refused.value)


def test_a_deployment_refuses_patience() -> None:
    with pytest.raises(InputError, match="newest rounds"):
        hub.check(LONG)
