"""The command `check`: the laws for one method, one of somebody's own above all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from .. import models, testing
from ..core import own, settings
from ..core.errors import InputError, Shown, TrainingError, nearest
from ..core.method import Method
from ..core.objective import OBJECTIVES
from ..methods import METHODS, get
from ..report.fit import Order, hanging
from . import flags, screen
from .screen import say

ABOUT = (
    "Put a method under the laws: stacked equals one at a time, the wire changes nothing, neutral settings give the parent, "
    "what is private is never uploaded, cohorts and padding are invisible, the same seed gives the same bits, trees share no "
    "memory, the order of uploads is invisible. It runs the method on small problems in float64 and takes some seconds. The exit "
    "status is 1 where a law does not hold. In Python: fedstill.testing.check(MyMethod())."
)
EXAMPLES = (
    "fedstill check my_method.py:MOON",
    "fedstill check my_method.py:MOON --mu 0.5 --neutral mu=0 --parent fedavg",
    "fedstill check my_package.methods:MOON --objective regression --clients 3",
    "fedstill check my_method.py:MOON --model my_models.py:Net",
)
OF = ("both", "generic", "personal")
SHAPE, CLASSES = (4,), 3  # of the small problem's samples


def check(argv: Sequence[str]) -> None:
    """`fedstill check METHOD`."""
    own.allow()
    words = [word for word in argv if not word.startswith("-")]
    named = next((word for word in words if own.is_reference(word) or word in METHODS), "")
    kind = get(named) if named else None
    parser = _parser(kind)
    given, words = parser.read(argv)
    if "help" in given:
        parser.print_help()
        return
    if kind is None or len(words) != 1:
        shown = Shown(" ".join(words) or "nothing")
        raise InputError(
            "method", shown, f"one method: my_method.py:MOON, or {nearest(words[0] if words else '', METHODS)}"
        )
    with flags.named(given):
        method = kind(**flags.take(kind, given))
        report = testing.check(method, raises=False, **_options(kind, method, given))
    room = screen.width()
    cells = [(heading or "result", texts) for heading, texts in report.columns()]
    screen.table(cells, [False] * len(report.outcomes), [report.summary()], False, Order(always=("result",)))
    for outcome in report.outcomes:
        if outcome.why:
            say(hanging(f"  {outcome.law}: ", outcome.why, room))
    if not report.passed:
        broken = ", ".join(outcome.law for outcome in report.failed)
        raise TrainingError(f"{report.method} does not obey: {broken}")


def _parser(kind: type[Method] | None) -> flags.Parser:
    """Return the parser of the command's flags, and of the method's own."""
    parser = flags.Parser("check", ABOUT, "METHOD|METHOD.py:CLASS", EXAMPLES)
    group = parser.add_argument_group("what the laws are tried on")
    add = functools.partial(flags.plain, parser, group)
    kinds = ", ".join(OBJECTIVES)
    add("objective", f"what is learned: {kinds} [default classification]", "NAME", f"one of {kinds}")
    add("clients", "how many clients, of different sizes [at least 1; default 5]", "N", "a whole number at least 1")
    help = "a model of your own instead of the small ones: FILE.py:CLASS or MODULE:CLASS, for samples of 4 numbers in 3 classes"
    add("model", help, "FILE.py:CLASS", "a reference to code, such as my_models.py:Net")
    add(
        "neutral",
        "values with which the method must be its parent, for example lam=0,mu=0",
        "FIELD=VALUE",
        "FIELD=VALUE",
    )
    add("parent", "the method that it must then equal, for example fedavg", "METHOD", "a method's name")
    add("of", f"whose models must be equal: {', '.join(OF)} [default both]", "NAME", f"one of {', '.join(OF)}")
    if kind is not None:
        own_fields = [field.name for field in settings.fields_of(kind) if field.name not in parser.takes]
        flags.add(parser, kind, own_fields)
    return parser


def _options(kind: type[Method], method: Method, given: dict[str, Any]) -> dict[str, Any]:
    """Return what `testing.check` takes, from the flags."""
    options: dict[str, Any] = {name: given[name] for name in ("objective", "of") if name in given}
    options["clients"] = flags.whole_number(given, "clients", 5)
    if "model" in given:
        options["model"] = functools.partial(models.build, given["model"], SHAPE, CLASSES)
    if "parent" in given or "neutral" in given:
        for name, right in (("neutral", "given too, for example lam=0"), ("parent", "given too, for example fedavg")):
            if name not in given:
                raise InputError(flags.flag(name), Shown("nothing"), right)
        options["neutral"] = _neutral(kind, given["neutral"])
        options["parent"] = get(given["parent"])()
        dataclasses.replace(method, **options["neutral"])  # refuses a value outside its limits
    return options


def _neutral(kind: type[Method], text: str) -> dict[str, Any]:
    """Return the fields' values from FIELD=VALUE,FIELD=VALUE."""
    pairs = [part.partition("=") for part in text.split(",")]
    known = [field.name for field in settings.fields_of(kind)]
    for name, sign, value in pairs:
        if not sign or not value:
            raise InputError("--neutral", text, "FIELD=VALUE, several with commas, for example lam=0,mu=0")
        if name not in known:
            raise InputError("--neutral", name, f"a field of {kind.__name__}: {nearest(name, known)}")
    types = settings.types_of(kind)
    values = {name: value in ("true", "on", "1") if types[name] is bool else value for name, _, value in pairs}
    return flags.take(kind, values)
