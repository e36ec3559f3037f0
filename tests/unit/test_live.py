"""Progress lines: the time left is that of rounds that neither compile nor warm up, shared by runs that are trained together."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.cli.live import Meter, Watch


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(clock: Clock, rounds: int, seeds: int = 1) -> Watch:
    return Watch(["fedavg"], rounds, seeds, None, clock)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_first_round_of_a_run_is_not_extrapolated(clock, capsys) -> None:
    """As on a GPU: 30 s for the first round, which compiles, then 0.1 s a round."""
    watch = watching(clock, rounds=200)
    watch.start("fedavg")
    clock.after(30)
    watch.step("fedavg", 0, {"round": 1})
    assert lines(capsys) == ["fedavg  round   1/200"]
    for round in range(2, 41):
        clock.after(0.1)
        watch.step("fedavg", 0, {"round": round})
    assert lines(capsys) == ["fedavg  round  40/200           16 s left"]  # 160 rounds of 0.1 s, rounded up
    assert watch.meters["fedavg"].spent == pytest.approx(30 + 39 * 0.1)


def test_compiling_in_a_later_round_is_left_out(clock) -> None:
    meter = Meter(10, clock)
    meter.start()
    for round, seconds, more in ((1, 40, {}), (2, 2, {}), (3, 22, {"compile_seconds": 20.0}), (4, 2, {})):
        clock.after(seconds)
        meter.step({"round": round, **more}, done=round)
    assert meter.left() == "12 s left"
    assert meter.spent == 66


def test_the_first_rounds_of_later_seeds_are_not_extrapolated_either(clock) -> None:
    watch = watching(clock, rounds=4, seeds=3)
    for number in range(2):
        watch.start("fedavg")
        for round, seconds in ((1, 60), (2, 3), (3, 3), (4, 3)):
            clock.after(seconds)
            watch.step("fedavg", number, {"round": round})
    assert watch.meters["fedavg"].left() == "12 s left"


def test_one_step_of_stacked_seeds_is_a_round_of_each(clock, capsys) -> None:
    """Five seeds as one stack: 10 s for a round of all of them, so 8 more rounds of all take 80 s."""
    watch = watching(clock, rounds=10, seeds=5)
    watch.start("fedavg")
    for round, seconds in ((1, 50), (2, 10)):
        clock.after(seconds)
        for seed in range(5):  # each run reports its own record
            watch.step_together("fedavg", {"round": round, "personal": 0.1 * seed})
    assert lines(capsys) == [
        "fedavg  seed 5/5, round  1/10    0.0 %",
        "fedavg  seed 5/5, round  2/10    0.0 %  1 min 20 s left",
    ]
    for round in range(3, 11):
        clock.after(10)
        watch.step_together("fedavg", {"round": round})
    assert [line.split("  ")[-1] for line in lines(capsys)] == [
        "1 min 00 s left",
        "40 s left",
        "20 s left",
        "2 min 20 s in all",
    ]


def test_a_stack_that_begins_again_starts_a_new_estimate(clock) -> None:
    watch = watching(clock, rounds=3, seeds=2)
    watch.start("fedavg")
    clock.after(500)  # in vain
    for number in range(2):
        watch.start("fedavg")
        for round in (1, 2):
            clock.after(7)
            watch.step("fedavg", number, {"round": round})
    assert watch.meters["fedavg"].left() == "7 s left"


def test_rounds_before_a_resume_are_neither_timed_nor_left(clock, capsys) -> None:
    watch = watching(clock, rounds=100)
    for round in (81, 82):
        clock.after(4)
        watch.step("fedavg", 0, {"round": round})
    assert lines(capsys) == ["fedavg  round  81/100"]
    assert watch.meters["fedavg"].left() == "1 min 12 s left"


def test_a_single_round_says_what_it_took(clock, capsys) -> None:
    watch = watching(clock, rounds=1)
    watch.start("fedavg")
    clock.after(4.2)
    watch.step("fedavg", 0, {"round": 1})
    assert lines(capsys) == ["fedavg  round 1/1           5 s in all"]


def test_where_several_runs_stand(clock) -> None:
    """Two methods with two seeds of 10 rounds: one of 3 rounds, then one of a whole seed and 4 rounds."""
    watch = Watch(["fedavg", "local"], 10, 2, None, clock)
    watch.step("fedavg", 0, {"round": 3})
    assert watch.where() == "3 of 40 rounds in all"
    watch.step("local", 1, {"round": 4})
    assert watch.where() == "17 of 40 rounds in all"
    assert watching(clock, rounds=5).where() == ""


# ---- from Python -------------------------------------------------------------------------------------------------------
STOPPED = fs.Experiment(method=fs.FedAvg(), rounds=30, epochs=1, clients=5, patience=1, score_round="best-test", lr=0.2)


def test_progress_from_python(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines where nothing can be updated, one line that changes in a terminal; the end is the round of an early stop."""
    shown = fs.Progress()
    run = fs.run(STOPPED, callbacks=[shown])
    last = len(run.history)
    assert run.stopped
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("fedavg  round  1/30 ")
    assert f"round {last}/{last}" in said[-1]
    assert " in all" in said[-1]
    assert len(said) <= 7
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fs.run(STOPPED, callbacks=[shown])
    said = capsys.readouterr().err
    assert said.count("\r") == last
    assert said.endswith("s in all\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (
            "54.1,3",
            "not scaled: age (about 54.1); models may learn nothing from such columns: --normalise federated scales them",
        ),
        ("0.4,3", ""),
    ],
)
def test_columns_that_are_not_scaled_are_named(tmp_path: Path, capsys, monkeypatch, column: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    for name in ("berlin", "lyon"):
        (tmp_path / "sites" / f"{name}.csv").write_text("age,size,label\n" + f"{column},a\n{column},b\n" * 6)
    assert main(["run", "local", "--data", "sites", "--rounds", "1", "--epochs", "1"]) == 0
    said = capsys.readouterr().out
    assert (says in said) if says else ("not scaled" not in said)
