"""The Model Store: what each client keeps between rounds. A client that was never asked costs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from .. import tree
from ..tree import Tree


class ModelStore:
    """Memories by client; every client starts from the same one."""

    def __init__(self, initial: Tree) -> None:
        self._initial = tree.clone(initial)
        self._kept: dict[int, Tree] = {}

    def get(self, client: int) -> Tree:
        """The client's memory. Hooks do not change their arguments, so this is not a copy."""
        return self._kept.get(client, self._initial)

    def put(self, client: int, memory: Tree) -> None:
        """Keep a new memory."""
        self._kept[client] = memory

    def items(self) -> Iterator[tuple[int, Tree]]:
        """Every memory that differs from the initial one, by ascending client."""
        return iter(sorted(self._kept.items()))
