"""The System Monitor of a simulation: draws each device's status from (seed, round, client) about its profile's means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core import plan
from ..edge.monitor import Policy, Status
from .clock import LEVELS, Clock


@dataclass(frozen=True)
class SimulatedMonitor:
    """Devices whose battery, load and memory are drawn uniformly about their means, as widely as 0 and 1 allow."""

    clock: Clock
    policy: Policy

    def status(self, round: int, client: int) -> Status:
        """Return a device's status in a round."""
        ids, devices = np.array([client]), self.clock.devices
        drawn = {}
        for i, name in enumerate(LEVELS):
            mean = float(getattr(devices, name)[client])
            u = float(self.clock.uniform(plan.MONITOR, round, ids, i)[0])
            drawn[name] = mean + (2 * u - 1) * min(mean, 1 - mean)
        return Status(**drawn, network=float(devices.uplink[client]))

    def refusal(self, round: int, client: int) -> str | None:
        """Return the reason for which a client refuses to work in a round; None if it accepts."""
        return self.policy.refusal(self.status(round, client))
