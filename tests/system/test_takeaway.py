"""The commands for finished runs: show, export, predict, and --track, on three sites' files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedstill as fs
from fedstill.cli import main

from ..unit.test_load import cities

QUICK = ["--rounds", "3", "--epochs", "1", "--batch-size", "16", "--device", "cpu", "--workers", "1"]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("work")
    data = cities(root / "cities")
    words = ["--data", str(data), *QUICK]
    assert main(["run", "pfedsd", *words, "--out", str(root / "one")]) == 0
    assert main(["run", "fedavg", *words, "--out", str(root / "again")]) == 0
    assert main(["compare", "fedavg", "local", *words, "--seeds", "2", "--out", str(root / "both")]) == 0
    return root


def printed(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_show_prints_the_table_that_the_run_ended_with(work: Path, tmp_path: Path, capsys) -> None:
    data = str(work / "cities")
    after = printed(capsys, "run", "fedavg", "--data", data, *QUICK, "--out", tmp_path / "run")
    table = after[after.index("method ") : after.index("saved in")].strip()
    assert "FLOPs" in table
    assert table in printed(capsys, "show", tmp_path / "run")


def test_show_sets_folders_side_by_side(work: Path, tmp_path: Path, capsys) -> None:
    text = printed(capsys, "show", work / "one", work / "both", "--clients", "--out", tmp_path / "all.png")
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("pfedsd ", "fedavg ", "local "))]
    assert set(rows) == {"pfedsd", "fedavg", "local"}
    history = fs.load(work / "one").history
    paris = next(line.split() for line in text.splitlines() if " paris " in line)
    assert f"{100 * history[-1]['personal_clients']['1']:.2f}" in paris
    assert paris[2:4] == ["24", "6"]
    bars = [line.split()[1] for line in text.splitlines() if line.startswith("pfedsd ") and len(line.split()) == 3]
    assert len(bars) == 1
    assert len(bars[0]) == 3
    assert set(bars[0]) <= set("▁▂▃▄▅▆▇█")
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_clients_of_different_divisions_are_not_mixed(tmp_path: Path, capsys) -> None:
    """Each seed deals the digits anew: client 2 of one seed is not client 2 of the other."""
    printed(capsys, "compare", "fedavg", "local", "--clients", 4, "--seeds", 2, *QUICK, "--out", tmp_path / "all")
    text = printed(capsys, "show", tmp_path / "all", "--clients")
    first = {label: runs[0].history[-1]["personal_clients"]["2"] for label, runs in fs.load(tmp_path / "all").items()}
    row = next(line.split() for line in text.splitlines() if line.startswith("2 "))
    assert sorted(row[3:]) == sorted(f"{100 * rate:.2f}" for rate in first.values())
    assert (
        "clients of seed 0; runs on other divisions of the data, whose clients are others, are left out here: 2" in text
    )


def test_show_by_another_contract(work: Path, capsys) -> None:
    text = printed(capsys, "show", work / "both", "--score-round", "best-test", "--score-model", "generic")
    runs = fs.load(work / "both")["fedavg"]
    best = sum(max(record["generic_client"] for record in run.history) for run in runs) / 2
    row = next(line for line in text.splitlines() if line.startswith("fedavg"))
    assert f"{100 * best:.2f}" in row
    assert "validation data" in refused(capsys, "show", work / "both", "--score-round", "best-val")


def test_the_same_run_twice_is_told_apart(work: Path, capsys) -> None:
    """Two folders of equal settings and seed are no two seeds."""
    text = printed(capsys, "show", work / "both", work / "again")
    assert f"folder={work / 'again'}" in text


def test_an_unfinished_run_says_so(work: Path, tmp_path: Path, capsys) -> None:
    def stop(record: dict) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    settings = {"rounds": 5, "epochs": 1, "checkpoint_every": 1, "device": "cpu", "workers": 1}
    experiment = fs.Experiment(method=fs.FedAvg(), data=str(work / "cities"), **settings)
    with pytest.raises(KeyboardInterrupt):
        fs.run(experiment, out=tmp_path / "cut", progress=stop)
    text = printed(capsys, "show", tmp_path / "cut")
    assert f"not finished: fedavg, seed 0: 2 of 5 rounds; 'fedstill resume {tmp_path / 'cut'}' goes on" in text


def test_export_and_load_in_plain_torch(work: Path, tmp_path: Path, capsys) -> None:
    line = printed(capsys, "export", work / "one", "--client", "paris", "--to", tmp_path / "paris.safetensors")
    assert "loaded again: same predictions on 16 synthetic samples" in line
    state = load_file(tmp_path / "paris.safetensors")
    own = fs.load(work / "one").personal("paris")
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], state[name]) for name in own)
    assert "4 models in" in printed(capsys, "export", work / "one", "--all", tmp_path / "models")
    names = {file.name for file in (tmp_path / "models").iterdir()}
    clients = {f"client-{k}-{name}.safetensors" for k, name in enumerate(("berlin", "paris", "rome"))}
    assert names == {*clients, "generic.safetensors"}


def test_predict_writes_a_row_for_each_sample(work: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "predictions.csv"
    text = printed(capsys, "predict", work / "one", "--client", 2, "--data", work / "cities" / "rome.csv", "--out", out)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30
    assert rows[0].keys() == {"sample", "class", "probability", "label", "right"}
    right = sum(row["class"] == row["label"] for row in rows)
    assert f"accuracy {100 * right / 30:.2f} % ({right} of 30 right)" in text


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["export", "one"], "--to = nothing"),
        (["export", "one", "--to", "m.onnx"], "a client's number or name, or --generic"),
        (["export", "one", "--client", "1", "--generic", "--to", "m.pt2"], "or --generic"),
        (["export", "one", "--client", "london", "--to", "m.pt2"], "or a name: "),
        (["export", "one", "--client", "1", "--to", "m.bin"], "ends in .safetensors, .onnx, .pt2"),
        (["export", "one", "--all", "m", "--client", "1"], "left out with --all"),
        (["export", "both", "--client", "1", "--to", "m.pt2"], "this one holds several, such as"),
        (["predict", "one", "--client", "1"], "a file or a folder of samples"),
        (["predict", "one", "--client", "1", "--data", "gone.csv"], "a file that exists"),
        (["show"], "folders that --out made"),
        (["show", "cities"], "holds experiment.toml"),
    ],
)
def test_refusals(words: list[str], right: str, work: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(work)
    before = sorted(work.iterdir())
    assert right in refused(capsys, *words)
    assert sorted(work.iterdir()) == before


METHOD = """
from dataclasses import dataclass
import fedstill as fs

