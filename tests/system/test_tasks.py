"""A regression by command, from files to report, prediction and resume; and what real sites tell of their metrics."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import fedstill as fs
from fedstill import cli
from fedstill.core.errors import InputError
from fedstill.core.metric import METRICS, Measures, Tally, measure_of
from fedstill.deploy.data import SiteData, skeleton
from fedstill.report.html.page import render
from fedstill.report.html.read import read
from fedstill.report.verdict import student, verdict_of_scores
from fedstill.run.answers import Answers

from ..problems import cut_and_resumed, identical, rows, states


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> Path:
    """Five hospitals; each has its own level, so the one model for everybody is worse."""
    g, folder = np.random.default_rng(0), tmp_path_factory.mktemp("hospitals")
    for k, name in enumerate(("berlin", "lyon", "porto", "riga", "turin")):
        x = g.normal(size=(30, 3))
        y = x @ [1.0, -2.0, 0.5] + 2.0 * k + 0.2 * g.normal(size=30)
        lines = [",".join(f"{v:.4f}" for v in (*row, t)) for row, t in zip(x, y, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,c,y", *lines]) + "\n")
    return folder


def command(*words: object) -> None:
    cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def compared(hospitals: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "all"
    settings = ("--rounds", 6, "--epochs", 3, "--lr", 0.02, "--device", "cpu", "--model", "mlr")
    command("compare", "local", "fedavg", "--data", hospitals, "--out", out, *settings)
    return out


def test_the_command_learns_numbers_and_says_so(compared: Path, hospitals: Path, capsys) -> None:
    command("show", compared, "--clients", "--score-metric", "r2")
    shown = capsys.readouterr().out.strip()
    first, _, *lines = shown.splitlines()
    assert first.split()[:5] == ["method", "score", "R²", "personal", "MAE"]
    assert lines[0].startswith("local *")  # the least error, the highest R²
    assert "mean absolute error (less is better)" in shown
    assert re.search(r"berlin +24 +6 +[\d.]+ +[\d.]+", shown)
    command("predict", compared / "local", "--client", "riga", "--data", hospitals / "riga.csv")
    printed = capsys.readouterr().out
    assert re.match(r"riga.csv:0  -?[\d.]+  \(-?[\d.]+\)", printed)
    mae = float(re.search(r"^MAE ([\d.]+)$", printed, re.MULTILINE)[1])
    assert mae < 1


def test_the_report_is_about_errors(compared: Path) -> None:
    study = read([compared])
    assert study.labels == ["local", "fedavg"]
    page = re.sub(r"<(style|script).*?</\1>", "", render(study), flags=re.DOTALL)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    assert "(local) serves the clients with an MAE of" in text
    assert "MAE as training goes on" in text
    assert "Student's interval" in text
    assert "accuracy" not in text.lower()
    summary = json.loads((compared / "summary.json").read_text())
    run = summary["methods"]["fedavg"]["runs"][0]
    assert (run["metric"], run["objective"]) == ("mae", "regression")
    assert run["personal_rmse"] >= run["personal"]


def test_the_verdict_is_students_interval_of_the_samples_errors(compared: Path) -> None:
    """Training alone has the smaller errors at every hospital but where the levels' mean is right by chance."""
    local, federated = (Answers.read(compared / name, 6).right for name in ("local", "fedavg"))
    gains = federated[4] - local[4]
    right = scipy_stats.ttest_1samp(-gains, 0).confidence_interval(0.95)
    rates = float(local[4].mean()), float(federated[4].mean())
    one = verdict_of_scores("turin", 0, rates, (local[4], federated[4]), measure_of("mae"))
    assert (one.low, one.high) == pytest.approx((right.low, right.high), abs=1e-9)
    assert one.side == "stay local"
    assert one.gain < 0
    assert verdict_of_scores("turin", 0, rates, (None, federated[4]), measure_of("mae")) is None
    assert verdict_of_scores("turin", 0, (1.0, 2.0), (local[4][:1], federated[4][:1]), measure_of("mae")) is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 11, 30, 99, 400, 401, 5000])
