"""A batch as a loss sees it, and one client's own data as a method may ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A few samples of one client.

    `mask` is 1 for a real sample and 0 for padding, or None where there is no padding. `index` says which of the
    client's samples these are (so that something computed once per round can be looked up). `key` makes this step's
    randomness: drawn from (seed, round, client, step).
    """

    x: Tensor
    y: Tensor
    index: Tensor
    key: Tensor
    mask: Tensor | None = None
