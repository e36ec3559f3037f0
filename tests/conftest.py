"""Two workers on two cores: one thread each, so that they do not wait for one another. And what many tests watch with."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from fedstill.run import simulation
from fedstill.transport.local import LocalTransport

from .problems import SETTINGS

torch.set_num_threads(1)


@pytest.fixture
def spied(monkeypatch):
    """Every reply that passes, each with what its client keeps."""
    seen = []

    class Spy(LocalTransport):
        def replies(self, timeout=None):
            for reply in super().replies(timeout):
                seen.append((reply, self.controller.store.get(reply.client)))
                yield reply

    monkeypatch.setattr(simulation, "LocalTransport", Spy)
    return seen


@pytest.fixture
def traced(monkeypatch):
    """Runs with the shared settings trace their stacked phases, as on a GPU, but on a CPU and without graphs."""
    monkeypatch.setitem(SETTINGS, "compile", "traced")
