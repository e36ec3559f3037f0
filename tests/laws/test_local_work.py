"""Law 1 for every method with other local work: optimisers, schedules, clipping and augmentation, stacked and one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import fedstill as fs

from ..problems import distance, make, ragged, run, states
from .table import ROWS, Row

IMAGES = "crop:1,flip,cutout:1,jitter:0.3"
# ε is larger than usual, for Adam divides by it what rounding leaves of a gradient of 0 (a bias before BatchNorm).
LOCAL: dict[str, dict[str, Any]] = {
    "sgd": {"lr_schedule": "step", "lr_schedule_over": "steps", "lr_step": 2, "warmup": 2, "lr": 0.02},
    "adamw": {
        "optimizer": "adamw", "adam_eps": 1e-3, "lr_schedule": "cosine", "warmup": 1, "clip_gradient": 0.7, "lr": 0.01,
    },
}  # fmt: skip
ONE_EACH = list({row.method.id: row for row in reversed(ROWS)}.values())
UNMIXED = (fs.FedFomo, fs.FedPAC)  # which refuse mixup


def local_work(row: Row, kind: str) -> tuple[fs.Method, dict[str, Any]]:
    """A method and settings with all of this, but what the method refuses."""
    method = row.method
    if isinstance(method, fs.SCAFFOLD):
        method = dataclasses.replace(method, control="gradient")
    if isinstance(method, fs.L2GD):
        method = dataclasses.replace(method, p=0.5)
    mixup = "" if isinstance(method, UNMIXED) else ",mixup:0.4"
    return method, {"rounds": 2, "epochs": 1, **row.settings, **LOCAL[kind], "augment": IMAGES + mixup}


@pytest.mark.parametrize("row", ONE_EACH, ids=lambda row: row.method.id)
@pytest.mark.parametrize("kind", LOCAL)
def test_1_stacked_equals_one_with_other_local_work(row: Row, kind: str) -> None:
    method, how = local_work(row, kind)
    data = ragged(shape=(1, 2, 2))
    one, stacked = (run(method, "convolved", data, engine=engine, **how) for engine in ("one", "stacked"))
    assert distance(states(one), states(stacked)) < 1e-10
    for a, b in zip(one.history, stacked.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
    begun = make("convolved").state_dict()
    assert any((v - begun[n]).abs().max() > 1e-4 for s in states(one).values() for n, v in s.items())
