"""The paired permutation test and Holm's correction, by hand and against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedstill.report import significance
from fedstill.report.significance import differences, holm, permutation_test


def brute(row: list[float]) -> float:
    """The share of all signs under which the sum is at least as far from 0."""
    sums = [
        abs(sum(s * d for s, d in zip(signs, row, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(row))
    ]
    return sum(total >= abs(sum(row)) - 1e-12 for total in sums) / len(sums)


def test_by_hand() -> None:
    # of eight signs of (1, 2, 3) only + + + and − − − reach 6; of (1, −1, 0) every one reaches 0
    p = permutation_test(np.array([[1.0, 2.0, 3.0], [1.0, -1.0, 0.0]]))
    assert p == pytest.approx([2 / 8, 1.0])


@pytest.mark.parametrize("units", [1, 4, 9, 13])
def test_few_units_by_brute_force(units: int) -> None:
    rows = np.random.default_rng(units).normal(0.4, 1, (3, units)).round(2)
    assert permutation_test(rows) == pytest.approx([brute(row) for row in rows.tolist()])


def test_many_units_come_near_the_exact_p() -> None:
    rows = np.random.default_rng(0).normal(0.4, 1, (4, 16))
    exact = [brute(row) for row in rows.tolist()]
    assert permutation_test(rows) == pytest.approx(exact, abs=0.012)  # three deviations of 19,999 draws at p = 1/2
    assert np.array_equal(permutation_test(rows), permutation_test(rows))


def test_p_is_never_0_and_clear_differences_have_the_least() -> None:
    assert permutation_test(np.ones((1, 100))) == pytest.approx([1 / (significance.DRAWS + 1)])


def test_under_no_difference_p_is_uniform() -> None:
    rows = np.random.default_rng(1).normal(0, 1, (4000, 10))
    p = permutation_test(rows)
    for level in (0.05, 0.2, 0.5):  # four deviations of a share of 4,000
        assert np.mean(p <= level) == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 4000))


def test_signs_are_fair_and_do_not_repeat() -> None:
    signs = np.concatenate([significance._drawn(first, 19_999, 70) for first in range(0, 19_999, significance.BLOCK)])
    assert signs.shape == (19_999, 70)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(0)).max() < 5 / np.sqrt(19_999)
    assert len(np.unique(signs, axis=0)) == 19_999


def test_holm_by_hand() -> None:
    # sorted .01 .03 .04: 3·.01, then 2·.03, then 1·.04 which may not fall below .06
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1.0, 1.0])


def test_seeds_are_blocks_of_equal_weight() -> None:
    # seed 0 has one client with a gain of 0.2, seed 1 three with 0.1: the mean over seeds is 0.15, not 0.125
    base = {(0, "0"): 0.5, (1, "0"): 0.5, (1, "1"): 0.6, (1, "2"): 0.7}
    better = {(0, "0"): 0.7, (1, "0"): 0.6, (1, "1"): 0.7, (1, "2"): 0.8}
    found = differences({"a": better, "b": base})
    assert found.between("a", "b").gain == pytest.approx(0.15)
    assert found.between("b", "a").gain == pytest.approx(-0.15)
    assert found.between("a", "b").p == pytest.approx(brute([0.1, 0.1 / 6, 0.1 / 6, 0.1 / 6]))
    assert found.units == 4


def test_where_seeds_have_the_same_clients_a_client_counts_once() -> None:
    rates = {
        "a": {(s, str(k)): 0.6 + 0.01 * k + 0.001 * s for s in range(3) for k in range(4)},
        "b": {(s, str(k)): 0.5 for s in range(3) for k in range(4)},
    }
    found = differences(rates, same_clients=True)
    assert found.averaged
    assert found.units == 4
    assert found.between("a", "b").p == pytest.approx(2 / 16)
    assert differences(rates).between("a", "b").p == pytest.approx(2 / 4096)


def test_units_that_one_method_lacks_are_left_out_of_its_pairs_alone() -> None:
    full = {(0, str(k)): 0.5 + 0.01 * k for k in range(6)}
    less = {unit: rate + 0.1 for unit, rate in full.items() if unit[1] != "5"}
    more = {unit: rate + 0.2 for unit, rate in full.items()}
    found = differences({"full": full, "less": less, "more": more})
    assert found.between("less", "full").units == 5
    assert found.between("less", "full").gain == pytest.approx(0.1)
    assert found.between("more", "full").units == 6


def test_holm_runs_over_all_pairs() -> None:
    rng = np.random.default_rng(3)
    rates = {name: {(0, str(k)): float(rng.normal(0.5, 0.1)) for k in range(8)} for name in "abcd"}
    found = differences(rates)
    pairs = list(itertools.combinations("abcd", 2))
    alone = [brute([rates[a][0, str(k)] - rates[b][0, str(k)] for k in range(8)]) for a, b in pairs]
    assert [found.pairs[pair].p for pair in pairs] == pytest.approx(holm(np.array(alone)).tolist())
    assert "Holm's correction for 6 pairs" in found.words()
