"""`fedstill compare --attack`: clean, attacked under the mean and under each rule, of the same clients; also resumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedstill.cli import main
from fedstill.report.html.attacked import attacked
from fedstill.report.html.read import read

TINY = ["--rounds", "2", "--clients", "6", "--epochs", "1", "--partition", "dirichlet:100", "--engine", "one"]
ATTACK = ["--attack", "sign-flip", "--attackers", "2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)


def last(folder: str) -> dict:
    return json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[-1])


def printed(out: str) -> dict[str, list[str]]:
    """The table's cells by row, the headings first."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("method, model"))
    rows = [re.split(r"  +", line.strip()) for line in (lines[first], *lines[first + 2 :])]
    return {cells[0]: cells[1:] for cells in rows[: rows.index([""])]}


def test_the_table_holds_clean_attacked_and_each_rule_of_honest_clients(capsys) -> None:
    rules = ["--average", "median,trimmed-mean", "--suspected", "2"]
    assert main(["compare", "fedavg", "pfedsd", "local", *TINY, *ATTACK, *rules, "--out", "all"]) == 0
    out = capsys.readouterr().out
    rows = printed(out)
    assert rows["method, model"] == [
        "clean, mean %",
        "sign-flip, mean %",
        "sign-flip, median %",
        "sign-flip, trimmed-mean %",
    ]
    assert set(rows) == {"method, model", "fedavg, generic", "pfedsd, generic", "pfedsd, personal", "local, personal"}
    table = attacked(read([Path("all")]))  # the report's, from the folder alone
    assert table is not None
    first, *columns = table.columns
    shown = {row: {c.heading: c.cells[i] for c in columns} for i, row in enumerate(first.cells)}
    assert shown == {
        row: dict(zip(rows["method, model"], cells, strict=True))
        for row, cells in rows.items()
        if row != "method, model"
    }
    assert set(table.notes) <= set(out.splitlines())
    page = Path("all/report.html").read_text(encoding="utf-8")
    assert "Clean, attacked, defended" in page
    assert "% without attackers, " in page
    attackers = last("all/fedavg-sign-flip-mean")["attackers"]
    assert len(attackers) == 2
    honest = [str(k) for k in range(6) if k not in attackers]
    for row, cells in rows.items():
        if row == "method, model":
            continue
        method, model = row.split(", ")
        for name, cell in zip(
            ("clean", "sign-flip-mean", "sign-flip-median", "sign-flip-trimmed-mean"), cells, strict=True
        ):
            if method == "local" and name.startswith("sign-flip-") and name != "sign-flip-mean":
                assert cell == "–"
                continue
            record = last(f"all/{method}-{name}")
            assert (len(record["personal_clients"]), "attackers" in record) == (
                (6, False) if name == "clean" else (4, True)
            )
            hits = [record[f"{model}_clients"][k] * (record["samples"][k] if model == "generic" else 1) for k in honest]
            of = sum(record["samples"][k] for k in honest) if model == "generic" else 4
            assert cell == f"{100 * np.sum(hits) / of:.2f}", (row, name)
    assert "2 of 6 clients attack (sign-flip, strength 5.0)" in out
    assert "rows with an attack: the attackers are not counted" in out
    assert "has no effect" not in out
    before = {row: cells for row, cells in rows.items()}
    shutil.rmtree("all/pfedsd-sign-flip-median")
    assert main(["resume", "all"]) == 0
    assert printed(capsys.readouterr().out) == before


def test_a_backdoors_success_is_in_the_table(capsys) -> None:
    flags = [*TINY, "--attack", "backdoor", "--attackers", "2", "--backdoor-target", "3"]
    assert main(["compare", "fedavg", *flags, "--suspected", "0.1"]) == 0
    out = capsys.readouterr().out
    rows = printed(out)
    assert rows["method, model"] == ["clean, mean %", "backdoor, mean %"]
    assert rows["fedavg, backdoor in generic"][0] == "–"
    assert 0 <= float(rows["fedavg, backdoor in generic"][1]) <= 100
    assert "that get class 3" in out
    assert "--suspected has no effect without --average trimmed-mean" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--average", "median,best"], "--average = 'best'"),
        (["--average", "median,median"], "several that differ"),
        (["--average", "krum", "--suspected", "2"], "which needs 2f + 3 uploads"),
        (["--attackers", "6"], "makes 1 to 5 of the 6 clients attackers"),
        (["--attack", "fog"], "--attack = 'fog'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(flags, words, capsys) -> None:
    assert main(["compare", "fedavg", *TINY, *ATTACK, *flags, "--out", "all"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("all").exists()
