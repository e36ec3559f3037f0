"""Hospital tables with gaps, texts, decimal commas and raw ages: the guide's commands, word for word, and what they say."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main

from .test_docs import BLOCKS

GUIDE = "docs/guides/your-data.md"
FLAGS = "--data hospitals --label diagnosis --ignore patient --encode onehot --rounds 20"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the guide's script has run."""
    folder = tmp_path_factory.mktemp("guide")
    (script,) = [b for b in BLOCKS if b.page == GUIDE and b.note == "write: make_hospitals.py"]
    (folder / "make_hospitals.py").write_text(script.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path("make_hospitals.py")
    return folder


@pytest.fixture
def place(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the hospitals."""
    (tmp_path / "hospitals").symlink_to(written / "hospitals")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def accuracy(said: str, method: str) -> float:
    (found,) = re.findall(rf"^{method}\s+(\d+\.\d+) ±", said, re.M)
    return float(found)


def test_the_guide_is_true(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands give what stands below each; chance without scaling, a sensible model with it."""
    section = [b for b in BLOCKS if b.page == GUIDE]
    start = next(i for i, b in enumerate(section) if b.note == "write: make_hospitals.py")
    scored, said = [], ""
    for block in section[start + 1 :]:
        if block.language == "sh":
            words = shlex.split(block.text)[1:]
            code = main(words)
            captured = capsys.readouterr()
            said = captured.out + captured.err
            assert code == (0 if "--encode" in words or words[0] == "predict" else 2), said
            if words[0] == "run" and code == 0:
                scored.append(accuracy(said, "fedavg"))
        elif block.language == "text":
            for line in block.text.splitlines():
                assert line in said.splitlines()
    raw, scaled = scored
    assert raw < 65, "raw ages and pressures: about chance, which the line above the table has said"
    assert scaled > 85
    assert "accuracy" in said
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    assert sum(row["right"] == "1" for row in rows) > 0.85 * 120


@pytest.mark.parametrize(
    ("rules", "best"), [("--impute median --normalise site", 80), ("--impute drop --normalise federated", 85)]
)
def test_other_rules_work_too(place: Path, capsys: pytest.CaptureFixture[str], rules: str, best: float) -> None:
    assert main(shlex.split(f"run fedavg {FLAGS} {rules}")) == 0
    said = capsys.readouterr().out
    assert accuracy(said, "fedavg") > best
    assert "not scaled" not in said
    if "drop" in rules:
        files = {
            name: (place / "hospitals" / f"{name}.csv").read_text().splitlines()[1:]
            for name in ("berlin", "lyon", "porto")
        }
        gaps = {name: sum(";;" in line or ";NA;" in line for line in lines) for name, lines in files.items()}
        counted = ", ".join(f"{name} {count}" for name, count in gaps.items())
        assert f"left out: {sum(gaps.values())} of 410 samples, with gaps (--impute drop): {counted}" in said


def test_gaps_without_a_rule_are_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"run fedavg {FLAGS} --out runs/x")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    lines = Path("hospitals/berlin.csv").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if ";;" in line or ";NA;" in line)
    column = "3 (BMI)" if ";;" in lines[number - 1] else "6 (blood pressure)"
    every = [line for path in Path("hospitals").iterdir() for line in path.read_text().splitlines()]
    bmi, pressure = sum(";;" in line for line in every), sum(";NA;" in line for line in every)
    assert f"hospitals/berlin.csv, line {number}, column {column} = nothing: should be a value" in said
    count = f"({bmi + pressure} values are missing in 3 of 3 files: BMI {bmi}, blood pressure {pressure})"
    assert f"{count}; --impute mean, median or drop says what to do" in said
    assert not Path("runs").exists(), "nothing is written"


def test_the_rules_are_part_of_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are in experiment.toml, from which the same run comes; it goes on with the same samples; exports carry them."""
    rules = "--impute mean:site --normalise site"
    assert main(shlex.split(f"run pfedsd {FLAGS} {rules} --rounds 4 --out whole")) == 0
    assert main(shlex.split(f"run pfedsd {FLAGS} {rules} --rounds 2 --out run")) == 0
    assert main(["resume", "run", "--rounds", "4"]) == 0
    assert main(["run", "whole/experiment.toml", "--out", "again"]) == 0
    whole, run, again = (fs.load(name) for name in ("whole", "run", "again"))
    scores = [[record["personal_clients"] for record in one.history] for one in (whole, run, again)]
    assert scores[0] == scores[1] == scores[2]
    capsys.readouterr()
    assert main(["predict", "run", "--generic", "--data", "hospitals/porto.csv"]) == 2
    assert (
        "should be a client: the run prepared each site's samples by the site's own statistics"
        in capsys.readouterr().err
    )
    made = fs.export(run, "model.safetensors", client="porto")
    from safetensors import safe_open

    with safe_open(made.path, "pt") as file:
        about = json.loads(file.metadata()["preprocessing"])
    assert about["features"] == ["age", "BMI", "sex=f", "sex=m", "smoker=no", "smoker=yes", "blood pressure"]
    assert len(about["own"]) == 1
    assert about["own"][0] == run.outline.preparation.own[2].to_dict()
    with safe_open(fs.export(run, "generic.safetensors").path, "pt") as file:
        assert "own" not in json.loads(file.metadata()["preprocessing"]), (
            "no site's statistics go with the generic model"
        )


def test_the_page_about_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in BLOCKS if b.page == "docs/data.md" and b.language == "python" and "Preprocessing" in b.text]
    (tmp_path / "block.py").write_text(block.text)
    runpy.run_path("block.py")
    said = capsys.readouterr().out
    assert "('age', 'sex=f', 'sex=m')" in said
    assert "numbers are scaled by mean and deviation of all sites' training samples" in said
    assert (
        main(["data", "show", "--data", "patients.csv", "--label", "ill", "--encode", "onehot", "--clients", "4"]) == 0
    )
    assert "texts become a column for each category: sex (2)" in capsys.readouterr().out
