"""Files whose content may be anything end in a value or in one `Unreadable`, soon and in bounded memory."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import reading
from fedstill.core.reading import Missing, Unreadable, field, items, parse_json, parse_toml, read_json, read_toml

WHOLE = st.integers(-(1 << 63), (1 << 64) - 1)
PLAIN = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=4), v, max_size=4))

JSON_BOMBS: dict[str, tuple[str | bytes, str]] = {
    "not UTF-8": (b'{"a": "\xff"}', r"UTF-8 \(byte 7"),
    "lists in lists": ("[" * 100_000, "32 brackets deep"),
    "objects in objects": ('{"a":' * 100_000, "32 brackets deep"),
    "400 digits": ('{"a": ' + "9" * 400 + "}", "64 bits"),
    "5,000 digits": ('{"a": ' + "9" * 5000 + "}", "64 bits"),
    "a million digits": ('{"a": 1.' + "9" * 1_000_000 + "}", "400 digits"),
    "beyond 64 bits": ('{"a": 18446744073709551616}', "64 bits"),
    "not finite": ('{"a": 1e999}', "finite"),
    "NaN": ('{"a": NaN}', "without NaN"),
    "infinite": ('{"a": -Infinity}', "without -Infinity"),
    "a key twice": ('{"a": 1, "a": 2}', "'a' is there twice"),
    "half of a pair": ('{"a": "\\ud800"}', "Unicode"),
    "cut off": ('{"a": [1, 2', "whole JSON"),
    "an open text": ('{"a": "' + "\\" * 100_001, "whole JSON"),
    "empty": ("", "whole JSON"),
}
TOML_BOMBS: dict[str, tuple[str, str]] = {
    "lists in lists": ("a = " + "[" * 50_000, "32 brackets deep"),
    "tables in tables": ("a = " + "{a = " * 50_000, "32 brackets deep"),
    "a key of many parts": (".".join("a" * 60_000) + " = 1", "32 parts"),
    "a header of many parts": ("[" + " . ".join("ab" * 20_000) + "]", "32 parts"),
    "quoted parts": (".".join(['"a"'] * 20_000) + " = 1", "32 parts"),
    "tables of many parts in one another": ("a" + ".a" * 30 + " = {b" + ".b" * 30 + " = 1}", "32 tables deep"),
    "400 digits": ("a = " + "9" * 400, "64 bits"),
    "5,000 digits": ("a = " + "9" * 5000, "valid TOML"),
    "hexadecimal": ("a = [[0x" + "f" * 100_000 + "]]", "64 bits"),
    "a fraction of many digits": ("a = 1." + "9" * 100_000, "400 digits"),
    "a key twice": ("a = 1\na = 2", "valid TOML"),
    "an open text": ('a = """' + '"\\' * 50_001, "valid TOML"),
    "an open literal": ("a = '''" + "''x" * 50_000, "valid TOML"),
}


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_hostile_json_is_refused_soon_and_in_one_line(name: str) -> None:
    refused(lambda text: parse_json(text), *JSON_BOMBS[name])


@pytest.mark.parametrize("name", TOML_BOMBS)
def test_hostile_toml_is_refused_soon_and_in_one_line(name: str) -> None:
    refused(lambda text: parse_toml(text), *TOML_BOMBS[name])


def refused(parse: Callable[[Any], object], text: str | bytes, right: str) -> None:
    began = time.process_time()  # other processes do not count
    with pytest.raises(Unreadable, match=right) as caught:
        parse(text)
    assert time.process_time() - began < 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_what_json_wrote_is_read_as_it_was(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text('[]{}":,\\u019eE+-.NaIftrnl \n', max_size=60).map(str.encode))
def test_any_bytes_are_a_json_value_or_refused(raw: bytes) -> None:
    try:
        value = parse_json(raw)
    except Unreadable:
        return
    assert value == json.loads(raw)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=100) | st.text("ab01.=[]{}\"'#\\u- \n", max_size=60))
def test_any_text_is_a_toml_table_or_refused(text: str) -> None:
    try:
        table = parse_toml(text)
    except Unreadable:
        with pytest.raises(tomllib.TOMLDecodeError):  # nothing of this size and depth is refused that tomllib takes
            tomllib.loads(text)
        return
    assert repr(table) == repr(tomllib.loads(text))


@pytest.mark.parametrize("text", ['a = "[[[["\n' * 20 + "b = 1", "b = '" + "a." * 60 + "'", "#" + "[" * 60])
def test_brackets_and_dots_in_texts_and_comments_do_not_count(text: str) -> None:
    lines = text.replace("a =", "{}=").split("\n")
    text = "\n".join(f"k{i} = " + line.partition("=")[2] if "{}" in line else line for i, line in enumerate(lines))
    assert parse_toml(text) == tomllib.loads(text)
    quoted = json.dumps({"a": text})
    assert parse_json(quoted) == {"a": text}


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large.json").write_bytes(b"{" + b" " * 1000 + b"}")
    with (tmp_path / "hole.json").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "list.json").write_text("[]")
    faults = {
        "pipe": "regular file",
        "folder": "not a folder",
        "hole.json": "16,777,216 bytes",
        "none.json": "exists",
        "list.json": r"object \(it is a list",
        "a\0b": "system can take",
    }
    for name, right in faults.items():
        with pytest.raises(Unreadable, match=right):
            read_json(tmp_path / name)
        with pytest.raises(Unreadable):
            read_toml(tmp_path / name)
    with pytest.raises(Unreadable, match="regular file"):
        read_json("/dev/zero")
    with pytest.raises(Unreadable, match="at most 1,000 bytes"):
        read_json(tmp_path / "large.json", limit=1000)
    assert read_json(tmp_path / "large.json", limit=1002) == {}
    with pytest.raises(Missing):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("value", "kind", "right"),
    [
        (None, int, "with the field 'a'"),
        (True, int, "whole number .it is true"),
        (1.0, int, "whole number"),
        ("5", int, "whole number .it is the text '5'"),
        (math.nan, float, "finite"),
        (10**400, float, "finite number .it is a very large"),
        (False, float, "finite"),
        (1, str, "a text"),
        (1, bool, "true or false"),
        ({}, list, "a list .it is an object"),
        ([], dict, "an object"),
        ("x" * 1000, dict, "1,000 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_field_of_another_type_is_refused(value: object, kind: Any, right: str) -> None:
    with pytest.raises(Unreadable, match=right):
        field({"a": value}, "a", kind)
    if value is not None:
        with pytest.raises(Unreadable, match=right):
            items({"a": [value]}, "a", kind)


def test_fields_in_their_types_and_limits() -> None:
    data = {"n": 3, "x": 0.5, "s": "", "b": False, "l": [1], "o": {}, "z": None}
    for name, kind in (("n", int), ("x", float), ("s", str), ("b", bool), ("l", list), ("o", dict)):
        assert field(data, name, kind) is data[name]
    read = field(data, "n", float)
    assert (read, type(read)) == (3.0, float)
    assert field(data, "z", int, None) is None
    assert field(data, "absent", int, 7) == 7
    assert items(data, "l", float, least=1) == [1.0]
    for least, most in ((4, None), (None, 2)):
        with pytest.raises(Unreadable, match=r"at (least 4|most 2) .it is 3"):
            field(data, "n", int, least=least, most=most)
    with pytest.raises(Unreadable, match="an object with the field"):
        field([1], "a", int)
    assert reading.DEPTH == 32  # as the pattern of a dotted key says
