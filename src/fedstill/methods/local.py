"""Local: every client trains alone on its own data, and nothing travels.

    w_k ← SGD(CE on client k's data) from w_k,     w_k⁰ = w⁰

The reference that federation must beat. Choices: (1) a client trains in the rounds in which it is selected, so its budget
of steps equals the other methods'. (2) BatchNorm's statistics stay with the client. (3) The optimiser starts fresh each
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.method import Method, Upload
from ..core.task import Task
from ..core.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """No federation: every client trains alone."""

    id: ClassVar[str] = "local"
    scores: ClassVar[tuple[str, ...]] = ("personal",)
    robust: ClassVar[bool] = False

    def init_server(self, task: Task, params: Params) -> Tree:
        """w⁰, which nobody trains."""
        return {"params": params}

    def generic(self, task: Task, server: Tree) -> Params:
        """w⁰."""
        return server["params"]  # type: ignore[no-any-return]

    def init_client(self, task: Task, params: Params) -> Tree:
        """The client's own model."""
        return {"params": params}

    def private(self, task: Task) -> frozenset[str]:
        """Everything."""
        return frozenset(task.net.names)

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """Nothing."""
        return {}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """From where the client stopped."""
        return {"params": memory["params"]}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Nothing goes up."""
        return {}, {"params": local["params"]}

    def merge(self, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """The server has nothing to do."""
        return server

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """The client's own model."""
        return memory["params"]  # type: ignore[no-any-return]
