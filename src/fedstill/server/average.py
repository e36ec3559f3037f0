"""What can stand behind `task.average`: the server's mean, and robust rules in its place.

A rule takes the clients' trees and their weights and returns one tree. Methods call it through the task, so a rule written here
serves every method that averages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ..core import tree
from ..core.errors import InputError
from ..core.method import Method, Upload
from ..core.protection import Robustness
from ..core.task import Average, Task
from ..core.tree import Tree
from . import robust
from .gate import example_upload
from .robust import median

__all__ = ["check", "mean", "median", "rule_of"]

mean = tree.mean


def rule_of(settings: Robustness) -> Average:
    """Return the rule that a run asks for; that of fltrust still needs what `trust.Trust` gives each round."""
    rule = robust.RULES[settings.average]
    if settings.average in ("trimmed-mean", "krum", "multi-krum"):
        return functools.partial(rule, suspected=settings.suspected)
    return functools.partial(rule, limit=settings.clip_to) if settings.average == "norm-clip" else rule


def check(method: Method, task: Task, settings: Robustness, uploads: int) -> None:
    """Refuse a rule that the method, or the number of uploads that it merges at a time, does not allow."""
    rule = settings.average
    if rule == "mean":
        return
    asked = _asked(method, task)
    if not asked:
        raise InputError("average", rule, f"'mean' for {method.id}: its server averages nothing")
    if not method.robust:
        right = (
            f"'mean' for {method.id}: its server makes a mean for each client, with weights that a rule would not keep"
        )
        raise InputError("average", rule, right)
    if rule == "fltrust":
        if not all(asked):
            right = f"another rule for {method.id}: the server's own training gives no change of what it averages"
            raise InputError("average", rule, right)
        return
    if rule == "norm-clip" and uploads == 1 and not settings.clip_to:
        right = (
            "above 0 with norm-clip where one upload is merged at a time: the median of the round's lengths is its own"
        )
        raise InputError("clip_to", settings.clip_to, right)
    if uploads < 3 and rule != "norm-clip":
        raise InputError("average", rule, f"'mean' or 'norm-clip' where {uploads} upload(s) are merged at a time")
    f = robust.forged(settings.suspected, uploads)
    if rule == "trimmed-mean" and 2 * f >= uploads:
        right = f"below half of the {uploads} uploads of a round, of which trimmed-mean leaves out {f} at each end"
        raise InputError("suspected", settings.suspected, right)
    most = robust.most_krum(uploads)
    if rule in ("krum", "multi-krum") and f > most:
        right = (
            f"at most {most} of the {uploads} uploads of a round with {rule}, which needs 2f + 3 uploads; this is {f}"
        )
        raise InputError("suspected", settings.suspected, right)


def _asked(method: Method, task: Task) -> list[bool]:
    """Return for each mean that the method's merge asks for whether it is one of models' entries, around the server's.

    Found by merging an upload of a client that has not trained, in the first round and in the last.
    """
    asked: list[bool] = []
    initial = task.net.initial()

    def noted(trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
        shapes = {name: leaf.shape for name, leaf in tree.leaves(trees[0])}
        fits = all(name in initial and initial[name].shape == shape for name, shape in shapes.items())
        asked.append(around is not None and fits)
        return tree.mean(trees, weights, around)

    for number in (1, task.rounds):
        at = dataclasses.replace(task, round=number)
        server = method.init_server(at, initial)
        down = method.send(at, server, 0)
        upload = Upload(example_upload(method, at, down), 1.0, 0, down)
        method.merge(dataclasses.replace(at, average=noted), server, [upload])
    return asked
