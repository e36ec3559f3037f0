"""A client's samples into training, validation and test parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import InputError
from .dataset import Ints
from .draw import apportion, generator


@dataclass(frozen=True)
class Split:
    """Percentages of the training, validation and test parts; `official` takes the tests from the official test set."""

    train: int
    val: int
    test: int
    official: bool = False

    @property
    def least(self) -> int:
        """The fewest samples that can be split."""
        return 3 if self.val else 2


def parse_split(text: str) -> Split:
    """Read `80/20`, `70/10/20` or `official`.

    >>> parse_split("70/10/20")
    Split(train=70, val=10, test=20, official=False)
    """
    right = "'official', or percentages such as '80/20' or '70/10/20' (train/validation/test) that sum to 100"
    if text == "official":
        return Split(100, 0, 0, official=True)
    try:
        parts = [int(part) for part in text.split("/")]
    except (ValueError, AttributeError):
        raise InputError("split", text, right) from None
    if len(parts) not in (2, 3) or min(parts) < 1 or sum(parts) != 100:
        raise InputError("split", text, right)
    return Split(parts[0], parts[1] if len(parts) == 3 else 0, parts[-1])


def cut(hand: Ints, split: Split, seed: int, client: int) -> tuple[Ints, Ints, Ints]:
    """Training, validation and test indices of one client, drawn at random, sorted; none is empty that is wanted."""
    count = len(hand)
    val = max(1, (count * split.val + 50) // 100) if split.val else 0
    test = max(1, (count * split.test + 50) // 100)
    test = min(test, count - val - 1) if count - val > 1 else 1
    val = min(val, count - test - 1)
    order = generator(seed, "split", client).permutation(hand)
    parts = np.split(order, [count - val - test, count - test])
    return np.sort(parts[0]), np.sort(parts[1]), np.sort(parts[2])


def official_test(labels: Ints, test_labels: Ints, classes: int, total: int, seed: int, client: int) -> Ints:
    """Indices of the official test set for one client, drawn with the label distribution of its own samples.

    Its size is to the official test set as the client's data (`labels`) is to all the data (`total`), but at least 1.
    Drawn without repetition within a client; two clients may be tested on the same sample. Where the official set has
    too few samples of a class, all of them are taken.
    """
    have = np.bincount(test_labels, minlength=classes)
    mine = np.where(have > 0, np.bincount(labels, minlength=classes), 0)
    if not mine.any():
        raise InputError(
            "split", "official", f"another one: the official test set has no sample of client {client}'s classes"
        )
    size = max(1, round(len(test_labels) * len(labels) / total))
    wanted = np.minimum(apportion(size, mine.astype(np.float64)), have)
    rng = generator(seed, "official", client)
    drawn = [rng.permutation(np.flatnonzero(test_labels == c))[: wanted[c]] for c in np.flatnonzero(wanted)]
    return np.sort(np.concatenate(drawn))
