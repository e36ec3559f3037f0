"""The job of `fedstill sweep METHOD FIELD=VALUE,VALUE… [FIELD=VALUE,…]`: one experiment for each value, or combination of two."""

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
OF_THE_DATA = ("participation", "partition", "clients")  # and these
SWITCH = {"on": True, "true": True, "off": False, "false": False}


def plan_sweep(base: Experiment, texts: Sequence[str], flag_values: Mapping[str, Any]) -> Job:
    """Return the job that FIELD=VALUE,VALUE… and flags make of a base experiment: every combination of one or two fields."""
    axes = [_axis(base, text, flag_values) for text in texts]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise InputError("field", names[0], "another one than the other field that is swept")
    experiments = {}
    for values in itertools.product(*(values.items() for _, values in axes)):
        label = ",".join(f"{name}={shown}" for name, (shown, _) in zip(names, values, strict=True))
        chosen = {**flag_values, **{name: value for name, (_, value) in zip(names, values, strict=True)}}
        with flags.named(chosen):
            job = plan([base.method], base, chosen, SWEEP)
        experiments[label] = job.first
    if any(a == b for a, b in itertools.combinations(experiments.values(), 2)):
        word, _, listed = texts[0].partition("=") if len(texts) == 1 else (", ".join(texts), "", "")
        raise InputError(word, listed, "values that differ from one another")
    return dataclasses.replace(job, experiments=experiments)


def _axis(base: Experiment, text: str, flag_values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the field of FIELD=VALUE,VALUE…, and its values as they are written, each with what a flag would be given.

    Values are divided by ; where there is one, since a partition may have a comma.
    """
    word, _, listed = text.partition("=")
    name, values = word.replace("-", "_"), [v.strip() for v in listed.split(";" if ";" in listed else ",")]
    method = type(base.method)
    types = {
        f.name: settings.types_of(Experiment)[f.name]
        for f in settings.fields_of(Experiment)
        if f.metadata["group"] in GROUPS or f.name in OF_THE_DATA
    }
    types |= {f.name: settings.types_of(method)[f.name] for f in settings.fields_of(method)}
    types = {name: kind for name, kind in types.items() if get_origin(kind) is not tuple}
    if name not in types:
        right = f"a field of {method.id} or of local training, or {', '.join(OF_THE_DATA)}: {nearest(name, types)}"
        raise InputError("field", word, right)
    if len(values) < 2 or not all(values) or not listed.isascii():
        raise InputError(word, listed, f"two or more values, such as {word}={_example(name, types[name])}")
    if name in flag_values:
        raise InputError(flags.flag(name), flag_values[name], f"left out: {word} is what is swept")
    if len(set(values)) < len(values):
        raise InputError(word, listed, "values that differ from one another")
    if any("/" in value or value in (".", "..") for value in values):
        raise InputError(word, listed, "values without /, since each is the name of a folder")
    parsed = _switched(word, values) if types[name] is bool else values
    return name, dict(zip(values, parsed, strict=True))


def _example(name: str, kind: Any) -> str:
    """Return values of this field, as an example."""
    if name == "partition":
        return "dirichlet:0.1,shards:2"
    if get_origin(kind) is Literal:
        return ",".join(map(str, get_args(kind)))
    return {bool: "on,off", int: "1,5,10"}.get(kind, "0.1,0.5,1")


def _switched(word: str, values: Sequence[str]) -> list[bool]:
    """Return values such as "on" and "off" as true and false."""
    for value in values:
        if value not in SWITCH:
            raise InputError(word, value, "on or off")
    return [SWITCH[value] for value in values]
