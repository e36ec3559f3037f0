"""Names of clients and classes are wherever a client or a class is named; without names nothing changes."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.cli import main
from fedstill.core.errors import TrainingError, can_be_shown
from fedstill.data.outline import Outline
from fedstill.report import figures
from fedstill.report.bubbles import bubbles
from fedstill.report.fit import cells_of
from fedstill.report.html.live import Progress, _refused
from fedstill.report.html.verdicts import gains
from fedstill.report.text import aligned
from fedstill.report.verdict import verdict
from fedstill.run.export import LONGEST, stem
from fedstill.run.simulation import partition_record
from fedstill.server.gate import Gate

from ..problems import make, ragged

NAMES = ("Charité Berlin", "a<b>&'\"c", "東京病院", "$x_1$", "n" * 300)
LABELS = ("gesund", "<krank>", "unklar")
HOW = dict(rounds=1, epochs=1, batch_size=4, dtype="float64", engine="one")


@pytest.fixture(scope="module")
def named() -> fs.Federation:
    """Five clients and three classes with names, some of them hostile to a page, a picture or a file."""
    return dataclasses.replace(ragged(), names=NAMES, labels=LABELS)


@pytest.fixture(scope="module")
def folder(named: fs.Federation, tmp_path_factory) -> Path:
    """A local run and FedAvg beside it, as a comparison leaves them, with names."""
    root = tmp_path_factory.mktemp("names")
    data = root / "silos"
    data.mkdir()
    g = np.random.default_rng(0)
    for k, name in enumerate(("Köln Süd", "東京病院", "a&b")):
        rows = [f"{g.normal():.3f},{g.normal():.3f},{['ja', 'nein'][i % 2]}" for i in range(20 + 5 * k)]
        (data / f"{name}.csv").write_text("\n".join(["x,y2,label", *rows]) + "\n", encoding="utf-8")
    out = root / "runs"
    words = ["compare", "local", "fedavg", "--data", str(data), "--rounds", "2", "--epochs", "1", "--out", str(out)]
    assert main(words) == 0
    return out


def test_records_have_the_names_beside_the_numbers(named: fs.Federation, tmp_path: Path) -> None:
    fs.simulate(fs.FedPer(), model=make("plain"), data=named, out=tmp_path / "run", **HOW)
    partition = json.loads((tmp_path / "run/partition.json").read_text())
    assert partition["names"] == list(NAMES)
    assert partition["labels"] == list(LABELS)
    again = fs.simulate(fs.FedPer(), model=make("plain"), data=named, out=tmp_path / "run", resume=True, **HOW)
    assert len(again.history) == 1
    plain = partition_record(ragged(), "")
    assert not {"names", "labels"} & set(plain)


def test_a_folder_that_was_begun_without_names_goes_on(named: fs.Federation, tmp_path: Path) -> None:
    """Names play no part in the division, so a folder from before they were kept is the same run."""
    fs.simulate(fs.FedPer(), model=make("plain"), data=ragged(), out=tmp_path / "run", **HOW)
    again = fs.simulate(fs.FedPer(), model=make("plain"), data=named, out=tmp_path / "run", resume=True, **HOW)
    assert len(again.history) == 1


def test_an_error_names_the_client(named: fs.Federation) -> None:
    with pytest.raises(TrainingError, match=r"round 1, client 0 \(Charité Berlin\): the training loss is"):
        fs.simulate(fs.FedAvg(), model=make("plain"), data=named, **{**HOW, "lr": 1e30, "epochs": 3})
    assert Gate(names=NAMES).who(4) == f"client 4 ({'n' * 20}… (300 characters) …{'n' * 20})"
    assert Gate(names=NAMES).who(9) == "client 9"
    assert Gate().who(1) == "client 1"


def test_files_of_models_have_names_that_any_system_takes(named: fs.Federation) -> None:
    run = fs.simulate(fs.FedPer(), model=make("plain"), data=named, **HOW)
    stems = [stem(run, k) for k in range(5)]
    assert stems[:4] == ["client-0-Charité Berlin", "client-1-a_b_&'_c", "client-2-東京病院", "client-3-$x_1$"]
    assert stems[4] == f"client-4-{'n' * LONGEST}"
    wide = dataclasses.replace(named, names=("東" * 200, "../../etc", "…", ". .", "\u202ename"))
    run = fs.simulate(fs.FedPer(), model=make("plain"), data=wide, **HOW)
    stems = [stem(run, k) for k in range(5)]
    assert stems[0] == f"client-0-{'東' * (LONGEST // 3)}"
    assert stems[1:] == ["client-1-_.._etc", "client-2-…", "client-3", "client-4-_u202ename"]
    assert all(len(name.encode()) < 200 for name in stems)
    run = fs.simulate(fs.FedPer(), model=make("plain"), data=ragged(), **HOW)
    assert stem(run, 3) == "client-3"


def test_columns_are_straight_with_wide_signs() -> None:
    lines = aligned([("client", ["東京病院", "Rom"]), ("name", ["é", "東"]), ("%", ["1.0", "22.0"])])
    assert {cells_of(line) for line in lines} == {len("東京病院") * 2 + 2 + 4 + 2 + 4}
    drawn = bubbles(np.array([[3, 1], [2, 2]]), names=("東京病院", "Rom"))
    assert len({cells_of(line) for line in drawn[1:3]}) == 1


def test_pictures_write_names_as_they_are() -> None:
    assert figures.plain("$\\frac{1}{2}$", 3) == "\\$\\frac{1}{2}\\$"
    assert figures.plain("東京", 3) in ("東京", "3")
    assert figures.plain("x" * 100, 0) == "x" * 23 + "…"


@pytest.mark.filterwarnings("error")
def test_every_picture_can_be_drawn_with_hostile_names(named: fs.Federation, tmp_path: Path) -> None:
    figures.bubbles(named.counts(), tmp_path / "a.png", "t", "n", named.names, named.labels)
    run = fs.simulate(
        fs.FedPer(), model=make("plain"), data=named, profile="lognormal:0.5", out=tmp_path / "run", **HOW
    )
    figures.compare_figure({"fedper": [run]}, tmp_path / "b.png")
    assert main(["timeline", str(tmp_path / "run"), "--out", str(tmp_path / "c.png")]) == 0
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png", "c.png"))


def test_gains_have_names_where_there_is_room() -> None:
    def drawn(names: tuple[str, ...], width: int = 900) -> str:
        return str(gains([verdict(name, 0, 10, (0.5, 0.6)) for name in names], width))

    few = drawn(("Charité <i>", "Rom"))
    assert html.escape("Charité <i>") in re.sub(r'data-tip="[^"]*"', "", few)
    assert "<i>" not in few
    many = re.sub(r'data-tip="[^"]*"', "", drawn(tuple(f"hospital {k}" for k in range(80))))
    assert "hospital" not in many
    assert ">0</text>" in drawn(("0", "1"))  # the axis; without names no client's number is written
    assert drawn(("0", "1")).count("<text") == few.count("<text") - 2


def test_live_refusals_name_the_client() -> None:
    records = [{"round": 3, "rejected": {"1": "its upload holds numbers that are not finite"}}]
    assert "client Rom &lt;b&gt;: its upload" in str(
        _refused([Progress("a", 0, 5, records, names=("Berlin", "Rom <b>"))])
    )
    assert "client 1: its upload" in str(_refused([Progress("a", 0, 5, records)]))


def test_a_comparisons_folder(folder: Path, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["clients_named"] == ["Köln Süd", "a&b", "東京病院"]
    assert summary["classes_named"] == ["ja", "nein"]
    page = (folder / "report.html").read_text()
    dots = re.findall(r'<circle[^>]*cls="each"[^>]*>|<circle[^>]*class="each"[^>]*>', page)
    tips = [html.unescape(tip) for dot in dots for tip in re.findall(r'data-tip="([^"]*)"', dot)]
    assert {tip.partition(":")[0] for tip in tips} >= {"local, client Köln Süd", "fedavg, client a&b"}
    assert main(["show", str(folder), "--clients"]) == 0
    assert "Köln Süd" in capsys.readouterr().out
    assert main(["export", str(folder / "local"), "--all", str(tmp_path / "models")]) == 0
    assert {path.name for path in (tmp_path / "models").iterdir()} == {
        f"client-{k}-{name}.safetensors" for k, name in enumerate(("Köln Süd", "a&b", "東京病院"))
    }


def test_a_folder_from_elsewhere_moves_no_cursor() -> None:
    """Names in a folder may be anything that JSON can hold."""
    record = Outline.of(dataclasses.replace(ragged(), names=NAMES)).to_dict()
    hostile = {**record, "names": ["a\x1b[2J", "b\nc", "d\u202e", "\ud800", "plain"], "labels": ["\x07", "ja", "nein"]}
    outline = Outline.from_dict(hostile)
    assert all(can_be_shown(name) for name in (*outline.names, *outline.labels))
    assert outline.names[4] == "plain"
    assert outline.client(0) == "a\\x1b[2J"


def test_a_federation_s_names_have_no_control_characters() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    data = fs.Federation.from_arrays([(x, y, x, y)], classes=2, labels=["\x1b]0;x\x07", "b c"])
    assert data.labels == (r"\x1b]0;x\x07", "b c")
    assert dataclasses.replace(data, names=("\x1b[31mred",)).names == (r"\x1b[31mred",)
