"""Which methods differ: a paired permutation test for every pair, corrected for the number of pairs.

A unit is a client of a seed; where every seed has the same clients, a client with its mean over seeds. If two methods were
alike, a unit's difference d could as well have been −d, so the mean difference is compared with those under other signs:

    T = Σ_s 1/S · 1/n_s · Σ_k d_sk          p = P(|T with random signs| ≥ |T|)

seeds being blocks of equal weight, as in the tables. Up to EXACT units all signs are tried, else DRAWS of them, the same ones
every time; p counts the observed signs as one of the draws (Phipson and Smyth, 2010), so it is never 0. Holm's step-down
procedure (1979) over all pairs keeps the chance of any wrong "differs" below LEVEL, also for the method that was found best.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core import plan

EXACT = 14  # units up to which all signs are tried
DRAWS = 19_999
LEVEL = 0.05
BLOCK = 4096  # sign vectors at once
Floats = NDArray[np.float64]
Unit = tuple[int, str]  # seed (0 where seeds are averaged) and client
Rates = Mapping[str, Mapping[Unit, float]]  # accuracies by method and unit


@dataclass(frozen=True)
class Difference:
    """The first method's mean over clients minus the second's, on the units that both have."""

    gain: float
    p: float  # corrected
    units: int

    @property
    def significant(self) -> bool:
        """Whether the two differ."""
        return self.p <= LEVEL


@dataclass(frozen=True)
class Differences:
    """The differences between all pairs of methods."""

    pairs: Mapping[tuple[str, str], Difference]
    units: int
    averaged: bool  # over seeds, which have the same clients

    def between(self, one: str, other: str) -> Difference:
        """Return the first method's gain over the second."""
        if (one, other) in self.pairs:
            return self.pairs[one, other]
        back = self.pairs[other, one]
        return Difference(-back.gain, back.p, back.units)

    def words(self) -> str:
        """Describe the test."""
        unit = "clients, each with its mean over seeds" if self.averaged else "clients; seeds are blocks"
        pairs = len(self.pairs)
        corrected = f", Holm's correction for {pairs} pairs of methods" if pairs > 1 else ""
        few = "; so few clients can show no difference" if 2.0 ** (1 - self.units) * pairs > LEVEL else ""
        return f"paired permutation test of the mean over {self.units} {unit}{corrected}; level {100 * LEVEL:g} %{few}"


def differences(rates: Rates, same_clients: bool = False) -> Differences:
    """Test every pair of methods. `same_clients`: client k is the same in every seed."""
    rates = {label: _averaged(of) for label, of in rates.items()} if same_clients else rates
    units = sorted({unit for of in rates.values() for unit in of})
    values = np.array([[of.get(unit, np.nan) for unit in units] for of in rates.values()]).reshape(len(rates), -1)
    seeds = np.array([seed for seed, _ in units])
    pairs = list(itertools.combinations(range(len(rates)), 2))
    weighted = np.array([_weighted(values[a] - values[b], seeds) for a, b in pairs]).reshape(len(pairs), len(units))
    p = holm(permutation_test(weighted))
    labels = list(rates)
    found = {
        (labels[a], labels[b]): Difference(
            float(row.sum()), float(corrected), int(np.count_nonzero(_both(values, a, b)))
        )
        for (a, b), row, corrected in zip(pairs, weighted, p, strict=True)
    }
    return Differences(found, len(units), same_clients and len({seed for of in rates.values() for seed, _ in of}) == 1)


def permutation_test(rows: Floats) -> Floats:
    """Return for each row of differences the two-sided p of its sum under random signs."""
    count, units = rows.shape
    if not count or not units:
        return np.ones(count)
    observed = np.abs(rows.sum(1))
    reached = np.zeros(count)
    tolerance = 1e-12 * np.abs(rows).sum(1)  # sums that are equal but for rounding are equal
    exact = units <= EXACT
    total = 1 << units if exact else DRAWS
    for first in range(0, total, BLOCK):
        signs = _all_signs(first, min(BLOCK, total - first), units) if exact else _drawn(first, total, units)
        reached += (np.abs(signs @ rows.T) >= observed - tolerance).sum(0)
    return np.asarray(reached / total if exact else (1 + reached) / (1 + total))


def holm(p: Floats) -> Floats:
    """Return Holm's corrected p-values."""
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, stepped)
    return corrected


def _averaged(of: Mapping[Unit, float]) -> dict[Unit, float]:
    by_client: dict[str, list[float]] = {}
    for (_, client), rate in of.items():
        by_client.setdefault(client, []).append(rate)
    return {(0, client): float(np.mean(rates)) for client, rates in by_client.items()}


def _both(values: Floats, a: int, b: int) -> NDArray[np.bool_]:
    return np.asarray(~np.isnan(values[a]) & ~np.isnan(values[b]))


def _weighted(difference: Floats, seeds: NDArray[np.int64]) -> Floats:
    """Return each unit's share of T: 0 where one of the methods has no accuracy."""
    present = ~np.isnan(difference)
    blocks: Sequence[int] = np.unique(seeds[present]).tolist()
    out = np.zeros(len(difference))
    for seed in blocks:
        rows = present & (seeds == seed)
        out[rows] = difference[rows] / (rows.sum() * len(blocks))
    return out


def _all_signs(first: int, count: int, units: int) -> Floats:
    numbers = np.arange(first, first + count)[:, None]
    return np.asarray(1.0 - 2.0 * ((numbers >> np.arange(units)) & 1), np.float64)


def _drawn(first: int, total: int, units: int) -> Floats:
    """Return the next random signs, hashed from their number alone."""
    count = min(BLOCK, total - first)
    words = -(-units // 64)
    drawn = plan.bits(plan.key(first, units), count * words).reshape(count, words)
    bits = np.unpackbits(drawn.astype("<u8").view(np.uint8), axis=1, bitorder="little")[:, :units]
    return np.asarray(1.0 - 2.0 * bits, np.float64)
