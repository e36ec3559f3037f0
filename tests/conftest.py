"""Two workers on two cores: one thread each, so that they do not wait for one another."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

import pytest

from fedstill import simulation
from fedstill.transport.local import LocalTransport


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
