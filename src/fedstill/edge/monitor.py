"""The System Monitor: reads a device's status and decides whether the device accepts work. The round continues without a device
that refuses.

At a real site the numbers come from the machine (`psutil` where it is installed, else the standard library); in a simulation
they are drawn from (seed, round, client): see `timing.monitor`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Status:
    """Device status. Shares are between 0 and 1; unknown values assume the best case."""

    battery: float = 1.0  # charge; 1 also on mains power
    load: float = 0.0  # share of the processor that is in use
    memory: float = 1.0  # share of the memory that is free
    network: float = float("inf")  # bytes a second; 0: no link


@dataclass(frozen=True)
class Policy:
    """The status that a device needs to accept work."""

    battery: float = 0.0  # at least
    load: float = 1.0  # at most
    memory: float = 0.0  # at least
    network: float = 0.0  # bytes a second, more than this

    def refusal(self, status: Status) -> str | None:
        """Return the reason for which the device refuses work; None if it accepts."""
        if status.battery < self.battery:
            return f"battery at {status.battery:.0%}, below {self.battery:.0%}"
        if status.load > self.load:
            return f"load at {status.load:.0%}, above {self.load:.0%}"
        if status.memory < self.memory:
            return f"{status.memory:.0%} of the memory free, below {self.memory:.0%}"
        if status.network <= self.network:
            return "the network is too slow" if status.network else "no network"
        return None


class Monitor(Protocol):
    """Decides for the devices behind a controller whether they accept work."""

    def refusal(self, round: int, client: int) -> str | None:
        """Return the reason for which a client refuses to work in a round; None if it accepts."""


@dataclass(frozen=True)
class SystemMonitor:
    """The monitor of a real site: one policy, applied to this machine's status."""

    policy: Policy

    def refusal(self, round: int, client: int) -> str | None:
        """Return the reason for which this machine refuses work; None if it accepts."""
        return self.policy.refusal(read())


def read() -> Status:
    """Return this machine's current status."""
    try:
        import psutil  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        busy = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
        return Status(load=min(1.0, busy))
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    charge = 1.0 if battery is None or battery.power_plugged else battery.percent / 100
    memory = psutil.virtual_memory()
    links = [link for name, link in psutil.net_if_stats().items() if link.isup and not name.startswith("lo")]
    speed = max((link.speed * 1e6 / 8 or float("inf") for link in links), default=0.0)  # 0 Mbit/s means unknown
    load = min(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1))
    return Status(charge, load, memory.available / memory.total, speed)
