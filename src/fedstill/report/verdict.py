"""The verdict for every client: join the federation, or stay local.

Both models are tried on the client's own test samples. Of n samples let b be those that only the federation's model gets right
and c those that only the local one does. The gain is (b − c)/n, and its interval Tango's score interval for paired proportions
(Statistics in Medicine 17, 1998): all Δ with

    (b − c − nΔ)² ≤ z² · n(2 q(Δ) + Δ(1 − Δ)),     q the larger root of 2n·q² + B·q + C = 0,
    B = −b − c + (2n − b + c)Δ,   C = −cΔ(1 − Δ),

q being the likeliest probability of "only local" if the gain is Δ. It keeps its level with few samples; 0 is outside just where
McNemar's test rejects. Where it is not known which samples were right, two accuracies on n samples each are all there is, and the
interval is Newcombe's from two Wilson intervals (Statistics in Medicine 17, 1998, method 10), which is wider than need be.

Where samples are not simply right or wrong, each has a score under both models (an absolute error, a share of labels or tokens).
The gain is the mean of the n differences d, of errors with its sign turned, so that a gain is always good; its interval is
Student's, d̄ ± t·s/√n with n − 1 degrees of freedom. A client with a single test sample has no interval, and no verdict.

The interval is about these two models and other samples of the client. It does not say what another seed would train.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..core.metric import ACCURACY, Measure
from ..run.answers import Bits, Floats

Z = 1.959963984540054  # 95 %
LEVEL = 0.95
STEPS = 60  # halvings
MANY = 400  # degrees of freedom from which on Student's t is approximated
Side: TypeAlias = Literal["join", "stay local", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """One client's gain from the federation, with its interval."""

    client: str
    seed: int
    tests: int
    local: float
    federated: float
    low: float
    high: float
    paired: bool
    measure: Measure = ACCURACY

    @property
    def gain(self) -> float:
        """The accuracy in the federation minus that of training alone; of errors, how much smaller they are."""
        return self.measure.rank(self.federated) - self.measure.rank(self.local)

    @property
    def side(self) -> Side:
        """What the client should do, as far as its test samples decide it."""
        return "join" if self.low > 0 else "stay local" if self.high < 0 else "undecided"


def verdict(
    client: str,
    seed: int,
    tests: int,
    rates: tuple[float, float],
    answers: tuple[Bits | Floats | None, Bits | Floats | None] = (None, None),
) -> Verdict:
    """Return a client's verdict from its accuracies (local, federated) and, where both are known, its answers one by one."""
    local, federated = rates
    hits = [round(rate * tests) for rate in rates]
    one, other = answers
    known = one is not None and other is not None and len(one) == len(other) == tests
    if known and [int(one.sum()), int(other.sum())] == hits:  # type: ignore[union-attr]
        b, c = int((other > one).sum()), int((one > other).sum())  # type: ignore[operator]
        low, high = tango(b, c, tests)
        return Verdict(client, seed, tests, local, federated, low, high, True)
    low, high = newcombe(hits[1], hits[0], tests)
    return Verdict(client, seed, tests, local, federated, low, high, False)


def verdict_of_scores(
    client: str,
    seed: int,
    rates: tuple[float, float],
    scores: tuple[Floats | Bits | None, Floats | Bits | None],
    measure: Measure,
) -> Verdict | None:
    """Return a client's verdict from its samples' scores (local, federated); None without them, or with a single sample."""
    one, other = scores
    if one is None or other is None or len(one) != len(other) or len(one) < 2:
        return None
    gains = (one - other if measure.lower else other - one).astype(float)
    if abs(float(gains.mean()) - (measure.rank(rates[1]) - measure.rank(rates[0]))) > 1e-6 * (
        1 + abs(rates[0]) + abs(rates[1])
    ):
        return None  # of other models than those of the records
    half = student(len(gains) - 1) * float(gains.std(ddof=1)) / math.sqrt(len(gains))
    middle = float(gains.mean())
    return Verdict(client, seed, len(gains), *rates, middle - half, middle + half, True, measure)


@functools.cache
def student(degrees: int, level: float = LEVEL) -> float:
    """Return t with P(|T| < t) = level, by halving; of many degrees of freedom from the normal distribution's."""
    if degrees > MANY:
        return Z + (Z**3 + Z) / (4 * degrees)
    low, high = 0.0, 1e4
    for _ in range(2 * STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < level else (low, middle)
    return middle


def within(t: float, degrees: int) -> float:
    """Return P(|T| < t) of Student's distribution (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term = total = math.cos(angle) if odd else 1.0
    for i in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if degrees == 1:
        return 2 * angle / math.pi
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


def counts(verdicts: Mapping[str, Verdict] | list[Verdict]) -> dict[Side, int]:
    """Return how many clients should join, should stay local, and are undecided."""
    sides = [one.side for one in (verdicts.values() if isinstance(verdicts, Mapping) else verdicts)]
    return {side: sides.count(side) for side in ("join", "stay local", "undecided")}


def tango(b: int, c: int, n: int, z: float = Z) -> tuple[float, float]:
    """Return the score interval of (b − c)/n for paired samples."""
    if c > b:
        low, high = tango(c, b, n, z)
        return -high, -low
    gain = (b - c) / n
    low = _root(b, c, n, z, -1.0, gain)
    high = 1.0 if b == n else _root(b, c, n, z, 1.0, gain)
    return low, high


def _root(b: int, c: int, n: int, z: float, outside: float, inside: float) -> float:
    """Return the bound between a value that the interval has and one beyond it."""
    for _ in range(STEPS):
        middle = (outside + inside) / 2
        if _statistic(b, c, n, middle) ** 2 <= z * z:
            inside = middle
        else:
            outside = middle
    return inside


def _statistic(b: int, c: int, n: int, delta: float) -> float:
    """Return Tango's score statistic of the gain being delta."""
    linear = -b - c + (2 * n - b + c) * delta
    q = (math.sqrt(max(0.0, linear**2 + 8 * n * c * delta * (1 - delta))) - linear) / (4 * n)
    variance = n * (2 * q + delta * (1 - delta))
    distance = b - c - n * delta
    if variance <= 0:
        return 0.0 if abs(distance) < 1e-12 else math.inf
    return distance / math.sqrt(variance)


def newcombe(hits: int, base: int, n: int, z: float = Z) -> tuple[float, float]:
    """Return Newcombe's interval of hits/n − base/n for independent proportions."""
    (low, high), (base_low, base_high) = wilson(hits, n, z), wilson(base, n, z)
    p, q = hits / n, base / n
    below, above = math.hypot(p - low, base_high - q), math.hypot(high - p, q - base_low)
    return p - q - below, p - q + above


def wilson(hits: int, n: int, z: float = Z) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion."""
    p, square = hits / n, z * z
    centre, half = p + square / (2 * n), z * math.sqrt(p * (1 - p) / n + square / (4 * n * n))
    return max(0.0, (centre - half) / (1 + square / n)), min(1.0, (centre + half) / (1 + square / n))
