"""Verdicts against values worked out by hand and printed in tables of Student's t; Kendall's τ by its definition."""

from __future__ import annotations

import math

import pytest

from fedstill.reproduce.verdict import Entry, Sample, noise, rank, student, verdict, welch

TABLE = {  # two-sided 95 % points of Student's t, as printed in any table
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 8: 2.306, 10: 2.228, 20: 2.086, 30: 2.042, 120: 1.980,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "t"), TABLE.items())
def test_student_is_the_table(freedom, t):
    assert student(freedom) == pytest.approx(t, abs=6e-4)


def test_student_in_closed_form():
    # ν = 1: tan(π·0.95/2); ν = 2: p·√(2/(1 − p²))
    assert student(1, 0.5) == pytest.approx(1.0, rel=1e-6)
    assert student(2, 0.8) == pytest.approx(0.8 * math.sqrt(2 / (1 - 0.64)), rel=1e-6)


def test_a_sample_is_mean_and_deviation():
    assert Sample.of([1.0, 2.0, 3.0]) == Sample(2.0, 1.0, 3)
    assert Sample.of([1.5]) == Sample(1.5, None, 1)


def test_noise_of_equal_spreads_is_students_test():
    # s² = 0.09 each, n = 3: error √(0.03 + 0.03), ν = 0.06²/(2·0.03²/2) = 4
    bound = noise(Sample(90, 0.3, 3), Sample(91, 0.3, 3))
    assert bound == pytest.approx(2.776 * math.sqrt(0.06), rel=1e-3)


def test_noise_of_unequal_spreads_is_welchs():
    # v = 1/4 and 4/5: ν = 1.05²/(0.0625/3 + 0.64/4) = 6.0968
    bound = noise(Sample(0, 2.0, 5), Sample(0, 1.0, 4))
    assert bound == pytest.approx(student(1.1025 / (0.0625 / 3 + 0.16)) * math.sqrt(1.05), rel=1e-9)
    assert student(6.0968) == pytest.approx(2.438, abs=2e-3)  # between 2.447 (6) and 2.365 (7)


def test_noise_where_the_paper_says_less():
    ours = Sample(50, 0.6, 3)
    # no ±: one number whose seeds spread as ours do; ν = 2
    assert noise(Sample(50), ours) == pytest.approx(4.303 * 0.6 * math.sqrt(1 / 3 + 1), rel=1e-3)
    assert noise(Sample(50, None, 3), ours) == pytest.approx(4.303 * 0.6 * math.sqrt(2 / 3), rel=1e-3)
    # ± over nobody knows what: in full
    assert noise(Sample(50, 0.8), ours) == pytest.approx(4.303 * math.sqrt(0.64 + 0.12), rel=1e-3)
    assert noise(Sample(50, 0.8, 3), Sample(50, None, 1)) is None


@pytest.mark.parametrize(
    ("ours", "lower", "kind"),
    [
        (Sample(90.6, 0.3, 3), False, "within"),  # the bound is 0.68
        (Sample(90.7, 0.3, 3), False, "better"),
        (Sample(89.3, 0.3, 3), False, "worse"),
        (Sample(89.3, 0.3, 3), True, "better"),
        (Sample(90.7, 0.3, 3), True, "worse"),
        (Sample(70.0, None, 1), False, "one seed"),
    ],
)
def test_verdicts(ours, lower, kind):
    got = verdict(Sample(90.0, 0.3, 3), ours, lower=lower)
    assert got.kind == kind
    assert got.difference == pytest.approx(ours.mean - 90)


def test_a_share_of_time_is_neither_better_nor_worse():
    assert verdict(Sample(12.7), Sample(0.0, 0.1, 3), lower=None).kind == "differs"
    assert verdict(Sample(12.7), Sample(12.7, 0.1, 3), lower=None).kind == "within"


