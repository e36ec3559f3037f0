"""Read small files whose content may be anything: regular files only, bounded in size, depth and numbers, one error.

Whatever is wrong raises `Unreadable`, whose message is one line that says what the content should be; the caller adds
the file's name and what it is for. No other exception leaves these functions, except KeyboardInterrupt and the like.

    values = read_json(path)                     # an object; its keys are unique, its numbers finite, its depth bounded
    round = field(values, "round", int, least=1)
    best = field(values, "best", float, None)    # None where the field is missing or null
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, TypeVar, overload

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])
D = TypeVar("D")

LIMIT = 16 << 20  # bytes of a file, unless a caller says otherwise
DEPTH = 32  # brackets within one another, and parts of a dotted TOML key
DIGITS = 400  # of a number; a whole number is read as 64 bits or refused
LEAST, MOST = -(1 << 63), (1 << 64) - 1

_REQUIRED: Any = object()
_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
_JSON = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]++|\\.|""?(?!"))*+(?:"{3,5})?'  # what begins a text and does not end it takes the rest
    r"|'''(?:[^']++|''?(?!'))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]++|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_TOML_KEY = re.compile(r"(?<![\w\"-])[\w\"-]++(?:[ \t]*+\.[ \t]*+[\w\"-]++){32}")  # DEPTH dots
_BRACKET = re.compile(r"[\[{]|[\]}]")


class Unreadable(ValueError):
    """Content that cannot be used; the message is one line that says what it should be."""

    def __init__(self, right: str) -> None:
        super().__init__(" ".join(right.split()))


class Missing(Unreadable):
    """There is no such file."""


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    """Open a regular file to read its bytes; a pipe, a device or a folder is refused at once and never waited for.

    What goes wrong while it is read is left to the caller.
    """
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        raise Missing("a file that exists") from None
    except IsADirectoryError:
        raise Unreadable("a file, not a folder") from None
    except OSError as error:
        raise Unreadable(f"a readable file ({error.strerror or type(error).__name__})") from None
    except ValueError:  # a null byte, half of a pair
        raise Unreadable("a path that the system can take") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Unreadable("a regular file, not a pipe, socket or device")
        yield file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: str | os.PathLike[str], limit: int = LIMIT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(limit + 1) if size <= limit else b""
        except OSError as error:
            raise Unreadable(f"a readable file ({error.strerror or type(error).__name__})") from None
        except MemoryError:
            raise Unreadable("a file that fits into memory") from None
    if size > limit or len(raw) > limit:
        raise Unreadable(f"at most {limit:,} bytes (it has {max(size, len(raw)):,})")
    return raw


def read_text(path: str | os.PathLike[str], limit: int = LIMIT) -> str:
    """Return the content of a regular file in UTF-8."""
    return _decoded(read_bytes(path, limit))


def read_json(path: str | os.PathLike[str], limit: int = LIMIT, depth: int = DEPTH) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    value = parse_json(read_bytes(path, limit), depth)
    if not isinstance(value, dict):
        raise Unreadable(f"a JSON object (it is {described(value)})")
    return value


def parse_json(text: str | bytes, depth: int = DEPTH) -> Any:
    """Return the value of a JSON text: unique keys, finite numbers, whole numbers of 64 bits, at most `depth` deep.

    >>> parse_json('{"a": NaN}')
    Traceback (most recent call last):
    fedstill.core.reading.Unreadable: JSON without NaN
    """
    text = _decoded(text) if isinstance(text, bytes) else text
    level = 0
    for match in _JSON.finditer(text):
        mark = match[0]
        if len(mark) == 1 and mark != '"':
            level += 1 if mark in "[{" else -1
            if level > depth:
                raise Unreadable(f"JSON that is at most {depth} brackets deep")
    try:
        value = json.loads(
            text, object_pairs_hook=unique, parse_int=_whole, parse_float=_real, parse_constant=refuse_constant
        )
        if "\\u" in text:  # half of a pair, "\\ud800", could be neither written nor shown
            json.dumps(value, ensure_ascii=False).encode()
    except Unreadable:
        raise
    except UnicodeEncodeError:
        raise Unreadable("JSON whose texts are Unicode") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"whole JSON ({error})") from None
    except MemoryError:
        raise Unreadable("JSON that fits into memory") from None
    return value


def read_toml(path: str | os.PathLike[str], limit: int = 1 << 18) -> dict[str, Any]:
    """Return the table that a TOML file holds."""
    return parse_toml(_decoded(read_bytes(path, limit)))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text; whole numbers have 64 bits, nesting and dotted keys are bounded.

    Unlike in JSON, `nan` and `inf` are left to the fields that they are given to.
    """
    # tomllib reads nested values recursively, and a key of n parts in time n²: both are bounded before it begins
    outside = _TOML_TEXT.sub(lambda match: "" if match[0][0] == "#" else '""', text)
    level = 0
    for match in _BRACKET.finditer(outside):
        level += 1 if match[0] in "[{" else -1
        if level > DEPTH:
            raise Unreadable(f"TOML that is at most {DEPTH} brackets deep")
    if _TOML_KEY.search(outside):
        raise Unreadable(f"TOML whose keys have at most {DEPTH} parts")
    try:
        table = tomllib.loads(text, parse_float=_float)
        _check_table(table)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"valid TOML ({error})") from None
    except MemoryError:
        raise Unreadable("TOML that fits into memory") from None
    return table


