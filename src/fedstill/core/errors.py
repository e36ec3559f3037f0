"""Errors that a user can act on: which field, which value, and what would be right."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class InputError(ValueError):
    """A value that the user gave cannot be used. The message is one line; the command exits with status 2.

    >>> str(InputError("participation", 1.5, "a number above 0 and at most 1"))
    'participation = 1.5: should be a number above 0 and at most 1'
    """

    def __init__(self, field: str, value: object, right: str) -> None:
        self.field, self.value, self.right = field, value, right
        shown = str(value) if isinstance(value, Shown) else repr(value)
        super().__init__(f"{field} = {shown}: should be {right}".replace("\n", " "))


class Shown(str):
    """A value that is printed in the message without quotes: the description of something large."""


class TrainingError(RuntimeError):
    """Training cannot go on (a loss that is not finite, no replies). The message is one line; the command exits with 1."""


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
