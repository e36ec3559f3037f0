"""A hub and sites as real processes with real certificates on this machine."""

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
import torch
from safetensors.torch import load_file

import fedstill as fs
from fedstill.core import tree
from fedstill.data import Federation
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.deploy import demo, jobs, keeper, process

NAMES = ("a", "b", "c")
HELD: dict[str, Any] = {"rounds": 3, "dtype": "float64", "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


def data() -> Federation:
    """Three clients of different sizes and classes."""
    rng = np.random.default_rng(0)
    centres, clients = rng.normal(size=(4, 6)), []
    for k in range(3):
        y = rng.integers(0, 4, 40 + 9 * k)
        x = (centres[y] * (1 + k) + rng.normal(size=(len(y), 6))).astype(np.float32)
        clients.append((x[:-12], y[:-12], x[-12:], y[-12:]))
    return Federation.from_arrays(clients, classes=4)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return data()


@pytest.fixture(scope="module")
def party(federation: Federation) -> Iterator[demo.Party]:
    with demo.party(federation, NAMES) as made:
        yield made


def run(party: demo.Party, method: str, **changed: Any) -> tuple[Path, list[dict[str, Any]]]:
    job = {name: changed.pop(name) for name in ("deadline", "wait", "name") if name in changed}
    experiment = Experiment(method=METHODS[method](), **{**HELD, **changed})
    folder = jobs.submit(party.hub, experiment, NAMES, **job)
    return folder, list(jobs.follow(folder, lambda: bool(process.running(party.hub.folder))))


def models(party: demo.Party, job: Path) -> list[dict[str, torch.Tensor]]:
    """Each site's own model, as it keeps it."""
    about = json.loads((job / "run" / "deployment.json").read_text())
    return [load_file(party.site(name) / "runs" / about["run"] / "personal.safetensors") for name in NAMES]


def server(job: Path) -> dict[str, torch.Tensor]:
    """What the hub kept of its server's state."""
    checkpoint = Journal(job / "run").load(torch.device("cpu"))
    assert checkpoint is not None
    return dict(tree.leaves(checkpoint.state()["server"]))


@pytest.mark.parametrize("method", ["pfedsd", "scaffold", "fedrep", "spectral"])
def test_three_sites_give_the_numbers_of_one_process(method: str, party: demo.Party, federation: Federation) -> None:
    one = fs.run(Experiment(method=METHODS[method](), **HELD), federation=federation)
    job, history = run(party, method)
    merged = server(job)
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    for k, kept in enumerate(models(party, job)):
        for entry, leaf in one.served(k).items():
            torch.testing.assert_close(kept[entry], leaf, rtol=0, atol=1e-10)
    for a, b in zip(one.history, history, strict=True):
        assert b["participants"] == [0, 1, 2]
        assert b["missing"] == []
        assert a["personal_clients"] == b["personal_clients"]


# ---- kills -----------------------------------------------------------------------------------------------------------
SLOW: dict[str, Any] = {"rounds": 4, "epochs": 60}  # a round of a good half second


def kill(folder: Path) -> None:
    """End the process of a hub or site at once; its keeper starts another."""
    os.kill(int((folder / keeper.PROCESS).read_text()), signal.SIGKILL)


def disturbed(
    party: demo.Party, method: str, at: dict[int, tuple[str, float]], **changed: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Run, and some time after a round is over kill somebody, once each."""
    experiment = Experiment(method=METHODS[method](), **{**HELD, **SLOW, **changed})
    job, history = jobs.submit(party.hub, experiment, NAMES), []
    for record in jobs.follow(job, lambda: bool(process.running(party.hub.folder))):
        history.append(record)
        who, delay = at.pop(record["round"], ("", 0.0))
        if who:
            time.sleep(delay)
            kill(party.folder / who)
    assert not at
    return job, history


def test_killed_hubs_and_sites_come_to_the_same_bits(party: demo.Party) -> None:
    job, history = run(party, "scaffold", **SLOW)
    again, _ = disturbed(party, "scaffold", {1: ("hub", 0.3), 2: ("a", 0.1)})
    before, after = server(job), server(again)
    assert all(torch.equal(before[entry], after[entry]) for entry in before)
    for one, two in zip(models(party, job), models(party, again), strict=True):
        assert all(torch.equal(one[entry], two[entry]) for entry in one)
    final = list(jobs.follow(again, lambda: True))
    assert [record["round"] for record in final] == list(range(1, 5))
    for a, b in zip(history, final, strict=True):
        assert (a["participants"], a["steps"], a["personal_clients"]) == (
            b["participants"],
            b["steps"],
            b["personal_clients"],
        )
