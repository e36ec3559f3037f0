"""Whether a measured number is the published one, and whether the ranking holds: noise from both spreads and numbers of seeds.

The standard error of a difference is √(s_p²/n_p + s_o²/n_o), with the published spread s_p over n_p seeds and ours s_o over n_o.
A difference is within the noise where it is at most t times that, t being Student's at 95 % with Welch's degrees of freedom.
Where the paper prints no ±, its seeds are taken to spread as ours do; where it does not say what its ± is over, the ± counts in
full. Of the numbers of a scaled run there is no verdict: they are none of the paper's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

Kind = Literal["within", "better", "worse", "one seed", "holds", "fails", "differs", "scaled"]
State = Literal["holds", "holds but for ties", "is undecided", "differs"]
AS_PUBLISHED = "as published"
SHARE = 0.95  # of the differences between two equal numbers that are called noise
WORDS = {
    "within": "within the noise",
    "better": "better",
    "worse": "worse",
    "one seed": "one seed: no noise known",
    "holds": "as stated",
    "fails": "not as stated",
    "differs": "another",  # of numbers of which neither less nor more is better
    "scaled": "scaled: not compared",
}


@dataclass(frozen=True)
class Sample:
    """A mean over seeds, the standard deviation over them (n − 1), and how many they were; None: not known."""

    mean: float
    std: float | None = None
    seeds: int | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Return the sample of some values, one a seed."""
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), std, len(values))


@dataclass(frozen=True)
class Verdict:
    """What a measured number is beside the published one; `bound` is the largest difference that is called noise."""

    kind: Kind
    difference: float
    bound: float | None = None

    @property
    def words(self) -> str:
        """The verdict in words."""
        return WORDS[self.kind]


def verdict(
    published: Sample, ours: Sample, *, lower: bool | None = False, relation: str = "=", scaled: bool = False
) -> Verdict:
    """Return the verdict on a number; with `lower` a smaller one is better (None: neither is).

    `relation` says of what kind the published number is.
    """
    difference = ours.mean - published.mean
    if scaled:
        return Verdict("scaled", difference)
    if relation in ("<", ">"):
        return Verdict("holds" if difference * (1 if relation == ">" else -1) > 0 else "fails", difference)
    bound = noise(published, ours)
    if bound is None:
        return Verdict("one seed", difference)
    if abs(difference) <= bound or math.isclose(abs(difference), bound):
        return Verdict("within", difference, bound)
    if lower is None:
        return Verdict("differs", difference, bound)
    return Verdict("better" if (difference < 0) == lower else "worse", difference, bound)


def noise(published: Sample, ours: Sample) -> float | None:
    """Return the largest difference that is called noise; None where our spread is not known."""
    if ours.std is None or ours.seeds is None or ours.seeds < 2:
        return None
    parts = [(ours.std**2 / ours.seeds, ours.seeds - 1)]
    if published.std is None:  # as ours spread; that adds no degrees of freedom
        error = ours.std * math.sqrt(1 / ours.seeds + 1 / (published.seeds or 1))
        return error * student(ours.seeds - 1)
    if published.seeds is None or published.seeds < 2:
        error = math.sqrt(published.std**2 + parts[0][0])
        return error * student(ours.seeds - 1)
    parts.append((published.std**2 / published.seeds, published.seeds - 1))
    return welch(parts)


