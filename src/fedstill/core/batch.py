"""The batch that a loss function takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A few samples of one client.

    `mask` is 1 for a real sample and 0 for padding, or None without padding. `index` holds the samples' positions in the client's
    data, to look up values computed once per round. `key` seeds the step's randomness; it is drawn from (seed, round, client,
    step). Where mixup has mixed another sample into each one, `other` holds those samples' labels and `share` is λ, what is left
    of the sample itself: the loss is the mixture of both labels' (`terms.cross_entropy`).
    """

    x: Tensor
    y: Tensor
    index: Tensor
    key: Tensor
    mask: Tensor | None = None
    other: Tensor | None = None
    share: Tensor | None = None
