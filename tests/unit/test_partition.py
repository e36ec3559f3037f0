"""Partitions: always end, deal every sample at most once, and keep what their name promises."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import InputError
from fedstill.data import Partition, deal, load_record, parse, save_record
from fedstill.data.draw import apportion, generator, log_gammas, softmax
from fedstill.data.record import Record, lists_hash
from fedstill.data.schemes import repair

ALPHAS = st.floats(-3, 3).map(lambda e: 10.0**e)
LABELS = st.integers(2, 300).flatmap(lambda n: st.lists(st.integers(0, 6), min_size=n, max_size=n).map(np.array))


def covers(indices, count):
    """Every sample exactly once."""
    return sorted(np.concatenate(indices).tolist()) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(y=LABELS, kind=st.sampled_from(["dirichlet", "balanced-dirichlet", "lognormal"]), alpha=ALPHAS, data=st.data())
def test_real_valued_schemes_end_and_cover(y, kind, alpha, data):
    clients = data.draw(st.integers(1, len(y) // 2))
    indices = deal(f"{kind}:{alpha}", y, clients, data.draw(st.integers(0, 2**31)), classes=10)
    sizes = [len(own) for own in indices]
    assert len(indices) == clients
    assert covers(indices, len(y))
    assert min(sizes) >= 2
    if kind == "balanced-dirichlet":
        assert max(sizes) - min(sizes) <= 1
    if kind == "dirichlet":
        assert min(sizes) >= min(10, len(y) // (2 * clients))


@settings(max_examples=40, deadline=None)
@given(y=LABELS, data=st.data())
def test_iid_and_shards_cover_with_equal_sizes(y, data):
    clients = data.draw(st.integers(1, len(y) // 2))
    each = data.draw(st.integers(1, len(y) // clients))
    for text, slack in (("iid", 1), (f"shards:{each}", each)):
        indices = deal(text, y, clients, 3)
        sizes = [len(own) for own in indices]
        assert covers(indices, len(y))
        assert max(sizes) - min(sizes) <= slack


@settings(max_examples=60, deadline=None)
@given(y=LABELS, data=st.data())
def test_classes_gives_exactly_s_classes(y, data):
    clients = data.draw(st.integers(1, len(y) // 2))
    each = data.draw(st.integers(1, 7))
    try:
        indices = deal(f"classes:{each}", y, clients, 5, classes=7)
    except InputError:
        # refused only when there is no way: each holding needs ⌈2/S⌉ samples, a client holds a class once
        need = -(-2 // each)
        assert sum(min(clients, int(n) // need) for n in np.bincount(y, minlength=7)) < clients * each
        return
    dealt = np.concatenate(indices)
    assert len(set(dealt.tolist())) == len(dealt)
    assert all(len(set(y[own].tolist())) == each for own in indices)
    counts = np.stack([np.bincount(y[own], minlength=7) for own in indices])
    for label, total in enumerate(np.bincount(y, minlength=7)):
        shares = counts[counts[:, label] > 0, label]
        assert shares.sum() in (0, total)  # a class that is dealt is dealt whole, and evenly
        assert len(shares) == 0 or shares.max() - shares.min() <= 1


def test_classes_covers_every_class_when_there_are_places():
    y = np.repeat(np.arange(10), 30)
    for clients, each in ((5, 2), (10, 1), (7, 3), (20, 2)):
        indices = deal(f"classes:{each}", y, clients, 0)
        assert covers(indices, 300)
        holders = np.stack([np.bincount(y[own], minlength=10) > 0 for own in indices]).sum(axis=0)
        assert holders.max() - holders.min() <= 1
    few = deal("classes:2", y, 3, 0)
    assert len(np.unique(y[np.concatenate(few)])) == 6


SIGMAS = st.one_of(st.floats(-3, 6).map(lambda e: 10.0**e), st.sampled_from([1e-300, 1.0, 1e6]))


@settings(max_examples=60, deadline=None)
@given(y=LABELS, sigma=SIGMAS, data=st.data())
def test_classes_of_lognormal_sizes_are_those_of_even_sizes(y, sigma, data):
    """The same clients have the same classes, whole, and nobody has fewer samples than are needed."""
    clients, each = data.draw(st.integers(1, len(y) // 2)), data.draw(st.integers(1, 7))
    try:
        even = deal(f"classes:{each}", y, clients, 5, classes=7)
    except InputError:
        with pytest.raises(InputError, match=r"possible with fewer clients|at most classes:"):
            deal(f"classes:{each},lognormal:{sigma}", y, clients, 5, classes=7)
        return
    uneven = deal(f"classes:{each},lognormal:{sigma}", y, clients, 5, classes=7)
    dealt = np.concatenate(uneven)
    assert sorted(dealt.tolist()) == sorted(np.concatenate(even).tolist())
    assert len(set(dealt.tolist())) == len(dealt)
    assert all(len(own) >= 2 for own in uneven)
    for a, b in zip(even, uneven, strict=True):
        assert set(y[a]) == set(y[b])
        assert len(set(y[b])) == each


def test_classes_of_lognormal_sizes_have_the_spread_of_a_lognormal():
    """Of one class among all, a holder's share above the floor of ⌈2/1⌉ is its weight; of several, one weight serves all."""
    alone = np.array([len(own) for own in deal("classes:1,lognormal:0.7", np.zeros(2_000_000, int), 2000, 0)])
    assert np.log(alone - 2).std() == pytest.approx(0.7, abs=0.04)
    y = np.repeat(np.arange(3), 300_000)
    counts = np.stack([np.bincount(y[own]) for own in deal("classes:3,lognormal:1.0", y, 100, 0)])
    assert np.abs(counts - counts[:, :1]).max() <= 1  # all hold all three classes, so one weight gives one share
    two = np.stack([np.bincount(y[own], minlength=3) for own in deal("classes:2,lognormal:1.0", y, 300, 0)])
    logs = np.log(two.sum(axis=1) - 2.0)
    assert logs.std() == pytest.approx(1.0, abs=0.12)  # 300 draws; holders of a class share the same total
    skew = ((logs - logs.mean()) ** 3).mean() / logs.std() ** 3
    assert abs(skew) < 0.6  # a normal law of the logarithms
    other = np.array([len(own) for own in deal("classes:2,lognormal:1.0", y, 300, 1)])
    assert other.tolist() != two.sum(axis=1).tolist()


