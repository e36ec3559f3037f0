"""The gate: every upload is checked before any method sees it. One bad client is refused and named; the round goes on.

Checked are the names, shapes and dtypes of all entries, against what the method's own `finish` gives on an example, and that
every number is finite. A client that itself reports that its training has diverged stops the run, or is refused: as the
setting `on_divergence` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..core import tree
from ..core.errors import TrainingError
from ..core.method import Method
from ..core.task import Site, Task
from ..core.tree import Tree
from ..transport.messages import Reply

NOT_FINITE = "its upload holds numbers that are not finite"
REPORTED = ("loss", "steps")  # numbers that every reply to an order to train must have
Spec: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]  # of an upload's entries, by their full names


def example_upload(method: Method, task: Task, down: Tree) -> Tree:
    """Return what a client that was sent `down` would upload without having trained, on example data of one class."""
    x = task.net.example
    count = torch.tensor(float(len(x)), dtype=task.net.dtype, device=x.device)
    never = torch.zeros((), dtype=torch.float64, device=x.device)
    y, index = torch.zeros(len(x), dtype=torch.int64, device=x.device), torch.arange(len(x), device=x.device)
    task = task.at_site(Site(x, y, index, count, torch.ones_like(count), never))
    with torch.no_grad():
        memory = tree.fit_rows(method.init_client(task, task.net.initial()), method.per_sample, len(x))
        up, _ = method.finish(task, down, memory, method.begin(task, down, memory))
    return up


def spec_of(upload: Tree) -> Spec:
    """Return the shape and dtype of every entry."""
    return {name: (leaf.shape, leaf.dtype) for name, leaf in tree.leaves(upload)}


@dataclass
class Gate:
    """Refuses uploads that a method must not see. `expected` is what was right last, in `round`.

    `varies` says that uploads have another form from round to round (`Method.upload_varies`); else an upload that is as the last
    right one is right.
    """

    varies: bool = False
    refuse_diverged: bool = False  # whether a client whose own training diverged is refused, else it stops the run
    expected: Spec | None = field(default=None, init=False)
    round: int = field(default=0, init=False)
    lost: dict[int, str] = field(default_factory=dict, init=False)  # divergences since one client's training did not
    wrong: dict[int, str] = field(
        default_factory=dict, init=False
    )  # uploads of a wrong form before the first right one

    def diverged(self, task: Task, replies: Sequence[Reply], clients: int) -> dict[int, str]:
        """Return how the training of clients has diverged, by their own reports.

        It stops the run, unless these are refused: then only where nobody's has not, of three clients or of all `clients`.
        """
        reasons = {reply.client: reason for reply in replies if (reason := divergence(reply))}
        if len(reasons) < len(replies):
            self.lost.clear()
        elif reasons:
            self.lost |= reasons
        advice = f"a smaller lr (now {task.lr:g}) usually helps"
        if reasons and not self.refuse_diverged:
            client, reason = next(iter(reasons.items()))
            at = next(reply.round for reply in replies if reply.client == client)
            raise TrainingError(f"round {at}, client {client}: {reason}; {advice}")
        if len(self.lost) >= min(3, clients) and len(reasons) == len(replies):
            client, reason = next(iter(reasons.items()))
            who = f"all {len(self.lost)} clients" if len(self.lost) > 1 else "the only client"
            raise TrainingError(
                f"round {task.round}: the training of {who} diverged (client {client}: {reason}); {advice}"
            )
        return reasons

    def inspect(self, replies: Sequence[Reply], example: Callable[[Reply], Tree]) -> tuple[list[Reply], dict[int, str]]:
        """Divide replies into those that may be merged and the reasons, by client, for which the others are refused.

        `example(reply)` makes an upload that would be right in that reply's round; it is asked for only where a reply differs
        from what was right before.
        """
        reasons = {reply.client: reason for reply in replies if (reason := self._mismatch(reply, example))}
        if self.expected is None:
            self.wrong |= reasons
        checked = [reply for reply in replies if reply.client not in reasons]
        for reply, finite in zip(checked, tree.finite_each([reply.up for reply in checked]), strict=True):
            if not finite:
                reasons[reply.client] = NOT_FINITE
        return [reply for reply in checked if reply.client not in reasons], reasons

    def hopeless(self, clients: int) -> str:
        """Return what is wrong where three clients, or all, have uploaded a wrong form and nobody the right one; else ""."""
        if self.expected is not None or len(self.wrong) < min(3, clients):
            return ""
        client, reason = next(iter(self.wrong.items()))
        return f"client {client}: {reason}"

    def _mismatch(self, reply: Reply, example: Callable[[Reply], Tree]) -> str:
        missing = [name for name in REPORTED if name not in reply.report]
        if missing:
            return f"its report has no {missing[0]}"
        if not (math.isfinite(reply.report["steps"]) and reply.report["steps"] >= 0):
            return f"it reports {reply.report['steps']:g} steps"
        spec = spec_of(reply.up)
        if spec == self.expected and (not self.varies or reply.round == self.round):
            return ""
        right = spec_of(example(reply))
        if spec == right:
            self.expected, self.round = spec, reply.round
            return ""
        return difference(spec, right)


def difference(spec: Spec, right: Spec) -> str:
    """Return the first difference between an upload and what is right, in words."""
    for name, (shape, dtype) in right.items():
        if name not in spec:
            return f"{name} is missing from its upload"
        if spec[name][0] != shape:
            return f"{name} has shape {tuple(spec[name][0])} instead of {tuple(shape)}"
        if spec[name][1] != dtype:
            return f"{name} has dtype {_plain(spec[name][1])} instead of {_plain(dtype)}"
    extra = [name for name in spec if name not in right]
    return f"{extra[0]} does not belong into its upload" if extra else ""


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def divergence(reply: Reply) -> str:
    """Return in words how a client reports that its own training has diverged; else ""."""
    loss = reply.report.get("loss", 0.0)
    if not math.isfinite(loss):
        return f"the training loss is {loss}"
    return "" if reply.report.get("finite", 1.0) else "weights are no longer finite"