@dataclass(frozen=True, kw_only=True)
class Mine(fs.FedAvg):
    \"\"\"FedAvg by another name.\"\"\"

    id = "mine"
"""


def test_code_of_ones_own_is_not_imported_to_read_results(work: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    data = str(work / "cities")
    printed(capsys, "run", f"{tmp_path / 'mine.py'}:Mine", "--data", data, *QUICK, "--out", tmp_path / "run")
    (tmp_path / "mine.py").unlink()
    with pytest.raises(fs.InputError, match=r"code of its own .*mine\.py:Mine.*method=METHOD"):
        fs.load(tmp_path / "run")
    run = fs.load(tmp_path / "run", method=fs.FedAvg())
    assert run.generic().keys() == fs.load(work / "again").generic().keys()


def test_track_from_the_command(work: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("tensorboard")
    data = str(work / "cities")
    words = ["compare", "fedavg", "local", "--data", data, *QUICK, "--track", "tensorboard", "--out", tmp_path / "out"]
    printed(capsys, *words)
    for label in ("fedavg", "local"):
        assert list((tmp_path / "out" / label / "tensorboard").glob("events.*"))
    assert json.loads((tmp_path / "out" / "job.json").read_text())["track"] == ["tensorboard"]
    error = refused(capsys, "run", "fedavg", "--track", "tensorbord")
    assert "'tensorboard'?" in error
