"""Trees: the quick ways through stacked memory against the slow ones, and what may share memory with what."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.core import tree
from fedstill.core.tree import Tree

N = 5


def stacked(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tree:
    """A stack of N entries with nested names, whole numbers, and leaves of one number or none."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=dtype)

    return {
        "params": {"a": draw(N, 3, 2), "b": draw(N, 7), "count": torch.arange(N) * 3},
        "extra": {"c": draw(N, 1), "scalar": draw(N)},
        "empty": draw(N, 0),
    }


def equal(a: Tree, b: Tree) -> bool:
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    return tree.outline(a) == tree.outline(b) and all(
        torch.equal(x, y) and x.dtype == y.dtype for (_, x), (_, y) in pairs
    )


PARTS = [lambda t: t, lambda t: t["params"], lambda t: t["extra"], lambda t: {"b": t["params"]["b"]}]


def together(entries: list[Tree]) -> bool:
    return tree._joined_rows([[v for _, v in tree.leaves(e) if v.is_floating_point()] for e in entries]) is not None


def test_rows_are_the_entries() -> None:
    whole = stacked()
    found = tree.rows(whole, N)
    for i, entry in enumerate(found):
        assert equal(entry, tree.unstack(whole, i))
    assert not tree.aliases({"all": whole}, {"rows": {str(i): entry for i, entry in enumerate(found)}})


