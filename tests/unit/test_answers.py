"""answers.json: the models' answers on the clients' own test samples, as a run's folder keeps them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.run.answers import ANSWERS, Answers

SMALL = {"rounds": 2, "epochs": 1, "clients": 6}


@pytest.mark.parametrize("method", [fs.PFedSD(), fs.FedAvg(), fs.FedRep(), fs.Local()])
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_they_add_up_to_the_accuracies_of_the_last_round(method: fs.Method, engine: str, tmp_path: Path) -> None:
    run = fs.run(fs.Experiment(method=method, engine=engine, dtype="float64", **SMALL), out=tmp_path / "run")
    answers = Answers.read(tmp_path / "run", 2)
    assert answers is not None
    last = run.history[-1]
    assert {str(k): bits.mean() for k, bits in answers.right.items()} == pytest.approx(last["personal_clients"])
    assert {str(k): len(bits) for k, bits in answers.right.items()} == last["samples"]


def test_the_samples_are_in_the_clients_order(tmp_path: Path) -> None:
    run = fs.run(fs.Experiment(method=fs.FedAvg(), **SMALL), out=tmp_path / "run")
    answers = Answers.read(tmp_path / "run", 2)
    assert answers is not None
    for k, bits in answers.right.items():
        x, y = run.data.test.of(k)
        right = [int(run.task.predict(run.generic_model(), x[i : i + 1]).argmax()) == int(y[i]) for i in range(len(y))]
        assert bits.tolist() == right


def test_classes_are_counted_over_all_splits(tmp_path: Path) -> None:
    experiment = fs.Experiment(method=fs.FedAvg(), split="70/10/20", **SMALL)
    run = fs.run(experiment, out=tmp_path / "run")
    answers = Answers.read(tmp_path / "run", 2)
    assert answers is not None
    assert sum(map(sum, answers.classes.values())) == 1797
    train, val, test = run.data.train, run.data.val, run.data.test
    assert val is not None
    for k, counts in answers.classes.items():
        labels = [int(y) for part in (train, val, test) for y in part.of(k)[1]]
        assert counts == [labels.count(c) for c in range(10)]


def test_newcomers_have_none(tmp_path: Path) -> None:
    run = fs.run(fs.Experiment(method=fs.FedAvg(), newcomers=2, **SMALL), out=tmp_path / "run")
    answers = Answers.read(tmp_path / "run", 2)
    assert answers is not None
    assert set(answers.right) == set(run.clients)


def test_they_belong_to_a_round(tmp_path: Path) -> None:
    experiment = fs.Experiment(method=fs.FedAvg(), **SMALL)
    fs.run(experiment, out=tmp_path / "run")
    before = (tmp_path / "run" / ANSWERS).read_bytes()
    fs.resume(tmp_path / "run")
    assert (tmp_path / "run" / ANSWERS).read_bytes() == before
    fs.resume(tmp_path / "run", rounds=3)
    assert Answers.read(tmp_path / "run", 2) is None
    whole = fs.run(dataclasses.replace(experiment, rounds=3), out=tmp_path / "whole")
    assert (tmp_path / "run" / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    assert len(whole.history) == 3


def test_lost_ones_are_made_again_by_a_resume(tmp_path: Path) -> None:
    fs.run(fs.Experiment(method=fs.PFedSD(), **SMALL), out=tmp_path / "run")
    before = (tmp_path / "run" / ANSWERS).read_bytes()
    (tmp_path / "run" / ANSWERS).unlink()
    fs.resume(tmp_path / "run")
    assert (tmp_path / "run" / ANSWERS).read_bytes() == before


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "other", "empty"])
def test_what_is_damaged_is_not_used(damage: str, tmp_path: Path) -> None:
    file = tmp_path / ANSWERS
    Answers(2, {0: np.array([True, False, True])}, {0: [3]}).write(tmp_path)
    assert Answers.read(tmp_path, 2) is not None
    raw = file.read_text()
    if damage == "gone":
        file.unlink()
    else:
        record = json.loads(raw)
        record["clients"]["0"]["tests"] = 2
        texts = {"changed": json.dumps(record), "cut": raw[:-9], "other": "[]", "empty": ""}
        file.write_text(texts[damage])
    assert Answers.read(tmp_path, 2) is None


def test_without_out_no_model_is_asked_for(spied, tmp_path: Path) -> None:
    experiment = fs.Experiment(method=fs.PFedSD(), **SMALL)
    fs.run(experiment)
    assert [order for order in spied.orders if order.kind == "model"] == []
    fs.run(experiment, out=tmp_path / "run")
    assert [order.client for order in spied.orders if order.kind == "model"] == [*range(6)]
