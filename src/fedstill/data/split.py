"""Split a client's samples into training, validation and test data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import InputError
from .dataset import Ints
from .draw import apportion, generator


@dataclass(frozen=True)
class SplitRatio:
    """Percentages of training, validation and test data; `official` takes the tests from the official test set."""

    train: int
    val: int
    test: int
    official: bool = False

    @property
    def min_samples(self) -> int:
        """The fewest samples that can be split."""
        return 3 if self.val else 2


def parse_split(text: str) -> SplitRatio:
    """Read `80/20`, `70/10/20` or `official`.

    >>> parse_split("70/10/20")
    SplitRatio(train=70, val=10, test=20, official=False)
    """
    right = "'official', or percentages such as '80/20' or '70/10/20' (train/validation/test) that sum to 100"
    if text == "official":
        return SplitRatio(100, 0, 0, official=True)
    try:
        percentages = [int(number) for number in text.split("/")]
    except (ValueError, AttributeError):
        raise InputError("split", text, right) from None
    if len(percentages) not in (2, 3) or min(percentages) < 1 or sum(percentages) != 100:
        raise InputError("split", text, right)
    return SplitRatio(percentages[0], percentages[1] if len(percentages) == 3 else 0, percentages[-1])


def split_indices(indices: Ints, ratio: SplitRatio, seed: int, client: int) -> tuple[Ints, Ints, Ints]:
    """Draw a client's training, validation and test indices, sorted; none is empty unless its percentage is 0."""
    count = len(indices)
    val = max(1, (count * ratio.val + 50) // 100) if ratio.val else 0
    test = max(1, (count * ratio.test + 50) // 100)
    test = min(test, count - val - 1) if count - val > 1 else 1
    val = min(val, count - test - 1)
    order = generator(seed, "split", client).permutation(indices)
    subsets = np.split(order, [count - val - test, count - test])
    return np.sort(subsets[0]), np.sort(subsets[1]), np.sort(subsets[2])


def official_test(labels: Ints, test_labels: Ints, classes: int, total: int, seed: int, client: int) -> Ints:
    """Draw a client's indices of the official test set, with the label distribution of its own samples.

    The client's share of the test set is its share of the training data (`labels` of `total`), but at least one sample.
    Drawn without repetition within a client; two clients may be tested on the same sample. Where the official set has
    too few samples of a class, all of them are taken.
    """
    available = np.bincount(test_labels, minlength=classes)
    own = np.where(available > 0, np.bincount(labels, minlength=classes), 0)
    if not own.any():
        raise InputError(
            "split", "official", f"another one: the official test set has no sample of client {client}'s classes"
        )
    size = max(1, round(len(test_labels) * len(labels) / total))
    counts = np.minimum(apportion(size, own.astype(np.float64)), available)
    rng = generator(seed, "official", client)
    drawn = [rng.permutation(np.flatnonzero(test_labels == c))[: counts[c]] for c in np.flatnonzero(counts)]
    return np.sort(np.concatenate(drawn))