def test_bounds_are_held_or_not():
    assert verdict(Sample(98), Sample(98.5, None, 1), relation=">").kind == "holds"
    assert verdict(Sample(98), Sample(97.5, 0.1, 3), relation=">").kind == "fails"
    assert verdict(Sample(98), Sample(97.5, 0.1, 3), relation="<").kind == "holds"


def test_no_spread_at_all():
    same = Sample(5.0, 0.0, 3)
    assert verdict(same, same).kind == "within"
    assert verdict(same, Sample(5.1, 0.0, 3)).kind == "better"
    assert welch([(0.0, 2), (0.0, 2)]) == 0


def entries(published, ours, std=None, seeds=None):
    return [
        Entry(f"m{i}", Sample(p, std, seeds), Sample(o, std, seeds))
        for i, (p, o) in enumerate(zip(published, ours, strict=True))
    ]


def test_kendalls_tau_by_its_definition():
    # of the six pairs of 1 2 3 4 against 2 1 4 3, four agree and two do not
    ranking = rank(entries([1, 2, 3, 4], [2, 1, 4, 3]))
    assert ranking.tau == pytest.approx((4 - 2) / 6)
    assert {(s.first, s.second) for s in ranking.swaps} == {("m1", "m0"), ("m3", "m2")}
    assert not ranking.holds
    assert rank(entries([1, 2, 3], [10, 20, 30])).tau == 1
    assert rank(entries([1, 2, 3], [3, 2, 1])).tau == -1
    assert rank(entries([1, 2, 3], [5, 5, 6])).tau == pytest.approx(
        2 / math.sqrt(3 * 2)
    )  # τ_b: 2 agree, of 3 and 2 ordered
    assert rank(entries([1, 1, 3], [5, 6, 7])).tau == pytest.approx(2 / math.sqrt(2 * 3))
    assert rank(entries([1, 1, 3], [6, 6, 7])).tau == 1
    assert rank(entries([1, 2], [5, 5])).tau == 0
    assert rank(entries([1], [1])) is None


def test_less_is_better_turns_both_orders():
    ranking = rank(entries([10, 20], [30, 25]), lower=True)
    assert [(s.first, s.second) for s in ranking.swaps] == [("m0", "m1")]
    assert ranking.tau == -1


def test_swaps_within_the_noise_are_ties():
    # std 0.3 over 3 seeds: differences up to 0.68 are noise
    near = rank(entries([90.0, 91.0], [90.5, 90.0], 0.3, 3))
    assert near.state == "is undecided"  # our noise hides the order, which neither holds nor is contradicted
    assert not near.holds
    assert near.tau == -1
    assert near.swaps[0].tie == "a tie by the noise here"
    both = rank(entries([90.0, 90.5], [90.5, 90.0], 0.3, 3))
    assert both.swaps[0].tie == "a tie by the noise as published and here"
    assert both.state == "holds but for ties"
    far = rank(entries([90.0, 91.0], [91.0, 90.0], 0.3, 3))
    assert not far.holds
    assert "m1 above m0 by 1.00 as published, 1.00 below here" in far.lines()[1]


def test_equal_numbers_are_no_order():
    equal = rank(entries([90.0, 91.0], [50.0, 50.0], 0.3, 3))
    assert equal.state == "is undecided"
    assert "m1 above m0 by 1.00 as published, equal here" in equal.lines()[1]
    assert rank(entries([90.0, 90.0], [50.0, 60.0], 0.3, 3)).state == "holds"  # the paper has no order to hold


def test_scaled_numbers_have_no_verdict():
    for relation in ("=", ">", "<"):
        got = verdict(Sample(100.0), Sample(2.0, 0.0, 3), lower=True, relation=relation, scaled=True)
        assert (got.kind, got.difference) == ("scaled", -98)


def test_one_seed_says_that_no_noise_is_known():
    ranking = rank([Entry("a", Sample(2.0), Sample(1.0, None, 1)), Entry("b", Sample(1.0), Sample(2.0, None, 1))])
    assert not ranking.known
    assert "one seed: no noise known" in ranking.lines()[0]
