"""Schedules of the learning rate: a factor by which it is multiplied, from round to round or from step to step.

warm-up     (i+1)/W                     for the first W rounds (or steps), i = 0, 1, …
constant    1
step        decay^⌊j/every⌋             j = i − W
cosine      ½·(1 + cos(π·j/n))          n = N − W of N rounds, or of a client's N steps in a phase
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

ScheduleName: TypeAlias = Literal["constant", "step", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over the rounds, or over a client's steps in each phase of a round."""

    kind: ScheduleName = "constant"
    over: Literal["rounds", "steps"] = "rounds"
    warmup: int = 0
    every: int = 10
    decay: float = 0.1

    def factor(self, i: int, count: int) -> float:
        """Return the factor of round, or step, i of `count`; what lies beyond has that of the last.

        >>> [round(Schedule("cosine", warmup=2).factor(i, 6), 3) for i in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        i = min(max(0, i), max(0, count - 1))
        if i < self.warmup:
            return (i + 1) / self.warmup
        j, n = i - self.warmup, count - self.warmup
        if self.kind == "step":
            return self.decay ** (j // self.every)
        return 0.5 * (1 + math.cos(math.pi * j / n)) if self.kind == "cosine" else 1.0

    def factors(self, count: int) -> list[float]:
        """Return the factors of all of so many steps."""
        return [self.factor(i, count) for i in range(count)]
