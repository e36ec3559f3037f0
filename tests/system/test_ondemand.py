"""Commands on images that stay on disk: what they print and leave behind is what they do with images in memory."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.data import cached

from ..unit.test_ondemand import paint

QUICK = [
    "--epochs",
    "1",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--workers",
    "1",
    "--model",
    "lenet5",
    "--clients",
    "3",
]


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def numbers(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if not name.endswith("seconds")} for record in records]


def test_run_resume_score_predict_and_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "decoded"))
    data = f"{paint(tmp_path / 'images', 60, splits=('train', 'test'))}@12"
    other = f"{paint(tmp_path / 'other', 24, seed=3)}@12"
    words = ["--data", data, "--pool", "train", "--external", other, *QUICK]
    run("run", "pfedsd", *words, "--rounds", 3, "--memory-map", "off", "--out", tmp_path / "off")
    assert not (tmp_path / "decoded").exists()
    run("run", "pfedsd", *words, "--rounds", 2, "--memory-map", "on", "--out", tmp_path / "on")
    capsys.readouterr()
    run("resume", tmp_path / "on", "--rounds", 3)
    assert numbers(tmp_path / "on") == numbers(tmp_path / "off")
    same = ("partition.json", "answers.json")
    for name in same:
        assert (tmp_path / "on" / name).read_bytes() == (tmp_path / "off" / name).read_bytes(), name
    assert (tmp_path / "on" / "report.html").stat().st_size > 10_000
    loaded = [fs.load(tmp_path / way) for way in ("on", "off")]
    assert loaded[0].after == loaded[1].after
    shown, decoded = [], len(list((tmp_path / "decoded").iterdir()))
    for memory in ("1G", "100K"):  # enough, and too little: what is predicted is decoded into the cache then
        monkeypatch.setenv("FEDSTILL_MEMORY", memory)
        out = tmp_path / f"{memory}.csv"
        run("predict", tmp_path / "on", "--data", tmp_path / "other", "--client", 1, "--out", out)
        shown.append(list(csv.DictReader(out.open())))
    assert len(list((tmp_path / "decoded").iterdir())) == decoded + 1
    assert shown[0] == shown[1]
    assert len(shown[0]) == 24


def test_data_show(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "decoded"))
    data = paint(tmp_path / "images", 30)
    texts = []
    for way in ("on", "off"):
        run("data", "show", "--data", data, "--clients", 3, "--memory-map", way)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["data", "show", "--data", str(data), "--memory-map", "maybe"]) == 2
    assert "--memory-map" in capsys.readouterr().err


def test_a_cluster_of_shares(tmp_path, monkeypatch):
    """Clients in several processes: each holds its own, of the same file."""
    import torch

    from fedstill.data import load
    from fedstill.edge.data_manager import DataManager

    monkeypatch.setenv(cached.FOLDER, str(tmp_path / "decoded"))
    whole = fs.Federation.from_dataset(load(paint(tmp_path / "i", 30), memory_map="on"), partition="iid", clients=3)
    share = DataManager(whole.only([2]), torch.device("cpu"), torch.float32)
    assert torch.equal(share.train.of(2)[0][:], whole.clients[2].x_train[:])
    with pytest.raises(Exception, match="another"):
        share.train.of(1)


def test_the_benchmark_compares():
    """A small version of what docs/performance.md has; of speed nothing is said on so few images."""
    script = Path(__file__).parents[2] / "benchmarks" / "ondemand.py"
    words = ["--images", "150", "--size", "16", "--clients", "2", "--rounds", "2", "--model", "mlr"]
    printed = subprocess.run([sys.executable, str(script), *words], check=True, capture_output=True, text=True).stdout
    assert "the same bits" in printed
    assert "150 JPEG images of 16×16" in printed
