"""The papers' own data sets, each on small files in its published layout, and the errors about broken ones."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from fedstill.core.errors import InputError
from fedstill.data import Federation, catalogue, load
from fedstill.data.aesthetics import RATINGS
from fedstill.data.domainnet import DOMAINS, TEN
from fedstill.report.text import partition_of

from .test_data_folders import paint
from .test_data_mat import house
from .test_data_sources import STEMS, cifar_bytes, idx_bytes


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("FEDSTILL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def refused(source, root, says):
    with pytest.raises(InputError, match=says) as caught:
        load(source, root)
    assert "\n" not in str(caught.value)


# FEMNIST


def leaf(path, writers, **fields):
    """A file as LEAF writes it: each writer's labels; image j of a writer is all (j + 1)/100."""
    data = {w: {"x": [[(j + 1) / 100] * 784 for j in range(len(ys))], "y": ys} for w, ys in writers.items()}
    content = {"users": list(writers), "num_samples": [len(ys) for ys in writers.values()], "user_data": data, **fields}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content


@pytest.fixture
def femnist(tmp_path):
    leaf(tmp_path / "femnist/train/all_data_0_niid_0_keep_0_train_9.json", {"f1_02": [0, 36, 61], "f0_01": [10, 45]})
    leaf(tmp_path / "femnist/train/all_data_1_niid_0_keep_0_train_9.json", {"f2_00": [5, 9]})
    leaf(tmp_path / "femnist/test/all_data_0_niid_0_keep_0_test_9.json", {"f0_01": [37], "f1_02": [0], "f3_99": [44]})
    return tmp_path


def test_femnist_writers_are_owners(femnist):
    data = load("femnist", femnist)
    assert (data.name, data.classes, data.shape, data.x.dtype) == ("femnist", 62, (1, 28, 28), np.float32)
    assert data.y.tolist() == [0, 36, 61, 10, 45, 5, 9]
    assert data.owner.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert data.groups == ("f1_02", "f0_01", "f2_00", "f3_99")
    assert data.test_y.tolist() == [37, 0, 44]
    assert data.test_owner.tolist() == [1, 0, 3]
    np.testing.assert_allclose(data.x[:, 0, 27, 27], [0.01, 0.02, 0.03, 0.01, 0.02, 0.01, 0.02], rtol=1e-6)
    assert [data.labels[k] for k in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]
    assert data.mean == ()  # the numbers are taken as LEAF wrote them


def test_femnist_by_writer_with_its_own_tests(femnist):
    (femnist / "femnist/train/all_data_1_niid_0_keep_0_train_9.json").unlink()
    fed = Federation.from_dataset(load("femnist", femnist), partition="owner", clients=None, split="official")
    assert [(c.y_train.tolist(), c.y_test.tolist()) for c in fed.clients] == [([0, 36, 61], [0]), ([10, 45], [37])]


def test_femnist_letters_by_classes_with_lognormal_sizes(femnist):
    """FedBSD's division: so many letters a client, sizes by a log-normal law, writers apart."""
    writers = {f"w{k}": [36 + (k + i) % 10 for i in range(12)] for k in range(40)}
    leaf(femnist / "femnist/train/all_data_2_niid_0_keep_0_train_9.json", writers)
    data = load("femnist:letters10", femnist)
    fed = Federation.from_dataset(data, partition="classes:3,lognormal:1.0", clients=15, seed=1)
    counts = fed.counts()
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert counts.sum() == len(data.pooled())
    assert counts.sum(axis=1).max() > 3 * counts.sum(axis=1).min()
    assert partition_of(fed) == "classes:3,lognormal:1.0"


def test_femnist_letters(femnist):
    data = load("femnist:letters10", femnist)
    assert (data.name, data.classes, data.labels) == ("femnist:letters10", 10, tuple("abcdefghij"))
    assert data.y.tolist() == [0, 9]
    assert data.owner.tolist() == [0, 1]
    assert data.test_y.tolist() == [1, 8]
    assert data.test_owner.tolist() == [1, 2]  # the writer with digits only is gone
    assert data.groups == ("f1_02", "f0_01", "f3_99")


