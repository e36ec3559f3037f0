"""One step of a client's phase: augmentation → objective → gradient → the method's correction → clipping → the optimiser.

Every engine runs this definition. `one` differentiates by `autograd.grad`, which is fastest for a single client; `StackStep`
runs it for a stack by `vmap` over `torch.func.grad`, step by step (`cohort`) or traced (`program`). Only a perceptron's loop
(`fused`) has the step written out once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, autograd
from torch.func import grad_and_value, vmap

from ..core import tree
from ..core.batch import Batch
from ..core.errors import InputError, TrainingError
from ..core.method import Loss, Method, Phase
from ..core.optim import Optimizer, clipped
from ..core.task import SampleNoise, Site, Task
from ..core.tree import Params, Tree
from . import private
from .bench import Bench
from .hooks import calls, explanation

Objective: TypeAlias = Callable[[Params, Params], tuple[Tensor, Params]]  # (weights, buffers) → loss, new buffers
Differentiate: TypeAlias = Callable[[Objective, Params, Params], tuple[Params, tuple[Tensor, Params]]]


@dataclass(frozen=True, eq=False)
class Step:
    """The step of one phase, as one client takes it."""

    method: Method
    task: Task
    loss: Loss
    stays: bool = False  # whether it trains a model that stays at the client, which needs no DP-SGD

    def gradient(
        self, differentiate: Differentiate, weights: Params, buffers: Params, fixed: Params, local: Tree, batch: Batch
    ) -> tuple[Params, Tensor, Params]:
        """Return the gradient that the optimiser takes, the loss, and the buffers as the pass leaves them.

        Without weights everything is frozen: there is no gradient, and only BatchNorm's statistics move.
        """
        batch = self.task.augmented(batch)

        def objective(weights: Params, buffers: Params) -> tuple[Tensor, Params]:
            params = {**fixed, **weights, **buffers}
            return self.loss(self.task, params, local, batch), {name: params[name] for name in buffers}

        if self.task.private is not None and weights and not self.stays:
            grads, loss = self.private(self.task.private, weights, buffers, fixed, local, batch)
        else:
            grads, (loss, buffers) = differentiate(objective, weights, buffers)
        if weights and type(self.method).correct is not Method.correct:
            grads = self.corrected(local, grads)
        return clipped(grads, self.task.recipe.clip), loss.detach(), buffers

    @calls("loss")
    def private(
        self, noise: SampleNoise, weights: Params, buffers: Params, fixed: Params, local: Tree, batch: Batch
    ) -> tuple[Params, Tensor]:
        """Return the gradient of DP-SGD, and the loss. Models with buffers are refused before: they mix samples."""

        def loss(weights: Params, batch: Batch) -> Tensor:
            return self.loss(self.task, {**fixed, **weights, **buffers}, local, batch)

        return private.gradient(noise, self.task, loss, weights, batch)

    @calls("correct")
    def corrected(self, local: Tree, grads: Params) -> Params:
        """Return the gradient that SGD takes, from the loss's own."""
        corrected = self.method.correct(self.task, local, grads)
        return {name: corrected[name] for name in grads}

    @calls("step")
    def own(self, local: Tree, batch: Batch, rate: Any = None) -> tuple[Tree, Tensor]:
        """Take the whole step of a method that brings its own: return the new `local` and the loss.

        `rate` is the step's learning rate; None: that of the task.
        """
        assert self.method.step is not None
        if self.task.private is not None:
            raise RuntimeError(f"{type(self.method).__name__}.step() has no DP-SGD")
        task = self.task if rate is None else with_values(self.task, now=rate)
        local, loss = self.method.step(task, local, task.augmented(batch))
        return local, loss.detach()


@calls("loss")
def by_autograd(objective: Objective, weights: Params, buffers: Params) -> tuple[Params, tuple[Tensor, Params]]:
    """Differentiate by autograd; the weights require a gradient, and the buffers are updated in place."""
    loss, buffers = objective(weights, buffers)
    if not weights:
        return {}, (loss, buffers)
    grads = autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(weights, grads, strict=True)), (loss, buffers)


