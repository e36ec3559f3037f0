"""The Device Sampler: who is asked in a round. A sampler is a function of the plan, the round and who is alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..plan import Plan

Sampler: TypeAlias = Callable[[Plan, int, Sequence[int], int], list[int]]


def count(clients: int, participation: float) -> int:
    """How many clients a share of them is: rounded to the nearest, at least one."""
    return max(1, min(clients, int(participation * clients + 0.5)))


def uniform(plan: Plan, round: int, alive: Sequence[int], wanted: int) -> list[int]:
    """`wanted` of the living clients, each as likely as the other, none twice; ascending."""
    return plan.cohort(round, alive, min(wanted, len(alive)))