def test_broken_femnist_is_refused(femnist):
    path = femnist / "femnist/train/all_data_1_niid_0_keep_0_train_9.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    refused("femnist", femnist, "a whole JSON file")
    path.write_text("[" * 100_000)
    refused("femnist", femnist, "a whole JSON file")
    path.write_text("[1]")
    refused("femnist", femnist, "holds an object")
    path.write_text("{}")
    refused("femnist", femnist, "users, num_samples and user_data")
    leaf(path, {"a": [1]}, users=["b"])
    refused("femnist", femnist, "name the same writers")
    leaf(path, {"a": [1]}, num_samples=[2])
    refused("femnist", femnist, "2 images x and 2 labels y as num_samples says")
    leaf(path, {"a": [62]})
    refused("femnist", femnist, "label 62")
    leaf(path, {"f1_02": [1]})
    refused("femnist", femnist, "f1_02 is also in all_data_0")
    for pixels, says in (
        ([0.5] * 783, "784 numbers"),
        ([0.5] * 783 + [[1]], "784 numbers|numbers"),
        ([0.5] * 783 + ["a"], "numbers"),
        ([0.5] * 783 + [2], "x from 0.5 to 2: should be numbers from 0 to 1"),
        ([0.5] * 783 + [float("nan")], "NaN"),
    ):
        leaf(path, {"a": [1]}, user_data={"a": {"x": [pixels], "y": [1]}})
        refused("femnist", femnist, says)
    leaf(path, {"a": [1]}, user_data={"a": [1]})
    refused("femnist", femnist, "its samples")
    for file in path.parent.iterdir():
        file.unlink()
    refused("femnist", femnist, "LEAF's json files")
    refused("femnist", femnist / "none", r"put femnist/train, femnist/test \(LEAF's json files\) into")
    refused("femnist:letters", femnist, "femnist or femnist:letters10: there is no option 'letters'")


# DomainNet and Office