def test_shards_on_sorted_labels_have_at_most_s_classes_when_shards_divide_classes():
    y = generator(0, "y").permutation(np.repeat(np.arange(10), 40))
    indices = deal("shards:2", y, 10, 0)  # 20 shards of 20: two for each class
    assert all(len(np.unique(y[own])) <= 2 for own in indices)
    assert all(len(own) == 40 for own in indices)


def test_small_alpha_is_skewed_and_large_alpha_is_even():
    y = np.repeat(np.arange(10), 600)
    for kind in ("dirichlet", "balanced-dirichlet"):
        skewed = [len(np.unique(y[own])) for own in deal(f"{kind}:0.01", y, 20, 0)]
        assert np.mean(skewed) < 4
        even = np.stack([np.bincount(y[own], minlength=10) for own in deal(f"{kind}:1000", y, 20, 0)])
        assert even.min() > 15  # the mean is 30


def test_dirichlet_shares_have_the_moments_of_a_dirichlet():
    # a share of Dir(α) over K has mean 1/K and variance (1/K)(1 − 1/K)/(Kα + 1)
    for alpha in (0.05, 0.5, 5.0):
        shares = softmax(log_gammas(generator(1, alpha), alpha, (40000, 5)))
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        np.testing.assert_allclose(shares.mean(axis=0), 0.2, atol=0.012)
        np.testing.assert_allclose(shares.var(axis=0), 0.16 / (5 * alpha + 1), rtol=0.05)


@pytest.mark.parametrize("alpha", [1e-320, 1e-12, 1e-3, 1e6])
def test_dirichlet_shares_are_finite_at_any_alpha(alpha):
    shares = softmax(log_gammas(generator(2, "tiny"), alpha, (100, 7)))
    assert np.isfinite(shares).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_lognormal_sizes_have_the_spread_of_a_lognormal():
    sizes = np.array([len(own) for own in deal("lognormal:0.5", np.zeros(1_000_000, int), 2000, 0)])
    assert np.log(sizes - 2).std() == pytest.approx(0.5, abs=0.03)


def test_repair_takes_from_the_largest_and_keeps_totals():
    counts = np.array([[9, 0, 1], [20, 0, 0]])
    repair(counts, 4)
    assert counts.tolist() == [[9, 0, 1], [13, 4, 3]]


