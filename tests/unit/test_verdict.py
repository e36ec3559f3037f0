"""The verdict for a client: its interval by an oracle and by simulation, and its side by hand."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from fedstill.report import verdict
from fedstill.report.verdict import Verdict, newcombe, tango, wilson

ROOT = Path(__file__).parents[2]


def likelihood(b: int, c: int, n: int, delta: float) -> float:
    """The greatest probability of "only local" under a gain of delta, by search: q maximises the multinomial likelihood."""
    low, high = max(0.0, -delta), (1 - delta) / 2
    grid = np.linspace(low, high, 20_001)[1:-1]
    log = b * np.log(grid + delta) + c * np.log(grid) + (n - b - c) * np.log(1 - 2 * grid - delta)
    return float(grid[np.argmax(log)])


@pytest.mark.parametrize(("b", "c", "n"), [(9, 1, 50), (3, 2, 10), (12, 2, 50), (1, 4, 8), (20, 17, 90)])
def test_the_interval_ends_where_the_score_of_the_likeliest_model_reaches_z(b: int, c: int, n: int) -> None:
    low, high = tango(b, c, n)
    for delta in (low, high):
        q = likelihood(b, c, n, delta)
        score = (b - c - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))
        assert abs(score) == pytest.approx(verdict.Z, rel=2e-3)


def test_no_disagreement_and_nothing_but_disagreement() -> None:
    # b = c = 0: (nΔ)² ≤ z²·n·|Δ|(1 − |Δ|) where q is 0 or −Δ, so |Δ| ≤ z²/(n + z²)
    square = verdict.Z**2
    assert tango(0, 0, 20) == pytest.approx((-square / (20 + square), square / (20 + square)), abs=1e-9)
    # b = n: the lower end solves n(1 − Δ)² = z²(1 − Δ)(1 + Δ) for q = (1 − Δ)/2·0 … by hand: Δ = (n − z²)/(n + z²)
    assert tango(20, 0, 20) == pytest.approx(((20 - square) / (20 + square), 1.0), abs=1e-9)


def test_the_interval_is_a_mirror_image_of_the_other_way_round() -> None:
    for b, c, n in [(5, 2, 30), (0, 6, 9), (4, 4, 12)]:
        low, high = tango(b, c, n)
        assert tango(c, b, n) == pytest.approx((-high, -low))
        assert low <= (b - c) / n <= high


def test_it_decides_exactly_where_mcnemars_test_does() -> None:
    for n in (12, 40):
        for b in range(n + 1):
            for c in range(n + 1 - b):
                rejects = (b - c) ** 2 > verdict.Z**2 * (b + c)
                low, high = tango(b, c, n)
                assert (low > 1e-12 or high < -1e-12) == rejects, (b, c, n)


def coverage(n: int, only_federated: float, only_local: float) -> float:
    """The exact probability that the interval holds the true gain: the sum over all outcomes."""
    total, both = 0.0, 1 - only_federated - only_local
    for b in range(n + 1):
        for c in range(n + 1 - b):
            low, high = tango(b, c, n)
            if low - 1e-9 <= only_federated - only_local <= high + 1e-9:
                ways = math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(c + 1) - math.lgamma(n - b - c + 1)
                logs = b * math.log(only_federated) + c * math.log(only_local) + (n - b - c) * math.log(both)
                total += math.exp(ways + logs)
    return total


@pytest.mark.parametrize("n", [10, 25])
@pytest.mark.parametrize(("b", "c"), [(0.05, 0.05), (0.2, 0.05), (0.3, 0.3), (0.02, 0.1), (0.6, 0.1)])
def test_it_covers_the_true_gain_with_few_samples(n: int, b: float, c: float) -> None:
    assert 0.92 <= coverage(n, b, c) <= 0.999


def test_wilson_and_newcombe_by_published_numbers() -> None:
    # Newcombe, Statistics in Medicine 17 (1998) 857: 81/263, 15/148, 0/20, 1/29, by Wilson's method
    for hits, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(hits, n) == pytest.approx((low, high), abs=6e-5)
    # the same volume, 873, case 9/10 − 3/10: 0.1705 to 0.8090, and 10/10 − 0/10: 0.6075 to 1
    assert newcombe(9, 3, 10) == pytest.approx((0.1705, 0.8090), abs=6e-5)
    assert newcombe(10, 0, 10) == pytest.approx((0.6075, 1.0), abs=6e-5)


def bits(text: str) -> np.ndarray:
    return np.array([letter == "1" for letter in text])


def test_answers_one_by_one_decide_what_two_accuracies_do_not() -> None:
    local, federated = bits("1" * 30 + "0" * 10), bits("1" * 37 + "0" * 3)
    rates = 30 / 40, 37 / 40
    paired = verdict.verdict("3", 0, 40, rates, (local, federated))
    alone = verdict.verdict("3", 0, 40, rates)
    assert paired.paired
    assert (paired.side, alone.side) == ("join", "join")
    assert paired.high - paired.low < alone.high - alone.low
    fewer = verdict.verdict("3", 0, 40, (33 / 40, 38 / 40), (bits("1" * 33 + "0" * 7), bits("1" * 38 + "0" * 2)))
    assert fewer.side == "join"
    assert verdict.verdict("3", 0, 40, (33 / 40, 38 / 40)).side == "undecided"


def test_answers_that_contradict_the_accuracies_are_not_used() -> None:
    one = verdict.verdict("0", 0, 8, (0.5, 0.75), (bits("11110000"), bits("11111111")))
    assert not one.paired
    assert one.gain == pytest.approx(0.25)


def test_sides_and_counts() -> None:
    made = [
        Verdict(str(i), 0, 9, 0.5, 0.5, low, high, True)
        for i, (low, high) in enumerate([(0.1, 0.2), (-0.1, 0.2), (-0.3, -0.1), (0.0, 0.1)])
    ]
    assert [one.side for one in made] == ["join", "undecided", "stay local", "undecided"]
    assert verdict.counts(made) == {"join": 1, "undecided": 2, "stay local": 1}


def test_where_federation_provably_helps_half_and_hurts_half_the_verdicts_are_right() -> None:
    """A few repetitions of benchmarks/verdicts.py, whose 200 are in docs/report.md."""
    spec = importlib.util.spec_from_file_location("verdicts_benchmark", ROOT / "benchmarks" / "verdicts.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    every = [one for outcomes in benchmark.repeat(4) for one in outcomes]
    assert all(one.true_gain > 0 for one in every if one.helped)
    assert all(one.true_gain < 0 for one in every if not one.helped)
    decided = [one for one in every if one.side != "undecided"]
    assert len(decided) > len(every) / 2
    assert sum(one.right for one in decided) >= 0.9 * len(decided)
    assert 0.85 <= sum(one.covered for one in every) / len(every) <= 1.0
