"""All laws for one method, in one call: `check` runs them on small problems and reports which hold."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from .. import models
from ..core import settings as fields
from ..core.errors import HookError, InputError, Shown, TrainingError, first_line, nearest, printable, shorten
from ..core.method import Method
from ..core.objective import OBJECTIVES
from ..data import Federation
from ..engine.bench import threads
from ..engine.rehearsal import rehearse
from ..report.text import aligned
from ..run import prepare
from ..run.experiment import Training
from . import laws, problems
from .laws import Broken, Problem, name_of

HOOKS = "hooks keep the contract"
State: TypeAlias = Literal["passed", "failed", "not applicable"]
Law: TypeAlias = tuple[str, Callable[[], str]]


class NotApplicable(Exception):
    """Why a law says nothing about a method."""


@dataclass(frozen=True)
class Outcome:
    """What became of one law."""

    law: str
    state: State
    seconds: float
    why: str  # the evidence, or what is wrong and where


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of every law for a method; printed, it is a table."""

    method: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether every law that applies holds."""
        return not self.failed

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The laws that do not hold."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "failed")

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table's columns, each with its heading, but for the last one: why."""
        return [
            ("law", [outcome.law for outcome in self.outcomes]),
            ("", [outcome.state for outcome in self.outcomes]),
            ("seconds", [f"{outcome.seconds:.1f}" for outcome in self.outcomes]),
        ]

    def summary(self) -> str:
        """Return how many of the laws hold, in a line."""
        applied = [outcome for outcome in self.outcomes if outcome.state != "not applicable"]
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        held = len(applied) - len(self.failed)
        return f"{self.method}: {held} of {len(applied)} laws hold, {seconds:.1f} s"

    def __str__(self) -> str:
        head, rule, *rows = aligned(self.columns())
        width = max(map(len, (head, *rows))) + 2
        lines = [f"{head:<{width}}why", rule]
        lines += [f"{row:<{width}}{outcome.why}" for row, outcome in zip(rows, self.outcomes, strict=True)]
        return "\n".join([*lines, "", self.summary()])

    __repr__ = __str__


class LawError(AssertionError):
    """Laws that do not hold; the message lists each, `report` has them all."""

    def __init__(self, report: Report) -> None:
        self.report = report
        lines = [f"  {outcome.law}: {outcome.why}" for outcome in report.failed]
        count = sum(outcome.state != "not applicable" for outcome in report.outcomes)
        super().__init__("\n".join([f"{len(lines)} of {count} laws do not hold for {report.method}:", *lines]))


def check(
    method: Method,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    head: str | Sequence[str] | None = None,
    objective: str = "classification",
    clients: int = len(problems.SIZES),
    neutral: Mapping[str, Any] | None = None,
    parent: Method | None = None,
    of: Literal["both", "generic", "personal"] = "both",
    within: float = 0.0,
    raises: bool = True,
    **settings: Any,
) -> Report:
    """Return which laws hold for a method, after running it on small problems in float64; raise `LawError` where one does not.

    The problem is a ragged federation of an `objective` with so many `clients` and a model with BatchNorm and dropout; `model`
    (with `head`) and `data` stand for these where they are given. `neutral` are values of the method's fields with which it
    must give what `parent` gives, `of` these models, `within` so much (0: to the bit). With `raises=False` the report says what
    does not hold. The other keywords are settings of training, as those of `fedstill.simulate`.
    """
    _check_arguments(method, data, objective, clients, neutral, parent, of, settings)
    shown, run = name_of(method), {**problems.SETTINGS, **settings}
    sizes = [problems.SIZES[k % len(problems.SIZES)] for k in range(clients)]
    federation = data or problems.federation(objective, sizes)
    net = _module(model, run["seed"]) if model is not None else problems.model(objective)
    problem = Problem(net, federation, run, head)
    own = model is not None or data is not None
    quiet, several = (problem, problem) if own else _variants(objective, sizes, run)
    tried = [problem, *(_others(sizes, run) if not own and objective == "classification" else ())]

    with threads(torch.get_num_threads() if own else 1):  # the small problems have nothing to divide
        first = _outcome(HOOKS, lambda: _hooks(problem, method))
        outcomes = [first]
        if first.state == "passed":
            given = _laws(method, problem, quiet, several, tried, neutral, parent, of, within)
            outcomes += [_outcome(name, law) for name, law in given]
    report = Report(shown, tuple(outcomes))
    if raises and not report.passed:
        raise LawError(report)
    return report


def _laws(
    method: Method,
    problem: Problem,
    quiet: Problem,
    several: Problem,
    tried: Sequence[Problem],
    neutral: Mapping[str, Any] | None,
    parent: Method | None,
    of: str,
    within: float,
) -> Iterator[Law]:
    """Yield the laws by name. `quiet` is a problem without dropout, `several` one in which no client has one sample alone."""

    def stacked() -> str:
        return _all(lambda p: laws.stacked_equals_one(p, method), tried)

    def is_parent() -> str:
        if parent is None or neutral is None:
            raise NotApplicable("no neutral={field: value} and parent=method were given")
        variant = dataclasses.replace(method, **neutral)
        return _engines(lambda e: laws.neutral_gives_parent(quiet, variant, parent, of, within, engine=e))

    def private() -> str:
        net = several.run(method, rounds=1, epochs=1).task
        if not method.private(net):
            raise NotApplicable("private() names nothing")
        return _engines(lambda e: laws.private_stays_private(several, method, e))

    def any_order() -> str:
        if len(problem.data) == 1:
            raise NotApplicable("there is one client alone")
        return laws.uploads_in_any_order(problem, method)

    yield laws.STACKED, stacked
    yield laws.WIRE, lambda: laws.wire_changes_nothing(problem, method)
    yield laws.NEUTRAL, is_parent
    yield laws.PRIVATE, private
    yield laws.INVISIBLE, lambda: laws.cohorts_are_invisible(problem, method)
    yield laws.REPEATED, lambda: _engines(lambda e: laws.same_seed_same_bits(problem, method, e))
    yield laws.ALIASES, lambda: _engines(lambda e: laws.nothing_aliases(problem, method, e))
    yield laws.ORDER, any_order


