"""Damage to a run folder: the checkpoint before loads and a line says so, or the folder is refused in a line and left alone."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill.cli import main
from fedstill.core import files
from fedstill.run.journal import Journal, Lines

from ..problems import SETTINGS, cut, identical, make, ragged, states

TINY = dict(rounds=6, epochs=1, clients=3, partition="iid", checkpoint_every=2, batch_size=64, profile="lognormal:0.3")
NEWEST, BEFORE = "checkpoints/round-000004", "checkpoints/round-000002"


def experiment(**changes) -> fs.Experiment:
    return fs.Experiment(method=fs.SCAFFOLD(), **{**TINY, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> fs.Run:
    return fs.run(experiment(), out=tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped after round 5, with checkpoints of rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    cut(experiment(), folder, 5)
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, says: str, capsys, *flags: str) -> None:
    """The folder cannot be resumed: one line on stderr, exit status 2, and nothing is changed."""
    before = contents(folder)
    capsys.readouterr()
    assert main(["resume", str(folder), *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said, said
    assert contents(folder) == before


def goes_on(folder: Path, whole: fs.Run, capsys, *says: str) -> None:
    """The folder is resumed to the end of the run that was never stopped, and a line says what is wrong."""
    capsys.readouterr()
    resumed = fs.resume(folder)
    said = capsys.readouterr().err
    assert said.count("\n") == (1 if says else 0), said
    for words in says:
        assert words in said, said
    assert identical(states(whole), states(resumed))
    for one, other in zip(whole.history, resumed.history, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    names = {file.name for file in (folder / "checkpoints").iterdir()}
    assert len(names) == 4, "two checkpoints are kept"
    assert f"round-{6:06d}.json" in names
    assert Journal(folder).history() == [{k: v for k, v in r.items() if k != "timeline"} for r in resumed.history]


def sealed_again(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Change the index of the newest checkpoint, its checksum made right again."""

    def damage(folder: Path) -> None:
        file = folder / f"{NEWEST}.json"
        index = files.unseal(file)
        change(index)
        file.write_bytes(files.seal(index))

    return damage


def text(name: str, old: str, new: str, count: int = 1) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new, count))

    return damage


def pipe(file: Path) -> None:
    """Put a pipe in the place of a file: who opens it waits for ever."""
    file.unlink()
    os.mkfifo(file)


def outside(index: dict) -> None:
    index["parts"][0]["file"] = "../../elsewhere.safetensors"


