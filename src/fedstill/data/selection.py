"""Which columns of a data set are samples and label, and one value of them as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown, nearest
from ..core.memory import require
from . import arrays
from .targets import Array

INPUTS = ("image", "img", "pixel_values", "input_ids", "x", "input", "inputs", "features", "data")
LABELS = ("label", "labels", "y", "target", "targets", "fine_label")


def choose(
    where: str, names: Sequence[str], input: str | Sequence[str] = (), label: str = "", without: Sequence[str] = ()
) -> tuple[tuple[str, ...], str]:
    """Return the columns of samples and that of labels, as they are named, else by their usual names.

    Without a usual name all columns but the label's and `without` are numbers of a sample.

    >>> choose("d", ["id", "image", "label"])
    (('image',), 'label')
    >>> choose("d", ["age", "bmi", "y"])
    (('age', 'bmi'), 'y')
    """
    listed = ", ".join(names)
    if label and label not in names:
        raise InputError("label", label, f"a column of {where}: {nearest(label, names)}")
    label = label or next((name for name in LABELS if name in names), "")
    if not label:
        raise InputError("label", Shown("(none)"), f"a column of {where} ({listed})")
    asked = tuple(part.strip() for part in input.split(",") if part.strip()) if isinstance(input, str) else tuple(input)
    for name in asked:
        if name not in names or name == label:
            rest = [other for other in names if other != label]
            raise InputError("input", name, f"a column of {where} other than the label: {nearest(name, rest)}")
    usual = next((name for name in INPUTS if name in names and name not in (label, *without)), "")
    found = asked or ((usual,) if usual else tuple(n for n in names if n != label and n not in without))
    if not found:
        raise InputError("input", Shown("(none)"), f"a column of {where} ({listed})")
    return found, label


def value_of(where: str, value: Any) -> Array:
    """Return a sample or a part of one as an array: an image with its channels first, a number as a row of one."""
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # of Pillow
        return image(value)
    if isinstance(value, str | bytes):
        right = "numbers: of texts, ids of tokens (a tokeniser makes them, as data.map(tokenizer) does)"
        raise InputError(where, Shown("a text"), right)
    found = arrays.array(where, value)
    if found.dtype.kind not in "buif":
        raise InputError(where, Shown(f"a value of type {type(value).__name__}"), "a number, an array or an image")
    return np.asarray(found, np.float32).reshape(1) if found.ndim == 0 else found


def image(picture: Any) -> Array:
    """Return an image of Pillow as [channels, height, width]: grey, or RGB; of more than eight bits as float32."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        return np.asarray(picture, dtype=np.float32)[None]
    grey = picture.mode in ("1", "L")
    pixels = np.asarray(picture.convert("L" if grey else "RGB"), dtype=np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def joined(where: str, values: Sequence[Any]) -> Array:
    """Return a sample that is made of several columns' numbers."""
    parts = [value_of(where, value) for value in values]
    return parts[0] if len(parts) == 1 else np.concatenate([part.reshape(-1).astype(np.float64) for part in parts])


class Column:
    """Arrays of one shape, one after another, in memory that is taken when the first has come."""

    def __init__(self, where: str, count: int) -> None:
        self.where, self.count = where, count
        self.done, self.out = 0, np.empty(0)

    def add(self, value: Array) -> None:
        """Append a value."""
        if not self.done:
            require("data", self.where, 3 * self.count * max(1, value.nbytes))
            self.out = np.empty((self.count, *value.shape), value.dtype)
        if value.shape != self.out.shape[1:]:
            shown = Shown(f"sample {self.done} of shape {value.shape}")
            hint = "; pad texts to one length, and resize images to one size"
            raise InputError(self.where, shown, f"samples of shape {self.out.shape[1:]} as the first has{hint}")
        if value.dtype != self.out.dtype:
            self.out = self.out.astype(np.result_type(self.out, value), copy=False)
        self.out[self.done] = value
        self.done += 1
