"""Folders: images by class, domains, and one file for each client."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from fedstill.core.errors import InputError
from fedstill.data import Federation, load


def paint(path, value, size=(4, 4), colour=True):
    Image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if colour else (size[1], size[0])
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)


def refused(source, says, path=None):
    with pytest.raises(InputError, match=says) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    if path is not None:
        assert str(path) in str(caught.value)


def test_images_by_class(tmp_path):
    paint(tmp_path / "dog" / "b.png", 2)
    paint(tmp_path / "dog" / "a.png", 1)
    paint(tmp_path / "cat" / "z.PNG", 3)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    data = load(tmp_path)
    assert data.labels == ("cat", "dog")
    assert data.shape == (3, 4, 4)
    assert data.x[:, 0, 0, 0].tolist() == [3, 1, 2]
    assert data.y.tolist() == [0, 1, 1]
    assert data.test_x is None


def test_images_with_train_and_test(tmp_path):
    paint(tmp_path / "train" / "b" / "1.png", 10, colour=False)
    paint(tmp_path / "train" / "a" / "1.png", 20, colour=False)
    paint(tmp_path / "test" / "b" / "1.png", 30, colour=False)
    data = load(tmp_path)
    assert data.shape == (1, 4, 4)  # grey stays one channel
    assert data.y.tolist() == [0, 1]
    assert data.test_y.tolist() == [1]
    assert data.test_x[0, 0, 0, 0] == 30


def test_images_by_domain(tmp_path):
    for domain in ("real", "sketch"):
        for i in range(2):
            paint(tmp_path / domain / "cup" / f"{i}.png", 9)
    paint(tmp_path / "sketch" / "axe" / "0.jpg", 9)
    data = load(tmp_path)
    assert data.groups == ("real", "sketch")
    assert data.labels == ("axe", "cup")
    assert data.domain.tolist() == [0, 0, 1, 1, 1]
    fed = Federation.from_dataset(data, partition="domain", clients=2)
    assert fed.counts().tolist() == [[0, 2], [1, 2]]


def test_images_of_differing_sizes(tmp_path):
    paint(tmp_path / "a" / "1.png", 7)
    paint(tmp_path / "a" / "2.png", 8, size=(6, 5))
    refused(tmp_path, r"4×4 as 1.png is \(it is 6×5\); or write PATH@32", tmp_path / "a" / "2.png")
    data = load(f"{tmp_path}@8")
    assert data.shape == (3, 8, 8)
    assert (data.x[1] == 8).all()
    refused(f"{tmp_path}@0", "from 1 to 4096")


def test_broken_images_are_named(tmp_path):
    path = tmp_path / "a" / "1.png"
    paint(path, 7, size=(64, 64))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(tmp_path, "a whole image|a readable image", path)
    path.write_bytes(b"nothing")
    refused(tmp_path, "a readable image", path)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a" / "1.png"
    path.parent.mkdir()
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused(tmp_path, r"pip install 'fedstill\[images\]'")


def test_csv_silos(tmp_path):
    (tmp_path / "site-b.csv").write_text("a,label,b\n1,0,2\n3,1,4\n\n")
    (tmp_path / "site-a.csv").write_text("\ufeffa,label,b\n5,2.0,6\n7,0,8\n9,0,10\n", encoding="utf-8")
    data = load(tmp_path)
    assert data.groups == ("site-a", "site-b")
    assert data.x.tolist() == [[5, 6], [7, 8], [9, 10], [1, 2], [3, 4]]
    assert data.y.tolist() == [2, 0, 0, 0, 1]
    assert data.owner.tolist() == [0, 0, 0, 1, 1]
    assert data.classes == 3
    fed = Federation.from_dataset(data, partition="owner", clients=None)
    assert [len(c.y_train) + len(c.y_test) for c in fed.clients] == [3, 2]


def test_csv_labels_may_be_the_classes_names(tmp_path):
    """Classes are numbered by their sorted names over all files, whichever of them a file has."""
    (tmp_path / "berlin.csv").write_text("age,label\n1,sick\n2, healthy\n")
    (tmp_path / "lyon.csv").write_text("age,label\n3,unknown\n4,sick\n")
    data = load(str(tmp_path))
    assert data.labels == ("healthy", "sick", "unknown")
    assert data.y.tolist() == [1, 0, 2, 1]
    assert data.x.tolist() == [[1], [2], [3], [4]]
    for text, says in (
        ("age,label\n3,unknown\n4,0\n", "lyon.csv, line 3, column 2 (label) = '0': should be the name of a class"),
        (
            "age,label\n3,unknown\n4,\n",
            "line 3, column 2 (label) = nothing: should be a label (1 value is missing in 1 of 2 files: label 1)",
        ),
        ("age,label\n3,0\n4,1\n", "should be with names as labels as berlin.csv has"),
        ("age,label\n3,0\n4,sick\n", "line 3, column 2 (label) = 'sick': should be a number"),
    ):
        (tmp_path / "lyon.csv").write_text(text)
        refused(tmp_path, re.escape(says))


def test_csv_without_header_has_the_label_last(tmp_path):
    (tmp_path / "1.csv").write_text("1.5,2,0\n3,4,1\n")
    data = load(tmp_path)
    assert data.x.tolist() == [[1.5, 2], [3, 4]]
    assert data.y.tolist() == [0, 1]
    (tmp_path / "1.csv").write_text("Y,0,1\n1,5,6\n0,7,8\n")  # numbers may name columns beside a named label
    data = load(tmp_path)
    assert data.x.tolist() == [[5, 6], [7, 8]]
    assert data.y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,y\n1,0\n2\n", "line 3 = 1 cells: should be 2 cells"),
        ("a,y\n1,0\nfoo,1\n", r"line 3, column 1 \(a\) = 'foo': should be a number, as 1 of"),
        (
            "a,y\n1,0\n,1\n",
            r"line 3, column 1 \(a\) = nothing: should be a value \(1 value is missing: a 1\); --impute",
        ),
        ("a,y\n1,0.5\n" + 11 * "1,1\n", "label 0.5"),
        ("a,y\n1,-1\n", "label -1"),
        ("a,y\nnan,0\n", r"line 2, column 1 \(a\) = nothing: should be a value"),
        ("a,y\n1,0\n-inf,0\n", r"line 3, column 1 \(a\) = -inf: should be a finite number"),
        ("1,oops,0\n2,3,1\n", "line 1, column 2 = 'oops'"),
        ("a,y\n", "at least one row"),
        ("", "at least one row"),
        ("1\n2\n", "at least one feature"),
    ],
)
def test_broken_csv_is_named(tmp_path, text, says):
    path = tmp_path / "1.csv"
    path.write_text(text)
    refused(tmp_path, says, path)


def test_csv_silos_must_agree(tmp_path):
    (tmp_path / "1.csv").write_text("a,b,y\n1,2,0\n")
    (tmp_path / "2.csv").write_text("b,a,y\n1,2,0\n")
    refused(tmp_path, "with the columns of 1.csv: a, b, y", tmp_path / "2.csv")
    (tmp_path / "2.csv").write_text("a,y\n1,0\n")
    refused(tmp_path, r"with the columns of 1.csv: a, b, y \(it has a, y\)", tmp_path / "2.csv")
    (tmp_path / "2.csv").write_bytes(b"\xff\xfe,1\n")
    refused(tmp_path, "UTF-8", tmp_path / "2.csv")


def test_npz_silos_keep_their_own_tests(tmp_path):
    for k in range(2):
        np.savez(
            tmp_path / f"{k}.npz",
            train_x=np.full((3, 2), k, np.float32),
            train_y=[0, 1, 0],
            test_x=np.full((1 + k, 2), 10 + k, np.float32),
            test_y=[1] * (1 + k),
        )
    data = load(tmp_path)
    assert data.owner.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_owner.tolist() == [0, 1, 1]
    fed = Federation.from_dataset(data, partition="owner", clients=2, split="official")
    assert fed.clients[1].x_test.tolist() == [[11, 11], [11, 11]]
    assert fed.clients[0].x_train.tolist() == [[0, 0]] * 3
    np.savez(tmp_path / "2.npz", x=np.zeros((3, 2), np.float32), y=[0, 1, 0])
    refused(tmp_path, "with test_x and test_y as 0.npz is", tmp_path / "2.npz")