def test_apportion_rounds_by_largest_remainder():
    assert apportion(10, np.array([0.55, 0.25, 0.2])).tolist() == [6, 2, 2]  # 5.5, 2.5, 2: the tie goes to the first
    assert apportion(1, np.array([1.0, 1.0, 1.0])).tolist() == [1, 0, 0]


def test_seed_and_key_decide_the_stream():
    first, again, other = (generator(s, "a").random(4).tolist() for s in (1, 1, 2))
    assert first == again != other
    assert generator(1, "a").random() != generator(1, "b").random()
    assert [h.tolist() for h in deal("iid", np.zeros(20), 4, 0)] != [
        h.tolist() for h in deal("iid", np.zeros(20), 4, 1)
    ]


def test_domain_and_owner_follow_the_data():
    group = np.array([5, 2, 2, 5, 9, 9, 9])
    y = np.zeros(7, int)
    for kind in ("domain", "owner"):
        indices = deal(kind, y, None, 0, domain=group, owner=group)
        assert [own.tolist() for own in indices] == [[1, 2], [0, 3], [4, 5, 6]]


PINNED = {  # these change only when a partition's algorithm does, and then saved experiments no longer match
    "iid": "9ecf53ac82170c28",
    "dirichlet:0.1": "6f1531a6a9bf87c8",
    "balanced-dirichlet:0.1": "18072eac9df22b7b",
    "shards:2": "31eafdf381cc051a",
    "classes:2": "779760923437a1e3",
    "lognormal:1.0": "65e388a8c4288b4b",
    "classes:2,lognormal:1.0": "80718422b99c5ff8",
}


@pytest.mark.parametrize("text", PINNED)
def test_partition_is_the_one_it_has_always_been(text):
    y = np.arange(1000) % 10
    assert lists_hash(deal(text, y, 25, 7))[:16] == PINNED[text]


def test_hash_is_the_same_in_another_process():
    code = (
        "import numpy as np; from fedstill.data import deal; from fedstill.data.record import lists_hash;"
        "print(lists_hash(deal('dirichlet:0.1', np.arange(1000) % 10, 25, 7))[:16])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == PINNED["dirichlet:0.1"]


def test_hash_by_hand():
    # sha256 of the lengths and entries 2: 0, 1 and 1: 2 as little-endian 64-bit integers
    raw = struct.pack("<5q", 2, 0, 1, 1, 2)
    assert lists_hash([np.array([0, 1]), np.array([2])]) == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet:0.1", "shards:2", "classes:3", "classes:2,lognormal:0.5", "domain", "file:a/b,c.json"]
)
def test_parse_and_print_agree(text):
    assert str(parse(text)) == text
    assert parse(parse(text)) == parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dirichelt:0.1", "'dirichlet'"),
        ("dirichlet", "dirichlet:ALPHA"),
        ("dirichlet:0", "above 0"),
        ("dirichlet:-1", "above 0"),
        ("dirichlet:nan", "above 0"),
        ("dirichlet:inf", "above 0"),
        ("dirichlet:x", "above 0"),
        ("balanced-dirichlet:0", "above 0"),
        ("lognormal:0", "above 0"),
        ("shards:0", "at least 1"),
        ("shards:1.5", "at least 1"),
        ("classes", "at least 1"),
        ("classes:2,lognormal:0", "above 0"),
        ("classes:2,lognormal:x", "above 0"),
        ("classes:2,lognormal", "above 0"),
        ("classes:2,lognormal:nan", "above 0"),
        ("classes:2,dirichlet:0.1", "classes:S,lognormal:SIGMA"),
        ("classes:0,lognormal:1.0", "at least 1"),
        ("classes:x,lognormal:1.0", "at least 1"),
        ("iid:3", "without a parameter"),
        ("file:", "file:PATH"),
        (7, "a text such as"),
    ],
)
def test_parse_refuses(text, says):
    with pytest.raises(InputError, match=says) as caught:
        parse(text)
    assert str(caught.value).startswith("partition = ")
    assert "\n" not in str(caught.value)


def test_partition_object_is_checked_too():
    with pytest.raises(InputError, match="above 0"):
        Partition("dirichlet", "0.1")
    with pytest.raises(InputError, match="at least 1"):
        Partition("shards", 2.0)
    with pytest.raises(InputError, match="classes:S,lognormal:SIGMA"):
        Partition("shards", 2, 1.0)


