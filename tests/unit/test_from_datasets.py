"""Federations of a user's own arrays and data sets, by the clients' names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import fedstill as fs
from fedstill.core.errors import InputError
from fedstill.data.outline import Outline
from fedstill.data.split import parse_split, split_indices

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 3


class Listed(Dataset):
    """Items of a list, each as `make` makes it, with the names of classes if they have some."""

    def __init__(self, items, make=lambda item: item, classes=None):
        self.items, self.make = list(items), make
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.make(self.items[i])


def tensors(rows=slice(None)):
    return TensorDataset(torch.from_numpy(X[rows]), torch.from_numpy(Y[rows]))


def refused(says, *args, **options):
    with pytest.raises(InputError, match=says) as caught:
        fs.Federation.from_datasets(*args, **options)
    assert "\n" not in str(caught.value)


# ---- arrays by name --------------------------------------------------------------------------------------------------


def test_arrays_by_name_are_arrays_by_number_with_names():
    fours = [(X[:10], Y[:10], X[10:15], Y[10:15]), (X[15:30], Y[15:30], X[30:], Y[30:])]
    listed = fs.Federation.from_arrays(fours)
    named = fs.Federation.from_arrays(dict(zip(("berlin", "lyon"), fours, strict=True)))
    assert (listed.names, named.names) == ((), ("berlin", "lyon"))
    assert listed.hash == named.hash
    assert listed.checksum() == named.checksum()
    assert named.partition_record["names"] == ["berlin", "lyon"]
    assert Outline.of(named).client(1) == "lyon"
    assert "names" not in listed.partition_record
    with pytest.raises(InputError, match=r"clients\['lyon'\].y_test"):
        fs.Federation.from_arrays({"berlin": fours[0], "lyon": (*fours[1][:3], Y[:2])})
    with pytest.raises(InputError, match=r"clients\['lyon'\].x_train.*as clients\['berlin'\].x_train"):
        fs.Federation.from_arrays({"berlin": fours[0], "lyon": (X[:5, :4], Y[:5], X[:5, :4], Y[:5])})
    for names in ({3: fours[0]}, {"": fours[0]}, {"a\nb": fours[0]}):
        with pytest.raises(InputError, match="named by texts"):
            fs.Federation.from_arrays(names)


# ---- data sets -------------------------------------------------------------------------------------------------------


def test_data_sets_are_their_arrays():
    """One alone is divided as `split_indices` says, by the client's number; a test set given stays one."""
    found = fs.Federation.from_datasets(
        {"berlin": tensors(slice(0, 20)), "lyon": (tensors(slice(20, 35)), tensors(slice(35, 40)))}, seed=4
    )
    train, _, test = split_indices(np.arange(20), parse_split("80/20"), 4, 0)
    oracle = fs.Federation.from_arrays(
        {"berlin": (X[train], Y[train], X[test], Y[test]), "lyon": (X[20:35], Y[20:35], X[35:], Y[35:])}
    )
    assert found.names == ("berlin", "lyon")
    assert (found.hash, found.checksum(), found.classes) == (oracle.hash, oracle.checksum(), 3)
    run = fs.simulate(fs.FedAvg(), model=torch.nn.Linear(6, 3), data=found, rounds=1, epochs=1)
    assert len(run.history) == 1


def test_validation_data():
    three = fs.Federation.from_datasets([tensors(slice(0, 20)), tensors(slice(20, 40))], split="70/10/20")
    assert (three.sizes("train"), three.sizes("val"), three.sizes("test")) == ((14, 14), (2, 2), (4, 4))
    parts = tensors(slice(0, 20)), tensors(slice(20, 30)), tensors(slice(30, 40))
    given = fs.Federation.from_datasets({"a": parts}, split="70/10/20")
    assert torch.equal(given.clients[0].x_val, torch.from_numpy(X[20:30]))
    assert torch.equal(given.clients[0].x_test, torch.from_numpy(X[30:]))
    refused(r"clients\['b'\].*without validation", {"a": parts, "b": parts[:2]})


