"""The run folder: whole files, checksums, and a run that goes on after a kill as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill import methods
from fedstill.core import tree
from fedstill.run import callbacks, checkpoint
from fedstill.run.callbacks import Pace
from fedstill.run.experiment import FORMAT
from fedstill.run.journal import Journal

from ..problems import SETTINGS, cut, identical, make, needed, ragged, states

TINY = dict(rounds=6, epochs=1, clients=5, partition="iid", checkpoint_every=2, eval_every=2, batch_size=32)


def experiment(name: str = "pfedsd", **changes) -> fs.Experiment:
    method = methods.get(name)()
    return fs.Experiment(method=method, **{**TINY, **needed(method), **changes})


def metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.endswith("seconds")} for line in lines]


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_run_that_stopped_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = fs.run(experiment(name, participation=0.6), out=tmp_path / "whole")
    cut(experiment(name, participation=0.6), tmp_path / "cut", 5)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "los')  # as a kill in the middle of a line would leave it
    resumed = fs.resume(tmp_path / "cut")
    assert identical(states(whole), states(resumed))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert [r["round"] for r in resumed.history] == [1, 2, 3, 4, 5, 6]


def test_a_real_kill_is_survived(tmp_path: Path) -> None:
    script = (
        "import fedstill as fs, sys\n"
        f"e = fs.Experiment(method=fs.PFedSD(), **{dict(TINY, rounds=400, checkpoint_every=1, eval_every=400)!r})\n"
        "fs.run(e, out=sys.argv[1])\n"
    )
    folder = tmp_path / "killed"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], env=environment)
    end = time.monotonic() + 60
    while time.monotonic() < end and len(list((folder / "checkpoints").glob("*.json"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
    assert 0 < done < 400
    resumed = fs.resume(folder, rounds=done + 3)
    whole = fs.run(experiment(rounds=done + 3, eval_every=400))
    assert identical(states(whole), states(resumed))


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    whole = fs.run(experiment(), out=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    assert len(newest) == 2, "the newest two are kept"
    data = bytearray(newest[-1].read_bytes())
    data[-1] ^= 1
    newest[-1].write_bytes(bytes(data))
    found = Journal(tmp_path / "run").load(torch.device("cpu"))
    assert found is not None
    assert found.round == 4
    assert identical(states(whole), states(fs.resume(tmp_path / "run")))


def test_memories_lie_in_several_files_where_they_are_many(tmp_path: Path, monkeypatch) -> None:
    whole = fs.run(experiment(), out=tmp_path / "whole")
    monkeypatch.setattr(
        checkpoint, "FILE_BYTES", 100_000
    )  # the model has 9,610 weights of four bytes: three clients a file
    cut(experiment(), tmp_path / "run", 5)
    folder = tmp_path / "run" / "checkpoints"
    names = [f"round-00000{t}{part}" for t in (2, 4) for part in ("-1.safetensors", ".json", ".safetensors")]
    assert sorted(file.name for file in folder.iterdir()) == names
    assert identical(states(whole), states(fs.resume(tmp_path / "run")))
    assert {file.name[:12] for file in folder.iterdir()} == {"round-000004", "round-000006"}


@pytest.mark.parametrize("part", ["round-000004.safetensors", "round-000004-1.safetensors", "round-000004.json"])
def test_a_checkpoint_with_a_part_gone_is_passed_over(part: str, tmp_path: Path, monkeypatch) -> None:
    whole = fs.run(experiment())
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)
    cut(experiment(), tmp_path / "run", 5)
    (tmp_path / "run" / "checkpoints" / part).unlink()
    assert Journal(tmp_path / "run").load(torch.device("cpu")).round == 2
    assert identical(states(whole), states(fs.resume(tmp_path / "run")))
    assert not (tmp_path / "run" / "checkpoints" / "round-000002.json").exists()


@pytest.mark.parametrize(
    ("environment", "version"),
    [
        ('{"fedstill": "0.3.1", "python": "3.11"}', "0.3.1"),  # as earlier versions wrote it
        ('{"fedstill": "9.0", "format": 99}', "9.0"),
        ('{"python": "3.11"}', "of an unknown version"),
        ("[1]", "of an unknown version"),
        ("{", "of an unknown version"),
        (None, "of an unknown version"),
    ],
)
def test_a_folder_of_another_version_is_refused_in_a_line_and_left_alone(
    environment: str | None, version: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    cut(experiment(), folder, 3)
    about = json.loads((folder / "environment.json").read_text())
    assert about["format"] == FORMAT
    assert about["fedstill"] == fs.__version__
    if environment is None:
        (folder / "environment.json").unlink()
    else:
        (folder / "environment.json").write_text(environment)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(fs.InputError, match=re.escape(f"fedstill {version} wrote this one")) as refused:
        fs.resume(folder)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_call_from_python_refuses_a_folder_of_another_version(tmp_path: Path) -> None:
    def call(**more) -> fs.Run:
        return fs.simulate(fs.FedAvg(), model=make("plain"), data=ragged(), **SETTINGS, out=tmp_path / "run", **more)

    call()
    (tmp_path / "run" / "environment.json").write_text('{"fedstill": "0.3.1"}')
    with pytest.raises(fs.InputError, match=re.escape("fedstill 0.3.1 wrote this one")):
        call(resume=True)


LATE = {"profile": "lognormal:0.8", "deadline": 0.5, "drop": 0.1}


@pytest.mark.parametrize(
    "changes", [LATE, {**LATE, "late": "fold"}, {**LATE, "minimum": 3}], ids=["drop", "fold", "few"]
)
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "l2gd"])
def test_what_is_not_decided_at_a_checkpoint_is_decided_after_it(name: str, changes: dict, tmp_path: Path) -> None:
    """Clients whose late replies are not, or not yet, merged: their coupled entries are rolled back after a resume, too."""
    late = experiment(name, clients=8, participation=0.5, **changes)
    whole = fs.run(late, out=tmp_path / "whole")
    cut(late, tmp_path / "cut", 5)
    resumed = fs.resume(tmp_path / "cut")
    assert identical(states(whole), states(resumed))
    for k in range(8):
        memories = [tree.flatten(one.memory(k)) for one in (whole, resumed)]
        assert identical({"": memories[0]}, {"": memories[1]})
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert any(record["late"] for record in whole.history)
    if changes.get("late") == "fold":
        assert set(map(int, whole.history[3]["busy"])) & set(
            whole.history[4]["folded"]
        )  # over the checkpoint of round 4


def test_a_checkpoint_holds_no_more_than_a_part_in_memory(tmp_path: Path, monkeypatch) -> None:
    """Of 40 memories of a megabyte, those of one file and what is made of them; they come back one file at a time."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 4 * 2**20)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def memories():
        nonlocal most
        for k in range(40):
            value = torch.full((2**18,), float(k))
            alive.add(value)
            most = max(most, len(alive))
            yield k, {"v": value}

    one = Journal(tmp_path)
    one.save(0, {"server": {"w": torch.ones(3)}}, memories())
    assert most <= 6
    assert len(list(tmp_path.glob("checkpoints/*.safetensors"))) == 10
    found = one.load(torch.device("cpu"))
    assert torch.equal(found.state()["server"]["w"], torch.ones(3))
    assert [(k, float(kept["v"].mean())) for k, kept in found.clients()] == [(k, float(k)) for k in range(40)]