def test_students_t(degrees: int) -> None:
    assert student(degrees) == pytest.approx(scipy_stats.t.ppf(0.975, degrees), rel=1e-5)


def test_a_regression_goes_on_to_the_same_bits(hospitals: Path, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.PFedSD(), data=str(hospitals), rounds=3, epochs=1, lr=0.02, device="cpu", model="mlr", checkpoint_every=1,
        metrics=("mae", "r2"), seed=1,
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=2)
    assert identical(states(whole), states(resumed))
    assert rows(whole.history) == rows(resumed.history)
    loaded = fs.load(tmp_path / "whole")
    assert loaded.score(metric="r2", mean="pooled") == whole.history[-1]["personal_r2_pooled"]
    assert identical(states(whole), states(loaded))


def test_a_function_of_ones_own_by_command(hospitals: Path, tmp_path: Path, capsys) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def worst(y, f):\n    return abs(y - f).max()\n\n\nworst.lower = True\n")
    settings = ("--rounds", 1, "--epochs", 1, "--lr", 0.02, "--device", "cpu", "--model", "mlr")
    command(
        "run", "fedavg", "--data", hospitals, "--out", tmp_path / "run", "--metrics", f"rmse,{code}:worst", *settings
    )
    said = capsys.readouterr().out
    assert "regression of 1 output (as the targets are; --objective says otherwise)" in said
    assert "worst: personal model, mean per client, less is better" in said
    (last,) = fs.load(tmp_path / "run").history
    assert last["lower"] == ["worst"]
    assert last["personal_worst_pooled"] == max(last["personal_worst_clients"].values())
    assert f"{code}:worst@" in (tmp_path / "run" / "experiment.toml").read_text()


# ---- real sites ----------------------------------------------------------------------------------------------------------
def test_a_site_says_what_its_targets_are_for_and_another_must_agree(hospitals: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "own.csv").write_text((hospitals / "lyon.csv").read_text())
    site = SiteData.read(str(tmp_path / "site"))
    about = site.about()
    assert (about["objective"], about["target"], about["classes"]) == ("regression", [1], 1)
    whole = skeleton(["lyon", "porto"], [about, about])
    assert whole.objective == "regression"
    assert whole.clients[0].y_train.shape == (0, 1)
    assert site.among(0, 2, 1).objective == "regression"
    with pytest.raises(
        InputError, match="objective of site 'porto' = multilabel: should be regression as at site 'lyon'"
    ):
        skeleton(["lyon", "porto"], [about, {**about, "objective": "multilabel"}])


def test_sums_leave_a_site_and_rows_do_not() -> None:
    objective = fs.Federation.from_arrays([(np.ones((3, 2)), [0, 1, 2], np.ones((2, 2)), [0, 1])]).learns()
    measures = Measures.of(objective, [name for name, m in METRICS.items() if "classification" in m.objectives])
    closed = Measures(objective, measures.metrics, rows=False)
    tally = Tally(measures)
    tally.add(torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 2]))
    _, statistics = tally.done()
    sent = closed.sent(statistics)
    assert "scored" in statistics
    assert "scored" not in sent
    assert all(value.numel() <= 15 for family in sent.values() for value in family.values())
    assert not {"auroc", "average_precision"} & closed.values(sent).keys()
    assert closed.values(sent)["f1"] == measures.values(statistics)["f1"]
    assert closed.wrong(sent, 7) == ""
    assert "another form" in closed.wrong({**sent, "counts": {k: v[:2] for k, v in sent["counts"].items()}}, 7)
    assert "not finite" in closed.wrong({**sent, "squares": {k: v * np.nan for k, v in sent["squares"].items()}}, 7)
    assert "not those of the run's metrics" in closed.wrong(statistics, 7)
    assert "not whole" in closed.wrong({**sent, "counts": {}}, 7)
    assert measures.wrong(statistics, 7) == ""
    assert "another form" in measures.wrong(statistics, 8)
