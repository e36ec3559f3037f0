"""Groups of settings: each checks itself, and what a group calls unused changes nothing, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

import fedstill as fs
from fedstill.core import settings
from fedstill.core.protection import Acceptance, Privacy, Robustness
from fedstill.core.training import (
    Adapters,
    FederationSettings,
    FurtherScores,
    LocalTraining,
    Machine,
    ServerOptimizer,
    Timing,
)

from ..problems import identical, run, states

GROUPS = (
    FederationSettings, LocalTraining, Adapters, ServerOptimizer, Machine, Timing, FurtherScores, Acceptance, Robustness, Privacy
)  # fmt: skip
SLOW = {"profile": "lognormal:0.9", "rounds": 6}
FEDBUFF, FEDASYNC = {**SLOW, "mode": "fedbuff"}, {**SLOW, "mode": "fedasync"}
WAIT_FREE = {**SLOW, "wait_free": "until-download", "personal_cap": 2}

CENTRAL = {"privacy": "central", "rounds": 2, "participation": 1.0}

UNUSED = [  # settings, a field, another value of it
    ({}, "server_lr", 0.5),
    ({}, "server_momentum", 0.1),
    ({}, "server_beta2", 0.1),
    ({}, "server_tau", 0.1),
    ({"server": "momentum"}, "server_beta2", 0.1),
    ({"server": "momentum"}, "server_tau", 0.1),
    ({}, "candidates", 4),
    ({"sampler": "round-robin"}, "candidates", 4),
    ({}, "bank", 1.0),
    ({"engine": "one"}, "cohort", 2),
    ({"engine": "one"}, "compile", "on"),
    ({"engine": "stacked", "fast": False}, "compile", "on"),
    ({"engine": "stacked"}, "workers", 2),
    (SLOW, "late", "fold"),
    ({}, "buffer", 2),
    (FEDASYNC, "buffer", 2),
    ({}, "mixing", 0.1),
    (FEDBUFF, "mixing", 0.1),
    ({}, "staleness", "hinge"),
    ({}, "staleness_a", 2.0),
    ({**FEDASYNC, "staleness": "constant"}, "staleness_a", 2.0),
    ({}, "staleness_b", 0),
    (FEDASYNC, "staleness_b", 0),
    (SLOW, "personal_cap", 1),
    (SLOW, "unselected", "broadcast"),
    ({}, "fine_tune_part", "all"),
    ({"local_steps": 2}, "epochs", 3),
    ({}, "adam_beta1", 0.5),
    ({}, "adam_beta2", 0.5),
    ({}, "adam_eps", 0.1),
    ({"optimizer": "adam"}, "momentum", 0.1),
    ({"optimizer": "adamw"}, "nesterov", True),
    ({"momentum": 0.0}, "keep_optimizer", True),
    ({}, "lr_step", 1),
    ({"lr_schedule": "cosine"}, "lr_decay", 0.5),
    ({}, "lr_schedule_over", "steps"),
    ({}, "join_epochs", 1),
    ({}, "suspected", 2.0),
    ({"average": "median"}, "clip_to", 1.0),
    ({}, "noise_multiplier", 3.0),
    ({}, "clip_norm", 0.1),
    ({}, "privacy_delta", 1e-4),
    ({}, "privacy_budget", 2.0),
    ({}, "accountant", "pld"),
    ({}, "root_samples", 5),
    ({}, "attackers", 2.0),
    ({}, "attack_strength", 1.0),
    ({"attack": "label-flip"}, "backdoor_target", 1),
    ({}, "over_norm", "clip"),
]
USED = [
    ({"optimizer": "adam"}, "adam_beta1", 0.5),
    ({"optimizer": "adamw"}, "adam_eps", 0.1),
    ({"optimizer": "adam"}, "keep_optimizer", True),
    ({"lr_schedule": "step", "lr_decay": 0.5}, "lr_step", 1),
    ({"warmup": 2}, "lr_schedule_over", "steps"),
    ({"server": "momentum"}, "server_lr", 0.5),
    ({"server": "momentum"}, "server_momentum", 0.1),
    ({"server": "adam"}, "server_beta2", 0.1),
    ({"server": "yogi"}, "server_tau", 0.1),
    (FEDBUFF, "server_lr", 0.5),
    ({"sampler": "power-of-choice", "rounds": 6, "participation": 0.4}, "candidates", 5),
    ({**SLOW, "over_select": 1.5}, "late", "fold"),
    ({**SLOW, "deadline": 0.1}, "late", "fold"),
    (FEDBUFF, "buffer", 1),
    (FEDASYNC, "mixing", 0.1),
    (FEDASYNC, "staleness", "constant"),
    (FEDASYNC, "staleness_a", 2.0),
    ({**FEDASYNC, "staleness": "hinge"}, "staleness_b", 0),
    (WAIT_FREE, "personal_cap", 1),
    (WAIT_FREE, "unselected", "broadcast"),
    ({"fine_tune": 10, "lr": 0.5, "rounds": 1}, "fine_tune_part", "all"),
    ({"newcomers": 1}, "join_epochs", 40),
    ({"average": "trimmed-mean", "participation": 1.0}, "suspected", 0.4),
    ({"average": "norm-clip"}, "clip_to", 0.01),
    (CENTRAL, "noise_multiplier", 3.0),
    (CENTRAL, "clip_norm", 0.1),
    (CENTRAL, "privacy_delta", 1e-4),
    (CENTRAL, "accountant", "pld"),
    ({"average": "fltrust", "root_samples": 20}, "root_samples", 10),
    ({"attack": "sign-flip"}, "attackers", 2.0),
    ({"attack": "gaussian"}, "attack_strength", 2.0),
    ({"attack": "backdoor"}, "backdoor_target", 2),
    ({"max_norm": 0.05}, "over_norm", "clip"),
]


def name(case: tuple[dict[str, Any], str, object]) -> str:
    given, field, _ = case
    return "-".join([field, *(f"{key}={value}" for key, value in given.items())])


def outcome(result: fs.Run) -> list[object]:
    """All that a run reports, without what it took."""
    history = [{k: v for k, v in record.items() if "seconds" not in k} for record in result.history]
    return [history, result.after]


def both(given: dict[str, Any], field: str, other: object) -> tuple[fs.Run, fs.Run]:
    method = fs.Ditto() if "wait_free" in given else fs.FedAvg(mean="uniform" if "privacy" in given else "weighted")
    return run(method, **given), run(method, **{**given, field: other})


@pytest.mark.parametrize(("given", "field", "other"), UNUSED, ids=map(name, UNUSED))
def test_what_is_unused_changes_nothing(given, field, other) -> None:
    assert [f for f, _ in fs.Training(**{"device": "cpu", **given, field: other}).without_effect([field])] == [field]
    one, two = both(given, field, other)
    assert identical(states(one), states(two))
    assert outcome(one) == outcome(two)


@pytest.mark.parametrize(("given", "field", "other"), USED, ids=map(name, USED))
def test_what_is_not_unused_changes_something(given, field, other) -> None:
    assert fs.Training(**{"device": "cpu", **given, field: other}).without_effect([field]) == []
    one, two = both(given, field, other)
    assert not identical(states(one), states(two)) or outcome(one) != outcome(two)


def test_every_reason_has_a_case() -> None:
    """Whatever some settings can leave unused is in the table above."""
    kinds = {"mode": ("sync", "fedasync", "fedbuff"), "server": ("mean", "momentum"), "engine": ("one", "stacked")}
    found = set(fs.Training(local_steps=1).unused()) | set(fs.Training(optimizer="adam").unused())
    found |= set(fs.Training(momentum=0.0).unused())
    for mode in kinds["mode"]:
        for server in kinds["server"]:
            for engine in kinds["engine"]:
                for fast in (True, False):
                    given = fs.Training(
                        profile="uniform", mode=mode, server=server, engine=engine, fast=fast, device="cpu"
                    )
                    found |= set(given.unused())
    assert found == {field for _, field, _ in UNUSED}


def test_training_has_the_fields_of_its_groups_and_no_other() -> None:
    fields = [field.name for group in GROUPS for field in settings.fields_of(group)]
    assert [field.name for field in settings.fields_of(fs.Training)] == fields
    assert len(set(fields)) == len(fields)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_group_stands_alone(group) -> None:
    assert isinstance(fs.Training(), group)
    assert settings.values_of(group()).items() <= settings.values_of(fs.Training()).items()


@pytest.mark.parametrize(
    ("group", "values", "says"),
    [
        (LocalTraining, {"nesterov": True, "momentum": 0}, "nesterov = True: should be false, or a momentum above 0"),
        (LocalTraining, {"lr": 10**400}, "lr = inf: should be a number above 0"),
        (FederationSettings, {"participation": 0}, "participation = 0.0: should be a number above 0 and at most 1"),
        (ServerOptimizer, {"server": "adagrad"}, "server = 'adagrad': should be one of: mean, momentum, adam, yogi"),
        (Machine, {"precision": ["tf32"]}, "precision = ['tf32']: should be one of: tf32, bf16, full"),
        (Timing, {"drop": 0.2}, "drop = 0.2: should be 0.0 without a profile of devices, as uniform"),
        (Timing, {"mode": "fedbuff"}, "mode = 'fedbuff': should be 'sync' without a profile of devices, as uniform"),
        (
            Timing,
            {"profile": "uniform", "mode": "fedbuff", "minimum": 2},
            "minimum = 2: should be 1 with mode 'fedbuff', which has no rounds that end",
        ),
        (FurtherScores, {"join_epochs": 0}, "join_epochs = 0: should be a whole number at least 1"),
        (fs.Training, {"sampler": "robin"}, "sampler = 'robin': should be 'round-robin'? (one of: available, "),
        (
            fs.Training,
            {"sampler": "available"},
            "sampler = 'available': should be another without a profile of devices",
        ),
        (fs.Training, {"profile": "phones"}, "profile = 'phones': should be 'uniform'"),
        (
            fs.Training,
            {"profile": "uniform", "wait_free": "until-download", "participation": 0.5},
            "personal_cap = 0: should be a number of steps for clients that are not asked in a round, or unselected",
        ),
    ],
)
def test_a_group_refuses_what_is_illegal_in_it(group, values, says) -> None:
    with pytest.raises(fs.InputError) as refused:
        group(**values)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)
