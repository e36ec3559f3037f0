"""What a client's local work is in words: the method's own phases where it has some, and flags that do not reach them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.method import Method, Phase
from ..core.task import Task
from ..run.experiment import Training

if TYPE_CHECKING:
    from ..run.result import Run


FEW = 6  # methods up to which all are named


def work(method: Method, task: Task | None, training: Training) -> str:
    """The epochs of each phase, and what moves in it.

    `5` for one phase as the experiment says; `10 (head) + 1 (body)` for FedRep. Epochs that are drawn by round: their mean.
    """
    if task is None:
        return str(training.epochs)
    found = [method.phases(replace(task, round=t)) for t in range(1, task.rounds + 1)]  # they may be drawn by round
    columns = [[epochs for _, epochs in _with_epochs(phases, training)] for phases in found]
    means = [sum(column) / len(column) for column in zip(*columns, strict=True)]
    return " + ".join(
        f"{mean:.3g}{_what(phase, task)}" if phase.model == "params" or training.wait_free != "until-download"
        else f"as many as fit{_what(phase, task)}"
        for phase, mean in zip(found[-1], means, strict=True)
    )  # fmt: skip


def work_lines(runs: Mapping[str, Sequence[Run]]) -> tuple[str, list[str]]:
    """The local epochs as part of a line, and a line where the methods' momentum differs from the experiment's."""
    works: dict[str, list[str]] = {}
    own: dict[float, list[str]] = {}
    for label, (run, *_) in runs.items():
        works.setdefault(work(run.method, run.task, run.training), []).append(label)
        momenta = {p.momentum for p in run.method.phases(run.task)} - {None} if run.task is not None else set()
        for momentum in sorted(m for m in momenta if m is not None and m != run.training.momentum):
            own.setdefault(momentum, []).append(label)
    most = max(works, key=lambda text: len(works[text]), default="")
    several = len(works.get(most, [])) > FEW and len(works) > 1
    named = {text: labels for text, labels in works.items() if not several or text != most}
    said = "; ".join(f"{text} for {', '.join(labels)}" for text, labels in named.items())
    said += f"; {most} for the others" if several else ""
    first = next(iter(runs.values()))[0].training
    epochs = f"{next(iter(works))} local epochs" if len(works) == 1 else f"local epochs ({said})"
    lines = [f"momentum {first.momentum:g}; {m:g} for {', '.join(labels)}" for m, labels in own.items()]
    return epochs, lines


def without_effect(method: Method, task: Task, training: Training, given: Iterable[str]) -> list[str]:
    """For each given field that this method's local work does not read: a line that says so."""
    phases = [phase for phase, epochs in _with_epochs(method.phases(task), training) if epochs]
    lines: list[str] = []
    if not phases:
        return lines
    for name in given:
        if name == "epochs" and all(phase.epochs is not None for phase in phases):
            lines.append(f"--epochs has no effect on {method.id}: its own are {work(method, task, training)}")
        if name == "personal_epochs" and training.wait_free == "until-download":
            lines.append(f"--personal-epochs has no effect on {method.id} with --wait-free until-download")
        if name == "lr" and all(phase.lr is not None for phase in phases):
            lines.append(f"--lr has no effect on {method.id}: it has its own")
        if name in ("momentum", "nesterov") and all(phase.momentum is not None for phase in phases):
            own = ", ".join(sorted({f"{phase.momentum:g}" for phase in phases}))
            lines.append(f"--{name} has no effect on {method.id}: its momentum is {own}")
    return lines


def _with_epochs(phases: Sequence[Phase], training: Training) -> list[tuple[Phase, int]]:
    return [(phase, training.epochs if phase.epochs is None else phase.epochs) for phase in phases]


def _what(phase: Phase, task: Task) -> str:
    """What moves, where that is not all of the model that travels."""
    if phase.moves is not None and task.split is not None:
        return {task.split.head: " (head)", task.split.body: " (body)"}.get(phase.moves, " (part)")
    return "" if phase.model == "params" else f" ({phase.model})"
