"""The job of `fedstill sweep METHOD FIELD=VALUE,VALUE…`: one experiment for each value."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from ..core import settings
from ..core.errors import InputError, nearest
from ..run.experiment import Experiment
from . import flags
from .job import SWEEP, Job, plan

GROUPS = ("local training", "server")  # whose fields may be swept, besides the method's own
SWITCH = {"on": True, "true": True, "off": False, "false": False}


def plan_sweep(base: Experiment, text: str, flag_values: Mapping[str, Any]) -> Job:
    """Return the job that FIELD=VALUE,VALUE… and flags make of a base experiment."""
    word, _, listed = text.partition("=")
    name, values = word.replace("-", "_"), [value.strip() for value in listed.split(",")]
    method = type(base.method)
    types = {
        f.name: settings.types_of(Experiment)[f.name]
        for f in settings.fields_of(Experiment)
        if f.metadata["group"] in GROUPS
    }
    types |= {f.name: settings.types_of(method)[f.name] for f in settings.fields_of(method)}
    types = {name: kind for name, kind in types.items() if get_origin(kind) is not tuple}
    if name not in types:
        raise InputError("field", word, f"a field of {method.id} or of local training: {nearest(name, types)}")
    if len(values) < 2 or not all(values) or not listed.isascii():
        raise InputError(word, listed, f"two or more values, such as {word}={_example(types[name])}")
    if name in flag_values:
        raise InputError(flags.flag(name), flag_values[name], f"left out: {word} is what is swept")
    experiments = {}
    for value, parsed in zip(values, _switched(word, values) if types[name] is bool else values, strict=True):
        with flags.named({**flag_values, name: parsed}):
            job = plan([base.method], base, {**flag_values, name: parsed}, SWEEP)
        experiments[f"{name}={value}"] = job.first
    equal = any(a == b for a, b in itertools.combinations(experiments.values(), 2))
    if equal or len(experiments) < len(values):
        raise InputError(word, listed, "values that differ from one another")
    return dataclasses.replace(job, experiments=experiments)


def _example(kind: Any) -> str:
    """Return values of this type, as an example."""
    if get_origin(kind) is Literal:
        return ",".join(map(str, get_args(kind)))
    return {bool: "on,off", int: "1,5,10"}.get(kind, "0.1,0.5,1")


def _switched(word: str, values: Sequence[str]) -> list[bool]:
    """Return values such as "on" and "off" as true and false."""
    for value in values:
        if value not in SWITCH:
            raise InputError(word, value, "on or off")
    return [SWITCH[value] for value in values]
