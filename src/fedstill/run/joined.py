"""What several runs have, as if it were one run's: plans, data and clients' memories. Client r·K + k is client k of run r."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..core import plan, tree
from ..core.plan import Plan
from ..core.tree import Tree
from ..data.samples import Part, Samples
from ..edge.model_store.store import ModelStore
from ..engine.bench import FederationData


class Apart(Exception):
    """Why runs cannot go together; they can still go one after the other."""


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans of several runs; client r·K + k is client k of run r."""

    plans: tuple[Plan, ...]
    clients: int

    @property
    def batch_size(self) -> int:
        """Samples a step, the same in all."""
        return self.plans[0].batch_size

    def steps(self, samples: int, epochs: int) -> int:
        """SGD steps of so many samples."""
        return self.plans[0].steps(samples, epochs)

    def order(self, round: int, client: int, samples: int, epoch: int) -> NDArray[np.int64]:
        """The order of a client's samples."""
        run, k = divmod(client, self.clients)
        return self.plans[run].order(round, k, samples, epoch)

    def step_keys(self, round: int, client: int, steps: int) -> NDArray[np.int64]:
        """The keys of a phase's steps."""
        run, k = divmod(client, self.clients)
        return self.plans[run].step_keys(round, k, steps)

    def tables(
        self, round: int, clients: Sequence[int], samples: Sequence[int], epochs: int, width: int, device: torch.device
    ) -> plan.Tables:
        """All batches of a phase of several clients."""
        seeds = [self.plans[client // self.clients].seed for client in clients]
        own = [client % self.clients for client in clients]
        return plan.tables(seeds, self.batch_size, round, own, samples, epochs, width, device)


class Joined:
    """The data of several runs one after another; runs on the same data share it."""

    def __init__(self, managers: Sequence[FederationData]) -> None:
        self.train, self.test = (_joined([manager.part(name) for manager in managers]) for name in ("train", "test"))
        validation = [manager.val for manager in managers if manager.val is not None]
        if len(validation) not in (0, len(managers)):
            raise Apart("not all of them have validation data")
        self.val = _joined(validation) if validation else None

    def part(self, name: str) -> Part:
        """train, val or test."""
        found = {"train": self.train, "val": self.val, "test": self.test}[name]
        assert found is not None
        return found


def _joined(parts: Sequence[Part]) -> Part:
    distinct: list[Part] = []
    which = []  # of those that differ each part is
    for part in parts:
        same = [i for i, other in enumerate(distinct) if _same(part, other)]
        which.append(same[0] if same else len(distinct))
        distinct += [] if same else [part]
    places = list(itertools.accumulate((len(part.y) for part in distinct), initial=0))
    x = distinct[0].x
    for part in distinct[1:]:
        for name, mine in x.tensors().items():
            other = part.x.tensors().get(name)
            if name != "raw" and (other is None or not torch.equal(mine, other)):
                raise Apart("their samples are normalised differently")
        if part.x.raw.dtype != x.raw.dtype:
            raise Apart("their samples are kept differently")
    whole: Samples = x.over({**x.tensors(), "raw": torch.cat([part.x.raw for part in distinct])})
    starts = tuple(places[i] + start for i, part in zip(which, parts, strict=True) for start in part.starts)
    sizes = tuple(size for part in parts for size in part.sizes)
    return Part(whole, torch.cat([part.y for part in distinct]), starts, sizes)


def _same(a: Part, b: Part) -> bool:
    return a.x.raw.dtype == b.x.raw.dtype and torch.equal(a.x.raw, b.x.raw) and torch.equal(a.y, b.y)


class Stores:
    """The model stores of several runs as the trainer asks for them."""

    def __init__(self, stores: Sequence[ModelStore], clients: int) -> None:
        self.stores, self.clients = stores, clients

    def _runs(self, clients: Sequence[int]) -> Iterator[tuple[ModelStore, list[int], list[int]]]:
        """For each run that is asked: its store, which places of the list are its, and its own numbers for them."""
        for run, store in enumerate(self.stores):
            places = [i for i, client in enumerate(clients) if client // self.clients == run]
            if places:
                yield store, places, [clients[i] % self.clients for i in places]

    def get(self, client: int) -> Tree:
        """A client's memory."""
        return self.stores[client // self.clients].get(client % self.clients)

    def put(self, client: int, memory: Tree) -> None:
        """Keep a new memory."""
        self.stores[client // self.clients].put(client % self.clients, memory)

    def gather(self, clients: Sequence[int], per_sample: frozenset[str] = frozenset(), rows: int = 0) -> Tree:
        """The clients' memories as one stacked tree."""
        parts = [(places, store.gather(own, per_sample, rows)) for store, places, own in self._runs(clients)]
        if len(parts) == 1:
            return parts[0][1]
        back = np.argsort(np.concatenate([places for places, _ in parts]))

        def join(*leaf: torch.Tensor) -> torch.Tensor:
            return torch.cat(leaf)[torch.from_numpy(back).to(leaf[0].device)]

        return tree.map(join, *(part for _, part in parts))

    def scatter(
        self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str] = frozenset(), sizes: Sequence[int] = ()
    ) -> None:
        """Keep the rows of a stacked tree."""
        for store, places, own in self._runs(clients):
            rows = torch.tensor(places)
            mine = tree.map(lambda leaf, rows=rows: leaf[rows.to(leaf.device)], memory)
            store.scatter(own, mine, per_sample, [sizes[i] for i in places] if len(sizes) else ())

    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to fetch."""
        for store, _, own in self._runs(clients):
            store.prefetch(own)
