"""The checks that need more than one object: the method, its task and the settings; and the arguments of `simulate` and `run`.

What the settings alone decide (types, limits, fields that contradict one another) `Training` has refused when it was made.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import scores
from ..core import settings, tree
from ..core.errors import InputError, Shown, check_callable, check_path
from ..core.method import Method
from ..core.plan import Plan
from ..core.protection import POISONS
from ..core.task import Task
from ..data import Federation, Preprocessing
from ..server import average, privacy
from ..server.attack import OMNISCIENT
from ..server.optimizer import Rule
from ..server.sampler import count
from ..timing import wait_free
from ..timing.asynchronous import Asynchrony
from .experiment import Experiment, Training, check_format, check_method
from .lock import check_free


def check_statistics(training: Training, rules: Preprocessing) -> None:
    """Refuse statistics of training samples where ε is counted: it does not count what they reveal."""
    if training.privacy != "off" and rules.fitted:
        name, right = ("normalise", "none") if rules.scales else ("impute", "drop")
        counted = f"{right!r} with privacy {training.privacy!r}: ε does not count such statistics"
        raise InputError(name, getattr(rules, name), counted)
    if training.privacy != "off" and rules.encodes:
        counted = f"'none' with privacy {training.privacy!r}: ε does not count which categories training samples have"
        raise InputError("encode", rules.encode, counted)


def check(method: Method, task: Task, training: Training) -> None:
    """Refuse settings that the method, its model or the number of clients does not allow.

    `task.clients` is the number of clients that train, without `training.newcomers`.
    """
    largest = torch.finfo(getattr(torch, training.dtype)).max
    for name, value in {**settings.values_of(training), **settings.values_of(method)}.items():
        if isinstance(value, float) and abs(value) > largest:
            raise InputError(name, value, f"at most {largest:g} with dtype {training.dtype}")
    everyone = task.clients + training.newcomers
    scores.newcomers(Plan(training.seed, training.batch_size), everyone, training.newcomers)
    check_local(method, task, training)
    if method.needs_classes and task.objective.name != "classification":
        right = f"'classification' with {method.id}, which {method.needs_classes}"
        raise InputError("objective", task.objective.name, right)
    method.check(task)
    if training.fine_tune and training.fine_tune_part == "head":
        task.need_split()
    cohort = count(task.clients, training.participation)
    if training.minimum > cohort:
        raise InputError("minimum", training.minimum, f"at most {cohort}, the clients that are wanted in a round")
    if training.max_norm and not (method.averages and (training.over_norm == "reject" or not method.coupled)):
        raise InputError("max_norm", training.max_norm, f"0 for {method.id}: its server takes no plain mean of models")
    Rule.of(method, training)
    asynchrony = Asynchrony.of(method, training, training, cohort)
    if training.attack in OMNISCIENT and training.mode != "sync":
        right = f"one that needs no other uploads of its round with mode {training.mode!r}, such as sign-flip"
        raise InputError("attack", training.attack, right)
    average.check(method, task, training, cohort if asynchrony is None else asynchrony.buffer)
    mixes = training.mode == "fedasync" and training.mixing != 1
    if training.average == "fltrust" and asynchrony is not None and (mixes or training.staleness != "constant"):
        why = "it makes every change as long as the server's, which undoes others"
        right = f"another in mode {training.mode!r}, unless staleness is 'constant' and mixing 1: {why}"
        raise InputError("average", training.average, right)
    wait_free.check(method, task, training)
    if training.patience and training.score_model == "generic" and "generic" not in method.scores:
        raise InputError("patience", training.patience, f"0 for {method.id}: it has no generic model, which is scored")
    if training.privacy != "off":
        privacy.check(method, task, training, cohort)
        check_private_rounds(task, training, cohort)


def check_local(method: Method, task: Task, training: Training) -> None:
    """Refuse optimisers' state, clipping and augmentation where they cannot be."""
    if task.recipe.keep and method.step is not None:
        right = f"false for {method.id}, which makes its own steps: their state starts afresh each round"
        raise InputError("keep_optimizer", True, right)
    if task.recipe.keep and training.wait_free != "off":
        raise InputError("keep_optimizer", True, "false with wait_free: a round is trained in two parts")
    if task.recipe.by_step and training.wait_free == "until-download":
        right = "'rounds' with wait_free 'until-download': nobody knows how many steps there will be"
        raise InputError("lr_schedule_over", "steps", right)
    if task.recipe.clip and training.privacy == "local":
        right = "0 with privacy 'local', whose clip_norm clips each sample's gradient"
        raise InputError("clip_gradient", task.recipe.clip, right)
    if training.privacy == "local":
        check_private_weights(task, training)
    if task.augment is None:
        return
    task.augment.check(tuple(task.net.example.shape[1:]))
    if task.augment.mixup and not task.objective.plain:
        right = "without mixup, which mixes the cross-entropy of two classes: no other objective, class weights or smoothing"
        raise InputError("augment", training.augment, right)
    if task.augment.mixup and training.privacy == "local":
        right = "without mixup with privacy 'local': a mixed gradient is that of two samples"
        raise InputError("augment", training.augment, right)


