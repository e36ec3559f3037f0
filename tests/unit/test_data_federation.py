"""Federations from arrays and from data sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from fedstill.core.errors import InputError
from fedstill.data import Dataset, Federation, load, save_record
from fedstill.data.split import SplitRatio, official_test, parse_split, split_indices


def four(n=3, m=2, d=4, dtype=np.float32):
    return [np.ones((n, d), dtype), np.arange(n) % 2, np.zeros((m, d), dtype), np.zeros(m, int)]


def test_from_arrays():
    fed = Federation.from_arrays([four(3), four(5)], test=(np.ones((2, 4), np.float32), [0, 1]))
    assert len(fed) == 2
    assert fed.shape == (4,)
    assert fed.classes == 2
    assert fed.counts().tolist() == [[4, 1], [5, 2]]
    assert fed.clients[1].x_train.dtype == torch.float32
    assert fed.clients[1].y_train.dtype == torch.int64
    assert fed.test[1].tolist() == [0, 1]
    assert fed.partition_record["sizes"] == [[3, 2], [5, 2]]
    assert fed.partition_record["hash"] == fed.hash


@pytest.mark.parametrize(
    ("dtype", "expected", "scale"),
    [
        (np.float32, torch.float32, 1),
        (np.float64, torch.float64, 1),
        (np.float16, torch.float32, 1),
        (np.int32, torch.int64, 1),  # ids
        (np.uint8, torch.float32, 255),
        (">f4", torch.float32, 1),
    ],
)
def test_kinds_of_numbers(dtype, expected, scale):
    client = Federation.from_arrays([four(dtype=dtype)]).clients[0]
    assert client.x_train.dtype == expected
    assert torch.equal(client.x_train, torch.full((3, 4), 1 / scale, dtype=expected))


def test_float64_anywhere_makes_all_float64():
    fed = Federation.from_arrays([four(), four(dtype=np.float64)])
    assert {c.x_test.dtype for c in fed.clients} == {torch.float64}


def test_torch_tensors_and_no_shared_memory():
    tensors = [torch.ones(3, 4, requires_grad=True), torch.arange(3), torch.zeros(2, 4).bfloat16(), torch.zeros(2)]
    plain = four()
    fed = Federation.from_arrays([tuple(tensors), tuple(plain)])
    with torch.no_grad():
        tensors[0].fill_(9)
    tensors[1].fill_(9)
    plain[0].fill(9)
    plain[1].fill(9)
    for client in fed.clients:
        assert torch.equal(client.x_train, torch.ones(3, 4))
        assert client.y_train.max() <= 2
        assert not client.x_train.requires_grad


def test_strided_views_are_accepted():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = (base[::-1, ::2], [0, 1, 0, 1], base.T[:2, :3], [0, 0])
    assert Federation.from_arrays([arrays]).clients[0].x_train[0].tolist() == [18, 20, 22]


def test_hash_of_arrays_changes_with_the_data():
    def of(change=None, **more):
        parts = four()
        if change:
            change(parts)
        return Federation.from_arrays([parts], **more).hash

    same, value, label = of(), of(lambda p: p[0].__setitem__((0, 0), 5)), of(lambda p: p[1].__setitem__(0, 1))
    assert of() == same
    assert len({same, value, label, of(lambda p: p.__setitem__(0, p[0].astype(float)))}) == 4


def broken(index, value):
    parts = four()
    parts[index] = value
    return parts


NAN = np.array([[1, 2, 3, 4], [1, np.nan, 3, 4], [1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("client", "field", "says"),
    [
        (four()[:3], "clients[1]", "x_train, y_train, x_test, y_test"),
        (None, "clients[1]", "x_train, y_train, x_test, y_test"),
        (broken(0, np.zeros((0, 4))), "clients[1].x_train", "at least one sample"),
        (broken(2, np.zeros((0, 4))), "clients[1].x_test", "at least one sample"),
        (broken(0, NAN), "clients[1].x_train", "sample 1 holds NaN or infinity"),
        (broken(2, np.full((2, 4), np.inf)), "clients[1].x_test", "sample 0 holds NaN or infinity"),
        (broken(0, np.zeros(3)), "clients[1].x_train", "features"),
        (broken(1, [0, 1]), "clients[1].y_train", "one label for each of the 3 samples"),
        (broken(3, [[0], [1]]), "clients[1].y_test", "one label for each of the 2 samples"),
        (broken(1, [0, 0.5, 1]), "clients[1].y_train", "label 0.5 of sample 1"),
        (broken(1, [0, -1, 1]), "clients[1].y_train", "label -1 of sample 1"),
        (broken(3, [0, 3]), "clients[1].y_test", "below 3"),
        (broken(1, ["a", "b", "c"]), "clients[1].y_train", "whole numbers"),
        (broken(0, [["a"] * 4] * 3), "clients[1].x_train", "numbers"),
        (broken(0, [[1], [1, 2], [1]]), "clients[1].x_train", "an array or a tensor"),
        (broken(0, np.zeros((3, 4), complex)), "clients[1].x_train", "numbers"),
        (four(d=5), "clients[1].x_train", r"samples of shape \(4,\) as clients\[0\].x_train is"),
        (broken(2, np.zeros((2, 7))), "clients[1].x_test", r"samples of shape \(4,\)"),
    ],
)
def test_from_arrays_names_client_and_field(client, field, says):
    with pytest.raises(InputError, match=says) as caught:
        Federation.from_arrays([four(), client], classes=3)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_from_arrays_refuses_the_rest():
    with pytest.raises(InputError, match="at least one"):
        Federation.from_arrays([])
    with pytest.raises(InputError, match="classes = 0"):
        Federation.from_arrays([four()], classes=0)
    with pytest.raises(InputError, match="below 1"):
        Federation.from_arrays([four()], classes=1)
    with pytest.raises(InputError, match=r"test = .*\(x, y\)"):
        Federation.from_arrays([four()], test=(1, 2, 3))
    with pytest.raises(InputError, match=r"test.x = .*shape"):
        Federation.from_arrays([four()], test=(np.zeros((1, 9)), [0]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 98), st.integers(0, 98), st.integers(2, 400))
def test_splits_are_disjoint_complete_and_never_empty(train, val, count):
    val = min(val, 99 - train)
    ratio = SplitRatio(train, val, 100 - train - val)
    indices = np.arange(count) * 3
    if count < ratio.min_samples:
        return
    splits = split_indices(indices, ratio, 1, 2)
    assert sorted(np.concatenate(splits).tolist()) == indices.tolist()
    assert len(splits[0]) >= 1
    assert len(splits[2]) >= 1
    assert (len(splits[1]) >= 1) == (val > 0)
    if count >= 300:
        for split, share in zip(splits, (train, val, 100 - train - val), strict=True):
            assert abs(len(split) - count * share / 100) <= 2 or share < 1


def test_split_sizes_by_hand():
    cases = {(10, "80/20"): [8, 0, 2], (10, "70/10/20"): [7, 1, 2], (2, "80/20"): [1, 0, 1], (3, "90/5/5"): [1, 1, 1]}
    for (count, text), sizes in cases.items():
        assert [len(split) for split in split_indices(np.arange(count), parse_split(text), 0, 0)] == sizes


@pytest.mark.parametrize("text", ["80", "80/30", "0/100", "100/0", "a/b", "10/20/30/40", "-20/120", "", 80])
def test_split_refuses(text):
    with pytest.raises(InputError, match="sum to 100"):
        parse_split(text)


def toy(train=200, test=50, classes=5, **more):
    """Sample i of the training split is [i], of the test split [1000 + i]."""
    x, t = (np.arange(n, dtype=np.float32)[:, None] + at for n, at in ((train, 0), (test, 1000)))
    return Dataset("toy", x, np.arange(train) % classes, classes, t, np.arange(test) % classes, **more)


def values(fed, field):
    return sorted(v for c in fed.clients for v in getattr(c, field).flatten().tolist())


def test_pool_all_merges_and_splits():
    fed = Federation.from_dataset(toy(), partition="iid", clients=5, seed=1)
    assert fed.test is None
    assert [len(c.y_train) for c in fed.clients] == [40] * 5
    assert [len(c.y_test) for c in fed.clients] == [10] * 5
    assert sorted(values(fed, "x_train") + values(fed, "x_test")) == [*range(200), *range(1000, 1050)]
    assert fed.partition_record["samples"] == 250
    for client in fed.clients:  # labels stay with their samples
        assert torch.equal(client.y_train, client.x_train[:, 0].long() % 5)


def test_pool_train_keeps_the_official_test():
    fed = Federation.from_dataset(toy(), partition="iid", clients=5, pool="train", split="70/10/20")
    assert sorted(v for split in ("train", "val", "test") for v in values(fed, f"x_{split}")) == list(range(200))
    assert [len(c.y_val) for c in fed.clients] == [4] * 5
    assert fed.test[0].flatten().tolist() == list(range(1000, 1050))
    assert fed.counts().sum() == 200
    none = Federation.from_dataset(load("digits"), clients=4, pool="train")
    assert none.test is None


def test_official_split_follows_each_clients_labels():
    fed = Federation.from_dataset(toy(1000, 200), partition="classes:2", clients=5, split="official")
    assert fed.test[0].shape == (200, 1)
    assert values(fed, "x_train") == list(range(1000))
    for client in fed.clients:
        assert client.x_test.min() >= 1000
        assert len(client.y_test) == 40  # 200 tests in proportion to 200 of 1,000 samples
        assert set(client.y_test.tolist()) == set(client.y_train.tolist())
        assert torch.bincount(client.y_test).max() == 20
        assert len(client.x_test.unique()) == 40


def test_official_tests_by_hand():
    # 3 : 1 of classes 0 and 2; 8 tests for 4 of 8 samples → 4 tests, 3 of class 0 and 1 of class 2
    index = official_test(np.array([0, 0, 2, 0]), np.array([0, 0, 1, 2, 2, 0, 1, 0]), 3, 8, 0, 0)
    assert np.bincount(np.array([0, 0, 1, 2, 2, 0, 1, 0])[index], minlength=3).tolist() == [3, 0, 1]
    one = official_test(np.array([1, 1]), np.array([0, 1, 1]), 2, 100, 0, 0)
    assert len(one) == 1
    with pytest.raises(InputError, match="no sample of client 7's classes"):
        official_test(np.array([1, 1]), np.array([0, 0]), 2, 2, 0, 7)


@pytest.mark.parametrize("data", [TensorDataset(torch.zeros(4, 2), torch.zeros(4)), None, "digits"])
def test_a_dataset_must_be_ours(data):
    with pytest.raises(InputError, match=rf"dataset .*{type(data).__name__}.*from_arrays") as error:
        Federation.from_dataset(data)
    assert "\n" not in str(error.value)


def test_official_needs_an_official_test():
    with pytest.raises(InputError, match="digits has no official test part"):
        Federation.from_dataset(load("digits"), split="official")


def test_domain_tests_are_the_domains_own():
    data = toy(20, 10, domain=np.repeat([0, 1], 10), test_domain=np.repeat([1, 0], 5))
    fed = Federation.from_dataset(data, partition="domain", clients=2, split="official")
    assert fed.clients[0].x_test.flatten().tolist() == list(range(1005, 1010))
    merged = Federation.from_dataset(data, partition="domain", clients=None)
    assert [len(c.y_train) + len(c.y_test) for c in merged.clients] == [15, 15]


def test_same_seed_same_federation_other_seed_another():
    data = load("digits")
    one, two, three = (Federation.from_dataset(data, clients=7, seed=s) for s in (0, 0, 1))
    assert one.hash == two.hash != three.hash
    for a, b in zip(one.clients, two.clients, strict=True):
        assert torch.equal(a.x_train, b.x_train)
        assert torch.equal(a.y_test, b.y_test)
    assert one.counts().sum() == 1797
    assert one.shape == (1, 8, 8)


def test_saved_partition_is_dealt_again(tmp_path):
    data, path = toy(), tmp_path / "partition.json"
    fed = Federation.from_dataset(data, clients=4, seed=3)
    save_record(fed.partition_record, path)
    again = Federation.from_dataset(data, partition=f"file:{path}", clients=4, seed=3)
    assert again.hash == fed.hash
    assert again.partition_record == fed.partition_record
    for a, b in zip(fed.clients, again.clients, strict=True):
        assert torch.equal(a.x_train, b.x_train)
    with pytest.raises(InputError, match="one of 200 samples"):
        Federation.from_dataset(data, partition=f"file:{path}", clients=None, pool="train")
    other = Dataset("other", data.x, data.y, 5, data.test_x, data.test_y)
    with pytest.raises(InputError, match="source is 'other'"):
        Federation.from_dataset(other, partition=f"file:{path}", clients=None)


def test_from_dataset_refuses():
    data = toy()
    with pytest.raises(InputError, match="pool = 'some'"):
        Federation.from_dataset(data, pool="some")
    with pytest.raises(InputError, match="at most 125"):
        Federation.from_dataset(data, clients=126)
    with pytest.raises(InputError, match="at most 83"):  # three parts want three samples
        Federation.from_dataset(data, clients=100, split="70/10/20")
    with pytest.raises(InputError, match="which owner"):
        Federation.from_dataset(data, partition="owner")


def test_images_are_normalised_by_the_training_part():
    data = load("digits")
    fed = Federation.from_dataset(data, partition="iid", clients=3)
    everything = torch.cat([torch.cat([c.x_train, c.x_test]) for c in fed.clients])
    assert float(everything.mean()) == pytest.approx(0, abs=1e-4)
    assert float(everything.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("kind", "clients"), [("domain", 2), ("iid", 2)])
def test_partition_json_names_clients_that_are_one_domain_each(kind, clients):
    domains = {"domain": np.repeat([1, 0], 10), "test_domain": np.repeat([1, 0], 5)}
    data = toy(20, 10, **domains, groups=("berlin", "paris"), labels=("a", "b"))
    record = Federation.from_dataset(data, partition=kind, clients=clients, split="official").partition_record
    firsts = [own[0] for own in record["indices"]]
    expected = ["paris" if first < 10 else "berlin" for first in firsts]
    assert record.get("names") == (expected if kind == "domain" else None)
    assert record["labels"] == ["a", "b"]