@pytest.mark.parametrize("kind", ["arrays", "numbers", "images", "rows", "double", "mixed"])
def test_samples_of_every_kind(kind):
    Image = pytest.importorskip("PIL.Image")
    bytes_ = RNG.integers(0, 256, (12, 5, 4, 3), np.uint8)
    make, want = {
        "arrays": (lambda i: (X[i], int(Y[i])), X[:12]),
        "numbers": (lambda i: (float(X[i, 0]), Y[i]), X[:12, :1]),
        "images": (lambda i: (Image.fromarray(bytes_[i]), Y[i]), bytes_.transpose(0, 3, 1, 2).astype(np.float32) / 255),
        "rows": (lambda i: {"id": i, "x": torch.from_numpy(X[i]), "label": Y[i]}, X[:12]),
        "double": (lambda i: (X[i].astype(np.float64), Y[i]), X[:12].astype(np.float64)),
        "mixed": (lambda i: (X[i].astype(np.float64 if i else np.float32), Y[i]), X[:12].astype(np.float64)),
    }[kind]
    one = Listed(range(12), make)
    found = fs.Federation.from_datasets({"a": (one, one)})
    assert torch.equal(found.clients[0].x_train, torch.from_numpy(np.ascontiguousarray(want)))
    assert found.clients[0].y_train.tolist() == Y[:12].tolist()


def test_rows_by_column():
    rows = [{"age": float(i), "bmi": 2.0 * i, "site": "a", "ill": "yes" if i % 2 else "no"} for i in range(10)]
    found = fs.Federation.from_datasets({"a": (Listed(rows), Listed(rows))}, input="bmi,age", label="ill")
    assert found.clients[0].x_train[3].tolist() == [6.0, 3.0]
    assert (found.labels, found.clients[0].y_train[:2].tolist()) == (("no", "yes"), [0, 1])
    refused("input = 'height': should be a column", {"a": Listed(rows)}, input="height", label="ill")
    refused("label = 'sick': should be a column", {"a": Listed(rows)}, label="sick")
    refused(r"label = \(none\)", {"a": Listed(rows)})
    refused("a text: should be numbers: of texts, ids of tokens", {"a": Listed(rows)}, input="site", label="ill")


def test_classes_are_the_same_where_their_names_are():
    """Number 0 is a cat at one site and a dog at the other: torchvision's ImageFolder numbers the folders that it finds."""
    one = Listed([(X[0], 0), (X[1], 1)], classes=["cat", "dog"])
    other = Listed([(X[2], 0), (X[3], 1)], classes=["dog", "fox"])
    found = fs.Federation.from_datasets({"a": (one, one), "b": (Subset(other, [0, 1]), other)})
    assert found.labels == ("cat", "dog", "fox")
    assert [client.y_train.tolist() for client in found.clients] == [[0, 1], [1, 2]]
    assert found.classes == 3
    same = fs.Federation.from_datasets({"a": (one, one), "b": (one, one)})
    assert (same.labels, same.clients[1].y_train.tolist()) == (("cat", "dog"), [0, 1])


def test_transforms_that_draw_at_random_are_refused():
    noise = np.random.default_rng(1)
    refused(
        r"clients\['a'\] = sample 0, which differs when it is read again: should be the same each time",
        {"a": Listed(range(10), lambda i: (X[i] + noise.normal(), Y[i]))},
    )
    refused("differs when it is read again", [Listed(range(10), lambda i: (X[i], noise.integers(1000)))])
    flips = iter(range(10**6))  # every fifth reading is another one
    refused("differs when", [Listed(range(40), lambda i: (X[i] * (-1 if next(flips) % 5 == 4 else 1), Y[i]))])
    fs.Federation.from_datasets([Listed(range(10), lambda i: (X[i], Y[i]))])


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


def test_what_is_wrong_is_named():
    refused("a data set with __len__ and __getitem__", {"a": Endless()})
    refused("a data set without samples", {"a": Listed([])})
    refused("a pair", {"a": Listed(range(5), lambda i: X[i])})
    refused(r"sample 0: should be one that can be read \(ZeroDivisionError", {"a": Listed(range(5), lambda i: 1 // 0)})
    refused("sample 3 of shape", {"a": Listed(range(5), lambda i: (X[i][: 6 - i // 3], 0))})
    refused("1 samples: should be at least 2", {"a": tensors(slice(0, 1))})
    refused("4 data sets", {"a": (tensors(),) * 4})
    refused("percentages", {"a": tensors()}, split="official")
    refused("clients = 'TensorDataset'", tensors())
    refused("a list of at least one", {})
    refused("names or numbers in all", [Listed([(X[0], "a")] * 4), Listed([(X[0], 1)] * 4)])
    refused("a value of type object", {"a": Listed(range(5), lambda i: (object(), 0))})
