"""The plan: pinned draws, coverage, uniformity."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.plan import Length, Plan, bits, key, keys, permutation, tables, tensor_bits, uniform_bits

MASK = (1 << 64) - 1


def splitmix64(state: int, n: int) -> list[int]:
    """SplitMix64 as published (Steele, Lea, Flood 2014), in Python's integers."""
    words = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(z ^ (z >> 31))
    return words


def test_bits_are_splitmix64() -> None:
    assert bits(1234567, 5).tolist() == splitmix64(1234567, 5)
    assert bits(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]  # the published test vector


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_different_words_make_different_keys(a: list[int], b: list[int]) -> None:
    assert (key(*a) == key(*b)) == (a == b)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 9))
def test_every_epoch_covers_every_sample_once(samples: int, batch: int, epochs: int, seed: int) -> None:
    plan = Plan(seed, batch)
    rows = plan.batches(3, 4, samples, epochs, width=min(batch, samples))
    assert len(rows) == plan.steps(samples, epochs) == epochs * -(-samples // min(batch, samples))
    for epoch, part in enumerate(np.split(rows, epochs)):
        visited = part[part >= 0]
        assert sorted(visited) == list(range(samples))
        assert visited.tolist() == plan.order(3, 4, samples, epoch).tolist()
        assert (part[:-1] >= 0).all(), "only an epoch's last batch may be partial"


def test_streams_depend_on_seed_round_client_and_epoch() -> None:
    orders = [
        Plan(s, 4).order(r, c, 30, e).tolist()
        for s, r, c, e in [(0, 1, 1, 0), (1, 1, 1, 0), (0, 2, 1, 0), (0, 1, 2, 0), (0, 1, 1, 1)]
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_cohorts_are_uniform() -> None:
    plan, rounds = Plan(7, 1), 4000
    seen = np.zeros(10)
    pairs = np.zeros((10, 10))
    for t in range(rounds):
        cohort = plan.cohort(t, range(10), 3)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 3
        seen[cohort] += 1
        pairs[np.ix_(cohort, cohort)] += 1
    # Binomial: 4000 draws with p = 0.3 (single) and p = 1/15 (pair); five standard deviations
    assert np.abs(seen - rounds * 0.3).max() < 5 * np.sqrt(rounds * 0.3 * 0.7)
    off = pairs[~np.eye(10, dtype=bool)]
    assert np.abs(off - rounds / 15).max() < 5 * np.sqrt(rounds / 15 * 14 / 15)


def test_the_cohort_does_not_depend_on_the_order_of_candidates() -> None:
    assert Plan(0, 1).cohort(1, [5, 3, 9, 1], 2) == Plan(0, 1).cohort(1, [1, 3, 5, 9], 2)


def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for k in range(6000):
        order = tuple(permutation(key(k), 3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert max(abs(c - 1000) for c in counts.values()) < 5 * np.sqrt(1000 * 5 / 6)


def test_device_bits_are_uniform_and_rows_do_not_see_the_padding() -> None:
    k = torch.tensor(123456)
    wide = uniform_bits(k, 1, (400, 50))
    assert torch.equal(wide[:300], uniform_bits(k, 1, (300, 50)))
    assert not torch.equal(wide, uniform_bits(k, 2, (400, 50)))
    share = wide.double() / 2**32
    assert share.min() >= 0
    assert share.max() < 1
    assert abs(share.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20000)
    assert np.abs(np.histogram(share.numpy(), 10, (0, 1))[0] - 2000).max() < 5 * np.sqrt(2000 * 0.9)
    a, b = share.flatten()[:-1] - 0.5, share.flatten()[1:] - 0.5
    assert abs((a * b).mean()) < 5 / 12 / np.sqrt(20000)


def test_dropout_keys_differ_between_seeds_rounds_clients_and_steps() -> None:
    draws = [Plan(s, 4).step_keys(r, c, 3).tolist() for s, r, c in [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)]]
    assert len({k for keys in draws for k in keys}) == 12


SEEDS = st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1), st.just(2**63 - 1))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 40)), min_size=1, max_size=6), SEEDS, st.integers(1, 12),
    st.one_of(st.integers(1, 3), st.builds(Length, epochs=st.integers(1, 3)), st.builds(Length, steps=st.integers(1, 20))),
    st.integers(0, 5), st.integers(1, 500),
)  # fmt: skip
def test_tables_are_the_same_batches(
    cohort, seed: int, batch: int, length: int | Length, wider: int, round: int
) -> None:
    """All clients' batches at once, on the device, against client by client on the host."""
    plan, clients, samples = Plan(seed, batch), [k for k, _ in cohort], [n for _, n in cohort]
    width = min(batch, max(samples)) + wider
    found = plan.tables(round, clients, samples, length, width, torch.device("cpu"))
    steps = max(plan.steps(n, length) for n in samples)
    assert found.index.shape == found.real.shape == (steps, len(clients), width)
    assert found.key.shape == (steps, len(clients))
    for i, (k, n) in enumerate(cohort):
        right = plan.batches(round, k, n, 20, width)[: plan.steps(n, length)]  # 20 epochs: at least so many steps
        index, real = found.index[:, i].numpy(), found.real[:, i].numpy()
        assert len(right) == plan.steps(n, length)
        assert np.array_equal(np.where(real, index, -1)[: len(right)], right)
        assert not real[len(right) :].any()
        assert (index[~real] == 0).all()
        assert found.key[: len(right), i].tolist() == plan.step_keys(round, k, len(right)).tolist()


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(1, 9))
def test_tables_of_several_seeds_are_each_seeds_own(seeds: list[int], n: int) -> None:
    clients, device = list(range(len(seeds))), torch.device("cpu")
    found = tables(seeds, 4, 3, clients, [n] * len(seeds), 2, 4, device)
    for i, seed in enumerate(seeds):
        alone = Plan(seed, 4).tables(3, [i], [n], 2, 4, device)
        assert torch.equal(found.index[:, [i]], alone.index)
        assert torch.equal(found.key[:, [i]], alone.key)


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=4))
def test_words_on_the_device_are_the_hosts(words: list[int]) -> None:
    whole = keys(np.array(words, dtype=np.uint64), 2, np.array(words[::-1], dtype=np.uint64))
    assert whole.tolist() == [key(a, 2, b) for a, b in zip(words, words[::-1], strict=True)]
    found = tensor_bits(torch.from_numpy(whole.view(np.int64)), 5)
    assert found.numpy().view(np.uint64).tolist() == [splitmix64(int(k), 5) for k in whole]
