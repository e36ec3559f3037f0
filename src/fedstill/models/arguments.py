"""Arguments of a model in one text: `img_size=32,drop_path_rate=0.1`."""

from __future__ import annotations

import ast
import keyword
from typing import Any

from ..core.errors import InputError

RIGHT = "name=value, several with commas: img_size=32,drop_path_rate=0.1"


def parse(text: str) -> dict[str, Any]:
    """Return the arguments by name; a value is a number, true, false, none, a list in brackets, or else a text.

    >>> parse("img_size=32,drop=0.5, class_token=false,depths=[1,2],act=gelu")
    {'img_size': 32, 'drop': 0.5, 'class_token': False, 'depths': [1, 2], 'act': 'gelu'}
    """
    arguments: dict[str, Any] = {}
    for part in _parts(text):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier() or keyword.iskeyword(name) or not value or name in arguments:
            raise InputError("model_args", text, RIGHT)
        arguments[name] = _value(value)
    return arguments


def _parts(text: str) -> list[str]:
    """Return what commas outside of brackets divide."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
