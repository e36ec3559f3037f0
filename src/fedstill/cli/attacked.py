"""The job of `fedstill compare METHOD… --attack KIND`: each method clean, attacked under the mean, attacked under each rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import InputError, Shown
from ..core.method import Method
from ..core.protection import Robustness
from ..core.settings import fields_of
from ..run.experiment import Experiment
from . import flags
from .job import Job, plan


def plan_attacked(methods: Sequence[Method], flag_values: Mapping[str, Any]) -> Job:
    """Return the job; a method whose server makes no common mean runs without the rules."""
    attack = flag_values["attack"]
    rules = [rule.strip() for rule in flag_values.get("average", "mean").split(",")]
    if not all(rules) or len(set(rules)) < len(rules):
        right = "a rule, or several that differ, such as median,krum"
        raise InputError(flags.flag("average"), Shown(flag_values["average"]), right)
    experiments: dict[str, Experiment] = {}
    job = None
    for method in methods:
        cases = {"clean": {"attack": "none", "average": "mean"}}
        for rule in dict.fromkeys(["mean", *rules]):
            if rule == "mean" or method.robust:
                cases[f"{attack}-{rule}"] = {"average": rule}
        for name, values in cases.items():
            job = plan([method], Experiment(), {**flag_values, **values}, "compare")
            experiments[f"{method.id}-{name}"] = job.first
    assert job is not None
    ours = {field.name for field in fields_of(Robustness)}
    explicit = [
        name
        for name in job.explicit
        if name not in ours or all(experiment.without_effect([name]) for experiment in experiments.values())
    ]
    return dataclasses.replace(job, experiments=experiments, explicit=tuple(explicit))
