"""The Device Sampler: who is asked in a round.

A sampler is a function of a `Scene`, which holds all that it may go by, and of how many clients are wanted. One of your own:

    @sampler("largest")
    def largest(scene: Scene, wanted: int) -> Sequence[int]:
        return scene.clients[np.argsort(-scene.samples, kind="stable")[:wanted]]

and `--sampler largest` (or `simulate(..., sampler="largest")`) takes it. What it draws, it draws from `scene.plan` and
`scene.round`, so that a run can be repeated; what it remembers is in the scene, and comes from the run's records.
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
    """What a sampler may go by; arrays have an entry for each of `clients`."""

    plan: Plan
    round: int
    clients: Ints  # who can be asked now, ascending
    samples: Ints  # training samples
    availability: Floats  # share of the rounds in which a client can be asked
    losses: Floats  # last known training loss; ∞: none is known
    asked: Ints  # how often a client has been asked
    candidates: int = 0  # d of power-of-choice; 0: twice as many as wanted

    def draw(self, weights: Floats, wanted: int) -> NDArray[np.intp]:
        """Places of `wanted` clients, drawn one after another without replacement, each by its weight (which is above 0).

        The smallest of Exp(1) / weight (Efraimidis and Spirakis, 2006): no client's draw depends on who else is there.
        """
        keys = keyed.keys(self.plan.seed, keyed.COHORT, self.round, self.clients.astype(np.uint64))
        u = ((keys >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
        return np.argsort(-np.log(u) / weights, kind="stable")[:wanted]


Sampler: TypeAlias = Callable[[Scene, int], "Sequence[int] | Ints"]
SAMPLERS: dict[str, Sampler] = {}
BY_PLAN = ("uniform", "size", "available", "round-robin")  # do not look at what training gave


def sampler(name: str) -> Callable[[Sampler], Sampler]:
    """Make a sampler known by a name."""

    def known(function: Sampler) -> Sampler:
        SAMPLERS[name] = function
        return function

    return known


def count(clients: int, participation: float) -> int:
    """How many clients a share of them is: rounded to the nearest, at least one."""
    return max(1, min(clients, int(participation * clients + 0.5)))


@sampler("uniform")
def uniform(scene: Scene, wanted: int) -> Sequence[int] | Ints:
    """Each as likely as the other, none twice."""
    return scene.plan.cohort(scene.round, scene.clients.tolist(), wanted)


@sampler("size")
def size(scene: Scene, wanted: int) -> Sequence[int] | Ints:
    """The more samples, the likelier."""
    return scene.clients[scene.draw(np.maximum(scene.samples, 1).astype(float), wanted)]


@sampler("available")
def available(scene: Scene, wanted: int) -> Sequence[int] | Ints:
    """Of those that are there now, the ones that are there more often the likelier."""
    return scene.clients[scene.draw(scene.availability, wanted)]


@sampler("power-of-choice")
def power_of_choice(scene: Scene, wanted: int) -> Sequence[int] | Ints:
    """d candidates by size, of whom those with the highest last known loss; who was never heard of comes first.

    Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022 (rpow-d).
    """
    few = scene.draw(np.maximum(scene.samples, 1).astype(float), max(wanted, scene.candidates or 2 * wanted))
    return scene.clients[few[np.argsort(-scene.losses[few], kind="stable")[:wanted]]]


@sampler("round-robin")
def round_robin(scene: Scene, wanted: int) -> Sequence[int] | Ints:
    """Whoever has been asked least often; each pass through the clients in an order of its own."""
    order = keyed.keys(scene.plan.seed, keyed.COHORT, scene.asked.astype(np.uint64), scene.clients.astype(np.uint64))
    return scene.clients[np.lexsort((order, scene.asked))[:wanted]]


@dataclass
class Memory:
    """What a run remembers for its sampler, from round to round; its records hold all of it."""

    losses: dict[int, float] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, history: Sequence[Mapping[str, Any]]) -> Memory:
        """As it was after these records."""
        memory = cls()
        for record in history:
            memory.take(record)
        return memory

    def take(self, record: Mapping[str, Any]) -> None:
        """A round is over."""
        self.losses.update({int(k): loss for k, loss in record.get("losses", {}).items()})
        for k in record.get("asked", ()):
            self.asked[k] = self.asked.get(k, 0) + 1

    def scene(
        self, plan: Plan, round: int, clients: Sequence[int], samples: Ints, availability: Floats, candidates: int = 0
    ) -> Scene:
        """What a sampler may go by in this round."""
        who = np.sort(np.asarray(clients, dtype=np.int64))
        losses, asked = np.full(len(samples), np.inf), np.zeros(len(samples), dtype=np.int64)
        losses[list(self.losses)] = list(self.losses.values())
        asked[list(self.asked)] = list(self.asked.values())
        return Scene(plan, round, who, samples[who], availability[who], losses[who], asked[who], candidates)
