"""Mistakes in a method's hooks, as errors of one line that name the method, the hook, the place and the remedy.

Engines call hooks without any guard, so nothing is spent on a step that goes well. When something fails, the traceback tells
which hook it was: the outermost frame of the method's own code or, where a hook's result cannot be used, the engine's caller.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

from ..core.errors import InputError, TrainingError, first_line
from ..core.method import Method
from ..core.task import Task
from ..nn.net import Net

HOOKS = (
    "init_server", "init_client", "send", "begin", "phases", "fit", "loss", "step", "closed_form", "correct", "finish",
    "merge", "personal", "generic", "private",
)  # fmt: skip
SETS = (
    "A method keeps nothing: state belongs in the memory, in local or at the server, as entries of the returned trees"
)
READS = "A hook must not read a tensor's value in Python: use torch.where or a mask, or engine='one'"
CALLERS: dict[CodeType, str] = {}  # the engines' functions that do nothing but call one hook
Frame = tuple[CodeType, int]
F = TypeVar("F", bound=Callable[..., Any])


def calls(hook: str) -> Callable[[F], F]:
    """Mark a function of an engine as the caller of a hook: what goes wrong in it is that hook's fault."""

    def mark(function: F) -> F:
        CALLERS[function.__code__] = hook
        return function

    return mark


def explanation(method: Method, task: Task, error: Exception, stacked: bool) -> Exception | None:
    """Return the error to raise instead; None where no hook took part, or where one raised an error of its own kind."""
    if type(error).__module__.partition(".")[0] not in ("builtins", "torch", "dataclasses"):
        return None
    frames = list(_frames(error.__traceback__))
    blamed = _blamed(method, task, frames)
    refused = (
        stacked and any(code is Net._forward.__code__ for code, _ in frames) and "batching rule" in str(error).lower()
    )
    if refused:
        return InputError("engine", "stacked", f"'one' for this model: {first_line(error)}")
    if blamed is None:
        return None
    hook, place = blamed
    name = f"{type(error).__name__}: " if isinstance(error, LookupError | AttributeError | TypeError) else ""
    failure, remedy = f"{type(method).__name__}.{hook}{place} failed: {name}{first_line(error)}", _remedy(error, hook)
    if remedy is SETS:
        failure = f"{type(method).__name__}.{hook}{place} sets an attribute: {first_line(error)}"
    if remedy is READS:  # torch explains itself at length
        failure = f"{type(method).__name__}.{hook}{place} reads a tensor's value, by .item(), bool(), float() or a branch (if)"
    return TrainingError(f"{failure}. {remedy}".replace("\n", " "))


def reads_values(error: Exception) -> bool:
    """Return whether an explanation says that a hook reads a tensor's value."""
    return READS in str(error)


def changes_arguments(error: Exception) -> bool:
    """Return whether an explanation says that a hook changes something in place."""
    return "in place" in str(error)


def _remedy(error: Exception, hook: str) -> str:
    text = str(error).lower()
    if isinstance(error, FrozenInstanceError):
        return SETS
    if any(sign in text for sign in (".item()", "data-dependent", "tolist", "data pointer", ".numpy()")):
        return READS
    if "inplace" in text or "in-place" in text or "in place" in text:
        return "A hook must not change a tensor in place: return a new one (x = x + y, not x += y)"
    if isinstance(error, KeyError):
        return "Entries come from init_server and send (down), init_client (memory) and begin (local)"
    if "vmap" in text or "batching rule" in text:
        return "A hook must consist of operations that torch.func.vmap takes, or be run by engine='one'"
    returns = {
        "loss": "It should return one number, a function of params", "fit": "It should return one number",
        "correct": "It should return a tree like grads", "step": "It should return (local, loss)",
        "finish": "It should return (upload, memory)", "begin": "It should return a tree of tensors",
        "phases": "It should return a tuple of fedstill.Phase",
    }  # fmt: skip
    return returns.get(hook.partition("(")[0], "It should return a tree like the one that it was given")


def _blamed(method: Method, task: Task, frames: list[Frame]) -> tuple[str, str] | None:
    """Return the hook that took part, and where in its file it failed."""
    codes = {code: f"{name}()" for name in HOOKS for code in _codes(getattr(type(method), name, None))}
    with contextlib.suppress(Exception):  # what fails may be `phases` itself
        for number, phase in enumerate(method.phases(task), start=1):
            for field in ("loss", "enter", "after_epoch"):
                function = getattr(phase, field)
                name = getattr(function, "__name__", field)
                for code in _codes(function):
                    codes.setdefault(code, f"{name}() ({field} of phase {number})" if name != field else f"{field}()")
    own = [i for i, (code, _) in enumerate(frames) if code in codes]
    if own:
        file = frames[own[0]][0].co_filename
        line = [line for code, line in frames[own[0] :] if code.co_filename == file][-1]
        return codes[frames[own[0]][0]], f" at {Path(file).name}:{line}"
    callers = [CALLERS[code] for code, _ in frames if code in CALLERS]
    return (f"{callers[-1]}()", "") if callers else None


def _codes(function: Any) -> list[CodeType]:
    """Return the code of a function or bound method, of what it wraps and of a partial's function."""
    codes = []
    while function is not None:
        code = getattr(function, "__code__", None)
        codes += [code] if isinstance(code, CodeType) else []
        function = getattr(function, "func", None) or getattr(function, "__func__", None) if code is None else None
    return codes


def _frames(trace: TracebackType | None) -> Iterator[Frame]:
    for frame, line in traceback.walk_tb(trace):
        yield frame.f_code, line
