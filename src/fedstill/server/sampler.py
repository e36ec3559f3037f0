"""The Device Sampler: selects the clients that are asked in a round.

A sampler is a function of a `Scene`, which holds everything it may use, and of the number of clients to select. To add one:

    @sampler("largest")
    def largest(scene: Scene, number: int) -> Sequence[int]:
        return scene.clients[np.argsort(-scene.samples, kind="stable")[:number]]

and select it by `--sampler largest` (or `simulate(..., sampler="largest")`). Draw random numbers from `scene.plan` and
`scene.round` only, so that a run can be repeated. The history that a sampler may use is in the scene; it comes from the run's
records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core import plan as keyed
from ..core.plan import Plan

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """The input of a sampler; arrays have an entry for each of `clients`."""

    plan: Plan
    round: int
    clients: Ints  # clients that can be asked now, ascending
    samples: Ints  # training samples
    availability: Floats  # share of the rounds in which a client can be asked
    losses: Floats  # last known training loss; ∞ where none is known
    asked: Ints  # number of rounds in which a client has been asked
    candidates: int = 0  # d of power-of-choice; 0: twice the number to select

    def draw(self, weights: Floats, number: int) -> NDArray[np.intp]:
        """Sample `number` clients without replacement, weighted by `weights` (above 0); return their places in `clients`.

        Takes the smallest of Exp(1) / weight (Efraimidis and Spirakis, 2006): no client's draw depends on the other clients.
        """
        keys = self.plan.words(self.round, self.clients.astype(np.uint64))
        u = ((keys >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
        return np.argsort(-np.log(u) / weights, kind="stable")[:number]


Sampler: TypeAlias = Callable[[Scene, int], "Sequence[int] | Ints"]
SAMPLERS: dict[str, Sampler] = {}
BY_PLAN = ("uniform", "size", "available", "round-robin", "poisson")  # independent of the results of training


def sampler(name: str) -> Callable[[Sampler], Sampler]:
    """Register a sampler under a name."""

    def register(function: Sampler) -> Sampler:
        SAMPLERS[name] = function
        return function

    return register


def count(clients: int, participation: float) -> int:
    """Return the number of clients in a share of them, rounded to the nearest, at least one."""
    return max(1, min(clients, int(participation * clients + 0.5)))


@sampler("uniform")
def uniform(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Sample clients uniformly without replacement."""
    return scene.plan.cohort(scene.round, scene.clients.tolist(), number)


@sampler("size")
def size(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Sample clients weighted by their numbers of training samples."""
    return scene.clients[scene.draw(np.maximum(scene.samples, 1).astype(float), number)]


@sampler("available")
def available(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Sample available clients, weighted by availability."""
    return scene.clients[scene.draw(scene.availability, number)]


@sampler("power-of-choice")
def power_of_choice(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Draw d candidates by size and select those with the highest last known loss; clients without a loss come first.

    Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022 (rpow-d).
    """
    candidates = scene.draw(np.maximum(scene.samples, 1).astype(float), max(number, scene.candidates or 2 * number))
    return scene.clients[candidates[np.argsort(-scene.losses[candidates], kind="stable")[:number]]]


@sampler("round-robin")
def round_robin(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Select the clients asked least often; each pass through the clients has a random order of its own."""
    order = keyed.keys(scene.plan.seed, keyed.COHORT, scene.asked.astype(np.uint64), scene.clients.astype(np.uint64))
    return scene.clients[np.lexsort((order, scene.asked))[:number]]


@sampler("poisson")
def poisson(scene: Scene, number: int) -> Sequence[int] | Ints:
    """Sample each client by itself, so that `number` are selected on average: what an ε of clients that are sampled assumes."""
    keys = scene.plan.words(scene.round, scene.clients.astype(np.uint64))
    u = ((keys >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    return scene.clients[u * len(scene.clients) < number]


@dataclass
class Memory:
    """Losses and counts that a sampler may use in later rounds; all of it can be read from the run's records."""

    losses: dict[int, float] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, history: Sequence[Mapping[str, Any]]) -> Memory:
        """Rebuild the memory from a run's records."""
        memory = cls()
        for record in history:
            memory.take(record)
        return memory

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a round's record."""
        self.losses.update({int(k): loss for k, loss in record.get("losses", {}).items()})
        for k in record.get("asked", ()):
            self.asked[k] = self.asked.get(k, 0) + 1

    def scene(
        self, plan: Plan, round: int, clients: Sequence[int], samples: Ints, availability: Floats, candidates: int = 0
    ) -> Scene:
        """Return the sampler's input for a round."""
        ids = np.sort(np.asarray(clients, dtype=np.int64))
        losses, asked = np.full(len(samples), np.inf), np.zeros(len(samples), dtype=np.int64)
        losses[list(self.losses)] = list(self.losses.values())
        asked[list(self.asked)] = list(self.asked.values())
        return Scene(plan, round, ids, samples[ids], availability[ids], losses[ids], asked[ids], candidates)