@calls("loss")
def by_func(objective: Objective, weights: Params, buffers: Params) -> tuple[Params, tuple[Tensor, Params]]:
    """Differentiate by `torch.func`, inside `vmap`; the buffers are copied."""

    def pure(weights: Params, buffers: Params) -> tuple[Tensor, Params]:
        return objective(weights, {name: value.clone() for name, value in buffers.items()})

    if not weights:
        return {}, pure(weights, buffers)
    grads, result = grad_and_value(pure, has_aux=True)(weights, buffers)
    return grads, result


# ---- a stack of clients ---------------------------------------------------------------------------------------------------
def over_clients(f: Callable[..., Any], *trees: Any) -> Any:
    """Apply `vmap` over the leading axis; a tree without leaves has no axis, so it is left out of the mapping."""
    dims = tuple(0 if not isinstance(t, dict) or next(tree.leaves(t), None) is not None else None for t in trees)
    return vmap(f, in_dims=dims, randomness="error")(*trees)


class Watched(Task):
    """A task that records whether anybody asked for the round: a step that did must not be used in another round."""

    asked: list[bool]

    @classmethod
    def of(cls, task: Task) -> Watched:
        """Return a watched copy."""
        watched = cls(**{f.name: getattr(task, f.name) for f in dataclasses.fields(task)})
        object.__setattr__(watched, "asked", [False])
        return watched

    def at(self, **changes: Any) -> Watched:
        """Return the task with other values; it reports to the same list."""
        values = {f.name: object.__getattribute__(self, f.name) for f in dataclasses.fields(Task)}
        watched = type(self)(**{**values, **changes})
        object.__setattr__(watched, "asked", self.asked)
        return watched

    def __getattribute__(self, name: str) -> Any:
        if name == "round":
            with contextlib.suppress(AttributeError):  # while it is made
                object.__getattribute__(self, "asked")[0] = True
        return object.__getattribute__(self, name)


def with_values(task: Task, **changes: Any) -> Task:
    """Return a task with other values; one that is watched stays so."""
    return task.at(**changes) if isinstance(task, Watched) else dataclasses.replace(task, **changes)


@dataclass(frozen=True, eq=False)
class ClientView:
    """The method and the task as one client of a stack has them, inside `vmap`. `site` is that client's slice of the stack."""

    bench: Bench
    task: Task

    def method(self, site: Tree) -> Method:
        """Return the method, with the client's own values of the fields that differ."""
        return self.bench.method_at({n: v for n, v in site.get("fields", {}).items() if n != "lr"})

    def at(self, site: Tree, x: Any, y: Tensor) -> Task:
        """Return the task, with the client's own data, work and learning rate."""
        changes: dict[str, Any] = {
            "site": Site(
                x, y, site["index"], site["samples"], site["steps"], site["last"], balance=site.get("balance")
            ),
            **{name: value for name, value in site.get("fields", {}).items() if name == "lr"},
        }
        return with_values(self.task, **changes)

    def phase(self, site: Tree, x: Any, y: Tensor, number: int) -> Phase:
        """Return one of the phases."""
        return self.method(site).phases(self.at(site, x, y))[number]


