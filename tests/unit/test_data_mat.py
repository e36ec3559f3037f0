"""The reader of MATLAB 5 files, on bytes written here from the format's description (and by scipy where it is there)."""

from __future__ import annotations

import contextlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import InputError
from fedstill.data import load
from fedstill.data.mat5 import matrices

TYPES = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 9, "i8": 12, "u8": 13}
KINDS = {"f8": 6, "f4": 7, "i1": 8, "u1": 9, "i2": 10, "u2": 11, "i4": 12, "u4": 13, "i8": 14, "u8": 15}


def head(version=0x0100, order=b"IM", text=b"MATLAB 5.0 MAT-file"):
    return text.ljust(116) + bytes(8) + struct.pack("<H", version) + order


def item(kind, raw, small=True):
    if small and 0 < len(raw) <= 4:
        return struct.pack("<HH", kind, len(raw)) + raw.ljust(4, b"\0")
    return struct.pack("<II", kind, len(raw)) + raw + bytes(-len(raw) % 8)


def element(name, array, *, packed=False, stored=None, small=True, flags=0, kind=None):
    """One variable; `stored` is the type on disk where it is not the variable's own."""
    data = array.astype(stored or array.dtype)
    body = item(6, struct.pack("<II", (kind or KINDS[array.dtype.str[1:]]) | flags, 0))
    body += item(5, struct.pack(f"<{array.ndim}i", *array.shape))
    body += item(1, name.encode(), small)
    body += item(TYPES[data.dtype.str[1:]], data.tobytes(order="F"), small)
    matrix = struct.pack("<II", 14, len(body)) + body
    if not packed:
        return matrix
    squeezed = zlib.compress(matrix)
    return struct.pack("<II", 15, len(squeezed)) + squeezed


def write(path, *elements, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head(**more) + b"".join(elements))
    return path


def refused(path, says, names=("X", "y")):
    with pytest.raises(InputError, match=says) as caught:
        matrices(path, names)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.integers(0, 5), min_size=2, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_numeric_array_comes_back(tmp_path_factory, kind, shape, packed, small, seed):
    rng = np.random.Generator(np.random.Philox(key=seed))
    array = rng.integers(0, 100, shape).astype(kind)
    path = tmp_path_factory.mktemp("mat") / "a.mat"
    write(path, element("other", np.ones((1, 1)), packed=packed), element("X", array, packed=packed, small=small))
    arrays = matrices(path, ["X"])
    assert arrays.keys() == {"X"}
    assert arrays["X"].dtype == array.dtype
    assert arrays["X"].shape == array.shape
    assert np.array_equal(arrays["X"], array)


def test_numbers_may_be_stored_in_a_smaller_type(tmp_path):
    labels = np.array([[1.0], [10.0], [3.0]])
    path = write(tmp_path / "a.mat", element("y", labels, stored="u1"), element("X", labels, stored="u2", packed=True))
    arrays = matrices(path, ["X", "y"])
    assert arrays["y"].dtype == np.float64
    assert arrays["y"].tolist() == labels.tolist()
    assert arrays["X"].tolist() == labels.tolist()


def test_a_large_packed_array_is_read_in_pieces(tmp_path):
    rng = np.random.Generator(np.random.Philox(key=3))
    big = rng.integers(0, 256, (1500, 1500), dtype=np.uint8)  # several pieces of a MiB, packed and unpacked
    path = write(tmp_path / "a.mat", element("X", big, packed=True), element("y", big[:, :1]))
    assert np.array_equal(matrices(path, ["X", "y"])["X"], big)


def test_scipy_writes_what_we_read(tmp_path):
    io = pytest.importorskip("scipy.io")
    rng = np.random.Generator(np.random.Philox(key=4))
    x, y = rng.integers(0, 256, (32, 32, 3, 7), dtype=np.uint8), rng.integers(1, 11, (7, 1)).astype(np.uint8)
    for packed in (False, True):
        io.savemat(tmp_path / "a.mat", {"text": "hello", "X": x, "y": y}, do_compression=packed)
        arrays = matrices(tmp_path / "a.mat", ["X", "y"])
        assert np.array_equal(arrays["X"], x)
        assert np.array_equal(arrays["y"], y)


def test_a_variable_of_another_kind_is_passed_over_unless_it_is_wanted(tmp_path):
    ones = np.ones((2, 2), np.uint8)
    struct_like, complex_ = element("s", ones, kind=2), element("c", ones, flags=0x0800)
    path = write(tmp_path / "a.mat", struct_like, complex_, element("X", ones))
    assert matrices(path, ["X"])["X"].tolist() == [[1, 1], [1, 1]]
    refused(path, "in which s is an array of real numbers", ["s"])
    refused(path, "in which c is an array of real numbers", ["c"])
    refused(path, "that holds z", ["z"])