def truncated(name: str, by: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def lines(change: Callable[[list[bytes]], object], name: str = "metrics.jsonl") -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        found = (folder / name).read_bytes().splitlines(keepends=True)
        change(found)
        (folder / name).write_bytes(b"".join(found))

    return damage


def swapped(found: list[bytes]) -> None:
    found[0], found[1] = found[1], found[0]


def cut_last(found: list[bytes]) -> None:
    found[-1] = found[-1][:40]


def cut_third(found: list[bytes]) -> None:
    found[2] = found[2][:40] + b"\n"


def other_digit(number: int) -> Callable[[list[bytes]], None]:
    def change(found: list[bytes]) -> None:
        record = json.loads(found[number])
        found[number] = json.dumps({**record, "clock": 9.0}).encode() + b"\n"

    return change


FALLBACK = {
    "round": text(f"{NEWEST}.json", '"round": 4', '"round": 3'),
    "format of a number": text(f"{NEWEST}.json", '"bytes": ', '"bytes": 1'),
    "emptied": lambda folder: (folder / f"{NEWEST}.json").write_bytes(b""),
    "truncated index": truncated(f"{NEWEST}.json", 9),
    "deep": lambda folder: (folder / f"{NEWEST}.json").write_text("[" * 100_000),
    "another type": lambda folder: (folder / f"{NEWEST}.json").write_text("[1]"),
    "outside": sealed_again(outside),
    "index of another round": lambda folder: shutil.copy(folder / f"{BEFORE}.json", folder / f"{NEWEST}.json"),
    "another run's": sealed_again(lambda index: index.update(run="0" * 64)),
    "no parts": sealed_again(lambda index: index.pop("parts")),
    "no choices": sealed_again(lambda index: index.pop("choices")),
    "parts of another type": sealed_again(lambda index: index.update(parts=[3])),
    "an outline of nothing": sealed_again(lambda index: index["parts"][0].pop("outline")),
    "truncated tensors": truncated(f"{NEWEST}.safetensors", 1),
    "tensors are gone": lambda folder: (folder / f"{NEWEST}.safetensors").unlink(),
    "tensors are a link": lambda folder: _link(folder / f"{NEWEST}.safetensors"),
}


def _link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize("what", FALLBACK)
def test_damage_to_the_newest_checkpoint(what: str, folder: Path, whole: fs.Run, capsys) -> None:
    FALLBACK[what](folder)
    goes_on(folder, whole, capsys, "round-000004.", "goes on after round 2")


def test_a_byte_changed_anywhere_in_a_checkpoint_is_noticed(folder: Path) -> None:
    """Every 13th byte of the index and 40 of the tensors; a changed space between two words of JSON is no damage."""
    draw = random.Random(0)
    device = torch.device("cpu")
    whole = files.unseal(folder / f"{NEWEST}.json")
    for name, step in ((f"{NEWEST}.json", 13), (f"{NEWEST}.safetensors", 0)):
        data = (folder / name).read_bytes()
        for at in range(0, len(data), step) if step else draw.choices(range(len(data)), k=40):
            changed = bytearray(data)
            changed[at] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(changed)
            found = Journal(folder).load(device)
            assert found is not None
            if found.round == 4:
                assert files.unseal(folder / f"{NEWEST}.json") == whole
                assert name.endswith("json")
                assert data[at : at + 1].isspace()
        (folder / name).write_bytes(data)


def test_the_newest_index_is_gone(folder: Path, whole: fs.Run, capsys) -> None:
    """As a kill leaves a checkpoint that was being written."""
    (folder / f"{NEWEST}.json").rename(folder / f"{NEWEST}.json.part")
    goes_on(folder, whole, capsys, "the checkpoint of round 4 is unfinished", "goes on after round 2")
    assert not list(folder.rglob("*.part"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lines(cut_last), ["the last line of metrics.jsonl is cut short", "after round 4"]),
        (lines(lambda found: found.append(b"{")), ["the last line of metrics.jsonl is cut short", "after round 4"]),
        (lines(cut_last, "timeline.jsonl"), ["the last line of timeline.jsonl is cut short", "after round 4"]),
        (lines(cut_third), ["line 3 of metrics.jsonl is damaged", "goes on after round 2"]),
        (lines(cut_third, "timeline.jsonl"), ["line 3 of timeline.jsonl is damaged", "goes on after round 2"]),
        (lines(other_digit(2)), ["round-000004.json: the records up to its round", "goes on after round 2"]),
        (lines(lambda found: found.pop(4)), []),
    ],
)
def test_records_that_are_damaged_after_a_checkpoint(damage, says, folder: Path, whole: fs.Run, capsys) -> None:
    damage(folder)
    goes_on(folder, whole, capsys, *says)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lines(swapped), "line 1 of metrics.jsonl is damaged"),
        (lines(other_digit(0)), "the records up to its round are not those"),
        (lines(list.clear), "no record of its round"),
        (lines(list.clear, "timeline.jsonl"), "the records up to its round are not those"),
        (lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xff\n{}\n"), "line 1 of metrics.jsonl is damaged"),
        (lambda folder: pipe(folder / "metrics.jsonl"), "metrics.jsonl cannot be read (it should be a regular file"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), "it has 5 records and no checkpoint"),
        (lambda folder: [truncated(f"{name}.json", 5)(folder) for name in (NEWEST, BEFORE)], "round-000002.json: it"),
    ],
)
def test_a_folder_without_anything_to_go_on_from_is_refused(damage, says: str, folder: Path, capsys) -> None:
    """It never begins again in silence, and nothing is deleted."""
    damage(folder)
    refused(folder, says, capsys)
    refused(folder, "delete it to have it run again", capsys)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (text("experiment.toml", "lr = 0.05", "lr = 0.5"), "experiment.toml has been changed"),
        (text("experiment.toml", "rounds = 6", "rounds = 8"), "only a flag such as --rounds changes a run"),
        (text("experiment.toml", "scaffold", "fedavg"), "experiment.toml has been changed"),
        (lambda folder: (folder / "experiment.toml").write_bytes(b"\xff["), "experiment.toml has been changed"),
        (text("partition.json", '"hash": "', '"hash": "0'), "partition.json has been changed"),
        (lambda folder: (folder / "partition.json").write_text("[" * 100_000), "partition.json has been changed"),
        (lambda folder: (folder / "partition.json").unlink(), "partition.json: it should be a file that exists"),
        (lambda folder: pipe(folder / "partition.json"), "partition.json: it should be a regular file"),
        (text("environment.json", '"after": 0', '"after": 1'), "environment.json: its checksum is wrong"),
        (truncated("environment.json", 3), "of an unknown version"),
    ],
)
def test_settings_that_were_edited_are_refused(damage, says: str, folder: Path, capsys) -> None:
    damage(folder)
    refused(folder, says, capsys)