def test_the_folder_says_everything(tmp_path: Path) -> None:
    fs.run(experiment(lr=0.02), out=tmp_path / "run")
    files = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert files == [
        "answers.json",
        "checkpoints",
        "data.json",
        "environment.json",
        "experiment.toml",
        "metrics.csv",
        "metrics.jsonl",
        "partition.json",
    ]
    assert fs.Experiment.from_toml(tmp_path / "run" / "experiment.toml") == experiment(lr=0.02)
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert len(partition["hash"]) == 64
    assert not list((tmp_path / "run").rglob("*.part"))


def test_an_occupied_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(fs.InputError, match="new or empty"):
        fs.run(experiment(), out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_bad_input_leaves_no_folder(tmp_path: Path) -> None:
    for changes in (
        {"model": "mlpp"},
        {"partition": "shards:4000"},
        {"data": "nothing"},
        {"device": "tpu"},
        {"head": ("fc9",)},
    ):
        with pytest.raises(fs.InputError):
            fs.run(experiment(**changes), out=tmp_path / "run")
        assert not (tmp_path / "run").exists(), changes


def test_resume_notices_other_contents(tmp_path: Path) -> None:
    import numpy as np

    def save(scale: float) -> None:
        g = np.random.default_rng(0)
        np.savez(tmp_path / "mine.npz", x=scale * g.normal(size=(60, 4)).astype("float32"), y=np.arange(60) % 3)

    save(1.0)
    fs.run(experiment(data=str(tmp_path / "mine.npz")), out=tmp_path / "run")
    save(1.5)
    with pytest.raises(fs.InputError, match="contents"):
        fs.resume(tmp_path / "run")


def test_missing_records_send_a_resume_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    whole = fs.run(experiment(), out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:4]) + "{damaged\n" + lines[5])
    (tmp_path / "run" / "checkpoints" / "round-000006.json").write_text("{")
    resumed = fs.resume(tmp_path / "run")
    assert [r["round"] for r in resumed.history] == [1, 2, 3, 4, 5, 6]
    assert identical(states(whole), states(resumed))