def check_private_weights(task: Task, training: Training) -> None:
    """Refuse class weights where each sample's gradient is taken alone: they would leak, or cancel out."""
    if training.class_weights == "balanced":
        why = "a sample's gradient would depend on the client's other samples"
        raise InputError("class_weights", "balanced", f"'none' with privacy 'local': {why}")
    if training.class_weights != "none" and task.objective.name == "classification":
        why = "of a sample alone, its weight is divided by itself"
        raise InputError("class_weights", training.class_weights, f"'none' with privacy 'local': {why}")


def check_private_rounds(task: Task, training: Training, cohort: int) -> None:
    """Refuse rounds that reveal more than ε says. Noise at the server assumes that clients are alike and independent."""
    kind = f"with privacy {training.privacy!r}"
    if training.sampler == "power-of-choice":
        raise InputError("sampler", training.sampler, f"another {kind}: clients' losses are not protected")
    training.require_defaults(
        ("forgetting", "train_scores", "patience"), f"{kind}: scores in the replies are not protected"
    )
    if training.privacy == "local":
        if training.average == "fltrust":
            raise InputError("average", "fltrust", f"another {kind}: the server would own samples as they are")
        return
    if training.average != "mean" or task.average is not tree.mean:
        right = f"'mean' {kind}: how far one client moves another rule is not known"
        raise InputError("average", training.average, right)
    if training.attack not in ("none", *POISONS):
        right = f"none, {' or '.join(POISONS)} {kind}: forged uploads follow from other clients' uploads"
        raise InputError("attack", training.attack, right)
    if cohort < task.clients and training.sampler != "poisson":
        right = f"'poisson' {kind} and participation below 1: ε is that of clients who take part independently"
        raise InputError("sampler", training.sampler, right)
    if training.privacy_delta * task.clients >= 1:
        raise InputError(
            "privacy_delta", training.privacy_delta, f"below 1/{task.clients}, one by the number of clients"
        )
    why = f"{kind}: whether one client counts may not depend on another"
    names = ("mode", "deadline", "over_select", "late", "minimum", "availability", "wait_free")
    training.require_defaults(names, why)


def check_simulate(method: object, model: object, data: object, out: object, resume: object, progress: object) -> None:
    """Refuse arguments of `simulate` that are of another kind than it takes."""
    check_method(method)
    check_federation("data", data)
    check_model(model)
    check_callable("progress", progress)
    if not isinstance(resume, bool) or (resume and out is None):
        raise InputError("resume", resume, "true or false, and true only with `out`, the folder of the run to resume")
    if out is None:
        return
    check_path("out", out)
    begun = (Path(str(out)) / "experiment.toml").is_file()
    if resume and begun:
        check_format(str(out))
    else:
        check_out(out)


def check_run(experiment: object, out: object = None, progress: object = None, federation: object = None) -> None:
    """Refuse arguments of `run` that are of another kind than it takes."""
    if not isinstance(experiment, Experiment):
        right = "a fedstill.Experiment, such as fedstill.Experiment(method=fedstill.PFedSD(), rounds=20)"
        raise InputError("experiment", Shown(repr(experiment)), right)
    check_callable("progress", progress)
    if federation is not None:
        check_federation("federation", federation)
    if out is not None:
        check_out(out)


def check_runs(experiments: object, outs: object, federations: object, progress: object) -> None:
    """Refuse arguments of `run_together` that are of another kind than it takes, or lists of different lengths."""
    if not isinstance(experiments, Sequence) or not experiments:
        raise InputError("experiments", Shown(type(experiments).__name__), "a list of one or more fedstill.Experiment")
    check_callable("progress", progress)
    for field, items in (("outs", outs), ("federations", federations)):
        if items is not None and (not isinstance(items, Sequence) or len(items) != len(experiments)):
            shown = f"{type(items).__name__}" + (f" of {len(items)}" if isinstance(items, Sequence) else "")
            raise InputError(field, Shown(shown), f"a list of {len(experiments)}, one for each experiment")
    none = [None] * len(experiments)
    lists: list[Sequence[Any]] = [experiments, *(x if isinstance(x, Sequence) else none for x in (outs, federations))]
    for experiment, out, federation in zip(*lists, strict=True):
        check_run(experiment, out, None, federation)


def check_federation(field: str, value: object) -> None:
    """Refuse data that is no `Federation`."""
    if not isinstance(value, Federation):
        right = "a fedstill.Federation, for example Federation.from_arrays"
        raise InputError(field, Shown(type(value).__name__), right)


def check_model(model: object) -> None:
    """Refuse a model that is neither a module nor a function, or class, that can be called without arguments."""
    right = "an nn.Module, or a function that makes one"
    if isinstance(model, nn.Module):
        return
    if not callable(model):
        raise InputError("model", Shown(type(model).__name__), right)
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise InputError("model", Shown(getattr(model, "__name__", repr(model))), f"{right} ({error})") from None
    except ValueError:
        return  # some functions that are written in C have no signature


def check_out(out: object) -> None:
    """Refuse a results folder that holds something or cannot be written; leave nothing behind."""
    check_path("out", out)
    folder = Path(str(out))
    check_free(folder)
    new = [parent for parent in (folder.absolute(), *folder.absolute().parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError("out", str(folder), f"a folder that can be written ({error.strerror})") from None
    finally:
        for parent in new:
            with contextlib.suppress(OSError):
                parent.rmdir()