ENGINES = ("one", "stacked")


def _engines(law: Callable[[str], str]) -> str:
    """Return the evidence of a law in both engines; in the engine one alone, where the model cannot be stacked."""
    evidence = law("one")
    try:
        return law("stacked")
    except InputError as error:
        if error.field != "engine":
            raise
        return evidence


def _all(law: Callable[[Any], str], cases: Sequence[Any]) -> str:
    """Return the evidence of the last of several cases of a law."""
    return [law(case) for case in cases][-1]


def _outcome(law: str, run: Callable[[], str]) -> Outcome:
    """Run a law; return what became of it."""
    began = time.perf_counter()
    state: State = "failed"
    try:
        state, why = "passed", run()
    except NotApplicable as reason:
        state, why = "not applicable", str(reason)
    except Broken as broken:
        state, why = "failed", broken.what
    except InputError as error:
        unstacked = error.field == "engine" and law in (laws.STACKED, laws.INVISIBLE)
        state, why = (
            ("not applicable", f"the model cannot be stacked: {error.right}") if unstacked else ("failed", str(error))
        )
    except (HookError, TrainingError) as error:
        state, why = "failed", str(error)
    except Exception as error:
        state, why = "failed", f"{type(error).__name__}: {first_line(error)}"
    return Outcome(law, state, time.perf_counter() - began, printable(shorten(why)))


def _hooks(problem: Problem, method: Method) -> str:
    """Call every hook once, with its arguments compared before and after."""
    values = {**problem.settings, **problems.needed(method)}
    for engine in ENGINES[::-1]:  # stacked first, in which a hook that reads a value is refused
        training = fields.build(Training, {**values, "engine": engine})
        try:
            ready = prepare.prepare(method, problem.model, problem.data, problem.head, training)
        except InputError as error:
            if error.field == "engine" and engine == "stacked":
                continue  # the model cannot be stacked
            raise
        rehearse(ready.trainer.bench, ready.trainer.name, ready.trainer.together)
        break
    return "every hook was called, alone and, where the model allows it, stacked"


def _variants(objective: str, sizes: Sequence[tuple[int, int]], run: Mapping[str, Any]) -> tuple[Problem, Problem]:
    """Return a problem without dropout, and one without a client of one sample, which BatchNorm turns into zeros."""
    quiet = Problem(problems.make("plain"), problems.ragged(sizes), run)
    pairs = [(max(train, 5), test) for train, test in sizes]
    several = Problem(problems.model(objective), problems.federation(objective, pairs), run)
    return (quiet if objective == "classification" else several), several


def _others(sizes: Sequence[tuple[int, int]], run: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of classification with other models: linear layers alone, and a convolution."""
    for name in ("plain", "convolved"):
        yield Problem(problems.make(name), problems.ragged(sizes), run)


def _module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the model; one that a function makes, with weights of the seed."""
    if not isinstance(model, nn.Module) and callable(model):
        model = models.seeded(model, seed)
    if not isinstance(model, nn.Module):
        raise InputError("model", Shown(type(model).__name__), "an nn.Module, or a function that makes one")
    return model


def _check_arguments(
    method: Method,
    data: Federation | None,
    objective: str,
    clients: int,
    neutral: Mapping[str, Any] | None,
    parent: Method | None,
    of: str,
    settings: Mapping[str, Any],
) -> None:
    """Refuse what cannot be checked, before any work."""
    for name, value in (("method", method), *([("parent", parent)] if parent is not None else [])):
        if isinstance(value, type) or not isinstance(value, Method):
            raise InputError(name, Shown(repr(value)), "a method such as fedstill.PFedSD(), not its class or name")
    if data is not None and not isinstance(data, Federation):
        raise InputError(
            "data", Shown(type(data).__name__), "a fedstill.Federation, for example Federation.from_arrays"
        )
    if objective not in OBJECTIVES:
        raise InputError("objective", objective, nearest(str(objective), OBJECTIVES))
    if isinstance(clients, bool) or not isinstance(clients, int) or not 1 <= clients <= 100:
        raise InputError("clients", clients, "a whole number at least 1 and at most 100")
    if (neutral is None) is not (parent is None):
        raise InputError("neutral", neutral, "given together with parent, the method that it is neutral to")
    known = [f.name for f in fields.fields_of(type(method))]
    for name in neutral or {}:
        if name not in known:
            raise InputError("neutral", name, f"a field of {type(method).__name__}: {nearest(name, known)}")
    if of not in ("both", "generic", "personal"):
        raise InputError("of", of, "'both', 'generic' or 'personal'")
    fixed = {
        "engine": "the laws try every engine",
        "cohort": "the laws try cohorts of several sizes",
        "dtype": "the laws compare in float64, to rounding",
    }
    for name in fixed.keys() & settings.keys():
        raise InputError(name, settings[name], f"left out: {fixed[name]}")
    fields.build(Training, {**problems.SETTINGS, **settings})
    if "device" in settings:
        prepare.pick_device(str(settings["device"]))