@dataclass(frozen=True, eq=False)
class StackStep:
    """The step of one phase for a stack of clients, in place on their rows.

    `rows` is a tree with a leading axis for clients: "weights", "buffers" and "fixed" of the model that trains, "optimizer" (its
    optimiser's state), "local", "site", "total" (the sum of the losses) and, where clients differ in it, "lr". A batch has "lr"
    where it changes from step to step.
    """

    view: ClientView
    number: int  # which of the method's phases
    names: tuple[str, ...]  # the parameters that move
    optimizer: Optimizer
    loss: Loss | None = (
        None  # None: clients differ in the method's fields, and each asks its own method for the phase's loss
    )
    stays: bool = False  # whether the phase trains a model that stays at the client
    keeps: bool = False  # whether the optimiser's state outlives the phase

    def __call__(self, rows: Tree, batch: Tree, x: Any, y: Tensor, live: Tensor | None = None) -> None:
        """Take one step of all rows on their batches; rows that are not `live` keep their values."""
        site, method = rows["site"], self.view.bench.method
        lr = batch.get("lr", rows.get("lr"))
        batch = {name: value for name, value in batch.items() if name != "lr"}

        def step(site: Tree) -> Step:
            own, task = self.view.method(site), self.view.at(site, x, y)
            loss = self.loss
            if loss is None and own.step is None:
                loss = own.phases(task)[self.number].loss
            return Step(own, task, loss or own.loss, self.stays)

        def own_step(site: Tree, local: Tree, b: Tree, now: Tree) -> tuple[Tree, Tensor]:
            return step(site).own(local, Batch(**b), now.get("lr"))

        def gradient(weights: Params, buffers: Params, fixed: Params, local: Tree, site: Tree, b: Tree) -> Any:
            return step(site).gradient(by_func, weights, buffers, fixed, local, Batch(**b))

        if method.step is not None:
            now = {"lr": lr} if lr is not None and self.view.task.recipe.schedule is not None else {}
            new, loss = over_clients(own_step, site, rows["local"], batch, now)
            _assign(rows["local"], new, live)
        else:
            weights, buffers = rows["weights"], rows["buffers"]
            state = rows["fixed"], rows["local"], site, batch
            grads, loss, moved = over_clients(gradient, weights, buffers, *state)
            moving = {name: weights[name] for name in self.names}
            if moving:
                self.optimizer.update(moving, grads, rows["optimizer"], lr, live, self.keeps)
            _assign(buffers, moved, live)
        rows["total"].add_(loss if live is None else torch.where(live, loss, torch.zeros_like(loss)))


def _assign(old: Tree, new: Tree, live: Tensor | None) -> None:
    """Copy new values into old memory, in rows that are live."""

    def assign(old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new if live is None else torch.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old))

    tree.map(assign, old, new)


def shared_loss(bench: Bench, phase: Phase) -> Loss | None:
    """Return the phase's loss where it is the same for all clients of a stack."""
    return None if bench.varied or bench.method.step is not None else phase.loss or bench.method.loss


def each_step(lengths: Sequence[int]) -> Iterator[int]:
    """Yield for each step how many of the clients (longest first) still train."""
    active = len(lengths)
    for s in range(lengths[0] if lengths else 0):
        while lengths[active - 1] <= s:
            active -= 1
        yield active


# ---- mistakes in hooks -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def explained(method: Method, task: Task, stacked: bool) -> Iterator[None]:
    """Turn what fails inside because of a hook, or of a model that cannot be stacked, into an error of one line."""
    try:
        yield
    except (InputError, TrainingError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        clear = explanation(method, task, error, stacked)
        if clear is None:
            raise
        raise clear from error


Versions: TypeAlias = list[tuple[str, Tensor, int]]


def versions(**trees: Tree) -> Versions:
    """Return how often each tensor of some trees has been changed in place."""
    return [(f"{name}|{leaf}", value, value._version) for name, t in trees.items() for leaf, value in tree.leaves(t)]


def check_begun(method: Method, models: Iterable[str], local: Tree) -> None:
    """Refuse a `begin` that has not returned every model that a phase trains."""
    for model in models:
        if not isinstance(local, dict) or not isinstance(local.get(model), dict):
            names = ", ".join(local) if isinstance(local, dict) else type(local).__name__
            what = f"{type(method).__name__}.begin() returned no {model!r} for the phase that trains it, but {names}"
            raise TrainingError(f"{what}. It should return a tree with every model that a phase trains")


def check_unchanged(method: Method, hook: str, before: Versions) -> None:
    """Refuse a hook that has changed one of its arguments in place."""
    for name, value, version in before:
        if value._version != version:
            where, *rest = name.split(tree.SEPARATOR)
            entry = where + "".join(f"[{key!r}]" for key in rest)
            what = f"{type(method).__name__}.{hook}() changed its argument {entry} in place"
            raise TrainingError(f"{what}. A hook must return new tensors (x = x + y, not x += y)")