@pytest.fixture
def domainnet(tmp_path):
    """Two classes that FedBN takes and one that it does not; label 2 is seen in sketch's lists only."""
    folder = tmp_path / "domainnet"
    classes = {0: "bird", 1: "axe", 2: "zebra"}
    for d, domain in enumerate(DOMAINS):
        for split, files in (("train", (0, 1, 2)), ("test", (7,))):
            labels = [k for k in classes if k < 2 or domain == "sketch"]
            lines = [f"{domain}/{classes[k]}/{domain}_{i}.png {k}" for k in labels for i in files]
            for line in lines:
                paint(
                    folder / line.rpartition(" ")[0], 10 * d + int(line[-1]), size=(4, 5), colour=domain != "quickdraw"
                )
            (folder / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_domainnet_lists_are_the_official_split(domainnet):
    data = load("domainnet@4", domainnet)
    assert (data.name, data.classes, data.shape) == ("domainnet", 3, (3, 4, 4))
    assert (data.labels, data.groups) == (("bird", "axe", "zebra"), DOMAINS)
    assert np.bincount(data.domain).tolist() == [6, 6, 6, 6, 6, 9]
    assert np.bincount(data.test_domain).tolist() == [2, 2, 2, 2, 2, 3]
    assert (data.x[:, 0, 0, 0] == 10 * data.domain + data.y).all()
    assert (data.test_x[:, 2, 3, 3] == 10 * data.test_domain + data.test_y).all()
    fed = Federation.from_dataset(data, partition="domain", clients=None, split="official")
    assert [(len(c.y_train), len(c.y_test)) for c in fed.clients] == [(6, 2)] * 5 + [(9, 3)]


def test_some_domains_keep_the_classes_of_all(domainnet):
    data = load("domainnet@4#real,clipart", domainnet)
    assert (data.name, data.groups) == ("domainnet#clipart,real", ("clipart", "real"))
    assert data.classes == 3
    assert data.y.max() == 1
    assert set(data.x[:, 0, 0, 0].tolist()) == {0, 1, 40, 41}
    assert load("domainnet#quickdraw", domainnet).shape == (3, 5, 4)  # never grey, whatever is chosen
    refused("domainnet#sketches", domainnet, "a domain that there is after #, not 'sketches': 'sketch'?")
    refused("domainnet#real,real", domainnet, "each domain once")
    refused("domainnet#", domainnet, "not ''")


def test_domainnet_ten_classes(domainnet):
    data = load("domainnet:10@4", domainnet)
    assert (data.name, data.classes, data.labels) == ("domainnet:10", 10, TEN)
    assert set(data.y[data.domain == 5].tolist()) == {TEN.index("bird"), TEN.index("zebra")} == {0, 9}
    assert np.bincount(data.domain).tolist() == [3, 3, 3, 3, 3, 6]


def test_broken_domainnet_is_refused(domainnet):
    path = domainnet / "domainnet/real_train.txt"
    text = path.read_text()
    for line, says in (
        ("real/bird/real_0.png", "a label, with a space between"),
        ("real/bird/real_0.png x", "line 1 = .*a label"),
        ("real/real_0.png 0", "real/CLASS/FILE"),
        ("sketch/bird/sketch_0.png 0", "real/CLASS/FILE"),
        ("real/../x.png 0", "within"),
        ("real/axe/real_0.png 0", "of class bird, as label 0 is elsewhere"),
        ("real/bird/none.png 0", "none.png.*a file that exists"),
        ("", "at least one image"),
    ):
        path.write_text(line + "\n")
        refused("domainnet@4", domainnet, says)
    path.write_bytes(b"\xff\xfe")
    refused("domainnet@4", domainnet, "UTF-8")
    path.write_text("real/axe/real_0.png 1\n")
    refused("domainnet:10@4", domainnet, "images of these classes")
    path.unlink()
    refused("domainnet@4", domainnet, "domainnet#clipart,real")
    assert load("domainnet@4#sketch", domainnet).groups == ("sketch",)
    path.write_text(text)
    image = domainnet / "domainnet/real/bird/real_0.png"
    paint(image, 3, size=(64, 64))
    refused("domainnet", domainnet, "or write PATH@32")
    image.write_bytes(image.read_bytes()[:60])
    refused("domainnet@4", domainnet, "a whole image|a readable image")
    refused("domainnet:345", domainnet, "there is no option '345'")
    refused("domainnet", domainnet / "none", r"put domainnet \(DOMAIN/CLASS/…, DOMAIN_train.txt")


def test_office_caltech_is_a_folder_of_domains(tmp_path):
    names = ("back_pack", "bike", "calculator", "headphones", "keyboard")
    for d, domain in enumerate(("amazon", "caltech", "dslr", "webcam")):
        for k, name in enumerate(names):
            for i in range(2):
                paint(tmp_path / domain / name / f"frame_{i:04}.jpg", 40 * d + k, size=(8, 6 + d))
    data = load(f"{tmp_path}@8")
    assert (data.labels, data.groups) == (names, ("amazon", "caltech", "dslr", "webcam"))
    fed = Federation.from_dataset(data, partition="domain", clients=None)
    assert fed.counts().tolist() == [[2] * 5] * 4


# HISTO-FED and any folder of domains


@pytest.fixture
def centres(tmp_path):
    """Four centres; the class MUC is seen in the third only."""
    for k in range(1, 5):
        for name in ("ADI", "TUM", *(("MUC",) if k == 3 else ())):
            for i in range(2):
                paint(tmp_path / f"histo-fed/center{k}/{name}/{i}.{'tif' if k < 3 else 'png'}", 10 * k + i, size=(6, 6))
    return tmp_path


def test_an_external_centre_has_the_same_classes(centres):
    inner = load("histo-fed@4#center1,center2,center3", centres)
    outer = load("histo-fed@4#center4", centres)
    assert inner.labels == outer.labels == ("ADI", "MUC", "TUM")
    assert inner.groups == ("center1", "center2", "center3")
    assert outer.groups == ("center4",)
    assert inner.classes == outer.classes == 3
    assert outer.y.tolist() == [0, 0, 2, 2]
    assert outer.domain.tolist() == [0, 0, 0, 0]
    assert sorted(set(outer.x[:, 0, 0, 0].tolist())) == [40, 41]
    assert load("histo-fed", centres).groups == ("center1", "center2", "center3", "center4")
    fed = Federation.from_dataset(inner, partition="domain", clients=None)
    assert fed.counts().tolist() == [[2, 0, 2], [2, 0, 2], [2, 2, 2]]
    # normalised as the data that the models saw, not by its own mean
    seen = outer.like(inner).tensors()[0]
    want = (outer.x / 255 - np.array(inner.mean)[:, None, None]) / np.array(inner.std)[:, None, None]
    np.testing.assert_allclose(seen.numpy(), want, atol=1e-5)
    with pytest.raises(InputError, match="as histo-fed#center1,center2,center3 is"):
        load("histo-fed@5#center4", centres).like(inner)


def test_parts_of_a_path(centres):
    folder = centres / "histo-fed"
    data = load(f"{folder}@4#center4")
    assert (data.name, data.labels) == ("histo-fed#center4", ("ADI", "MUC", "TUM"))
    assert load(f"{folder}#center4, center1").groups == ("center1", "center4")
    refused(f"{folder}#center5", None, "'center4'|'center1'")
    refused(f"{folder}/center3#ADI", None, "a folder of domains")
    hashed = centres / "a#b@3"
    os.rename(folder, hashed)
    assert load(f"{hashed}").groups == ("center1", "center2", "center3", "center4")
    assert load(f"{hashed}@4").shape == (3, 4, 4)
    assert load(f"{hashed}#center2").groups == ("center2",)
    assert load(f"{hashed}@4#center2").name == "a#b@3#center2"
    refused("histo-fed", centres, r"put histo-fed \(CENTRE/CLASS/\*.png\) into")
    (centres / "histo-fed").mkdir()
    refused("histo-fed", centres, "a folder that holds CENTRE/CLASS")
    np.savez(centres / "x.npz", x=np.ones((2, 2)), y=[0, 1])
    refused(f"{centres}/x.npz#a", None, "it is a file")
    refused(f"{centres}#a", None, "without #")  # a folder of silos
    refused("x" * 5000, None, "a path that can be read|or a path to your own files")


def test_a_stray_image_does_not_turn_domains_into_classes(centres):
    paint(centres / "histo-fed/center1/preview.png", 1)
    refused(f"{centres}/histo-fed", None, "class folders or domain folders, not both")
    assert load("histo-fed", centres).labels == ("ADI", "MUC", "TUM")


# FLICKR-AES and REAL-CUR


def flickr(root, rows, header="worker, imagePair, score"):
    folder = root / "flickr-aes"
    (folder / "40K").mkdir(parents=True, exist_ok=True)
    for _, image, _ in rows:
        paint(folder / "40K" / image, int(image[1:-4]), size=(5, 4))
    (folder / RATINGS).write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return folder


def test_flickr_raters_are_owners(tmp_path):
    rows = [("B", "f7.png", 5), ("A", "f9.png", 1), ("A", "f7.png", "3.0"), ("C", "f8.png", 2)]
    flickr(tmp_path, rows)
    data = load("flickr-aes@4", tmp_path)
    assert (data.classes, data.groups, data.labels) == (5, ("A", "B", "C"), ("1", "2", "3", "4", "5"))
    assert data.owner.tolist() == [0, 0, 1, 2]
    assert data.y.tolist() == [0, 2, 4, 1]
    assert data.x[:, 0, 0, 0].tolist() == [9, 7, 7, 8]  # an image that two rated is a sample of both
    some = load("flickr-aes#C,A", tmp_path)
    assert (some.name, some.groups, some.y.tolist()) == ("flickr-aes#A,C", ("A", "C"), [0, 2, 1])
    fed = Federation.from_dataset(load("flickr-aes#A", tmp_path), partition="owner", clients=None)
    assert fed.counts().tolist() == [[1, 0, 1, 0, 0]]


def test_flickr_workers_are_drawn_once_and_for_all(tmp_path):
    rows = []
    for w in range(8):
        number = 59 if w == 0 else 291 if w == 1 else 60 + w
        rows += [(f"w{w}", f"f{i % 6}.png", 1 if w == 2 else 1 + i % 5) for i in range(number)]
    flickr(tmp_path, rows)
    three = load("flickr-aes:3@2", tmp_path)
    assert three.name == "flickr-aes:3"
    assert len(three.groups) == 3
    assert set(three.groups) < {"w3", "w4", "w5", "w6", "w7"}  # the others rate too few, too many, or all alike
    assert load("flickr-aes:3@2", tmp_path).groups == three.groups
    assert load("flickr-aes:5@2", tmp_path).groups == ("w3", "w4", "w5", "w6", "w7")
    refused("flickr-aes:6@2", tmp_path, "from 1 to 5 workers")
    refused("flickr-aes:0@2", tmp_path, "from 1 to 5 workers")
    refused("flickr-aes:3@2#w3", tmp_path, "not both")
    refused("flickr-aes:x", tmp_path, "flickr-aes or flickr-aes:WORKERS")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the columns worker, imagePair, score"),
        ("a,b,c\nA,f1.png,3\n", "the columns worker"),
        ("worker, imagePair, score\n", "at least one rating"),
        ("worker, imagePair, score\nA,f1.png\n", "line 2 = 2 cells"),
        ("worker, imagePair, score\nA,f1.png,6\n", "line 2 = '6': should be a score from 1 to 5"),
        ("worker, imagePair, score\nA,f1.png,2.5\n", "a score from 1 to 5"),
        ("worker, imagePair, score\nA,../f1.png,3\n", "within"),
        ("worker, imagePair, score\nA,/f1.png,3\n", "within"),
        ("worker, imagePair, score\nA,f2.png,3\n", "f2.png.*a file that exists"),
    ],
)
def test_broken_flickr_is_refused(tmp_path, text, says):
    folder = flickr(tmp_path, [("A", "f1.png", 3)])
    (folder / RATINGS).write_text(text)
    refused("flickr-aes", tmp_path, says)