def welch(parts: Sequence[tuple[float, int]]) -> float:
    """Return t·√(Σ v) for variances v of means, each with its degrees of freedom, combined as Welch and Satterthwaite do."""
    total = sum(variance for variance, _ in parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return math.sqrt(total) * student(freedom)


@functools.cache
def student(freedom: float, share: float = SHARE) -> float:
    """Return t with P(|T| ≤ t) = `share` for Student's T with at least one degree of freedom.

    With T = √ν·tan θ the density of θ is proportional to cos^(ν−1) θ, which is integrated from 0 to π/2.

    >>> round(student(1), 2), round(student(4), 3), round(student(1000), 2)
    (12.71, 2.776, 1.96)
    """
    theta = np.linspace(0, np.pi / 2, 200_001)
    density = np.maximum(np.cos(theta), 0) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(math.sqrt(freedom) * np.tan(np.interp(share * area[-1], area, theta)))


# ---- rankings --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """A competitor in a ranking: its name, the published number and ours."""

    name: str
    published: Sample
    ours: Sample


@dataclass(frozen=True)
class Swap:
    """Two competitors that are in another order than published, or equal; `tie` says which of the differences are noise."""

    first: str  # the better one as published
    second: str
    published: float  # by how much the first is better, as published
    ours: float  # by how much it is in ours: negative, or 0
    tie: str = ""


@dataclass(frozen=True)
class Ranking:
    """How far an order agrees: Kendall's τ (τ_b, which counts ties), and the pairs that differ."""

    where: str
    tau: float
    pairs: int
    swaps: tuple[Swap, ...]
    known: bool = True  # whether the noise of our numbers is: False where there is one seed

    @property
    def state(self) -> State:
        """Whether the order is the published one.

        It "holds" also where the pairs that differ are ties as published; where they are ties by our own noise alone, nothing
        is decided.
        """
        if all(AS_PUBLISHED in swap.tie for swap in self.swaps):
            return "holds but for ties" if self.swaps else "holds"
        return "is undecided" if all(swap.tie for swap in self.swaps) else "differs"

    @property
    def holds(self) -> bool:
        """Whether no pair differs but for those that are ties as published."""
        return self.state in ("holds", "holds but for ties")

    def lines(self, *, scaled: bool = False) -> list[str]:
        """Describe the ranking in lines."""
        where = f"in {self.where} " if self.where else ""
        unknown = "" if self.known or self.state != "differs" else " (one seed: no noise known)"
        over = f"{self.pairs} pairs" if self.pairs > 1 else "one pair"
        tau = f"{self.tau:.2f}".replace("-", "−")
        head = f"ranking {'(SCALED) ' if scaled else ''}{where}{self.state}{unknown}: Kendall's τ {tau} over {over}"
        return [head, *(f"  {line}" for line in self.swap_lines())]

    def swap_lines(self) -> list[str]:
        """Describe each pair that differs."""
        return [
            f"{swap.first} above {swap.second} by {swap.published:.2f} as published, "
            f"{f'{-swap.ours:.2f} below here' if swap.ours else 'equal here'}{f' ({swap.tie})' if swap.tie and swap.ours else ''}"
            for swap in self.swaps
        ]


def rank(entries: Sequence[Entry], *, where: str = "", lower: bool = False) -> Ranking | None:
    """Return how two orders agree; None for fewer than two competitors."""
    if len(entries) < 2:
        return None
    sign = -1 if lower else 1
    agreement, ordered, ours_ordered, swaps = 0, 0, 0, []
    for a, b in combinations(entries, 2):
        published, ours = sign * (a.published.mean - b.published.mean), sign * (a.ours.mean - b.ours.mean)
        agreement += int(np.sign(published) * np.sign(ours))
        ordered += published != 0
        ours_ordered += ours != 0
        if published and published * ours <= 0:
            first, second = (a, b) if published > 0 else (b, a)
            tie = _tie(first, second, abs(published), abs(ours))
            swaps.append(Swap(first.name, second.name, abs(published), -abs(ours), tie))
    pairs = math.comb(len(entries), 2)
    known = all(entry.ours.std is not None for entry in entries)
    tau = agreement / math.sqrt(ordered * ours_ordered) if ordered and ours_ordered else 0.0
    return Ranking(where, tau, pairs, tuple(swaps), known)


def _tie(a: Entry, b: Entry, published: float, ours: float) -> str:
    """Say which of the differences of a pair are noise; nothing where neither is, or nobody knows."""
    ties = []
    for name, difference, pair in (
        (AS_PUBLISHED, published, (a.published, b.published)),
        ("here", ours, (a.ours, b.ours)),
    ):
        parts = [
            (s.std**2 / s.seeds, s.seeds - 1) for s in pair if s.std is not None and s.seeds is not None and s.seeds > 1
        ]
        if not difference or (len(parts) == 2 and difference <= welch(parts)):
            ties.append(name)
    return f"a tie by the noise {' and '.join(ties)}" if ties else ""
