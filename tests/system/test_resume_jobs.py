"""`fedstill resume` of a whole comparison, sweep or several seeds, after a real kill: the end is that of a job never stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstill.cli import main
from fedstill.cli.saved import Groups

from .test_cli import refused

TINY = ["--clients", "4", "--epochs", "1", "--rounds", "8", "--dtype", "float64", "--checkpoint-every", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Each test in an empty folder."""
    monkeypatch.chdir(tmp_path)


def killed(words: list[str], out: str, rounds: int) -> None:
    """Run the command in a process of its own, and kill it when so many rounds are recorded."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedstill", *words, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not Path(out, "job.json").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    while recorded(out) < rounds and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def recorded(folder: str) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in Path(folder).glob("**/metrics.jsonl"))


def contents(folder: str) -> dict[str, object]:
    """Return all numbers of a job's runs but seconds: records, checkpoints of the last round, scores."""
    found: dict[str, object] = {}
    for file in sorted(Path(folder).rglob("metrics.jsonl")):
        name = file.parent.relative_to(folder).as_posix()
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = [{k: v for k, v in record.items() if "seconds" not in k} for record in records]
        last = sorted(file.parent.glob("checkpoints/round-*.safetensors"))[-1:]  # none where the first round failed
        found[f"{name}/state"] = [(state.name, state.read_bytes()) for state in last]
        scores = file.parent / "scores.json"
        found[f"{name}/scores"] = scores.read_text() if scores.exists() else None
    return found


def means(folder: str) -> dict[str, object]:
    """Return the numbers of a job's table."""
    summary = json.loads(Path(folder, "summary.json").read_text())
    assert summary["finished"]
    names = ("personal", "personal_worst", "personal_sample", "generic")
    return {label: [record[name] for name in names] for label, record in summary["methods"].items()}


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        (["compare", "fedavg", "pfedsd", "--engine", "one", "--fine-tune", "1"], 12),
        (["compare", "fedavg", "pfedsd", "--engine", "stacked", "--seeds", "2"], 22),
        (["sweep", "fedprox", "mu=0.1,1,10", "--engine", "stacked"], 11),
        (["run", "scaffold", "--seeds", "2", "--engine", "one", "--participation", "0.5"], 11),
    ],
    ids=["compare", "stacked", "sweep", "seeds"],
)
def test_a_job_that_is_killed_goes_on_to_the_same_bits(words, rounds, capsys) -> None:
    assert main([*words, *TINY, "--out", "whole"]) == 0
    killed([*words, *TINY], "cut", rounds)
    before = {file: file.read_bytes() for file in Path("cut").rglob("metrics.jsonl") if recorded(str(file.parent)) == 8}
    assert main(["resume", "cut"]) == 0
    assert "personal %" in capsys.readouterr().out
    assert contents("cut") == contents("whole")
    assert before.items() <= {file: file.read_bytes() for file in Path("cut").rglob("metrics.jsonl")}.items()
    assert means("cut") == means("whole")


def test_what_failed_is_not_tried_again_and_the_others_go_on(capsys) -> None:
    words = ["sweep", "fedavg", "lr=1e200,0.1,0.05", "--engine", "stacked"]
    assert main([*words, *TINY, "--out", "whole"]) == 1
    reason = capsys.readouterr().err
    killed([*words, *TINY], "cut", 9)
    assert main(["resume", "cut"]) == 1
    assert capsys.readouterr().err.endswith(reason)  # a line before it may say what the kill cut short
    assert contents("cut") == contents("whole")


def test_runs_that_went_one_after_another_do_so_again(capsys) -> None:
    words = ["sweep", "fedavg", "batch-size=8,16", "--engine", "stacked", "--seeds", "2"]
    assert main([*words, *TINY, "--out", "whole"]) == 0
    killed([*words, *TINY], "cut", 24)
    assert main(["resume", "cut"]) == 0
    assert contents("cut") == contents("whole")