def test_a_run_from_python_goes_on_by_the_same_call_only(tmp_path: Path) -> None:
    def call(**more) -> fs.Run:
        settings = {**SETTINGS, "rounds": 12}
        return fs.simulate(fs.PFedSD(), model=make("plain"), data=ragged(), **settings, engine="one", **more)

    class Stop(Exception):
        pass

    def stop(record) -> None:
        if record["round"] == 11:
            raise Stop

    with pytest.raises(Stop):
        call(out=tmp_path / "run", progress=stop)
    with pytest.raises(fs.InputError, match="simulate"):
        fs.resume(tmp_path / "run")
    with pytest.raises(fs.InputError, match="same call"):
        fs.simulate(fs.PFedSD(lam=9), model=make("plain"), data=ragged(), out=tmp_path / "run", resume=True)
    assert identical(states(call()), states(call(out=tmp_path / "run", resume=True)))


def test_the_state_is_kept_as_often_as_costs_little() -> None:
    """After the first round; then when 50 times what that took is over, or 300 s if it took less than 30."""
    assert kept_rounds(saving=0.1, round_seconds=1.5, rounds=30) == [1, 8, 15, 22, 29]
    assert kept_rounds(saving=4.0, round_seconds=20, rounds=50) == [1, 16, 31, 46]  # 8 s in 300, less than a tenth
    assert kept_rounds(saving=40.0, round_seconds=100, rounds=20) == [1, 9, 17]  # 80 s in 800: not before


def kept_rounds(saving: float, round_seconds: float, rounds: int) -> list[int]:
    now = [0.0]
    pace, kept = Pace(lambda: now[0]), []

    def save():
        now[0] += saving
        yield

    for round in range(1, rounds + 1):
        now[0] += round_seconds
        due = [pace.due(round) for _ in range(2)]  # of two runs side by side
        assert due[0] == due[1]
        if due[0]:
            kept.append(round)
            for _ in range(2):
                list(pace.timed(save()))
    return kept


def test_a_kill_costs_at_most_a_round_where_saving_is_cheap(tmp_path: Path) -> None:
    """By default, with rounds that take long: every one is kept."""

    class Slow:
        def on_start(self, coordinator) -> None: ...
        def on_end(self, coordinator) -> None: ...
        def on_round(self, coordinator, record) -> None:
            clock[0] += 60

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks.Pace.__init__, "__defaults__", (lambda: clock[0],))
        settings = {**SETTINGS, "rounds": 4}
        with pytest.raises(KeyboardInterrupt):
            fs.simulate(
                fs.PFedSD(), model=make("plain"), data=ragged(), **settings, out=tmp_path / "run", callbacks=[Slow()],
                progress=lambda record: stop(record, 3),
            )  # fmt: skip
    assert list(Journal(tmp_path / "run").survey(torch.device("cpu")).whole) == [2, 3]


def stop(record, after: int) -> None:
    if record["round"] == after:
        raise KeyboardInterrupt


def test_a_run_of_a_version_that_kept_no_names_goes_on(tmp_path) -> None:
    (tmp_path / "partition.json").write_text(json.dumps({"hash": "a", "indices": []}))
    named = {"hash": "a", "indices": [], "names": ["berlin"], "labels": ["cat"]}
    Journal(tmp_path).check_partition(named)
    (tmp_path / "partition.json").write_text(json.dumps(named))
    with pytest.raises(fs.InputError, match="partition names"):
        Journal(tmp_path).check_partition({**named, "names": ["paris"]})
