"""The Model Store where everything fits into the host's memory: a dictionary of trees, and the oracle for `ModelStore`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...core import tree
from ...core.tree import Tree

NONE: frozenset[str] = frozenset()


class PlainStore:
    """Memories by client, on the device that they are used on. A client has its run's initial memory until it stores another.

    Several runs of `clients` clients each may share a store: client k of run r then has the number r·`clients` + k.
    """

    def __init__(self, initial: Tree, *, clients: int = 0, others: Sequence[Tree] = ()) -> None:
        if clients < (1 if others else 0):
            raise ValueError(f"clients is {clients}, not the number of clients of each initial memory")
        self._initial = [tree.clone(memory) for memory in (initial, *others)]
        self._clients = clients
        self._memories: dict[int, Tree] = {}

    def get(self, client: int) -> Tree:
        """Return the client's memory. Hooks do not change their arguments, so this is not a copy."""
        memory = self._memories.get(client)
        return self._initial[client // self._clients if self._clients else 0] if memory is None else memory

    read = get

    @torch.no_grad()
    def put(self, client: int, memory: Tree) -> None:
        """Store a copy of a new memory."""
        self._memories[client] = tree.clone(memory)

    def forget(self, client: int) -> None:
        """Give the client its initial memory again."""
        self._memories.pop(client, None)

    @torch.no_grad()
    def gather(self, clients: Sequence[int], per_sample: frozenset[str] = NONE, rows: int = 0) -> Tree:
        """Stack the clients' memories along a new leading axis; entries in `per_sample` as `tree.fit_rows` fits them."""
        memories = [tree.fit_rows(self.get(client), per_sample, rows) for client in clients]
        first = tree.outline(memories[0])
        if any(tree.outline(memory) != first for memory in memories):
            raise ValueError(f"the memories of clients {', '.join(map(str, clients))} differ in their names")
        return tree.stack(memories)

    @torch.no_grad()
    def scatter(
        self, clients: Sequence[int], memory: Tree, per_sample: frozenset[str] = NONE, sizes: Sequence[int] = ()
    ) -> None:
        """Store row i of a stacked tree as client i's memory, its entries in `per_sample` fitted to `sizes[i]` rows."""
        for row, client in enumerate(clients):
            own = tree.unstack(memory, row)
            self._memories[client] = tree.fit_rows(own, per_sample, sizes[row]) if per_sample and sizes else own

    def prefetch(self, clients: Sequence[int]) -> None:
        """Do nothing: all is there."""

    def items(self) -> Iterator[tuple[int, Tree]]:
        """Yield every stored memory by ascending client."""
        for client in sorted(self._memories):
            yield client, self._memories[client]

    def close(self) -> None:
        """Drop everything."""
        self._memories.clear()
