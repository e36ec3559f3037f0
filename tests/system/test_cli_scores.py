"""The further scores from the command line: what is printed, kept and refused; and which folders a demo may replace."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedstill as fs
from fedstill.cli import main
from tests.system.test_cli import TINY, metrics, refused

EVERYTHING = [
    "--new", "--averaged", "--forgetting", "--fine-tune", "2", "--fine-tune-part", "all", "--newcomers", "1",
    "--join-epochs", "2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arrays(path: str, classes: int = 10, shape=(1, 8, 8), count: int = 40) -> None:
    g = np.random.default_rng(0)
    x = g.integers(0, 17, (count, *shape)).astype(np.uint8)
    np.savez(path, x=x, y=np.arange(count) % classes)


def test_every_score_is_printed_kept_and_said(capsys) -> None:
    arrays("theirs.npz")
    flags = [*TINY, "--rounds", "3", *EVERYTHING, "--external", "theirs.npz"]
    assert main(["compare", "local", "pfedsd", *flags, "--out", "c"]) == 0
    out = capsys.readouterr().out
    headings = next(line for line in out.splitlines() if line.startswith("method"))
    for heading in (
        "new %", "external %", "external, generic %", "fine-tuned %", "newcomers %", "newcomers, trained %", "forgetting %",
    ):  # fmt: skip
        assert heading in headings
        assert f"\n{heading}: " in out
    assert "on theirs.npz, a source that no client had" in out
    assert "all clients: the 3 that train" in out
    assert "generic % of local: no such model: the mean of the personal weights" in out
    found = json.loads(Path("c/summary.json").read_text())
    alone = fs.run(fs.Experiment.from_toml("c/pfedsd/experiment.toml"))
    kept = found["methods"]["pfedsd"]
    assert json.loads(Path("c/pfedsd/scores.json").read_text()) == alone.after
    for name in ("new", "external", "external_generic", "fine_tuned", "newcomers_before", "newcomers_after"):
        assert kept["runs"][0][name] == kept[name]["mean"] == alone.after[name]
        assert found["scores"][name]
    assert alone.after["new"] == alone.new()
    assert alone.after["fine_tuned"] == alone.fine_tuned(2, "all")
    assert kept["runs"][0]["newcomers"] == list(alone.newcomers)
    gaps = [record["forgetting"] for record in metrics("c/pfedsd") if "forgetting" in record]
    assert kept["forgetting"]["mean"] == pytest.approx(np.mean(gaps))
    assert "averaged" in found["methods"]["local"]
    assert "averaged" not in kept


def test_a_centre_that_no_client_has_is_external(capsys) -> None:
    image = pytest.importorskip("PIL.Image")
    g = np.random.default_rng(2)
    for centre in ("north", "south", "west"):
        for label in ("ill", "well"):
            folder = Path("slides", centre, label)
            folder.mkdir(parents=True)
            for i in range(10):
                image.fromarray(g.integers(0, 256, (9 + i, 9, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    flags = ["--data", "slides@8#north,south", "--rounds", "1", "--external"]
    assert main(["run", "fedavg", *flags, "slides@8#west", "--out", "r"]) == 0
    assert "on slides@8#west, a source that no client had" in capsys.readouterr().out
    assert fs.Experiment.from_toml("r/experiment.toml").external == "slides@8#west"
    assert main(["resume", "r"]) == 0
    capsys.readouterr()
    assert "a source that no client has" in refused(capsys, "run", "fedavg", *flags, "slides@8#south")
    assert "a source that no client has" in refused(capsys, "run", "fedavg", *flags, "slides@8")


def test_nothing_asked_nothing_added(capsys) -> None:
    assert main(["run", "pfedsd", *TINY, "--out", "r"]) == 0
    assert "new %" not in capsys.readouterr().out
    assert not Path("r/scores.json").exists()
    assert "trained_clients" not in metrics("r")[-1]


def test_resume_gives_the_same_scores() -> None:
    flags = [*TINY, "--rounds", "4", "--participation", "0.7", "--checkpoint-every", "1", *EVERYTHING]
    assert main(["run", "fedavg", *flags, "--out", "whole"]) == 0
    shutil.copytree("whole", "cut")
    for last in (*Path("cut/checkpoints").glob("round-000004.*"), Path("cut/scores.json")):
        last.unlink()
    assert main(["resume", "cut"]) == 0
    assert metrics("cut") == metrics("whole")
    assert Path("cut/scores.json").read_text() == Path("whole/scores.json").read_text()


def test_common_and_generic_stand_apart() -> None:
    g = np.random.default_rng(1)
    data = {f"{part}_{name}": value for part, n in (("train", 200), ("test", 50)) for name, value in
            (("x", g.normal(size=(n, 6)).astype(np.float32)), ("y", np.arange(n) % 4))}  # fmt: skip
    np.savez("mine.npz", **data)
    assert main(["run", "fedavg", *TINY, "--data", "mine.npz", "--pool", "train", "--new", "--out", "r"]) == 0
    run = json.loads(Path("r/summary.json").read_text())["methods"]["fedavg"]
    last = metrics("r")[-1]
    assert (run["generic"]["mean"], run["generic_common"]["mean"]) == (last["generic"], last["generic_common"])
    assert run["new_common"]["mean"] == run["generic_common"]["mean"]  # all vote alike


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--external theirs9.npz", "9 classes.*10 classes as digits is"),
        ("--external wide.npz", "1×9×9.*1×8×8 as digits is"),
        ("--external digits", "a source that no client has"),
        ("--external nowhere.npz", "--external = 'nowhere.npz'"),
        ("--external digitz", "--external = 'digitz': should be 'digits'"),
        ("--newcomers 4", "--newcomers = 4: should be at most 3"),
        ("--fine-tune -1", "--fine-tune = -1"),
        ("--fine-tune-part tail", "--fine-tune-part = 'tail'.*all, head"),
        ("--join-epochs 0", "--join-epochs = 0"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_training(capsys, flags: str, says: str) -> None:
    import re

    arrays("theirs9.npz", classes=9)
    arrays("wide.npz", shape=(1, 9, 9))
    for command in (["run", "pfedsd"], ["compare", "local", "fedavg"]):
        assert re.search(says, refused(capsys, *command, *TINY, *flags.split(), "--out", "q"))


def test_flags_without_effect_are_said(capsys) -> None:
    assert main(["compare", "fedavg", "fedrep", "scaffold", *TINY, "--momentum", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "\n--epochs has no effect on fedrep: its own are 10 (head) + 1 (body)\n" in out
    assert "\n--momentum has no effect on scaffold: its momentum is 0\n" in out
    assert "no effect on fedavg" not in out
    assert "local epochs (1 for " in out
    assert main(["run", "fedavg", *TINY, "--join-epochs", "3"]) == 0
    assert "\n--join-epochs has no effect without --newcomers\n" in capsys.readouterr().out


# ---- which folders a demo may replace --------------------------------------------------------------------------------
def test_the_demo_replaces_its_own_folder_also_of_several_seeds_and_after_a_resume() -> None:
    assert main(["demo", *TINY, "--seeds", "2"]) == 0
    assert main(["resume", "fedstill-demo/local/seed-0"]) == 0
    Path("fedstill-demo/local/seed-0/metrics.jsonl.part").write_text("")  # as a kill may leave it
    Path("fedstill-demo/local/seed-0/choices.json").write_text("{}")  # as a GPU leaves it
    assert main(["demo", *TINY, "--rounds", "1"]) == 0
    assert sorted(p.name for p in Path("fedstill-demo/local").iterdir()) == [
        "answers.json", "checkpoints", "data.json", "environment.json", "experiment.toml", "metrics.csv", "metrics.jsonl",
        "partition.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "foreign",
    ["local/notes.txt", "local/checkpoints/best.pt", "local/plots/a.png", "seed-1/summary.json", "local/seed-0/x/y"],
)
def test_the_demo_keeps_off_foreign_files(capsys, foreign: str) -> None:
    assert main(["demo", *TINY, "--rounds", "1"]) == 0
    path = Path("fedstill-demo", foreign)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    capsys.readouterr()
    assert "is not part of one" in refused(capsys, "demo", *TINY)
    assert path.read_text() == "mine"


def test_the_demo_keeps_off_links_and_off_other_commands_results(capsys) -> None:
    assert main(["compare", "local", "fedavg", *TINY, "--out", "mine"]) == 0
    capsys.readouterr()
    assert "resume mine' goes on with what it holds" in refused(capsys, "demo", *TINY, "--out", "mine")
    assert main(["demo", *TINY, "--rounds", "1"]) == 0
    shutil.rmtree("fedstill-demo/local/checkpoints")
    Path("fedstill-demo/local/checkpoints").symlink_to(Path("mine").absolute())
    capsys.readouterr()
    assert "is not part of one" in refused(capsys, "demo", *TINY)
    assert Path("mine/summary.json").exists()
