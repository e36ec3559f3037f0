"""The optimiser's state that clients keep between rounds (`keep_optimizer`): an entry of their memory that methods do not see.

It has a tree for each of the method's phases, by its number, and is handed from a phase to the same phase of the client's next
round. Where a memory has no such entry, as in training after the federation, each phase starts afresh and nothing is kept.
"""

from __future__ import annotations

import dataclasses

from ..core.method import Method
from ..core.task import Task
from ..core.tree import Params, Tree, to

KEPT = "(optimizer)"  # no parameter and no entry of a method has such a name


def initial_memory(method: Method, task: Task, params: Params) -> Tree:
    """Return all that a client keeps before its first round."""
    memory = method.init_client(task, params)
    if not task.recipe.keep:
        return memory
    first = dataclasses.replace(task, round=1)
    kept: Tree = {}
    for number, phase in enumerate(method.phases(first)):
        moves = task.net.parameters if phase.moves is None else phase.moves
        weights = {name: params[name] for name in task.net.parameters if name in moves}
        state = first.optimizer_of(phase).init(weights) if weights and phase.length(first) else {}
        if state:
            kept[str(number)] = to(state, task.net.device)
    return {**memory, KEPT: kept}


def with_kept(memory: Tree, before: Tree, after: Tree) -> Tree:
    """Return a method's new memory with the optimiser's state: that of `after` where phases have run, else that of `before`."""
    return {**memory, KEPT: {number: after.get(number, state) for number, state in before[KEPT].items()}}
