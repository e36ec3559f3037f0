"""Loaders on small files in the published layouts, and what they say about broken ones."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest

from fedstill.core.errors import InputError
from fedstill.data import Dataset, catalogue, load
from fedstill.data.dataset import moments
from fedstill.data.source import root_of

STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing here may leave the machine: a missing set is looked for at a closed port."""
    monkeypatch.setenv("FEDSTILL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Twelve training and four test images; half of the files gzipped."""
    rng = np.random.Generator(np.random.Philox(key=1))
    arrays = [
        rng.integers(0, 256, (12, 28, 28), dtype=np.uint8),
        (np.arange(12) % 10).astype(np.uint8),
        rng.integers(0, 256, (4, 28, 28), dtype=np.uint8),
        np.array([9, 0, 3, 3], np.uint8),
    ]
    folder = tmp_path / "mnist"
    folder.mkdir()
    for stem, array in zip(STEMS, arrays, strict=True):
        raw = idx_bytes(array)
        if stem.startswith("train"):
            (folder / f"{stem}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / stem).write_bytes(raw)
    return tmp_path, arrays


def test_digits_are_the_uci_test_part():
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.uint8
    assert (data.x.min(), data.x.max()) == (0, 16)
    assert np.bincount(data.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.y[:10].tolist() == list(range(10))
    assert data.x[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # the first line of the published file
    x, y = data.tensors()
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    assert y.tolist() == data.y.tolist()


def test_mnist_reads_gzip_and_plain(mnist):
    root, arrays = mnist
    data = load("mnist", root)
    assert np.array_equal(data.x[:, 0], arrays[0])
    assert data.y.tolist() == arrays[1].tolist()
    assert np.array_equal(data.test_x[:, 0], arrays[2])
    assert data.test_y.tolist() == [9, 0, 3, 3]
    assert data.classes == 10
    assert data.mean[0] == pytest.approx(arrays[0].mean() / 255)
    assert data.std[0] == pytest.approx(arrays[0].std() / 255)
    want = (arrays[0] / 255 - data.mean[0]) / data.std[0]
    np.testing.assert_allclose(data.tensors()[0][:, 0].numpy(), want, atol=1e-5)


def test_a_tensor_is_a_copy(mnist):
    data = load("mnist", mnist[0])
    before = data.x.copy()
    data.tensor(data.x).zero_()
    assert np.array_equal(data.x, before)


def refused(name, root, says, path=None):
    with pytest.raises(InputError, match=says) as caught:
        load(name, root)
    assert "\n" not in str(caught.value)
    if path is not None:
        assert str(path) in str(caught.value)


def test_broken_idx_files_are_named(mnist):
    root, arrays = mnist
    path = root / "mnist" / f"{STEMS[0]}.gz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused("mnist", root, "a whole gzip file", path)
    path.write_bytes(content[:-6] + b"xxxxxx")
    refused("mnist", root, "a whole gzip file", path)
    path.write_bytes(gzip.compress(idx_bytes(arrays[1])))
    refused("mnist", root, "begins with 0x00000803", path)
    path.write_bytes(gzip.compress(idx_bytes(arrays[0])[:-1]))
    refused("mnist", root, "9424 bytes long as its header says", path)  # 16 + 12 · 784
    path.write_bytes(idx_bytes(arrays[0])[:7])
    refused("mnist", root, "header of 16 bytes", path)
    path.write_bytes(b"")
    refused("mnist", root, "begins with", path)
    path.write_bytes(idx_bytes(arrays[0][:5]))
    refused("mnist", root, "one label for each of the 5 samples")


def test_label_beyond_the_known_classes(mnist):
    root, _ = mnist
    (root / "mnist" / STEMS[3]).write_bytes(idx_bytes(np.array([9, 0, 10, 3], np.uint8)))
    refused("mnist", root, "label 10 of sample 2: should be a whole number of at least 0 and below 10")


def cifar_bytes(labels, pixels):
    return b"".join(bytes(head) + image.tobytes() for head, image in zip(labels, pixels, strict=True))


def test_cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.Generator(np.random.Philox(key=2))
    pixels = rng.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    for i in range(5):
        chunk = pixels[2 * i : 2 * i + 2]
        (folder / f"data_batch_{i + 1}.bin").write_bytes(cifar_bytes([[i], [9 - i]], chunk))
    test = folder / "test_batch.bin"
    test.write_bytes(cifar_bytes([[7], [0]], pixels[10:]))
    data = load("cifar10", tmp_path)
    assert np.array_equal(data.x, pixels[:10])
    assert data.y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert np.array_equal(data.test_x, pixels[10:])
    assert data.test_y.tolist() == [7, 0]
    np.testing.assert_allclose(data.mean, pixels[:10].mean(axis=(0, 2, 3)) / 255)
    np.testing.assert_allclose(data.std, pixels[:10].std(axis=(0, 2, 3)) / 255)
    test.write_bytes(test.read_bytes()[:-1])
    refused("cifar10", tmp_path, "whole number of records of 3073 bytes", test)
    test.write_bytes(b"")
    refused("cifar10", tmp_path, "whole number of records", test)
    test.write_bytes(cifar_bytes([[10]], pixels[:1]))
    refused("cifar10", tmp_path, "below 10")


def test_cifar100_takes_the_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    pixels = np.zeros((3, 3, 32, 32), np.uint8)
    pixels[1, 2, 31, 30] = 77
    (folder / "train.bin").write_bytes(cifar_bytes([[3, 99], [19, 42]], pixels[:2]))
    (folder / "test.bin").write_bytes(cifar_bytes([[1, 5]], pixels[2:]))
    data = load("cifar100", tmp_path)
    assert data.classes == 100
    assert data.y.tolist() == [99, 42]
    assert data.test_y.tolist() == [5]
    assert data.x[1, 2, 31, 30] == 77
    assert data.std[0] == 1.0  # a constant channel is not divided by 0


def test_usps_and_mnistm(tmp_path):
    grey = np.arange(3 * 16 * 16, dtype=np.uint8).reshape(3, 16, 16)
    np.savez(tmp_path / "usps.npz", train_x=grey, train_y=[0, 1, 9], test_x=grey[:1], test_y=[4])
    data = load("usps", tmp_path)
    assert data.shape == (1, 16, 16)
    assert np.array_equal(data.x[:, 0], grey)
    colour = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
    np.savez(tmp_path / "mnistm.npz", train_x=colour, train_y=[0, 1], test_x=colour, test_y=[4, 5])
    data = load("mnistm", tmp_path)
    assert np.array_equal(data.x, colour.transpose(0, 3, 1, 2))


def test_missing_files_are_named(tmp_path):
    refused("usps", tmp_path, r"put usps.npz \(train_x, train_y, test_x, test_y\) into", tmp_path)
    with pytest.raises(InputError, match=r"cifar-100-binary/train.bin, cifar-100-binary/test.bin into"):
        load("cifar100", tmp_path, fetch=False)


def test_domains_are_joined(mnist):
    root, _ = mnist
    grey = np.full((3, 16, 16), 100, np.uint8)
    np.savez(root / "usps.npz", train_x=grey, train_y=[0, 1, 9], test_x=grey[:2], test_y=[4, 4])
    data = load("mnist+usps+digits@20", root)
    assert data.shape == (1, 20, 20)
    assert np.bincount(data.domain).tolist() == [12, 3, 1797]
    assert np.bincount(data.test_domain).tolist() == [4, 2]
    assert data.groups == ("mnist", "usps", "digits")
    assert (data.x[12:15] == 100).all()  # a flat image stays flat when it is resized
    assert data.x[15:].max() > 200  # the digits' 16 is as bright as the others' 255
    colour = np.zeros((2, 32, 32, 3), np.uint8)
    colour[..., 1] = 50
    np.savez(root / "mnistm.npz", train_x=colour, train_y=[0, 1])
    both = load("usps+mnistm", root)
    assert both.shape == (3, 32, 32)
    assert (both.x[:3] == 100).all()
    assert both.x[3, :, 5, 5].tolist() == [0, 50, 0]
    refused("usps+usps", root, "each given once")


def test_npz_of_ones_own(tmp_path):
    path = tmp_path / "own.npz"
    x = np.linspace(0, 1, 12).reshape(4, 3)
    np.savez(path, x=x, y=np.array([0.0, 2.0, 1.0, 0.0]))
    data = load(path)
    assert (data.name, data.classes, data.shape) == ("own", 3, (3,))
    assert data.x.dtype == np.float32
    assert data.mean == ()  # a user's features are taken as they are
    assert data.tensors()[0].numpy().tolist() == x.astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": [1]}, r"x and y, or train_x, .* \(it holds a\)"),
        ({"x": [[1.0, np.nan]], "y": [0]}, "sample 0 holds NaN or infinity"),
        ({"x": [[1.0], [np.inf]], "y": [0, 0]}, "sample 1 holds NaN"),
        ({"x": [[1.0], [1e300]], "y": [0, 0]}, "fit float32"),
        ({"x": [[1.0]], "y": [-1]}, "label -1 of sample 0"),
        ({"x": [[1.0]] * 12, "y": [0.5] + [1.0] * 11}, "label 0.5 of sample 0"),
        ({"x": [[1.0]], "y": [np.nan]}, "label nan"),
        ({"x": [[1.0]], "y": [0, 1]}, "one label for each of the 1 samples"),
        ({"x": [[1.0]], "y": [[0]]}, "one label for each"),
        ({"x": [["a"]], "y": [0]}, "numbers"),
        ({"x": [[1.0]], "y": ["cat"]}, "whole numbers"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, "no length of 0"),
        ({"x": [1.0, 2.0], "y": [0, 1]}, r"samples of shape \(2,\)"),
        ({"train_x": [[1.0]], "train_y": [0], "test_x": [[1.0, 2.0]], "test_y": [0]}, "as the training samples are"),
    ],
)
def test_npz_contents_are_checked(tmp_path, arrays, says):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    refused(path, None, says, path)


def test_broken_npz_files_are_named(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x=np.arange(4000.0).reshape(-1, 4), y=np.zeros(1000, int))
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"no zip at all", content[:200] + b"?" * 50 + content[250:]):
        path.write_bytes(broken)
        refused(path, None, "a whole npz file of plain arrays", path)
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    path.write_bytes(buffer.getvalue())
    refused(path, None, "a single array", path)
    with zipfile.ZipFile(path, "w") as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.array([object()]), allow_pickle=True)
        archive.writestr("x.npy", buffer.getvalue())
        archive.writestr("y.npy", buffer.getvalue())
    refused(path, None, "a whole npz file of plain arrays", path)  # nothing is ever unpickled