def test_more_rounds(capsys) -> None:
    """All runs go on to the new number, which their folders then say; fewer than are over are refused."""
    assert main(["compare", "fedavg", "pfedsd", *TINY, "--out", "c"]) == 0
    assert main(["resume", "c", "--rounds", "10"]) == 0
    for label in ("fedavg", "pfedsd"):
        assert recorded(f"c/{label}") == 10
        assert "rounds = 10\n" in Path(f"c/{label}/experiment.toml").read_text()
    assert main(["resume", "c"]) == 0
    assert recorded("c") == 20
    capsys.readouterr()
    assert "at least 10" in refused(capsys, "resume", "c", "--rounds", "9")
    assert "at least 10" in refused(capsys, "resume", "c/fedavg", "--rounds", "9")
    assert main(["resume", "c/fedavg", "--rounds", "11"]) == 0
    whole = ["run", "fedavg", *TINY, "--rounds", "11", "--out", "w"]
    assert main(whole) == 0
    one, other = contents("c/fedavg"), contents("w")
    assert one["./state"] == other["./state"] if "./state" in one else one == other


def test_a_changed_record_of_a_job_is_refused(capsys) -> None:
    assert main(["compare", "fedavg", "local", *TINY, "--rounds", "1", "--out", "c"]) == 0
    text = Path("c/job.json").read_text()
    for damage in (text.replace('"lr": 0.05', '"lr": 0.5', 1), text[:-30], "[" * 100_000, "null", ""):
        Path("c/job.json").write_text(damage)
        capsys.readouterr()
        assert "job.json is as fedstill wrote it" in refused(capsys, "resume", "c")


def test_a_run_of_a_job_that_was_edited_stops_all_of_it_before_any_work(capsys) -> None:
    assert main(["compare", "fedavg", "local", *TINY, "--rounds", "1", "--out", "c"]) == 0
    toml = Path("c/local/experiment.toml")
    text = toml.read_text()
    for damage, says in (
        (text.replace("lr = 0.05", "lr = 0.5"), "has been changed"),
        (None, "delete it to have it run again"),
    ):
        toml.unlink() if damage is None else toml.write_text(damage)
        capsys.readouterr()
        assert says in refused(capsys, "resume", "c", "--rounds", "2")
        assert recorded("c/fedavg") == 1
    shutil.rmtree("c/local")
    assert main(["resume", "c", "--rounds", "2"]) == 0
    assert recorded("c") == 4


def test_what_was_trained_together_must_be_known(capsys) -> None:
    """Otherwise it would go on in other groups, to other bits, without a word."""
    words = ["run", "fedavg", *TINY, "--rounds", "1", "--seeds", "2", "--engine", "stacked"]
    assert main([*words, "--out", "many"]) == 0
    groups = Path("many/groups.json")
    for text, says in (
        ('{"groups": []}', "its checksum is wrong"),
        ("[" * 10**5, "deep"),
        (None, "does not name seed-0"),
    ):
        groups.unlink() if text is None else groups.write_text(text)
        capsys.readouterr()
        assert says in refused(capsys, "resume", "many", "--rounds", "2")
    assert main(["resume", "many/seed-0", "--rounds", "2"]) == 0


def test_a_run_of_a_stack_that_goes_on_alone_is_told_that_bits_differ(capsys) -> None:
    assert main(["run", "fedavg", *TINY, "--rounds", "2", "--seeds", "2", "--engine", "stacked", "--out", "many"]) == 0
    assert main(["resume", "many/seed-0", "--rounds", "3"]) == 0
    assert "many/seed-0 was trained together with others" in capsys.readouterr().out


def test_the_groups_of_runs_that_go_on() -> None:
    """A group that was given up for smaller ones is none; what had not begun comes last."""
    whole, pairs = ["a", "b", "c", "d"], [["a", "b"], ["c", "d"]]
    assert Groups(None, [whole]).divide(whole) == [whole]
    assert Groups(None, [whole, *pairs]).divide(whole) == pairs
    assert Groups(None, [whole, pairs[0]]).divide(whole) == pairs
    assert Groups(None, [whole]).divide(["a", "c"]) == [["a", "c"]]  # the others have failed
    assert Groups(None, []).divide(whole) == [whole]
