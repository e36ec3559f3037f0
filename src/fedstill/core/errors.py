"""Errors that a user can act on: which field, which value, and what would be right."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable


class InputError(ValueError):
    """A value that the user gave cannot be used. The message is one line; the command exits with status 2.

    >>> str(InputError("participation", 1.5, "a number above 0 and at most 1"))
    'participation = 1.5: should be a number above 0 and at most 1'
    """

    def __init__(self, field: str, value: object, right: str) -> None:
        self.field, self.value, self.right = field, value, right
        super().__init__(printable(f"{shorten(field)} = {_shown(value)}: should be {shorten(right, 1000)}"))


class NoSamples(InputError):
    """Something needs a client's samples, which are not in this process."""

    def __init__(self, client: int) -> None:
        super().__init__("client", client, "one whose samples this process holds: they are with another")


class Shown(str):
    """A value that is printed in the message without quotes: the description of something large."""


def _shown(value: object) -> str:
    """Return a value as a message shows it: on one line, shortened, whatever it is."""
    if isinstance(value, Shown):
        return shorten(value)
    try:
        return shorten(repr(value))
    except Exception:  # thousands of digits, lists within themselves or very deep, a __repr__ of one's own
        return f"a value of type {type(value).__name__}"


def shorten(text: str, most: int = 500) -> str:
    """Return a text with its middle left out where it is long.

    >>> shorten("abcdefgh" * 100, 21)
    'abcdefgh… (800 characters) …abcdefgh'
    """
    half = max(8, (most - 20) // 2)
    return text if len(text) <= most else f"{text[:half]}… ({len(text):,} characters) …{text[-half:]}"


def printable(text: str) -> str:
    """Return a text on one line that any terminal can show: nothing in it can move the cursor or fail to be written.

    >>> printable("a\\nb\\x1b[2J\\ud800")
    'a b\\\\x1b[2J\\\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def can_be_shown(text: str) -> bool:
    """Return whether a text has only characters that a terminal shows, spaces of any kind included.

    >>> can_be_shown("ein Name"), can_be_shown("a\\tb"), can_be_shown("\\ud800")
    (True, False, False)
    """
    return text.isprintable() or all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text)


class TrainingError(RuntimeError):
    """Training cannot go on (a loss that is not finite, no replies). The message is one line; the command exits with 1."""


class HookError(TrainingError, TypeError):
    """A mistake in a method's own code: which hook, and what would be right. One line; the command exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(shorten(message, 1000)))


class Paused(Exception):
    """A run ends before its last round, its state saved; others beside it go on to the end of the same round."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the command or a run, which has saved its state where the message says after which round."""

    def __init__(self, message: str, signal: int) -> None:
        self.signal = signal
        super().__init__(message)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or the error's type where it has no message.

    >>> first_line(ValueError("no\\nand why")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown name: the closest known one first, then all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"{close[0]!r}? " if close else ""
    return f"{hint}(one of: {', '.join(options)})" if options else "absent: nothing can be named here"


class CannotStack(Exception):
    """Why several runs cannot be trained side by side; they can still go one after the other."""


def check_callable(field: str, value: object) -> None:
    """Refuse what is neither None nor a function.

    >>> check_callable("progress", True)
    Traceback (most recent call last):
    fedstill.core.errors.InputError: progress = True: should be a function that is called with each round's record, or None
    """
    if value is not None and not callable(value):
        raise InputError(field, value, "a function that is called with each round's record, or None")


def check_path(field: str, value: object) -> None:
    """Refuse what is no path to a file or folder.

    >>> check_path("out", 3)
    Traceback (most recent call last):
    fedstill.core.errors.InputError: out = 3: should be a path, as a text or a pathlib.Path
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise InputError(field, value, "a path, as a text or a pathlib.Path")
