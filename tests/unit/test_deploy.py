"""A hub's desk and sites' stations in one process, without a network: the numbers, and what outlives a stop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstill as fs
from fedstill.core import tree
from fedstill.data import Federation
from fedstill.deploy import hub as hubs
from fedstill.deploy.data import Own
from fedstill.deploy.site import Station, Unreachable, attend
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal

NAMES = ("a", "b", "c")
HELD: dict[str, Any] = {"rounds": 3, "dtype": "float64", "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Three clients of different sizes and classes."""
    rng = np.random.default_rng(0)
    centres, clients = rng.normal(size=(4, 6)), []
    for k in range(3):
        y = rng.integers(0, 4, 40 + 9 * k)
        x = (centres[y] * (1 + k) + rng.normal(size=(len(y), 6))).astype(np.float32)
        clients.append((x[:-12], y[:-12], x[-12:], y[-12:]))
    return Federation.from_arrays(clients, classes=4)


TRACING = threading.Lock()


class OneAtATime(Station):
    """A station that shares its process: torch.fx, which follows models, is not made for several threads."""

    def open(self, about: Any) -> None:
        with TRACING:
            super().open(about)

    def handle(self, data: bytes) -> bytes:
        with TRACING:
            return super().handle(data)


class Party:
    """Sites as threads of this process."""

    def __init__(self, federation: Federation, folder: Path, hold: float = 0.2) -> None:
        self.federation, self.folder = federation, folder
        self.desk = hubs.Desk(hold=hold)
        self.stops: dict[str, threading.Event] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.cut: set[str] = set()  # sites whose network is cut

    def start(self, name: str) -> None:
        own = Own(self.federation.clients[NAMES.index(name)], self.federation.classes)
        station = OneAtATime(self.folder / name, own, device="cpu")

        def talk(header: Any, body: bytes) -> Any:
            if name in self.cut:
                raise Unreachable("cut")
            return self.desk.answer(name, header, body)

        self.stops[name] = threading.Event()
        self.threads[name] = threading.Thread(target=attend, args=(station, talk, self.stops[name]), daemon=True)
        self.threads[name].start()

    def stop(self, *names: str) -> None:
        for name in names or tuple(self.stops):
            self.stops[name].set()
            self.threads[name].join(20)

    def run(self, method: Any, out: str = "run", **changed: Any) -> fs.Run:
        assert not self.desk.wait_for(NAMES, 20)
        more = {name: changed.pop(name) for name in ("deadline", "progress") if name in changed}
        experiment = Experiment(method=method, **{**HELD, **changed})
        return hubs.run(self.desk, experiment, NAMES, self.folder / out, **more)

    def personal(self, name: str) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / name).glob("*/personal.safetensors")
        return load_file(file)


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:
    made = Party(federation, tmp_path)
    for name in NAMES:
        made.start(name)
    yield made
    made.stop()


def local(federation: Federation, method: Any, **changed: Any) -> fs.Run:
    experiment = Experiment(method=method, **{**HELD, **changed})
    return fs.run(experiment, federation=federation)


@pytest.mark.parametrize(
    "method", [METHODS[m]() for m in ("pfedsd", "scaffold", "fedrep", "spectral")], ids=lambda m: m.id
)
def test_sites_give_the_numbers_of_one_process(method: Any, federation: Federation, party: Party) -> None:
    one, sites = local(federation, method), party.run(method)
    merged = dict(tree.leaves(sites.server))
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    for k, name in enumerate(NAMES):
        kept = party.personal(name)
        assert kept.keys() == one.served(k).keys()
        for entry, leaf in one.served(k).items():
            torch.testing.assert_close(kept[entry], leaf, rtol=0, atol=1e-10)
    numbers = ("participants", "personal_clients", "loss", "personal", "generic", "steps")
    for a, b in zip(one.history, sites.history, strict=True):
        for number in numbers:
            assert a.get(number) == pytest.approx(b.get(number), abs=1e-10), number
    checkpoint = Journal(party.folder / "run").load(torch.device("cpu"))
    assert checkpoint is not None
    # what the hub keeps of a client is numbers: its state is at the site
    for _, state in checkpoint.clients():
        assert list(state) == ["report"]
    assert hubs.roster(sites.history, NAMES) == []