def test_real_cur(tmp_path):
    for user, score, i in (("u2", 5, 0), ("u2", 1, 1), ("u1", 3, 2)):
        paint(tmp_path / f"real-cur/images/{user}/{score}/{i}.jpg", 50 * i, size=(8, 8))
    data = load("real-cur@8", tmp_path)
    assert (data.classes, data.groups) == (5, ("u1", "u2"))
    assert data.owner.tolist() == [0, 1, 1]
    assert data.y.tolist() == [2, 0, 4]
    assert data.x[:, 1, 4, 4].tolist() == [100, 50, 0]
    assert load("real-cur#u1", tmp_path).y.tolist() == [2]
    paint(tmp_path / "real-cur/images/u1/6/9.jpg", 9)
    refused("real-cur", tmp_path, "named by a score from 1 to 5")
    refused("real-cur", tmp_path / "none", r"put real-cur/images \(USER/SCORE/\*.jpg\) into")
    (tmp_path / "b/real-cur/images").mkdir(parents=True)
    refused("real-cur", tmp_path / "b", "a folder that holds USER/SCORE")


# iNaturalist

SPECIES = [(9, "Apis mellifera", "Insecta"), (4, "Turdus merula", "Aves"), (2, "Parus major", "Aves")]


def inat(root, split, shown, **more):
    """`shown` are (id, category): file ID.png, painted with its id."""
    folder = root / "inaturalist"
    names = {c: f"{group}/{name}" for c, name, group in SPECIES}
    listed = [{"id": i, "file_name": f"train_val_images/{names[c]}/{i}.png", "width": 6} for i, c in shown]
    for image in listed:
        paint(folder / image["file_name"], image["id"], size=(6, 5))
    content = {
        "info": {},
        "images": listed,
        "categories": [{"id": c, "name": name, "supercategory": group} for c, name, group in SPECIES],
        "annotations": [{"id": k, "image_id": i, "category_id": c} for k, (i, c) in enumerate(shown)][::-1],
        **more,
    }
    (folder / f"{split}2017.json").write_text(json.dumps(content))