def test_simulate_obeys_the_same(tmp_path: Path, whole: fs.Run) -> None:
    def call(**more) -> fs.Run:
        return fs.simulate(fs.FedAvg(), model=make("plain"), data=ragged(), **SETTINGS, out=tmp_path / "run", **more)

    call()
    file = tmp_path / "run" / "experiment.toml"
    before = file.read_text()
    file.write_text(before.replace("lr =", "lr  ="))
    with pytest.raises(fs.InputError, match=r"experiment\.toml has been changed"):
        call(resume=True)
    file.write_text(before)
    for index in (tmp_path / "run" / "checkpoints").glob("*.json"):
        index.write_text("{}")
    with pytest.raises(fs.InputError, match="a checkpoint to go on from"):
        call(resume=True)


def test_more_rounds_are_recorded_and_a_kill_on_the_way_there_leaves_the_run_as_it_was(
    folder: Path, monkeypatch
) -> None:
    first = (folder / "experiment.toml").read_text()
    journal = Journal(folder)
    journal.amend(first.replace("rounds = 6", "rounds = 7"), 5)
    journal.check_settings()
    (folder / "experiment.toml").write_text(first)  # killed before it was replaced
    journal.check_settings()
    assert len(fs.resume(folder, rounds=7).history) == 7
    assert len(fs.resume(folder).history) == 7
    about = files.unseal(folder / "environment.json")
    assert [entry["after"] for entry in about["experiments"]] == [0, 5]


def test_another_version_of_torch_is_said(folder: Path, whole: fs.Run, capsys) -> None:
    about = files.unseal(folder / "environment.json")
    (folder / "environment.json").write_bytes(files.seal({**about, "torch": "1.0"}, indent=2))
    goes_on(folder, whole, capsys, f"it began with torch 1.0, now {torch.__version__}: last bits may differ")


def test_a_folder_that_is_refused_keeps_its_settings(folder: Path, capsys) -> None:
    shutil.rmtree(folder / "checkpoints")
    refused(folder, "nothing was changed", capsys, "--rounds", "9")


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(tmp_path: Path, whole: fs.Run, capsys) -> None:
    cut(experiment(), tmp_path / "run", 1)
    goes_on(tmp_path / "run", whole, capsys, "stopped before its first checkpoint: it begins again at round 1")


def test_a_new_checkpoint_stays_beside_damaged_ones_of_later_rounds(folder: Path, whole: fs.Run) -> None:
    """Names do not decide which checkpoints are the newest."""
    for name in (f"{NEWEST}.json", f"{NEWEST}.safetensors"):
        shutil.copy(folder / name, folder / name.replace("4", "9"))
        shutil.copy(folder / name, folder / name.replace("4", "8"))
    assert identical(states(whole), states(fs.resume(folder)))
    kept = sorted(file.name for file in (folder / "checkpoints").glob("*.json"))
    assert kept == ["round-000004.json", "round-000006.json"]


def test_lines_end_where_they_are_damaged(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"round": 1}\n{"round": 3}\n')
    assert Lines.read(file).problem == "the last line of records.jsonl is cut short"
    assert len(Lines.read(file, every=False).records) == 2
    file.write_bytes(b'{"round": 1}\n{"round": true}\n{"round": 3}\n')
    found = Lines.read(file)
    assert not found.torn
    assert found.problem.startswith("line 2 of records.jsonl is damaged")
    assert found.upto(5).raw == b'{"round": 1}\n'
    assert found.upto(0).raw == b""