def test_unknown_names_and_paths(tmp_path):
    refused("mnsit", tmp_path, r"'mnist'\? .*or a path to your own files")
    refused("no/such/folder", tmp_path, "that exists")
    refused(tmp_path / "none.npz", None, "that exists")
    text = tmp_path / "a.txt"
    text.write_text("x")
    refused(text, None, "an npz or CSV file, or a folder")
    refused(tmp_path, None, "class folders of png or jpg images, one CSV or npz file")


def test_root_is_argument_then_variable_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "a"))
    assert root_of(tmp_path / "b") == tmp_path / "b"
    assert root_of() == tmp_path / "a"
    monkeypatch.delenv("FEDSTILL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root_of() == tmp_path / ".cache" / "fedstill"


def test_catalogue_says_what_is_there(mnist):
    root, _ = mnist
    entries = {entry.name: entry for entry in catalogue(root)}
    small = {"digits", "mnist", "fmnist", "cifar10", "cifar100", "usps", "mnistm", "svhn", "synth", "synthetic"}
    large = {"femnist", "domainnet", "flickr-aes", "real-cur", "histo-fed", "inaturalist"}
    assert small | large == set(entries)
    assert entries["mnist"].present
    assert entries["digits"].present
    assert not entries["cifar10"].present
    assert entries["cifar10"].files[-1] == "cifar-10-batches-bin/test_batch.bin"


def test_synthetic_has_the_published_shape():
    data = load("synthetic:0.5,1,40,3")
    assert data.shape == (60,)
    assert data.classes == 10
    sizes = np.bincount(data.owner)
    assert len(sizes) == 40
    assert sizes.min() >= 50
    # around a client's own centre, feature j has variance j^-1.2
    k = int(sizes.argmax())
    own = data.x[data.owner == k].astype(float)
    np.testing.assert_allclose(own.var(axis=0) * np.arange(1, 61) ** 1.2, 1, atol=6 * np.sqrt(2 / len(own)))


def test_synthetic_sizes_and_labels_follow_the_model():
    data = load("synthetic:0,0,300")
    logs = np.log(np.bincount(data.owner) - 49.5)
    assert np.median(logs) == pytest.approx(4, abs=0.4)  # lognormal(4, 2), of which the whole part is taken
    means = np.stack([data.x[data.owner == k].mean(axis=0) for k in range(300)])
    # with β = 0 every centre is N(0, 1) in each feature, beside the error of a mean of at least 50 samples
    assert means.var() == pytest.approx(1, abs=0.05)
    wide = load("synthetic:0,3,300")
    centres = np.stack([wide.x[wide.owner == k].mean() for k in range(300)])
    assert centres.std() == pytest.approx(3, rel=0.15)  # B_k ~ N(0, 3), β a standard deviation
    # within a client labels are a linear function of x: multinomial regression could fit them, a constant cannot
    assert all(len(np.unique(data.y[data.owner == k])) > 1 for k in range(5))


def test_synthetic_client_does_not_depend_on_the_others():
    few, many = load("synthetic:0.5,0.5,3"), load("synthetic:0.5,0.5,9")
    assert np.array_equal(few.x, many.x[: len(few.x)])
    assert not np.array_equal(few.x[:50], load("synthetic:0.5,0.5,3,1").x[:50])


@pytest.mark.parametrize(
    "text", ["synthetic:1", "synthetic:a,b", "synthetic:-1,0", "synthetic:0,0,0", "synthetic:0,0,5,0,0"]
)
def test_synthetic_refuses(text):
    refused(text, None, "synthetic:ALPHA,BETA")


def test_moments_are_exact():
    x = np.array([[[[0, 255]]], [[[255, 255]]]], np.uint8)
    mean, std = moments(x)
    assert mean == (0.75,)
    assert std[0] == pytest.approx(np.sqrt(0.1875))


def test_a_dataset_is_checked_when_it_is_made():
    with pytest.raises(InputError, match="as many labels"):
        Dataset("a", np.zeros((2, 3), np.float32), np.zeros(3, np.int64), 1)
    with pytest.raises(InputError, match="uint8, float32 or int64"):
        Dataset("a", np.zeros((2, 3)), np.zeros(2, np.int64), 1)