@pytest.fixture
def inaturalist(tmp_path):
    inat(tmp_path, "train", [(11, 9), (12, 4), (13, 2), (14, 9)])
    inat(tmp_path, "val", [(21, 2), (22, 9)])
    return tmp_path


def test_inaturalist_species_and_super_categories(inaturalist):
    data = load("inaturalist@4", inaturalist)
    assert (data.classes, data.shape) == (3, (3, 4, 4))
    assert data.labels == ("Parus major", "Turdus merula", "Apis mellifera")  # by id
    assert data.y.tolist() == [2, 1, 0, 2]
    assert data.x[:, 0, 0, 0].tolist() == [11, 12, 13, 14]
    assert (data.test_y.tolist(), data.test_x[:, 0, 0, 0].tolist()) == ([0, 2], [21, 22])
    coarse = load("inaturalist:super", inaturalist)
    assert (coarse.name, coarse.labels) == ("inaturalist:super", ("Aves", "Insecta"))
    assert (coarse.y.tolist(), coarse.test_y.tolist()) == ([1, 0, 0, 1], [0, 1])
    birds = load("inaturalist#Aves", inaturalist)
    assert (birds.classes, birds.y.tolist(), birds.test_y.tolist()) == (3, [1, 0], [0])


def test_broken_inaturalist_is_refused(inaturalist):
    root = inaturalist
    images = [(11, 9), (12, 4)]
    annotations = [{"image_id": 11, "category_id": 9}]
    for more, says in (
        ({"images": None}, "images, categories and annotations"),
        ({"images": [{"id": "11", "file_name": "a.png"}]}, r"images\[0\].*id \(int\) and file_name"),
        ({"images": [{"id": 11, "file_name": "../a.png"}]}, "within"),
        ({"images": [{"id": 11, "file_name": "train_val_images/a.png"}]}, "a.png.*a file that exists"),
        ({"categories": [{"id": 9, "name": "Apis"}]}, r"categories\[0\]"),
        ({"categories": [{"id": 9, "name": "Apis", "supercategory": "Insecta"}]}, "the id of a category"),
        ({"annotations": annotations}, "an image that has an annotation"),
        ({"annotations": annotations * 2}, "one annotation"),
    ):
        inat(root, "train", images, **more)
        refused("inaturalist", root, says)
    inat(root, "train", images)
    changed = [{"id": c, "name": name, "supercategory": "Fungi"} for c, name, _ in SPECIES]
    inat(root, "val", images, categories=changed)
    refused("inaturalist", root, "as id 9 is elsewhere")
    inat(root, "val", images)
    path = root / "inaturalist/train2017.json"
    path.write_text(path.read_text()[:-9])
    refused("inaturalist", root, "a whole JSON file")
    inat(root, "train", [(11, 9)])
    refused("inaturalist#Aves", root, "one with images of Aves")
    refused("inaturalist:species", root, "inaturalist:super")
    path.unlink()
    refused("inaturalist", root, "put inaturalist/train2017.json into")


