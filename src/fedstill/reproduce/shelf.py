"""What a reproduction's cells share: each source is read once, and each division of it is dealt once, in bounded memory.

A place for what a device could keep between runs (samples on a GPU, compiled steps) is here, too: `Shelf.federation` returns the
same object for the same data, so whatever is kept by its identity is made once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from ..core.errors import InputError
from ..core.memory import available
from ..data import Dataset, Federation, load
from ..data.federation import Client
from ..data.mapped import mapping
from ..data.samples import Samples
from ..run.experiment import Experiment
from ..scores.external import with_external
from .scale import Scale

SHARE = 3  # one in so many parts of the free memory is for what is kept


class Shelf:
    """Keeps data sets and federations, the last used ones, in `limit` bytes (None: a third of the memory that is free)."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.made = 0  # how often something was read or dealt
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._checksums: dict[tuple[str, str], str | None] = {}

    def dataset(self, data: str, root: str, fetch: bool = True) -> Dataset:
        """Return a data set; with `fetch`, files that are missing are downloaded where that is possible."""
        return self._get(  # type: ignore[no-any-return]
            ("data", data, root), lambda: load(data, root or None, fetch=fetch), _bytes_of_dataset
        )

    def checksum(self, data: str, root: str) -> str | None:
        """Return the checksum of a data set; None where it is not here or cannot be read."""
        if (data, root) not in self._checksums:
            try:
                self._checksums[data, root] = self.dataset(data, root, fetch=False).checksum()
            except InputError:
                self._checksums[data, root] = None
        return self._checksums[data, root]

    def federation(self, experiment: Experiment, scale: Scale, root: str = "") -> Federation:
        """Return the federation of an experiment whose rounds and clients are already scaled."""
        e = experiment
        key = (e.data, root, e.partition, e.clients, e.split, e.pool, e.seed, e.external, scale)
        return self._get(key, lambda: self._deal(experiment, scale, root), size_of)  # type: ignore[no-any-return]

    def _deal(self, experiment: Experiment, scale: Scale, root: str) -> Federation:
        data = self.dataset(experiment.data, root)
        owned = "owner" if data.owner is not None else "domain" if data.domain is not None else None
        dealt = experiment.dealt(owned)
        data = scale.dataset(data, dealt.clients, dealt.partition.partition(":")[0])
        federation = Federation.from_dataset(
            data,
            partition=dealt.partition,
            clients=dealt.clients or None,
            seed=dealt.seed,
            split=dealt.split,
            pool=dealt.pool,
        )
        return with_external(federation, experiment.external, experiment.data, root or None)

    def _get(self, key: Any, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Return what is kept under a key, or make it and drop the longest unused of the others where they take too much."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        made = make()
        self.made += 1
        self._kept[key] = made, size(made)
        limit = available() // SHARE if self.limit is None else self.limit
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > limit:
            self._kept.popitem(last=False)
        return made


def _bytes_of_dataset(data: Dataset) -> int:
    samples = [x.nbytes for x in (data.x, data.test_x) if x is not None and mapping(x) is None]
    return int(sum(samples) + data.y.nbytes)


def size_of(federation: Federation) -> int:
    """Return the bytes of all clients' samples, and of the common and external tests."""
    tensors = [getattr(client, f.name) for client in federation.clients for f in fields(Client)]
    tensors += [t for pair in (federation.test, federation.external) if pair is not None for t in pair]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor | Samples))