Y = np.repeat(np.arange(5), 4)


@pytest.mark.parametrize(
    ("text", "clients", "field", "says"),
    [
        ("iid", 11, "clients", "at most 10: 20 samples"),
        ("dirichlet:0.1", 0, "clients", "at least 1"),
        ("dirichlet:0.1", True, "clients", "at least 1"),
        ("dirichlet:0.1", 2.0, "clients", "at least 1"),
        ("dirichlet:0.1", None, "clients", "at least 1"),
        ("shards:5", 5, "partition", "at most shards:4"),
        ("classes:6", 2, "partition", "at most classes:5"),
        ("classes:5", 10, "partition", "fewer clients"),
        ("domain", 2, "partition", "another one"),
        ("owner", None, "partition", "another one"),
    ],
)
def test_impossible_deals_are_refused(text, clients, field, says):
    with pytest.raises(InputError, match=says) as caught:
        deal(text, Y, clients, 0)
    assert caught.value.field == field


def test_more_refusals():
    with pytest.raises(InputError, match="2, one client for each domain"):
        deal("domain", Y, 3, 0, domain=np.repeat([0, 1], 10))
    with pytest.raises(InputError, match="at least 2"):
        deal("owner", Y, None, 0, owner=np.array([0] * 19 + [1]))
    with pytest.raises(InputError, match="one entry for each of the 20"):
        deal("owner", Y, None, 0, owner=np.array([0, 1]))
    with pytest.raises(InputError, match="below 3"):
        deal("iid", Y, 2, 0, classes=3)
    with pytest.raises(InputError, match="seed"):
        deal("iid", Y, 2, -1)


@pytest.fixture
def saved(tmp_path):
    record = Record("iid", None, 2, 0, "toy", 6, ((0, 1, 5), (2, 3)))
    path = tmp_path / "partition.json"
    save_record(record.to_dict(), path)
    return record, path


def test_record_round_trip(saved):
    record, path = saved
    assert load_record(path) == record
    assert json.loads(path.read_text())["hash"] == record.hash
    assert [p.name for p in path.parent.iterdir()] == ["partition.json"]
    indices = deal(f"file:{path}", np.zeros(6), None, 0)
    assert [own.tolist() for own in indices] == [[0, 1, 5], [2, 3]]


def test_names_of_clients_and_classes_come_back_and_change_no_hash(saved, tmp_path):
    record, path = saved
    named = replace(record, names=("berlin", "paris"), labels=("cat", "dog"))
    save_record(named.to_dict(), path)
    assert load_record(path) == named
    assert named.hash == record.hash
    assert not {"names", "labels"} & record.to_dict().keys()


def test_file_partition_must_fit(saved):
    _, path = saved
    with pytest.raises(InputError, match="one of 7 samples"):
        deal(f"file:{path}", np.zeros(7), 2, 0)
    with pytest.raises(InputError, match="clients = 3: should be 2"):
        deal(f"file:{path}", np.zeros(6), 3, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"indices": [[0, 1, 4], [2, 3]]}, "hash"),
        ({"indices": [[0, 1, 2], [2, 3]]}, "each dealt once"),
        ({"indices": [[0, 1, 6], [2, 3]]}, "below 6"),
        ({"indices": [[0, 1, -1], [2, 3]]}, "below 6"),
        ({"indices": [[0, 1, 5]]}, "2 index lists"),
        ({"indices": [[0, 1, "5"], [2, 3]]}, "whole numbers"),
        ({"indices": 3}, "field 'indices'"),
        ({"hash": None}, "field 'hash'"),
        ({"samples": True}, "field 'samples'"),
        ({"format": 2}, "format 1"),
        ({"names": ["a"]}, "2 names"),
        ({"names": [1, 2]}, "field 'names'"),
        ({"labels": "ab"}, "field 'labels'"),
    ],
)
def test_corrupt_record_is_refused(saved, change, says):
    record, path = saved
    path.write_text(json.dumps(record.to_dict() | change))
    with pytest.raises(InputError, match=says) as caught:
        load_record(path)
    assert str(path) in str(caught.value)


def test_unreadable_record_is_refused(saved, tmp_path):
    _, path = saved
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InputError, match=r"a whole partition\.json"):
        load_record(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="a JSON object"):
        load_record(path)
    with pytest.raises(InputError, match="a file that exists"):
        load_record(tmp_path / "none.json")
