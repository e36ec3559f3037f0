"""The Aggregator: has the method merge a round's uploads, then takes the server optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import TrainingError
from ..core.method import Method, Upload
from ..core.task import Task
from ..core.tree import Tree
from ..transport.messages import Reply
from .optimizer import Rule


@dataclass(frozen=True)
class Aggregator:
    """Merges uploads. Fewer than `minimum`: the round is abandoned, the server's state stays."""

    minimum: int = 1
    rule: Rule | None = None  # the server optimizer; None: the clients' mean itself

    def merge(self, method: Method, task: Task, server: Tree, uploads: Sequence[Upload]) -> Tree:
        """Return the server's next state."""
        if len(uploads) < self.minimum:
            return server
        merged = method.merge(task, server, uploads)
        return merged if self.rule is None else self.rule.follow(server, merged)


def check_converging(task: Task, replies: Sequence[Reply]) -> None:
    """Stop the run where a client reports that its own training has diverged."""
    for reply in replies:
        loss = reply.report["loss"]
        if not math.isfinite(loss) or not reply.report.get("finite", 1.0):
            reason = f"the training loss is {loss}" if not math.isfinite(loss) else "weights are no longer finite"
            raise TrainingError(
                f"round {reply.round}, client {reply.client}: {reason}; a smaller lr (now {task.lr:g}) usually helps"
            )
