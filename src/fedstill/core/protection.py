"""Settings that protect a federation: which uploads are accepted, what a merge tolerates, and what uploads may reveal.

The groups stand beside those of `core.training`; `run.experiment.Training` inherits from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .settings import Group, setting


@dataclass(frozen=True, kw_only=True)
class Acceptance(Group):
    """Which replies the server accepts, and what happens when a client's own training diverges."""

    on_divergence: Literal["stop", "refuse"] = setting(
        "stop", "where a client's own training diverges: stop the run, or refuse its upload", group="server"
    )


@dataclass(frozen=True, kw_only=True)
class Robustness(Group):
    """What the server makes of uploads of which some may be forged; and, for research, simulated attackers."""


@dataclass(frozen=True, kw_only=True)
class Privacy(Group):
    """Differential privacy of what clients upload: DP-SGD at the client, or noise at the server's merge."""