@overload
def field(data: object, name: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> T: ...


@overload
def field(
    data: object, name: str, kind: type[T], default: D, *, least: float | None = None, most: float | None = None
) -> T | D: ...


def field(
    data: object,
    name: str,
    kind: type[Any],
    default: Any = _REQUIRED,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a field of an object in its type: int, float (a whole number too), str, bool, list or dict.

    A field that is missing or null gives the default, where there is one. True and false are no numbers, and a float is
    finite. `least` and `most` bound a number.

    >>> field({"round": 3}, "round", int), field({}, "loss", float, None)
    (3, None)
    >>> field({"round": "3"}, "round", int)
    Traceback (most recent call last):
    fedstill.core.reading.Unreadable: one whose field 'round' is a whole number (it is the text '3')
    """
    if not isinstance(data, dict):
        raise Unreadable(f"an object with the field {name!r} (it is {described(data)})")
    value = data.get(name)
    if value is None:
        if default is not _REQUIRED:
            return default
        raise Unreadable(f"one with the field {name!r}" + (" (it is null)" if name in data else ""))
    return checked(value, kind, f"whose field {name!r} is", least=least, most=most)


def items(data: object, name: str, kind: type[T], *, least: float | None = None, most: float | None = None) -> list[T]:
    """Return a field that is a list whose members all have one type.

    >>> items({"sizes": [3, True]}, "sizes", int)
    Traceback (most recent call last):
    fedstill.core.reading.Unreadable: one whose field 'sizes' has at 1 a whole number (it is true)
    """
    values = field(data, name, list)
    return [checked(v, kind, f"whose field {name!r} has at {i}", least=least, most=most) for i, v in enumerate(values)]


def checked(value: object, kind: type[T], where: str, *, least: float | None = None, most: float | None = None) -> T:
    """Return a value in its type and within its limits; `where` says which one it is."""
    if kind is float and type(value) is int and value.bit_length() < 1000:
        value = float(value)
    fits = type(value) is kind and (kind is not float or math.isfinite(value))  # type: ignore[arg-type]
    if not fits:
        raise Unreadable(f"one {where} {_KINDS[kind]} (it is {described(value)})")
    if (least is not None and value < least) or (most is not None and value > most):  # type: ignore[operator]
        words = [f"at least {least:,}"] if least is not None else []
        words += [f"at most {most:,}"] if most is not None else []
        raise Unreadable(f"one {where} {' and '.join(words)} (it is {described(value)})")
    return value  # type: ignore[return-value]


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"a text in UTF-8 (byte {error.start} is not)") from None
    except MemoryError:
        raise Unreadable("a text that fits into memory") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; refuse one that has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Unreadable(f"JSON whose keys are unique ({described(twice)} is there twice)")
    return values


def _whole(digits: str) -> int:
    value = int(digits) if len(digits) <= 21 else MOST + 1
    if not LEAST <= value <= MOST:
        raise Unreadable("JSON whose whole numbers fit into 64 bits")
    return value


def _real(digits: str) -> float:
    value = _float(digits)
    if not math.isfinite(value):
        raise Unreadable(f"JSON whose numbers are finite (not {digits[:20]})")
    return value


def _float(digits: str) -> float:
    if len(digits) > DIGITS:
        raise Unreadable(f"numbers of at most {DIGITS} digits")
    return float(digits)


def refuse_constant(name: str) -> float:
    """Refuse NaN and Infinity in JSON."""
    raise Unreadable(f"JSON without {name}")


def _check_table(value: Any, level: int = 0) -> None:
    """Refuse a whole number of more than 64 bits, wherever in a table, and tables too deep within one another."""
    if level > DEPTH:
        raise Unreadable(f"TOML that is at most {DEPTH} tables deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_table(item, level + 1)
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        raise Unreadable("TOML whose whole numbers fit into 64 bits")


def described(value: object) -> str:
    """Return a value in a few words, whatever it is."""
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 40 else f"a text of {len(value):,} characters"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value}" if isinstance(value, float) or value.bit_length() <= 64 else "a very large number"
    return _KINDS.get(type(value), type(value).__name__)