def test_broken_files_are_refused(tmp_path):
    ones = np.ones((4, 5), np.uint8)
    path = tmp_path / "a.mat"
    for says, raw in (
        ("header of 128 bytes", b""),
        ("header of 128 bytes", head()[:100]),
        ("header of 128 bytes", b"\x89PNG".ljust(200)),
        ("version 7.3", head(0x0200, text=b"MATLAB 7.3 MAT-file")),
        ("little-endian", head(order=b"MI")),
        ("version 0x0100", head(0x0200)),
        ("that holds X and y", head()),
        ("ends within a tag", head() + b"\x0e\0\0"),
        ("an element of type 9", head() + item(9, bytes(8))),
        ("an element of 4294967295 bytes has 0", head() + b"\x0e\0\0\0\xff\xff\xff\xff"),
        ("compressed element of type 9", head() + item(15, zlib.compress(item(9, bytes(8))))),
        ("begin with their flags", head() + item(14, item(5, bytes(8)))),
        (
            "two dimensions",
            head() + item(14, item(6, struct.pack("<II", 9, 0)) + item(5, struct.pack("<i", 3))),
        ),
        (
            "two dimensions",
            head() + item(14, item(6, struct.pack("<II", 9, 0)) + item(5, struct.pack("<ii", 3, -1))),
        ),
        (
            "at most 1024 bytes",
            head() + item(14, item(6, struct.pack("<II", 9, 0)) + item(5, bytes(2000))),
        ),
    ):
        path.write_bytes(raw)
        refused(path, says)
    data = element("X", ones)
    for says, bad in (
        ("as many numbers as its dimensions", data.replace(struct.pack("<ii", 4, 5), struct.pack("<ii", 4, 6))),
        ("stored as numbers", data.replace(struct.pack("<II", 2, 20), struct.pack("<II", 16, 20))),
        ("whose small elements", data.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 7))),
        ("ends where its tag says", struct.pack("<II", 14, len(data)) + data[8:] + bytes(8)),
    ):
        assert bad != data
        path.write_bytes(head() + bad)
        refused(path, says, ["X"])
    refused(tmp_path, "not a folder")


@pytest.mark.parametrize("packed", [False, True])
def test_no_cut_and_no_flipped_byte_gets_through(tmp_path, packed):
    """Every shorter file is refused; a flipped byte is refused or, unpacked, changes numbers but nothing else."""
    rng = np.random.Generator(np.random.Philox(key=5))
    array = rng.integers(0, 256, (4, 5), dtype=np.uint8)
    path = tmp_path / "a.mat"
    data = head() + element("X", array, packed=packed)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        refused(path, "MATLAB 5 file", ["X"])
    for at in range(124, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with contextlib.suppress(InputError):
            arrays = matrices(path, ["X"])["X"]
            assert arrays.size == array.size
            assert not packed or np.array_equal(arrays, array)  # the sum at the end of a packed stream


def house(path, count, zero=10, packed=True, seed=0, grey=None):
    """A file in SVHN's layout: random images, or flat ones, and the digits 1, 2, …, with `zero` for 0."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    x = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
    if grey is not None:
        x[:] = grey
    y = np.array([zero if k % 10 == 0 else k % 10 for k in range(1, count + 1)], np.uint8)[:, None]
    write(path, element("X", x, packed=packed), element("y", y, packed=packed))
    return x, y


@pytest.mark.parametrize(
    ("name", "prefix", "zero"), [("svhn", "", 10), ("synth", "synth_", 0), ("synth", "synth_", 10)]
)
def test_svhn_and_synth(tmp_path, name, prefix, zero):
    x, _ = house(tmp_path / name / f"{prefix}train_32x32.mat", 12, zero, seed=1)
    test_x, _ = house(tmp_path / name / f"{prefix}test_32x32.mat", 1, zero, packed=False, seed=2)
    data = load(name, tmp_path, fetch=False)
    assert (data.name, data.classes, data.shape) == (name, 10, (3, 32, 32))
    assert data.x.dtype == np.uint8
    for i, row, column, channel in ((0, 0, 0, 0), (11, 3, 30, 2), (5, 31, 1, 1)):
        assert data.x[i, channel, row, column] == x[row, column, channel, i]
    assert np.array_equal(data.x, x.transpose(3, 2, 0, 1))
    assert data.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert np.array_equal(data.test_x, test_x.transpose(3, 2, 0, 1))
    assert data.test_y.tolist() == [1]


def test_svhn_of_another_shape_is_refused(tmp_path):
    def says(pattern, *elements):
        write(tmp_path / "svhn" / "train_32x32.mat", *elements)
        with pytest.raises(InputError, match=pattern) as caught:
            load("svhn", tmp_path, fetch=False)
        assert "\n" not in str(caught.value)

    house(tmp_path / "svhn" / "test_32x32.mat", 3)
    good, y = np.zeros((32, 32, 3, 2), np.uint8), np.array([[1], [2]], np.uint8)
    says(r"uint8 \[32, 32, 3, n\] \(it is float64", element("X", good.astype("f8")), element("y", y))
    says(r"\[32, 32, 3, n\]", element("X", good[:, :, :1]), element("y", y))
    says(r"\[32, 32, 3, n\]", element("X", good[:, :28]), element("y", y))
    says(r"y of \[2, 1\]", element("X", good), element("y", y[:1]))
    says("it has both", element("X", good), element("y", np.array([[0], [10]], np.uint8)))
    says("below 10", element("X", good), element("y", np.array([[1], [11]], np.uint8)))
    says("holds y", element("X", good))
    with pytest.raises(InputError, match=r"put synth/synth_train_32x32\.mat, synth/synth_test_32x32\.mat into"):
        load("synth", tmp_path)
