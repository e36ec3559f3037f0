"""Ctrl-C and SIGTERM: the round is finished and saved, and the run goes on from there to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill.cli import execute, main, show
from fedstill.core.errors import Stopped
from fedstill.run import signals, together
from fedstill.run.journal import Journal
from fedstill.run.signals import Stop

from ..problems import SETTINGS, identical, make, ragged, states

TINY = dict(rounds=6, epochs=1, clients=3, partition="iid", checkpoint_every=10, batch_size=64)


def experiment(**changes) -> fs.Experiment:
    return fs.Experiment(method=fs.SCAFFOLD(), **{**TINY, **changes})


def sends(*numbers: int, after: int = 2):
    """A progress function that sends signals to this process after a round."""

    def progress(record) -> None:
        if record["round"] == after:
            for number in numbers:
                os.kill(os.getpid(), number)

    return progress


def checkpoints(folder: Path) -> list[int]:
    return list(Journal(folder).survey(torch.device("cpu")).whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_round_and_saves(number: int, tmp_path: Path, capfd) -> None:
    whole, before = fs.run(experiment()), {kind: signal.getsignal(kind) for kind in signals.KINDS}
    with pytest.raises(Stopped, match="stopped after round 3") as stopped:
        fs.run(experiment(), out=tmp_path / "run", progress=sends(number))
    assert stopped.value.signal == number
    assert "stops after this round, with a checkpoint" in capfd.readouterr().err
    assert checkpoints(tmp_path / "run") == [3]
    assert {kind: signal.getsignal(kind) for kind in signals.KINDS} == before
    with pytest.raises(Stopped, match="stopped after round 5"):
        fs.resume(tmp_path / "run", progress=sends(number, after=4))
    assert checkpoints(tmp_path / "run") == [3, 5]
    assert identical(states(whole), states(fs.resume(tmp_path / "run")))
    assert capfd.readouterr().err.count("\n") == 1, "nothing is said but that it stops"


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="in the middle of a round") as stopped:
        fs.run(
            experiment(checkpoint_every=2), out=tmp_path / "run", progress=sends(signal.SIGINT, signal.SIGTERM, after=3)
        )
    assert stopped.value.signal == signal.SIGTERM
    assert checkpoints(tmp_path / "run") == [2]
    assert identical(states(fs.run(experiment())), states(fs.resume(tmp_path / "run")))


def test_a_run_that_is_not_saved_stops_at_once(tmp_path: Path) -> None:
    seen = []

    def progress(record) -> None:
        seen.append(record["round"])
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fs.run(experiment(), progress=progress)
    assert seen == [1]


def test_simulate_and_its_callbacks(tmp_path: Path) -> None:
    """All callbacks see the round after which the run stops."""

    def call(**more) -> fs.Run:
        return fs.simulate(fs.PFedSD(), model=make("plain"), data=ragged(), **{**SETTINGS, "rounds": 5}, **more)

    seen: list[int] = []

    class Watch:
        def on_start(self, coordinator) -> None: ...
        def on_end(self, coordinator) -> None: ...
        def on_round(self, coordinator, record) -> None:
            seen.append(record["round"])

    with pytest.raises(Stopped):
        call(out=tmp_path / "run", progress=sends(signal.SIGINT), callbacks=[Watch()])
    assert seen == [1, 2, 3]
    assert identical(states(call()), states(call(out=tmp_path / "run", resume=True)))


def test_runs_side_by_side_stop_after_the_same_round(tmp_path: Path) -> None:
    """Also where the signal comes when only some of them have ended the round."""
    runs = [fs.Experiment(method=fs.FedAvg(), **{**TINY, "engine": "stacked", "seed": seed}) for seed in (0, 1)]
    whole = fs.run_together(runs)
    folders = [tmp_path / "a", tmp_path / "b"]
    for first in (True, False):
        progress = [sends(signal.SIGINT) if first else None, None if first else sends(signal.SIGINT, after=4)]
        with pytest.raises(Stopped):
            together.try_together(runs, outs=folders, progress=progress, resume=not first)
        assert checkpoints(folders[0]) == checkpoints(folders[1]) == ([3] if first else [3, 5])
    done = together.try_together(runs, outs=folders, resume=True)
    for one, other in zip(whole, done, strict=True):
        assert identical(states(one), states(other))


def test_the_round_to_stop_after_is_decided_once() -> None:
    stop = Stop()
    assert not stop.due(1)  # of the first run
    stop.signal = signal.SIGINT
    assert not stop.due(1)  # of the second: both go on to the next
    assert stop.due(2)
    assert stop.due(2)
    assert stop.after == 2


def test_what_a_program_handles_itself_is_left_alone(tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        assert len(fs.run(experiment(), out=tmp_path / "run", progress=sends(signal.SIGTERM)).history) == 6
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


COMMANDS = {
    "run": ["run", "scaffold", "--rounds", "100000"],
    "compare": ["compare", "fedavg", "local", "--engine", "one", "--rounds", "100000"],
    "sweep": ["sweep", "fedprox", "mu=0.1,1", "--engine", "stacked", "--rounds", "100000"],
}


@pytest.mark.parametrize(
    ("command", "number"), [("run", signal.SIGTERM), ("compare", signal.SIGINT), ("sweep", signal.SIGTERM)]
)
def test_commands_say_where_they_stand(command: str, number: int, tmp_path: Path, capfd) -> None:
    sent = []

    def send(record) -> None:
        if record["round"] == 2 and not sent:
            sent.append(os.kill(os.getpid(), number))

    step = execute.Watch.step

    def stepped(self, label, index, record) -> None:
        step(self, label, index, record)
        send(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute.Watch, "step", stepped)
        patch.setattr(execute.Watch, "step_together", lambda self, label, record: send(record))
        small = ["--clients", "3", "--epochs", "1", "--eval-every", "1000", "--out", str(tmp_path / "out")]
        assert main([*COMMANDS[command], *small]) == 128 + number
        said = capfd.readouterr().err.splitlines()
        of_all = r", [\d,]+ of 200,000 rounds in all" if command != "run" else ""
        assert re.fullmatch(
            f"fedstill: stopped after round 3{of_all}; 'fedstill resume {tmp_path / 'out'}' goes on", said[-1]
        )
        assert len(said) == 2
        patch.undo()
    assert {checkpoints(file.parent)[-1] for file in (tmp_path / "out").rglob("metrics.jsonl")} == {3}


def test_sigterm_outside_of_training(capsys, monkeypatch) -> None:
    monkeypatch.setattr(show, "methods", lambda words: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["methods"]) == 143
    assert capsys.readouterr().err == "fedstill: stopped\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupt_while_the_command_is_imported(tmp_path: Path) -> None:
    """At several moments; one line, and no traceback."""
    for wait in (0.3, 0.7, 1.2):
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "fedstill", "run", "fedavg", "--rounds", "100000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        seen = ""
        while "fedstill.core" not in seen:
            seen = process.stderr.readline()
            assert seen, "it ended by itself"
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
        assert process.returncode == 130
        assert "Traceback" not in said
        assert [line for line in said.splitlines() if not line.startswith("import time")] == ["fedstill: stopped"]


@pytest.mark.parametrize(
    ("error", "says"), [("MemoryError()", "too small for PyTorch"), ("KeyError('x')", "KeyError: 'x'")]
)
def test_too_little_memory_to_import(error: str, says: str) -> None:
    """As long as the command has not begun, a lack of memory is said in a line, and anything else as Python says it."""
    code = f"import sys; sys.argv[0] = 'fedstill'; import fedstill; raise {error}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == (error != "MemoryError()")


def test_importing_the_library_changes_no_handler() -> None:
    code = "import signal, fedstill; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_a_full_memory_is_said_in_a_line(capsys, monkeypatch) -> None:
    def full(words) -> None:
        torch.empty(2**50)

    monkeypatch.setattr(show, "methods", full)
    assert main(["methods"]) == 1
    assert capsys.readouterr().err.startswith("fedstill: the memory is full")
