"""The batch that a loss function takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A few samples of one client.

    `mask` is 1 for a real sample and 0 for padding, or None without padding. `index` holds the samples' positions in the client's
    data, to look up values computed once per round. `key` seeds the step's randomness; it is drawn from (seed, round, client,
    step).
    """

    x: Tensor
    y: Tensor
    index: Tensor
    key: Tensor
    mask: Tensor | None = None