# Feature shift: each set of digits a client


@pytest.fixture
def digits_five(tmp_path):
    """Five domains of differing sizes and channels; each is one flat grey (or one pattern), tests one brighter."""
    house(tmp_path / "svhn/train_32x32.mat", 20, grey=10)
    house(tmp_path / "svhn/test_32x32.mat", 10, grey=11)
    house(tmp_path / "synth/synth_train_32x32.mat", 30, zero=0, grey=20)
    house(tmp_path / "synth/synth_test_32x32.mat", 15, zero=0, grey=21)
    (tmp_path / "mnist").mkdir()
    for stem, count, value in (("train", 40, 30), ("t10k", 5, 31)):
        images, labels = np.full((count, 28, 28), value, np.uint8), np.arange(count, dtype=np.uint8) % 10
        for name, array in zip([s for s in STEMS if s.startswith(stem)], (images, labels), strict=True):
            (tmp_path / "mnist" / name).write_bytes(idx_bytes(array))
    for name, shape, value in (("usps", (16, 16), 40), ("mnistm", (32, 32, 3), 50)):
        train, test = np.full((12, *shape), value, np.uint8), np.full((3, *shape), value + 1, np.uint8)
        np.savez(tmp_path / f"{name}.npz", train_x=train, train_y=np.arange(12) % 10, test_x=test, test_y=[7, 8, 9])
    return tmp_path


FIVE = ("svhn", "mnistm", "synth", "mnist", "usps")
GREYS = (10, 50, 20, 30, 40)
TRAIN, TEST = (20, 12, 30, 40, 12), (10, 3, 15, 5, 3)


