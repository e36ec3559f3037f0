"""`fedstill timeline`, and the flags of simulated time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.report import timeline as report

TINY = ["--rounds", "3", "--clients", "6", "--epochs", "1"]
TIMED = ["--profile", "lognormal:0.5", "--drop", "0.2", "--deadline", "0.5", "--late", "fold"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fedstill: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    return err


def test_a_run_is_drawn_and_summed_up(capsys) -> None:
    assert main(["run", "spectral", *TINY, *TIMED, "--out", "kept"]) == 0
    lines = [json.loads(line) for line in Path("kept/timeline.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    capsys.readouterr()
    assert main(["timeline", "kept"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    seconds = lines[-1]["end"]
    assert f"rounds 1–3: {seconds:,.4g} simulated seconds" in out
    assert "waiting" in out
    assert f"asked {sum(len(line['clients']) for line in lines)}: " in out
    assert out.strip().endswith("picture: kept/timeline.png")
    assert Path("kept/timeline.png").read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", "kept", "--rounds", "2-3", "--out", "two.png"]) == 0
    assert "rounds 2–3: " in capsys.readouterr().out
    assert Path("two.png").is_file()
    assert main(["timeline", "kept", "--rounds", "2"]) == 0


def test_wait_free_beside_compute_and_wait(capsys) -> None:
    for pace in ("off", "fixed"):
        assert main(["run", "ditto", *TINY, "--profile", "lognormal:0.5", "--wait-free", pace, "--out", pace]) == 0
    off, fixed = (
        [json.loads(line) for line in Path(name, "timeline.jsonl").read_text().splitlines()]
        for name in ("off", "fixed")
    )
    assert fixed[-1]["end"] < off[-1]["end"]
    assert "wait-free (fixed)" in capsys.readouterr().out
    assert main(["timeline", "off", "fixed", "--out", "both.png"]) == 0
    out = capsys.readouterr().out
    assert out.index("off:") < out.index("fixed:") < out.index("picture: both.png")
    assert f"rounds 1–3: {fixed[-1]['end']:,.4g} simulated seconds" in out
    assert Path("both.png").read_bytes().startswith(b"\x89PNG")


def test_an_asynchronous_run_is_drawn_and_says_what_it_was(capsys) -> None:
    given = [
        "--profile",
        "lognormal:0.9",
        "--mode",
        "fedbuff",
        "--buffer",
        "2",
        "--mixing",
        "0.5",
        "--personal-cap",
        "3",
    ]
    assert main(["run", "fedavg", *TINY, *given, "--out", "kept"]) == 0
    out = capsys.readouterr().out
    assert "--mixing has no effect without --mode fedasync" in out
    assert "--personal-cap has no effect without --wait-free until-download" in out
    assert "fedbuff, K 2, η 1, staleness polynomial a 0.5" in out
    assert main(["timeline", "kept"]) == 0
    assert "merged (" in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("kept/timeline.jsonl").read_text().splitlines()]
    last = [{**lines[-1], "clients": [], "state": [], "folded": [1, 4]}]  # who was asked before, and nobody new
    assert (
        report.summary(last, mode="fedbuff")[-1]
        == "asked 0: 2 merged (2 of them with later ones), 0 dropped out, 0 refused"
    )
    assert "should be 'sync' for scaffold" in refused(
        capsys, "run", "scaffold", *TINY, "--profile", "uniform", "--mode", "fedasync"
    )


def test_what_cannot_be_drawn_is_refused_in_a_line(capsys) -> None:
    assert "folders of runs" in refused(capsys, "timeline")
    assert "each once" in refused(capsys, "timeline", "a", "a")
    assert "simulated time (--profile uniform" in refused(capsys, "timeline", "nowhere")
    assert main(["run", "fedavg", *TINY, "--out", "plain"]) == 0
    assert not Path("plain/timeline.jsonl").exists()
    assert "simulated time" in refused(capsys, "timeline", "plain")
    assert main(["compare", "fedavg", "local", *TINY, "--profile", "uniform", "--out", "both"]) == 0
    assert "such as both/fedavg" in refused(capsys, "timeline", "both")
    for text in ("7-9", "x", "3-2", "0"):
        assert "between 1 and 3" in refused(capsys, "timeline", "both/fedavg", "--rounds", text)


def test_flags_of_time_are_refused_by_their_names(capsys) -> None:
    assert "--drop = 0.2: should be 0.0 without a profile" in refused(capsys, "run", "fedavg", "--drop", "0.2")
    assert "--profile = 'phones'" in refused(capsys, "run", "fedavg", "--profile", "phones")
    assert "--sampler = 'robin': should be 'round-robin'?" in refused(capsys, "run", "fedavg", "--sampler", "robin")
    Path("d.csv").write_text("speed,uplink,downlink\n1,2,x\n")
    assert "d.csv, line 2, column downlink = 'x'" in refused(capsys, "run", "fedavg", "--profile", "file:d.csv")


def test_flags_without_effect_are_named(capsys) -> None:
    assert main(["run", "fedavg", *TINY, "--profile", "uniform", "--late", "fold", "--candidates", "3"]) == 0
    out = capsys.readouterr().out
    assert "--late has no effect without --deadline or --over-select" in out
    assert "--candidates has no effect on the sampler uniform" in out
    given = ["--profile", "uniform", "--wait-free", "until-download", "--personal-epochs", "2"]
    assert main(["run", "ditto", *TINY, *given]) == 0
    told = "--personal-epochs has no effect on ditto with --wait-free until-download"
    assert told in capsys.readouterr().out


def test_seeds_in_a_stack_have_their_timelines(capsys) -> None:
    assert main(["run", "fedavg", *TINY, *TIMED, "--engine", "stacked", "--seeds", "2", "--out", "two"]) == 0
    for seed in (0, 1):
        lines = Path(f"two/seed-{seed}/timeline.jsonl").read_text().splitlines()
        experiment = fs.Experiment.from_toml(f"two/seed-{seed}/experiment.toml")
        alone = fs.run(experiment)
        assert [json.loads(line) for line in lines] == [record["timeline"] for record in alone.history]


def test_shares_by_hand() -> None:
    line = {
        "round": 1, "start": 1.0, "closed": 11.0, "end": 11.0, "clients": [0, 1, 2], "state": ["merged", "late", "dropped"],
        "download": [1.0, 1.0, 1.0], "generic": [2.0, 8.0, 0.0], "personal": [0.0, 0.0, 0.0], "upload": [1.0, 6.0, 0.0],
        "folded": [],
    }  # fmt: skip
    shares = report._shares([line])
    assert shares == {"download": 2 / 25, "work, generic model": 10 / 25, "upload": 7 / 25, "waiting": 6 / 25}


def test_many_clients_and_empty_rounds_can_be_drawn(tmp_path) -> None:
    from fedstill.report.timeline import draw

    empty = {"round": 1, "start": 0.0, "closed": 0.0, "end": 0.0, "clients": [], "state": [], "folded": []}
    empty |= {name: [] for name in ("download", "generic", "personal", "upload")}
    draw({"one": [empty]}, tmp_path / "empty.png")
    many = {**empty, "round": 2, "closed": 9.0, "end": 9.0, "clients": list(range(200)), "state": ["merged"] * 200}
    many |= {name: [0.01 * i for i in range(200)] for name in ("download", "generic", "personal", "upload")}
    ahead = {**many, "ahead": True, "hold": [0.001 * i for i in range(200)]}
    draw({"one": [empty, many], "other": [ahead]}, tmp_path / "many.png", "n")
    assert (tmp_path / "many.png").is_file()
