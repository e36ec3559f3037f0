"""A reproduction at a fraction of the cost: rounds, clients and data are cut in a stated way, and nothing else is.

With a scale s below 1:

    rounds      s times as many, at least 2; a round that a contract names likewise
    clients     all where there are at most 20, else s times as many, at least 20; the share that takes part is the paper's
    samples     s times as many of each class (and of each domain or owner), the first of a fixed permutation; at least 50 a
                client that is kept, as far as there are so many; of a common test set at least 20 a client
    newcomers   in proportion to the clients, at least 1

Local epochs, steps, batch size, learning rate, model and seeds are the paper's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..data.dataset import Dataset, Ints
from ..data.draw import generator
from ..run.experiment import Experiment
from ..server.sampler import count

ROUNDS, CLIENTS, SAMPLES, TESTS = 2, 20, 50, 20  # what is left at least: rounds, clients, and samples a client


@dataclass(frozen=True)
class Scale:
    """The fraction of rounds, clients and samples that is kept."""

    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError("--scale", self.share, "a number above 0 and at most 1, as 0.1")

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return self.share == 1

    def rounds(self, rounds: int) -> int:
        """Return how many of some rounds are left."""
        return rounds if self.whole else min(rounds, max(ROUNDS, round(self.share * rounds)))

    def clients(self, clients: int) -> int:
        """Return how many of some clients are left."""
        return clients if self.whole or clients <= CLIENTS else max(CLIENTS, round(self.share * clients))

    def experiment(self, whole: Experiment) -> Experiment:
        """Return an experiment with its rounds and clients cut."""
        if self.whole:
            return whole
        clients = self.clients(whole.clients)
        newcomers = whole.newcomers
        if newcomers and whole.clients:
            newcomers = max(1, round(newcomers * clients / whole.clients))
        cut: dict[str, Any] = {"rounds": self.rounds(whole.rounds), "clients": clients, "newcomers": newcomers}
        if whole.buffer:
            cut["buffer"] = min(whole.buffer, count((clients or CLIENTS) - newcomers, whole.participation))
        return dataclasses.replace(whole, **cut)

    def dataset(self, data: Dataset, clients: int, kind: str) -> Dataset:
        """Return a data set with its samples cut, for so many clients (0: one an owner) by a partition of this kind."""
        if self.whole:
            return data
        groups = {"owner": data.owner, "domain": data.domain}.get(kind)
        tests = {"owner": data.test_owner, "domain": data.test_domain}.get(kind)
        if kind == "owner" and groups is not None:
            data, groups, tests = _owners(data, clients or self.clients(len(np.unique(groups))))
        held = clients if groups is None else len(np.unique(groups))
        train = self._kept(data.y, groups, held, SAMPLES)
        test = None if data.test_y is None else self._kept(data.test_y, tests, held, TESTS)
        name = f"{data.name} cut to {len(train)} of {len(data)}"
        return _take(data, train, test, name)

    def _kept(self, y: Ints, groups: Ints | None, clients: int, least: int) -> Ints:
        """Return the indices of the samples that are kept, in their order."""
        key = np.zeros(len(y), np.int64) if groups is None else groups
        kept = []
        for group in np.unique(key):
            own = np.flatnonzero(key == group)
            a_group = least if groups is not None else least * clients
            share = min(1.0, max(self.share, a_group / len(own)))
            for label in np.unique(y[own]):
                of_class = own[y[own] == label]
                order = generator(0, "scale", int(group), int(label)).permutation(len(of_class))
                kept.append(of_class[order[: max(1, round(share * len(of_class)))]])
        return np.sort(np.concatenate(kept))

    def words(self) -> str:
        """Say what is cut."""
        return (
            f"SCALED to {self.share:g}: rounds and samples × {self.share:g} (at least {ROUNDS} rounds and {SAMPLES} samples "
            f"a client), clients above {CLIENTS} likewise; the published numbers are those of the whole"
        )


WHOLE = Scale()


def _owners(data: Dataset, clients: int) -> tuple[Dataset, Ints | None, Ints | None]:
    """Return the data of the first owners, and whose each sample is."""
    assert data.owner is not None
    kept = np.unique(data.owner)[:clients]
    train = np.flatnonzero(np.isin(data.owner, kept))
    test = None
    if data.test_y is not None:
        whose = data.test_owner
        test = np.arange(len(data.test_y)) if whose is None else np.flatnonzero(np.isin(whose, kept))
    data = _take(data, train, test, data.name)
    return data, data.owner, data.test_owner


def _take(data: Dataset, train: Ints, test: Ints | None, name: str) -> Dataset:
    """Return some of a data set's samples, normalised as they were."""

    def rows(values: Ints | None, index: Ints | None) -> Ints | None:
        return None if values is None or index is None else values[index]

    return dataclasses.replace(
        data,
        name=name,
        x=data.x[train],
        y=data.y[train],
        domain=rows(data.domain, train),
        owner=rows(data.owner, train),
        test_x=rows(data.test_x, test),
        test_y=rows(data.test_y, test),
        test_domain=rows(data.test_domain, test),
        test_owner=rows(data.test_owner, test),
    )