def test_rows_do_not_overlap() -> None:
    """Writing into one leaf of one entry changes nothing else."""
    whole = stacked()
    for i, name in ((0, "a"), (3, "b"), (2, "count")):
        found = tree.rows(whole, N)
        found[i]["params"][name].fill_(99)
        for k in range(N):
            right = tree.unstack(whole, k)
            if k == i:
                right["params"][name].fill_(99)
            assert equal(found[k], right)
    found = tree.rows(whole, N)
    for i in range(N):
        for k in range(N):
            if i != k:
                assert not tree.aliases(found[i], found[k])
        assert not tree.aliases(found[i]["params"], found[i]["extra"])
        kept = tree.unalias(found[i], *(found[k] for k in range(N) if k != i))
        assert all(
            x.data_ptr() == y.data_ptr()
            for (_, x), (_, y) in zip(tree.leaves(kept), tree.leaves(found[i]), strict=True)
        )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("which", [range(N), (3, 1), (4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_rows_is_the_mean_of_copies_to_the_bit(part, which, dtype) -> None:
    found = tree.rows(stacked(dtype=dtype), N)
    entries, weights = [part(found[i]) for i in which], [1.0, 2.0, 3.0, 4.0, 5.5][: len(which)]
    copies = [tree.clone(e) for e in entries]
    assert not together(copies)
    assert equal(tree.mean(entries, weights), tree.mean(copies, weights))


def test_the_quick_mean_is_taken_where_it_can_be() -> None:
    found = tree.rows(stacked(), N)
    assert together([t["params"] for t in found])
    assert together([found[3]["extra"], found[1]["extra"]])
    other = tree.rows(stacked(1), N)
    assert not together([found[0]["params"], other[0]["params"]])  # of two stacks
    gap = [{"a": t["params"]["a"], "c": t["extra"]["c"]} for t in found]
    assert not together(gap)  # b lies between them
    turned = [{"a": t["params"]["a"].mT, "b": t["params"]["b"]} for t in found]
    assert not together(turned)
    crossed = [{"a": found[i]["params"]["a"], "b": found[(i + 1) % N]["params"]["b"]} for i in range(N)]
    assert not together(crossed)  # leaves of two clients in one entry
    for entries in (gap, turned, crossed):
        copies = [tree.clone(e) for e in entries]
        assert equal(tree.mean(entries, [1, 2, 3, 4, 5]), tree.mean(copies, [1, 2, 3, 4, 5]))
    swapped = [{"b": t["params"]["b"], "a": t["params"]["a"]} for t in found]  # another order, the same stretch
    assert together(swapped)
    assert equal(tree.mean(swapped, [1, 2, 3, 4, 5]), tree.mean([tree.clone(t) for t in swapped], [1, 2, 3, 4, 5]))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=N), st.integers(0, 20))
def test_the_mean_is_the_weighted_sum(weights: list[float], seed: int) -> None:
    found = tree.rows(stacked(seed, torch.float64), N)[: len(weights)]
    mean = tree.mean([t["params"] for t in found], weights)
    for name in ("a", "b"):
        right = sum(w / sum(weights) * t["params"][name] for w, t in zip(weights, found, strict=True))
        assert torch.allclose(mean[name], right, atol=1e-12)
    count = sum(w * int(t["params"]["count"]) for w, t in zip(weights, found, strict=True)) / sum(weights)
    assert abs(int(mean["count"]) - count) <= 0.5 + 1e-9


def test_memory_is_shared_where_stretches_meet() -> None:
    base = torch.arange(12.0)
    left, right, middle = base[:6], base[6:], base[5:7]
    assert tree.aliases({"x": left}, {"y": right}) == []
    assert tree.aliases({"x": left}, {"y": middle}) == ["x"]
    assert tree.aliases({"x": left, "z": torch.zeros(3)}, {"y": base}) == ["x"]
    assert tree.aliases({"x": base[:0]}, {"y": base}) == []  # nothing is shared by nothing
    assert tree.aliases({"x": base[::2]}, {"y": base[4:5]}) == ["x"]
    doubles = torch.zeros(4, dtype=torch.float64)
    as_bytes = doubles.view(torch.uint8)
    assert tree.aliases({"x": doubles[1:2]}, {"y": as_bytes[8:9]}) == ["x"]  # counted in bytes, not in entries
    assert tree.aliases({"x": doubles[1:2]}, {"y": as_bytes[:8]}) == []


def test_unalias_copies_only_what_is_shared() -> None:
    base = torch.arange(12.0)
    given = {"free": base[:3], "taken": base[4:8], "twice": base[:2]}
    found = tree.unalias(given, {"kept": base[7:]})
    assert found["free"].data_ptr() == base.data_ptr()
    assert not tree.aliases({"taken": found["taken"], "twice": found["twice"]}, {"base": base})
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_stack_shared_copies_nothing_that_all_have() -> None:
    same, own = torch.arange(4.0), [torch.full((2,), float(i)) for i in range(3)]
    found = tree.stack_shared([{"same": same, "deep": {"own": t}} for t in own])
    assert found["same"].shape == (3, 4)
    assert found["same"].data_ptr() == same.data_ptr()
    plain = tree.stack([{"same": same, "deep": {"own": t}} for t in own])
    assert equal(tree.clone(found), plain)
    alike = tree.stack_shared([{"x": same.clone()} for _ in range(2)])  # equal, but not one tensor
    assert alike["x"].is_contiguous()


def test_finite_rows() -> None:
    up, kept = stacked(), {"memory": {"m": torch.zeros(N, 2, 2)}}
    up["params"]["a"][1, 2, 0] = torch.nan
    kept["memory"]["m"][3, 0, 1] = -torch.inf
    assert tree.finite_rows(N, up, kept).tolist() == [True, False, True, False, True]
    assert [tree.finite(entry) for entry in tree.rows({**up, **kept}, N)] == [True, False, True, False, True]
    assert tree.finite_rows(2, {}).tolist() == [True, True]
    assert tree.finite_rows(2, {"n": torch.arange(2)}).tolist() == [True, True]
    big = {"x": torch.full((2, 4), 3e38)}  # a sum that float32 does not hold is no bad number
    assert tree.finite_rows(2, big).all()


@pytest.mark.parametrize("copied", [False, True])
def test_norms(copied: bool) -> None:
    """Of rows of one buffer and of trees that lie anywhere."""
    whole = stacked()
    right = [
        math.sqrt(sum(float(leaf.double().square().sum()) for leaf in entry["params"].values()))
        for entry in tree.rows(whole, N)
    ]
    whole["params"]["a"][1, 2, 0] = torch.nan
    whole["params"]["b"][3, 0] = -torch.inf
    whole["params"]["b"][4, :2] = torch.tensor([torch.inf, -torch.inf])
    entries = [entry["params"] for entry in tree.rows(whole, N)]
    entries = [tree.clone(entry) for entry in entries] if copied else entries
    assert together(entries) is not copied
    found = tree.norms(entries)
    assert [math.isfinite(norm) for norm in found] == [True, False, True, False, False]
    assert found[0] == pytest.approx(right[0], rel=1e-6)
    assert tree.norms([entries[2], entries[1]])[0] == pytest.approx(right[2], rel=1e-6)


def test_norms_of_trees_that_are_not_alike() -> None:
    bad = {"x": torch.tensor([1.0, torch.nan])}
    assert tree.norms([]) == []
    assert tree.norms([{}, {}]) == [0.0, 0.0]
    found = tree.norms(
        [
            {},
            bad,
            {"n": torch.arange(4)},
            {"x": torch.ones(1), "y": bad},
            {"a": torch.tensor([3.0]), "b": {"c": torch.tensor(4)}},
        ]
    )
    assert found[0] == 0
    assert found[2] == pytest.approx(math.sqrt(14))
    assert found[4] == 5
    assert math.isnan(found[1])
    assert math.isnan(found[3])


@pytest.mark.parametrize(("value", "finite"), [(1.8e19, True), (1.9e19, False), (1e30, False), (-3e38, False)])
def test_a_norm_is_infinite_where_float32_cannot_hold_its_square(value: float, finite: bool) -> None:
    assert math.isfinite(tree.norms([{"x": torch.tensor([0.0, value])}])[0]) is finite
    assert tree.norms([{"x": torch.tensor([0.0, value], dtype=torch.float64)}]) == [abs(value)]
    assert tree.norms([{"n": torch.tensor(2**53)}, {"n": torch.tensor(2**53 + 2)}]) == [2.0**53, math.inf]


class Counted(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("copied", [False, True])
def test_whole_numbers_take_few_calls_however_many_a_model_has(copied: bool) -> None:
    """ResNet-18 counts batches in 20 tensors: calls for each of them and each client took a quarter of a round on a GPU."""
    clients, counts = 8, 20
    stack = {f"n{i}": torch.arange(clients) * (i + 1) for i in range(counts)} | {"w": torch.randn(clients, 3)}
    entries = tree.rows(stack, clients)
    entries = [tree.clone(entry) for entry in entries] if copied else entries
    weights = [1.0 + k for k in range(clients)]
    with Counted() as mean_calls:
        mean = tree.mean(entries, weights)
    with Counted() as norm_calls:
        norms = tree.norms(entries)
    for i in range(counts):
        exact = sum(Fraction(k * (i + 1)) * Fraction(1 + k) for k in range(clients)) / Fraction(36)
        assert mean[f"n{i}"].dtype == torch.int64
        assert mean[f"n{i}"].item() == round(exact)
    for k, norm in enumerate(norms):
        squares = sum((k * (i + 1)) ** 2 for i in range(counts)) + stack["w"][k].double().square().sum().item()
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    if not copied:
        assert mean_calls.calls < 10 * clients + 3 * counts  # 160 copies alone before
        assert norm_calls.calls < 5 * clients + counts


def test_whole_numbers_that_are_none_or_of_other_shapes() -> None:
    nothing = torch.empty(2, 0, dtype=torch.int64)
    for entries in (
        tree.rows({"n": nothing}, 2),
        [{"n": nothing[0]}] * 2,
        tree.rows({"n": nothing, "w": torch.ones(2, 3)}, 2),
    ):
        assert tree.norms(entries) == pytest.approx([math.sqrt(3) if "w" in entries[0] else 0.0] * 2)
        mean = tree.mean(entries, [1.0, 1.0])
        assert mean["n"].shape == (0,)
        assert mean["n"].dtype == torch.int64
    several = [{"b": torch.tensor([True, False]), "i": torch.tensor(k, dtype=torch.int8)} for k in (1, 4)]
    mean = tree.mean(several, [1.0, 2.0])
    assert (mean["i"].item(), mean["i"].dtype, mean["b"].tolist()) == (3, torch.int8, [True, False])
    with pytest.raises(ValueError, match="same shape"):
        tree.mean(
            [{"n": torch.zeros(2, 3, dtype=torch.int64)}, {"n": torch.zeros(3, 2, dtype=torch.int64)}], [1.0, 1.0]
        )
