"""The evaluation contract as flags: table, summary and picture show its number, computed here from the records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.run.evaluate import Evaluation
from fedstill.run.journal import Journal

from ..problems import run

QUICK = ["--rounds", "3", "--epochs", "1", "--clients", "5", "--batch-size", "64", "--device", "cpu"]


def command(*words: str) -> None:
    assert main([*words, *QUICK]) in (0, None)


def test_a_comparison_shows_the_contract_s_number(tmp_path: Path, capsys) -> None:
    out = tmp_path / "all"
    flags = ["--score-model", "generic", "--score-mean", "training", "--score-round", "best-test"]
    command("compare", "local", "fedavg", "fedprox", *flags, "--out", str(out))
    printed = capsys.readouterr().out
    assert "score %: generic model, all clients, mean by training size, best round ON TEST DATA" in printed
    assert "* best score" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert summary["contract"] == "generic model, all clients, mean by training size, best round ON TEST DATA"
    for name in ("fedavg", "fedprox"):
        history = Journal(out / summary["methods"][name]["runs"][0]["folder"]).history()
        sizes = history[-1]["train_samples"]
        by_hand = max(
            sum(n * record["generic_clients"][k] for k, n in sizes.items()) / sum(sizes.values()) for record in history
        )
        assert summary["methods"][name]["score"]["mean"] == pytest.approx(by_hand)
        assert f"{100 * by_hand:.2f}" in printed
    assert "score" not in summary["methods"]["local"]  # nobody trains a model for everybody
    row = [line for line in printed.splitlines() if line.startswith("local ")][-1]  # the others are of its progress
    assert row.split()[1] == "–"
    assert (out / "figure.png").stat().st_size > 10_000


def test_without_flags_nothing_changes(tmp_path: Path, capsys) -> None:
    command("run", "fedavg", "--out", str(tmp_path / "run"))
    assert "score %" not in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["contract"] == str(Evaluation())
    assert "score" not in summary["methods"]["fedavg"]


def test_further_models_and_a_resume(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    flags = ["--fine-tune", "2", "--further-every", "1", "--score-model", "fine-tuned", "--score-round", "mean10"]
    command("run", "fedavg", *flags, "--out", str(out))
    history = Journal(out).history()
    expected = np.mean([record["fine_tuned"] for record in history])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"]["fedavg"]["runs"][0]["score"] == pytest.approx(expected)
    first = capsys.readouterr().out
    assert "score %: fine-tuned model, all clients, mean per client, mean of the last 10 scored rounds" in first
    assert main(["resume", str(out)]) in (0, None)
    assert f"{100 * expected:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score_model": "personal", "score_clients": "common"}, "score_model = 'personal': should be 'generic'"),
        ({"score_model": "new"}, "score_model = 'new': should be 'personal' or 'generic' without new"),
        ({"score_model": "fine-tuned", "fine_tune": 1, "score_round": "best-test"}, "score_round = 'best-test'"),
        ({"score_model": "new", "new": True, "score_clients": "participants"}, "score_clients = 'participants'"),
        ({"score_round": "best-val"}, "score_round = 'best-val': should be another without validation data"),
        ({"score_model": "generic", "score_clients": "common"}, "score_clients = 'common': should be 'all'"),
        ({"score_model": "external"}, "score_model = 'external': should be another without data"),
    ],
)
def test_a_contract_that_cannot_be_is_refused_before_training(changes: dict, says: str) -> None:
    with pytest.raises(fs.InputError, match=says):
        run(fs.FedAvg(), **changes)