@pytest.mark.parametrize("size", [None, 28, 32])
def test_each_client_is_one_domain(digits_five, size):
    data = load("+".join(FIVE) + (f"@{size}" if size else ""), digits_five)
    side = size or 32  # the largest of them
    assert (data.shape, data.classes, data.groups) == ((3, side, side), 10, FIVE)
    for d, (grey, train, test) in enumerate(zip(GREYS, TRAIN, TEST, strict=True)):
        own, own_test = data.x[data.domain == d], data.test_x[data.test_domain == d]
        assert (len(own), len(own_test)) == (train, test)
        assert (own == grey).all()  # all three channels, whatever the size was
        assert (own_test == grey + 1).all()
    fed = Federation.from_dataset(data, partition="domain", clients=None, split="official")
    assert len(fed) == 5
    for client, grey, train, test in zip(fed.clients, GREYS, TRAIN, TEST, strict=True):
        assert (len(client.y_train), len(client.y_test)) == (train, test)
        for x, value in ((client.x_train, grey), (client.x_test, grey + 1)):
            back = x * torch.tensor(data.std).view(3, 1, 1) + torch.tensor(data.mean).view(3, 1, 1)
            torch.testing.assert_close(back, torch.full_like(back, value / 255))
    assert fed.clients[4].y_test.tolist() == [7, 8, 9]
    both = Federation.from_dataset(data, partition="domain", clients=5)  # pooled: official tests are dealt as well
    assert [len(c.y_train) + len(c.y_test) for c in both.clients] == [a + b for a, b in zip(TRAIN, TEST, strict=True)]


def test_a_grey_pattern_is_resized_and_repeated(digits_five):
    ramp = np.repeat(np.arange(16, dtype=np.uint8)[None] * 10, 16, axis=0)[None]
    np.savez(digits_five / "usps.npz", train_x=ramp, train_y=[3], test_x=ramp, test_y=[4])
    data = load("usps+svhn@8", digits_five)
    first = data.x[0]
    assert np.array_equal(first[0], first[1])
    assert np.array_equal(first[0], first[2])
    # halved with a triangle over four columns (weights 1 3 3 1), a ramp stays a ramp away from its ends
    assert first[0, 4, 1:-1].tolist() == [25, 45, 65, 85, 105, 125]


def test_a_domain_without_official_tests_is_named(digits_five):
    data = load("svhn+digits", digits_five)
    with pytest.raises(InputError, match="client 1 has no official tests"):
        Federation.from_dataset(data, partition="domain", clients=None, split="official")


def test_what_cannot_be_joined_or_resized(digits_five, femnist):
    refused("svhn+domainnet", digits_five, "sets whose images have one size each, unlike domainnet")
    refused("svhn+femnist", digits_five, "a set of images")
    refused("svhn+svhn", digits_five, "each given once")
    refused("svhn+usps@5000", digits_five, "from 1 to 4096")
    refused("svhn@28", digits_five, "svhn without @SIZE")
    refused("svhn#a", digits_five, "svhn without #")
    refused("svhn:extra", digits_five, "there is no option 'extra'")
    refused("svhn:", digits_five, "there is no option ''")


# CIFAR that was truncated between two records


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((10_000, 10_000, 10_000, 10_000, 10_000, 9_999), "test_batch.bin.*10000 records long.*it has 9999"),
        ((10_000, 10_000, 500, 10_000, 10_000, 10_000), "data_batch_3.bin.*it has 500"),
        ((10_000, 10_000, 10_000, 10_000, 10_001, 10_000), "data_batch_5.bin"),
        ((2_000, 2_000, 2_000, 2_000, 2_000, 2_000), "data_batch_1.bin.*it has 2000"),
    ],
)
def test_a_cut_cifar_file_is_noticed(tmp_path, counts, says):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, count in zip((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), counts, strict=True):
        (folder / f"{name}.bin").write_bytes(bytes(3073 * count))
    refused("cifar10", tmp_path, says)


def test_a_cut_cifar100_file_is_noticed(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(3074 * 49_999))
    (folder / "test.bin").write_bytes(bytes(3074 * 10_000))
    refused("cifar100", tmp_path, "train.bin.*50000 records long.*it has 49999")
    for name, count in (("train.bin", 3), ("test.bin", 1)):
        pixels = np.zeros((count, 3, 32, 32), np.uint8)
        (folder / name).write_bytes(cifar_bytes([[0, 1]] * count, pixels))
    assert len(load("cifar100", tmp_path)) == 3  # a small sample is nobody's truncated file


def test_catalogue_lists_the_papers_sets(domainnet, femnist):
    entries = {entry.name: entry for entry in catalogue(domainnet)}
    assert entries["domainnet"].present
    assert entries["femnist"].present
    assert not entries["svhn"].present
    assert entries["flickr-aes"].files == (f"flickr-aes/{RATINGS}", "flickr-aes/40K")
    assert {"synth", "real-cur", "histo-fed", "inaturalist"} <= entries.keys()
