"""Training after the federation: a client's model, trained for some more epochs on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core.batch import Batch
from ..core.method import Method, Phase
from ..core.task import Task
from ..core.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FineTune(Method):
    """Trains the model that it is given by the data term of the method that made it, and hands it back. Keeps nothing."""

    id: ClassVar[str] = "(fine-tuning)"

    made_by: Method
    epochs: int
    subset: Literal["head", "all"]

    def begin(self, task: Task, down: Tree, memory: Tree) -> Tree:
        """Start from the model that is to be tuned."""
        return {"params": down["params"]}

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Train the head or everything; what does not move keeps its values, BatchNorm's statistics included."""
        return (Phase(epochs=self.epochs, moves=task.need_split().head if self.subset == "head" else None),)

    def fit(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """Return the method's own data term."""
        return self.made_by.fit(task, params, batch)

    def finish(self, task: Task, down: Tree, memory: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Hand the trained model back."""
        return {"params": local["params"]}, memory
