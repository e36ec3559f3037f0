"""A client's local work in words: the epochs or steps of the method's phases, and which settings have no effect on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.method import Method, Phase
from ..core.plan import Length
from ..core.task import Task
from ..run.experiment import Training

if TYPE_CHECKING:
    from ..run.result import Run


MAX_LISTED = 6  # methods up to which all are named


def work(method: Method, task: Task | None, training: Training) -> str:
    """Return the length of each phase with what it trains: `10 (head) + 1 (body)` for FedRep, `5` for a method without its own.

    A plain number counts epochs. Where lengths are drawn by round, their mean is given.
    """
    if task is None:
        return f"{training.local_steps} steps" if training.local_steps else str(training.epochs)
    by_round = [method.phases(replace(task, round=t)) for t in range(1, task.rounds + 1)]
    lengths = [[phase.length(task) for phase in phases] for phases in by_round]

    def shown(column: Sequence[Length]) -> str:
        mean = sum(length.steps or length.epochs for length in column) / len(column)
        return f"{mean:.3g}{' steps' if column[0].steps else ''}"

    return " + ".join(
        f"{shown(column)}{_trained(phase, task)}" if phase.model == "params" or training.wait_free != "until-download"
        else f"as many as fit{_trained(phase, task)}"
        for phase, column in zip(by_round[-1], zip(*lengths, strict=True), strict=True)
    )  # fmt: skip


def work_lines(runs: Mapping[str, Sequence[Run]]) -> tuple[str, list[str]]:
    """Return the local epochs as a clause, and a line for each momentum that differs from the experiment's."""
    works: dict[str, list[str]] = {}
    own: dict[float, list[str]] = {}
    for label, (run, *_) in runs.items():
        works.setdefault(work(run.method, run.task, run.training), []).append(label)
        momenta = {p.momentum for p in run.method.phases(run.task)} - {None} if run.task is not None else set()
        for momentum in sorted(m for m in momenta if m is not None and m != run.training.momentum):
            own.setdefault(momentum, []).append(label)
    commonest = max(works, key=lambda text: len(works[text]), default="")
    shorten = len(works.get(commonest, [])) > MAX_LISTED and len(works) > 1
    named = {text: labels for text, labels in works.items() if not shorten or text != commonest}
    clause = "; ".join(f"{text} for {', '.join(labels)}" for text, labels in named.items())
    clause += f"; {commonest} for the others" if shorten else ""
    first = next(iter(runs.values()))[0].training
    epochs = _counted(next(iter(works))) if len(works) == 1 else f"local epochs ({clause})"
    lines = [f"momentum {first.momentum:g}; {m:g} for {', '.join(labels)}" for m, labels in own.items()]
    return epochs, lines


def recipe_lines(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return a line on the optimiser, schedule, clipping and augmentation of each run that has others than the defaults."""
    texts: dict[str, list[str]] = {}
    for label, (run, *_) in runs.items():
        texts.setdefault(recipe(run.training), []).append(label)
    if len(texts) == 1:
        return [text for text in texts if text]
    return [f"{', '.join(labels)}: {text}" for text, labels in texts.items() if text]


def recipe(training: Training) -> str:
    """Return in words how clients make their steps, as far as that differs from plain SGD; '' where it does not.

    >>> recipe(Training(optimizer="adamw", lr_schedule="cosine", warmup=2, augment="flip"))
    'adamw; lr by cosine over rounds after a warm-up of 2; augmented by flip'
    """
    parts: list[str] = []
    if training.optimizer != "sgd":
        parts.append(training.optimizer)
    if training.keep_optimizer:
        parts.append("the optimiser's state is kept between rounds")
    schedule = training.recipe().schedule
    if schedule is not None:
        kind = {"step": f"times {schedule.decay:g} every {schedule.every}"}.get(schedule.kind, f"by {schedule.kind}")
        kind = "constant" if schedule.kind == "constant" else kind
        warm = f" after a warm-up of {schedule.warmup}" if schedule.warmup else ""
        parts.append(f"lr {kind} over {schedule.over}{warm}")
    if training.clip_gradient:
        parts.append(f"gradients of at most {training.clip_gradient:g}")
    if training.augment:
        parts.append(f"augmented by {training.augment}")
    return "; ".join(parts)


def without_effect(method: Method, task: Task, training: Training, names: Collection[str]) -> list[tuple[str, str]]:
    """Return (field, reason) for each of these fields that the method's local work does not use, as `Group.without_effect`."""
    phases = [phase for phase in method.phases(task) if phase.length(task)]
    if not phases:
        return []
    unused: dict[str, str] = {}
    if all(phase.own_length for phase in phases):
        unused |= dict.fromkeys(
            ("epochs", "local_steps"), f"on {method.id}: its own are {work(method, task, training)}"
        )
    if training.wait_free == "until-download":
        unused["personal_epochs"] = f"on {method.id} with `wait_free` until-download"
    if all(phase.lr is not None for phase in phases):
        unused["lr"] = f"on {method.id}: it has its own"
    if all(phase.momentum is not None for phase in phases) and "momentum" not in training.unused():
        own = ", ".join(sorted({f"{phase.momentum:g}" for phase in phases}))
        unused |= dict.fromkeys(("momentum", "nesterov"), f"on {method.id}: its momentum is {own}")
    return [(name, reason) for name, reason in unused.items() if name in names]


def _counted(lengths: str) -> str:
    """Return the lengths of phases as a clause: "5 local epochs", "20 steps of local training"."""
    return f"{lengths} of local training" if "steps" in lengths else f"{lengths} local epochs"


def _trained(phase: Phase, task: Task) -> str:
    """Return in parentheses what a phase trains, where that is not all of the model that travels."""
    if phase.moves is not None and task.split is not None:
        return {task.split.head: " (head)", task.split.body: " (body)"}.get(phase.moves, " (part)")
    return "" if phase.model == "params" else f" ({phase.model})"
