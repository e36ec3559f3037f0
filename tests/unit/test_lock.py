"""The lock on a folder of results, and files that are whole after a failure."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedstill as fs
from fedstill.cli import main
from fedstill.core import files
from fedstill.run import lock
from fedstill.run.journal import Journal
from fedstill.run.lock import FolderLock, check_free

TINY = dict(rounds=2, epochs=1, clients=3, partition="iid", batch_size=64)
HOLDER = """
import sys, time
from pathlib import Path
from fedstill.run.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lock") / "run"
    fs.run(fs.Experiment(method=fs.FedAvg(), **TINY), out=folder)
    return folder


@pytest.fixture
def holder():
    """Start processes that hold a folder; end them afterwards."""
    processes = []

    def hold(folder: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_until_the_first_is_killed(finished: Path, tmp_path: Path, holder, capsys) -> None:
    process = holder(finished)
    before = contents(finished)
    assert main(["resume", str(finished), "--rounds", "3"]) == 2
    said = capsys.readouterr().err
    assert f"process {process.pid} on " in said
    assert said.count("\n") == 1
    with pytest.raises(fs.InputError, match="nobody is at work"):
        fs.resume(finished)
    assert contents(finished) == before
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert fs.resume(finished).history[-1]["round"] == 2
    assert not (finished / lock.LOCK).exists()


def test_a_job_that_is_at_work_refuses_another_and_the_resume_of_its_parts(tmp_path: Path, holder, capsys) -> None:
    words = ["--rounds", "1", "--clients", "3", "--epochs", "1", "--out", str(tmp_path / "c")]
    assert main(["compare", "fedavg", "local", *words]) == 0
    holder(tmp_path / "c")
    before = contents(tmp_path / "c")
    capsys.readouterr()
    for command in (["resume", str(tmp_path / "c")], ["resume", str(tmp_path / "c" / "local"), "--rounds", "2"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "nobody is at work" in said
        assert said.count("\n") == 1
    assert contents(tmp_path / "c") == before
    holder(tmp_path / "new")
    for command in ("run", "compare"):
        assert main([command, "fedavg", *words[:-1], str(tmp_path / "new")]) == 2
        said = capsys.readouterr().err
        assert "nobody is at work" in said
        assert said.count("\n") == 1


def test_runs_let_go_of_their_folders(finished: Path, tmp_path: Path) -> None:
    """After the end, an error and a refusal."""

    def stop(record) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fs.run(fs.Experiment(method=fs.FedAvg(), **TINY), out=tmp_path / "run", progress=stop)
    assert not list(tmp_path.rglob(lock.LOCK))
    with pytest.raises(fs.InputError):
        fs.resume(finished, rounds=1)
    with FolderLock(finished), FolderLock(tmp_path / "run"):
        pass


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    held, (reading, writing) = FolderLock(tmp_path), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    held._drop()  # as at the end of the process that made it
    try:
        with FolderLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(fs.InputError, match="can be written"):
        FolderLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"


def test_what_a_stop_before_the_beginning_leaves_may_be_run_into(tmp_path: Path, capsys) -> None:
    (tmp_path / lock.LOCK).touch()
    (tmp_path / "partition.json").write_text("{")
    (tmp_path / "experiment.toml.part").write_text("lr")
    (tmp_path / "checkpoints").mkdir()
    check_free(tmp_path)
    assert main(["resume", str(tmp_path)]) == 2
    assert "the command that made it can be given again" in capsys.readouterr().err
    fs.run(fs.Experiment(method=fs.FedAvg(), **TINY), out=tmp_path)
    with pytest.raises(fs.InputError, match="new or empty"):
        check_free(tmp_path)


@pytest.mark.parametrize("name", ["partition.json", "checkpoints/mine", ".lock/x", "experiment.toml", "job.json"])
def test_somebody_elses_files_are_not_taken_for_that(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    if "/" in name or name in lock.MARKS:
        (tmp_path / lock.LOCK).mkdir(exist_ok=True) if name[0] == "." else (tmp_path / lock.LOCK).touch()
    before = contents(tmp_path)
    with pytest.raises(fs.InputError):
        fs.run(fs.Experiment(method=fs.FedAvg(), **TINY), out=tmp_path)
    assert contents(tmp_path) == before


@pytest.fixture
def full(monkeypatch):
    """Let the disk be full after so many calls of fsync."""

    def fill(after: int = 0) -> None:
        left = [after]

        def fsync(file: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


def test_a_full_disk_leaves_files_as_they_were(tmp_path: Path, full) -> None:
    files.write(tmp_path / "a", b"old")
    files.append(tmp_path / "b", b"one\n")
    full()
    with pytest.raises(OSError, match="No space left") as error:
        files.write(tmp_path / "a", b"new")
    assert error.value.filename == str(tmp_path / "a")
    with pytest.raises(OSError, match="No space left") as error:
        files.append(tmp_path / "b", b"two\n")
    assert error.value.filename == str(tmp_path / "b")
    assert contents(tmp_path) == {tmp_path / "a": b"old", tmp_path / "b": b"one\n"}


@pytest.mark.parametrize("after", range(6))
def test_a_full_disk_at_the_beginning_leaves_a_folder_to_run_into(after: int, tmp_path: Path, full) -> None:
    journal = Journal(tmp_path / "run")
    full(after)
    try:
        with journal.entered():
            journal.begin("lr = 1", {}, torch.device("cpu"))
    except OSError:
        assert not list((tmp_path / "run").glob("*"))
    else:
        assert after > 2


def test_folders_are_flushed_after_a_file_has_its_name(tmp_path: Path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(os.readlink(f"/proc/self/fd/{file}")))
    files.write(tmp_path / "new" / "a", b"1")
    assert seen == [str(tmp_path), str(tmp_path / "new" / "a.part"), str(tmp_path / "new")]
    seen.clear()
    files.append(tmp_path / "new" / "b", b"1")
    files.append(tmp_path / "new" / "b", b"2")
    assert seen == [str(tmp_path / "new" / "b"), str(tmp_path / "new"), str(tmp_path / "new" / "b")]
