"""Asynchronous and wait-free runs on real processes with real certificates."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.data import Federation
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.deploy import audit, chain, demo, jobs, keeper, process
from fedstill.deploy.page import look, part

NAMES = ("a", "b", "c")
SIZES = (60, 60, 4000)  # training samples: c is slow because it has most of the data


@pytest.fixture(scope="module")
def party() -> Iterator[demo.Party]:
    rng = np.random.default_rng(0)
    centres, clients = rng.normal(size=(4, 6)), []
    for size in SIZES:
        y = rng.integers(0, 4, size + 20)
        x = (centres[y] + rng.normal(size=(len(y), 6))).astype(np.float32)
        clients.append((x[:-20], y[:-20], x[-20:], y[-20:]))
    with demo.party(Federation.from_arrays(clients, classes=4), NAMES) as made:
        yield made


def kill(folder: Path) -> None:
    """End the process of a hub or site at once; its keeper starts another."""
    os.kill(int((folder / keeper.PROCESS).read_text()), signal.SIGKILL)


def test_the_slow_site_keeps_nobody_waiting_and_counts_too_through_kills(party: demo.Party) -> None:
    experiment = Experiment(
        method=METHODS["pfedsd"](),
        mode="fedbuff",
        buffer=2,
        profile="real",
        rounds=24,
        lr=0.05,
        dtype="float64",
        epochs=3,
    )
    job = jobs.submit(party.hub, experiment, NAMES, audit=True)
    shown = ""
    for record in jobs.follow(job, lambda: bool(process.running(party.hub.folder))):
        assert len(record["participants"]) == 2
        if record["round"] == 4:
            kill(party.site("c"))  # in the middle of its round: its order is given out again
        if record["round"] == 8:
            kill(party.hub.folder)
        if record["round"] == 20:
            time.sleep(1.2)  # the hub writes its status every second
            shown = part(look(party.hub))
    history = [json.loads(line) for line in (job / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in history] == list(range(1, 25))
    counted = [k for record in history for k in record["participants"]]
    assert min(counted.count(0), counted.count(1)) > counted.count(2) > 0
    assert max(record["staleness"].get("2", 0) for record in history) > 1
    used = [(k, r["round"] - r["staleness"][str(k)]) for r in history for k in r["participants"]]
    assert len(set(used)) == len(used)  # no update was counted twice
    assert audit.of_hub(job / "run") == []
    assert all(f"<strong>{name}</strong>" in shown for name in NAMES)
    assert "at work" in shown


def test_personal_training_goes_on_between_upload_and_download(party: demo.Party) -> None:
    """The fast sites wait for the slow one, and train their personal models meanwhile."""
    how: dict[str, Any] = {"wait_free": "until-download", "profile": "real", "rounds": 4, "lr": 0.05, "epochs": 2}
    job = jobs.submit(party.hub, Experiment(method=METHODS["ditto"](), **how), NAMES, audit=True)
    history = list(jobs.follow(job, lambda: bool(process.running(party.hub.folder))))
    assert history[0]["personal_steps"] == 0
    assert all(record["personal_steps"] > 0 for record in history[1:])
    about = json.loads((job / "run" / "deployment.json").read_text())
    made = {}
    for name in NAMES:
        entries, wrong = chain.read(party.site(name) / "runs" / about["run"] / "audit" / "log.jsonl")
        assert wrong == []
        made[name] = sum(e["personal"] for e in entries if e["what"] == "reply" and e["kind"] in ("train", "idle"))
    assert min(made["a"], made["b"]) > 0
    assert sum(made.values()) == sum(record["personal_steps"] for record in history)
    assert audit.of_hub(job / "run") == []
