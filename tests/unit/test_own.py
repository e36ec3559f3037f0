"""Methods and models of one's own, by where their code is: flags, results, resume; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstill as fs
from fedstill.cli import main
from fedstill.core import own
from fedstill.core.errors import InputError
from fedstill.methods import METHODS
from fedstill.report.html import page
from fedstill.run.journal import Journal

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import fedstill as fs

@dataclass(frozen=True, kw_only=True)
class MOON(fs.FedProx):
    id: ClassVar[str] = "moon"
    mu: float = fs.setting(0.1, "weight", least=0)
    warmth: float = fs.setting(0.5, "own flag", least=0, most=1)

class NoId(fs.FedAvg):
    pass

class Taken(fs.FedAvg):
    id: ClassVar[str] = "fedavg"

VALUE = 3
"""
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 7), nn.ReLU(), nn.Linear(7, classes))

def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def wrong(shape, classes):
    return 3

def fails(shape, classes):
    raise KeyError("deep")
"""
TINY = ["--rounds", "2", "--clients", "3", "--epochs", "1", "--partition", "iid"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder with code in it; what is registered goes again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own, "_allowed", [False])
    (tmp_path / "my_method.py").write_text(METHOD)
    (tmp_path / "my_net.py").write_text(NET)
    before = dict(METHODS)
    yield tmp_path
    METHODS.clear()
    METHODS.update(before)
    sys.modules.pop("my_net", None)


def refused(capsys, *argv: str) -> str:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_a_run_with_both_resumes_and_is_drawn(files: Path, capsys) -> None:
    words = ["my_method.py:MOON", "--warmth", "0.25", "--mu", "0.3", "--model", "my_net:Net"]
    assert main(["run", *words, *TINY, "--out", "a"]) == 0
    out = capsys.readouterr().out
    assert "moon " in out
    assert "model Net" in out
    kept = Path("a/experiment.toml").read_text()
    assert f'id = "{files}/my_method.py:MOON@' in kept
    assert 'model = "my_net:Net@' in kept
    assert "warmth = 0.25" in kept
    del METHODS["moon"]
    assert main(["resume", "a", "--rounds", "3"]) == 0
    assert [record["round"] for record in Journal(Path("a")).history()] == [1, 2, 3]
    assert "MOON" in page.write([Path("a")]).read_text()
    # the same as FedProx with the same model, to the bit: MOON is FedProx by another name
    assert (
        main(["run", "fedprox", "--mu", "0.3", "--model", "my_net.py:Net", *TINY, "--rounds", "3", "--out", "b"]) == 0
    )
    one, other = (Journal(Path(name)).history()[-1] for name in ("a", "b"))
    assert one["personal_clients"] == other["personal_clients"]


def test_a_comparison_and_its_resume(capsys) -> None:
    assert main(["compare", "--rounds", "2", "fedprox", "my_method.py:MOON", *TINY[2:], "--out", "c"]) == 0
    assert Path("c/moon/experiment.toml").is_file()
    del METHODS["moon"]
    assert main(["resume", "c"]) == 0
    assert "moon" in capsys.readouterr().out
    assert main(["sweep", "my_method.py:MOON", "warmth=0.1,0.2", *TINY]) == 0
    assert "my own" not in capsys.readouterr().err


def test_help_has_its_flags(capsys) -> None:
    assert main(["run", "my_method.py:MOON", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--warmth X" in out
    assert "own flag [at least 0 and at most 1; default 0.5]" in out


def test_changed_or_missing_code_is_refused_before_anything_goes_on(files: Path, capsys) -> None:
    assert main(["run", "my_method.py:MOON", *TINY, "--out", "a"]) == 0
    capsys.readouterr()
    (files / "my_method.py").write_text(METHOD + "\n# other\n")
    assert "has changed since" in refused(capsys, "resume", "a", "--rounds", "3")
    (files / "my_method.py").unlink()
    assert "there is no" in refused(capsys, "resume", "a", "--rounds", "3")
    assert len(Journal(Path("a")).history()) == 2
    (files / "my_method.py").write_text(METHOD)
    assert main(["resume", "a", "--rounds", "3"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such.py:A"], "there is no"),
        (["no_such_module:A"], "ModuleNotFoundError"),
        (["my_method.py:Nothing"], "has no Nothing"),
        (["my_method.py:VALUE"], "a class of methods"),
        (["my_method.py:NoId"], "an id of its own"),
        (["my_method.py:Taken"], "is a method of fedstill's"),
        (["fedavg", "--model", "my_net.py:wrong"], "not int"),
        (["fedavg", "--model", "my_net.py:fails"], "KeyError: 'deep'"),
        (["fedavg", "--model", "os:abort"], "a class of modules"),
        (["my_method.py:MOON", "--warmth", "2"], "--warmth = 2.0: should be a number at least 0 and at most 1"),
        (["my_method.py:MOON", "--warmht", "0.2"], "--warmth?"),
    ],
)
def test_what_cannot_be_used_is_refused(words: list[str], says: str, capsys) -> None:
    assert says in refused(capsys, "run", *words, *TINY, "--out", "a")
    assert not Path("a").exists()


def test_a_function_without_arguments_makes_the_model() -> None:
    own.allow()
    assert fs.run(fs.Experiment(method=fs.FedAvg(), model="my_net.py:fixed", rounds=1, clients=3, epochs=1)).history


def test_code_is_run_by_commands_that_train_and_by_nothing_else(files: Path) -> None:
    """A site takes its hub's experiments as values; a reader of results reads them."""
    (files / "evil.py").write_text("raise SystemExit('it was run')\n")
    for values in ({"method": "evil.py:X"}, {"method": {"id": "evil:X"}}):
        with pytest.raises(InputError, match="run by run, compare, sweep, resume"):
            fs.Experiment.from_values(values)
    with pytest.raises(InputError, match="run by run, compare, sweep, resume"):
        fs.run(fs.Experiment(method=fs.FedAvg(), model="evil:X", clients=3))


def test_code_with_an_error_is_said_in_a_line(files: Path, capsys) -> None:
    (files / "broken.py").write_text("import nothing_of_this_name\n")
    assert "No module named 'nothing_of_this_name'" in refused(capsys, "run", "broken.py:X", *TINY)


def test_as_a_command(files: Path) -> None:
    """In a process of its own: the working directory is not on the path of an installed command."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fedstill", "run", "fedavg", "--model", "my_net:Net", *TINY, "--rounds", "1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "model Net" in done.stdout, done.stderr
