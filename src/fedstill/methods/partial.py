"""Partial personalisation: the base of methods that keep a fixed part of the model at each client and average the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.task import Task, pick
from ..core.tree import Params, Tree
from .fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PartialFedAvg(FedAvg):
    """FedAvg of all entries but those that `private` names; these are each client's own. Overrides `private`, at least."""

    id: ClassVar[str] = ""  # a base of methods, none itself
    scores: ClassVar[tuple[str, ...]] = ("personal",)  # nobody trains the private entries for everybody
    noisy_steps: ClassVar[bool] = True

    def shared(self, task: Task, params: Params) -> Params:
        """Return the entries that travel."""
        return pick(params, frozenset(params) - self.private(task))

    def init_client(self, task: Task, params: Params) -> Tree:
        """Return the private entries of w⁰."""
        return pick(params, self.private(task))

    def send(self, task: Task, server: Tree, client: int) -> Tree:
        """Return the shared entries."""
        return {"params": self.shared(task, server["params"])}

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """Return the received entries together with the client's own."""
        return {"params": {**down["params"], **memory}}

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Return the shared entries, which go up, and the private ones, which stay."""
        return {"params": self.shared(task, local["params"])}, pick(local["params"], self.private(task))

    def personal(self, task: Task, down: Tree, memory: Tree) -> Params:
        """Return the current shared entries together with the client's own."""
        return {**down["params"], **memory}
