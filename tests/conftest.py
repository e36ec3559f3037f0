"""Two workers on two cores: one thread each, so that they do not wait for one another. And what many tests watch with."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from fedstill.run import session

from .problems import SETTINGS, Spy

torch.set_num_threads(1)


@pytest.fixture
def spied(monkeypatch):
    """Every reply that passes, each with what its client keeps; a run that names no transport is carried by `spied.transport`."""
    spy = Spy()
    monkeypatch.setattr(session, "LocalTransport", spy.transport)
    return spy


@pytest.fixture
def traced(monkeypatch):
    """Runs with the shared settings trace their stacked phases, as on a GPU, but on a CPU and without graphs."""
    monkeypatch.setitem(SETTINGS, "compile", "traced")
