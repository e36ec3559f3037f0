"""Local work that can be interrupted: what is kept of a client's round while it trains, so that another process goes on with it.

The engine `one` says after each step where it is; whoever keeps the state decides when it is worth keeping. A client that goes on
has the same bits as one that was never interrupted, since all that a step needs is in the state or follows from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..core.tree import Tree


@dataclass(frozen=True)
class Halfway:
    """Where local work stands: so many steps of a phase (its place among the method's) are done.

    `state` has "local", as the phase began or, for a method with a `step` of its own, as it is; "total", the sum of the
    losses; "kept", the optimiser's state that earlier phases leave for the next round; and what the phase has changed: "params",
    "optimizer", "before" (`Phase.after_epoch`). In a perceptron's own loop "total" ends with the phase before, and "summed" is
    this phase's.
    """

    phase: int
    step: int
    state: Tree


class Savepoint(Protocol):
    """Keeps the state of one client's work."""

    def load(self) -> Halfway | None:
        """Return what was kept; None where the work begins."""

    def due(self, phase: int, step: int, epoch: bool) -> bool:
        """Return whether the state should be kept now, after this step of a phase; `epoch`: it ends an epoch."""

    def save(self, halfway: Halfway) -> None:
        """Keep the state in place of the one before."""


@dataclass(frozen=True)
class Course:
    """One phase of a client's work, with a savepoint."""

    savepoint: Savepoint
    phase: int
    steps: int  # of the phase
    per_epoch: int
    last: bool  # whether it is the last phase; its end is not kept, since the reply follows
    halfway: Halfway | None  # where the phase goes on
    kept: Tree = field(default_factory=dict)  # the optimiser's state that earlier phases leave for the next round

    @property
    def done(self) -> int:
        """The steps that are done already."""
        return 0 if self.halfway is None else self.halfway.step

    def due(self, step: int) -> bool:
        """Return whether the state after so many steps of the phase should be kept."""
        if self.last and step == self.steps:
            return False
        return self.savepoint.due(self.phase, step, step % self.per_epoch == 0 or step == self.steps)

    def save(self, step: int, state: Tree) -> None:
        """Keep the state after so many steps of the phase."""
        self.savepoint.save(Halfway(self.phase, step, {**state, "kept": self.kept} if self.kept else state))
