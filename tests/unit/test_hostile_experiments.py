"""Experiment files and flags whose content may be anything: a valid experiment, or one line and nothing else."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstill as fs
from fedstill.cli import main, saved
from fedstill.core import files
from fedstill.core.errors import InputError, printable
from fedstill.core.settings import fields_of
from fedstill.run import groups
from fedstill.run.experiment import FORMAT, Experiment

SELF: list[Any] = []
SELF.append(SELF)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

FILES = {
    "4,300 digits": "rounds = " + "9" * 4300,
    "400 digits": "lr = " + "9" * 400,
    "hexadecimal digits": "seed = 0x" + "f" * 100_000,
    "deep lists": "head = " + "[" * 5000 + "]" * 5000,
    "lists within limits": "head = " + "[" * 30 + "]" * 30,
    "deep tables": "method = " + "{id = " * 1000 + "1" + "}" * 1000,
    "a key of many parts": "method" + ".a" * 1000 + " = 1",
    "bytes": b"method = '\xff\xfe'",
    "a mark at the start": b"\xef\xbb\xbfrounds = 3",
    "too large": "# " + "x" * 300_000,
    "a million rounds of rounds": "rounds = 9223372036854775808",
    "numbers that are none": "lr = nan",
    "infinite": "lr = -inf",
    "a date": "rounds = 1979-05-27",
    "a table for a number": "rounds = {a = 1}",
    "a list of tables": "[[method]]\nid = 'fedavg'",
    "no text as id": "[method]\nid = 3",
    "an unknown field of great length": "a" * 100_000 + " = 1",
    "a value of great length": "data = '" + "a" * 100_000 + "'\nrounds = -1",
    "control characters": 'sampler = "\\u001b[2J\\u0007"',
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_one_short_line(name: str, tmp_path: Path) -> None:
    content = FILES[name]
    file = tmp_path / "e.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        Experiment.from_toml(file)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 2500


def test_a_pipe_or_device_in_place_of_a_file_is_refused_at_once(tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "e.toml")
    for path in (tmp_path / "e.toml", tmp_path, "/dev/zero", tmp_path / "none.toml"):
        with pytest.raises(InputError, match="experiment"):
            Experiment.from_toml(path)
    assert main(["run", str(tmp_path / "e.toml")]) == 2
    assert "a regular file, not a pipe" in capsys.readouterr().err


WORDS = st.sampled_from(
    [
        "nan",
        "-inf",
        "1e400",
        "2**63",
        "0x1ffffffffffffffff",
        "''",
        "'a'",
        "[]",
        "{}",
        "[[1]]",
        "-1",
        "0",
        "true",
        "1e-320",
        "1979-05-27T07:32:00Z",
        "{id = 'fedavg'}",
        "{id = 'fedprox', mu = nan}",
        "['a', 1]",
        '"\\u0000"',
        "0.5",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([f.name for f in fields_of(Experiment)] + ["method", "x"]), WORDS, max_size=3))
def test_a_file_of_odd_values_gives_a_valid_experiment_or_one_line(values: dict[str, str]) -> None:
    text = "".join(f"{name} = {value}\n" for name, value in values.items())
    check(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.sampled_from(["cut", "put", "over"]))
def test_a_damaged_file_gives_a_valid_experiment_or_one_line(at: int, raw: bytes, how: str) -> None:
    whole = fs.Experiment(method=fs.PFedSD()).to_toml().encode()
    at %= len(whole)
    rest = {"cut": b"", "put": raw + whole[at:], "over": raw + whole[at + len(raw) :]}[how]
    check(whole[:at] + rest)


def check(raw: bytes) -> None:
    file = Path(os.environ.get("TMPDIR", "/tmp"), f"fedstill-{os.getpid()}.toml")
    try:
        file.write_bytes(raw)
        experiment = Experiment.from_toml(file)
    except InputError as error:
        said = str(error)
    else:
        said = ""
    finally:
        file.unlink(missing_ok=True)
    assert said.isprintable()
    if said:
        return
    assert repr(Experiment.from_values(tomllib.loads(experiment.to_toml()))) == repr(experiment)


@pytest.mark.parametrize("value", [10**5000, -(10**5000), SELF, DEEP, "x" * 10**6, {"a": 10**5000}], ids=lambda v: "")
def test_an_error_can_be_made_of_any_value(value: Any) -> None:
    line = str(InputError("lr", value, "a number"))
    assert line.startswith("lr = ")
    assert line.endswith(": should be a number")
    assert len(line) < 600
    with pytest.raises(InputError, match="rounds"):
        fs.Experiment(rounds=value)


def test_a_message_cannot_move_the_cursor() -> None:
    assert printable("a\nb\x1b[2J\x9b\ud800\u202e") == r"a b\x1b[2J\x9b\ud800\u202e"
    assert "\x1b" not in str(InputError("a\x1bb", "c", "d\x1b"))


@pytest.mark.parametrize("digits", ["9" * 5000, "٣" * 30])
def test_a_flag_of_many_digits(digits: str, capsys: Any) -> None:
    assert main(["run", "fedavg", "--rounds", digits]) == 2
    assert main(["run", "fedavg", "--partition", f"shards:{digits}"]) == 2
    assert main(["run", "fedavg", "--split", f"{digits}/20"]) == 2
    assert main(["run", "fedavg", "--data", f"synthetic:1,1,{digits}"]) == 2
    assert main(["run", "fedavg", "--data", f"flickr-aes:{digits}"]) == 2
    assert all(len(line) < 2500 for line in capsys.readouterr().err.splitlines())


def test_the_record_of_a_job_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    table = saved._values(fs.Experiment())
    good = {
        "format": FORMAT,
        "fedstill": "0",
        "command": "compare",
        "seeds": 1,
        "explicit": [],
        "experiments": {"a": table},
    }

    def read(**changes: Any) -> Any:
        (tmp_path / saved.JOB).write_bytes(files.seal({**good, **changes}))
        return saved.read_job(tmp_path)

    assert list(read().experiments) == ["a"]
    for label in ("../a", "/tmp/a", "", "a/../../b", "\x1b[2J"):
        with pytest.raises(InputError, match="names no folder"):
            read(experiments={label: table})
    for name, value, says in (
        ("experiments", [], "an object"),
        ("experiments", {}, "names no folder"),
        ("experiments", {"a": 3}, "a mapping"),
        ("seeds", 0, "at least 1"),
        ("seeds", "1", "a whole number"),
        ("command", None, "command"),
        ("explicit", [1], "a text"),
        ("format", 1, "in format"),
    ):
        with pytest.raises(InputError, match=says):
            read(**{name: value})
    (tmp_path / saved.JOB).write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"job\.json is as fedstill wrote it"):
        saved.read_job(tmp_path)
    (tmp_path / saved.JOB).unlink()
    os.mkfifo(tmp_path / saved.JOB)
    with pytest.raises(InputError, match=r"job\.json is as fedstill wrote it"):
        saved.read_job(tmp_path)
    os.mkfifo(tmp_path / groups.GROUPS)
    with pytest.raises(InputError, match=r"groups\.json is as fedstill wrote it"):
        groups.Groups.read(tmp_path)
