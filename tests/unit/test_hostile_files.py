"""Data files that are bombs, traps or nonsense: one line, at once, and without the memory that they ask for."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstill as fs
from fedstill.core import memory
from fedstill.core.errors import InputError
from fedstill.data import load
from fedstill.data.federation import Federation
from fedstill.data.files import FREELY, idx, npz, npz_split, read_bytes
from fedstill.data.gather import gather
from fedstill.data.leaf import read_json
from fedstill.data.mat5 import matrices
from fedstill.data.rules import PLAIN

GB = 1 << 30


def refused(source: Path | str, says: str, **arguments: Any) -> None:
    """The source is refused in one line, in which nothing of it is expanded."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=says) as caught:
        load(source, **arguments)
    assert str(caught.value).isprintable()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150 << 10  # kB


def npy(array: Any, descr: str = "", shape: str = "", header: bytes = b"") -> bytes:
    """An array as numpy writes it, with another type, shape or header if wanted."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    raw = buffer.getvalue()
    length = 10 + int.from_bytes(raw[8:10], "little")
    old = raw[10:length]
    if descr:
        old = old.replace(repr(np.asarray(array).dtype.str).encode(), descr.encode())
    if shape:
        old = old.replace(f"'shape': {np.asarray(array).shape}".encode(), f"'shape': {shape}".encode())
    old = header or old
    return raw[:6] + b"\x02\0" + struct.pack("<I", len(old)) + old + raw[length:]


def write(path: Path, packed: bool = True, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def zeros(path: Path, size: int, into: str, **members: bytes) -> Path:
    """An npz file with a member of so many zeros beside others."""
    header = npy(np.zeros(0, np.uint8), shape=f"({size // 784}, 784)")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open(f"{into}.npy", "w", force_zip64=True) as member:
            member.write(header)
            left = size // 784 * 784
            while left:
                member.write(bytes(min(left, 1 << 20)))
                left -= min(left, 1 << 20)
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_a_bomb_of_zeros_is_not_expanded(tmp_path: Path) -> None:
    path = zeros(tmp_path / "bomb.npz", 300 << 20, "x", y=npy(Y))
    assert path.stat().st_size < 400_000
    refused(path, r"expand at most 200 times \(x.npy: .* kB to 314.6 MB")


def test_members_that_are_not_asked_for_stay_packed(tmp_path: Path) -> None:
    path = zeros(tmp_path / "more.npz", 300 << 20, "notes", x=npy(X), y=npy(Y))
    assert load(path).x.tolist() == X.tolist()


def test_a_declared_size_is_checked_before_anything_is_allocated(tmp_path: Path, monkeypatch: Any) -> None:
    y = npy(Y)
    for packed in (True, False):
        path = write(tmp_path / "a.npz", packed, x=npy(X, shape="(1000000000000, 2)"), y=y)
        refused(path, r"x.npy has 16,000,000,000,\d\d\d bytes as its header says")
    monkeypatch.setenv("FEDSTILL_MEMORY", "40M")
    whole = np.zeros((5000, 1000), np.float64)  # 40 MB, and 20 more as float32
    np.savez(tmp_path / "b.npz", x=whole, y=np.zeros(5000, int))
    refused(
        tmp_path / "b.npz", r"b.npz': should be small enough for the memory: it takes 60.1 MB, and 41.9 MB are free"
    )
    monkeypatch.setenv("FEDSTILL_MEMORY", "70M")
    assert load(tmp_path / "b.npz").shape == (1000,)
    monkeypatch.setenv("FEDSTILL_MEMORY", "30M")
    data = load("digits")
    with pytest.raises(InputError, match="synthetic"):
        Federation.from_dataset(load("synthetic:1,1,300"))
    assert len(Federation.from_dataset(data)) == 20
    monkeypatch.setenv("FEDSTILL_MEMORY", "much")
    refused(tmp_path / "b.npz", "FEDSTILL_MEMORY = 'much': should be a number of bytes such as 500M")


HEADERS = {
    "objects": (npy(np.array([{"a": 1}] * 6, object)), "nothing is unpickled .x.npy holds '.O'"),
    "records": (npy(np.zeros(6, [("a", "i4")])), "nothing is unpickled"),
    "text": (npy(np.array(["a"] * 6)), "nothing is unpickled"),
    "a header of 4 GB": (b"\x93NUMPY\x02\0\xff\xff\xff\xff", "header of at most 10,000 bytes"),
    "deep brackets": (npy(X, header=b"(" * 9000), "x.npy"),
    "many digits": (npy(X, shape=f"({'9' * 5000}, 2)"), "x.npy"),
    "a negative length": (npy(X, shape="(-6, -2)"), "lengths of at least 0"),
    "many dimensions": (npy(X, shape=str((6, 2) + (1,) * 60)), "at most 8 dimensions"),
    "a length that is none": (npy(X, shape="(True, 2)"), "lengths"),
    "no literal": (
        npy(X, header=b"{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (6, 2)}"),
        "x.npy",
    ),
    "truth beyond 1": (npy(np.full((6, 2), 7, np.uint8), descr="'|b1'"), "truth values"),
    "other magic": (b"\x93NUMPZ\x01\0" + bytes(200), "x.npy is none"),
    "empty": (b"", "x.npy is none"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_of_arrays(name: str, tmp_path: Path) -> None:
    content, says = HEADERS[name]
    refused(write(tmp_path / "a.npz", x=content, y=npy(Y)), says)


def test_arrays_in_every_layout_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    rng = np.random.Generator(np.random.Philox(key=1))
    base = rng.normal(size=(6, 3, 4))
    for dtype in ("<f8", ">f4", "<f2", "|b1", "|i1", ">i8", "<u4"):
        for array in (base.astype(dtype), np.asfortranarray(base.astype(dtype))):
            np.savez_compressed(tmp_path / "a.npz", x=array, y=Y.astype(">i4"))
            assert np.array_equal(load(tmp_path / "a.npz").x[:, 0], array.astype(np.float32))


def test_other_compression_encryption_and_doubles_are_refused(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            for name, array in (("x", X), ("y", Y)):
                archive.writestr(f"{name}.npy", npy(array))
        refused(tmp_path / "a.npz", "compressed in another way")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        for name, array in (("x", X), ("y", Y), ("z", X + 1)):
            archive.writestr(f"{name}.npy", npy(array))
    (tmp_path / "b.npz").write_bytes((tmp_path / "b.npz").read_bytes().replace(b"z.npy", b"x.npy"))
    refused(tmp_path / "b.npz", "it has x twice")


def idx_head(*shape: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)


def test_idx_headers_that_ask_for_too_much(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.gz"
    huge = idx_head(4_000_000_000, 28, 28)
    for content, says in (
        (huge, "3136000000016 bytes long"),
        (gzip.compress(huge), r"at most 67.1 MB \(it expands to more"),
        (gzip.compress(idx_head(90_000, 28, 28) + bytes(90_000 * 784), 9), "expands to more"),
        (gzip.compress(idx_head(10, 2, 2) + bytes(41)), r"56 bytes long .*it has more"),
        (gzip.compress(idx_head(10, 2, 2) + bytes(39)), r"56 bytes long .*it has 55"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            idx(path, 3)
    monkeypatch.setenv("FEDSTILL_MEMORY", "1M")
    path.write_bytes(gzip.compress(idx_head(1000, 28, 28) + bytes(784_000)))
    with pytest.raises(InputError, match=r"it takes 3.9 MB, and 1.0 MB are free"):
        idx(path, 3)


def test_gzip_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(FREELY + 1), 9))
    with pytest.raises(InputError, match="expands to more"):
        read_bytes(path)
    with pytest.raises(InputError, match=r"at most 1.0 kB .it expands to more"):
        read_bytes(path, 1000)
    path.write_bytes(b"x" * 1001)
    with pytest.raises(InputError, match=r"at most 1.0 kB .it has 1.0 kB"):
        read_bytes(path, 1000)
    path.write_bytes(gzip.compress(b"abc") + gzip.compress(b"def"))
    assert read_bytes(path) == b"abcdef"


@pytest.mark.parametrize("name", ["own.npz", "train-images-idx3-ubyte"])
def test_pipes_devices_and_folders_in_place_of_files(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    path = folder / name
    source = path if name.endswith("npz") else "mnist"
    os.mkfifo(path)
    refused(source, "pipe|npz file or a folder", root=tmp_path, fetch=False) if name.endswith("npz") else None
    with pytest.raises(InputError, match="regular file"):
        read_bytes(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="regular file"):
        read_bytes(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="not a folder"):
        read_bytes(path)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0] * 59 + [99_999], "label 99999 where 2 different labels occur"),
        ([0] * 59 + [999_999], "below 100,000"),
        ([*range(1000, 1060)], "label 1059 where 6[01] different"),
        ([0] * 59 + [-1], "label -1"),
        ([0.0] * 59 + [float("nan")], "label nan"),
        ([0.0] * 59 + [1e300], "label 1e.300"),
        ([0.0] * 59 + [0.5], "label 0.5"),
        ([0] * 59, "one label for each of the 60"),
    ],
)
def test_labels_that_would_need_a_huge_table(labels: list[float], says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 3)), y=np.array(labels))
    refused(tmp_path / "a.npz", says)
    with pytest.raises(InputError, match=says):
        Federation.from_arrays([(np.zeros((60, 3)), np.array(labels), np.zeros((1, 3)), np.zeros(1, int))])


def test_many_classes_that_occur_are_allowed_and_too_many_are_not(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3000, 2)), y=np.arange(3000) * 2 % 5999)
    assert load(tmp_path / "a.npz").classes == 5999
    with pytest.raises(
        InputError, match="classes = 100001: should be a whole number of at least 1 and at most 100,000"
    ):
        fs.Federation.from_arrays([(X, Y, X, Y)], classes=100_001)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_features_that_are_not_finite(value: float, tmp_path: Path) -> None:
    x = np.zeros((60, 3))
    x[7, 1] = value
    np.savez(tmp_path / "a.npz", x=x, y=np.zeros(60, int))
    refused(tmp_path / "a.npz", "sample 7 holds NaN or infinity")


def test_memory_of_the_machine_the_container_and_the_process(tmp_path: Path, monkeypatch: Any) -> None:
    free = memory.available()
    assert 1 << 20 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000000\n")
    assert memory.available() == 100_000_000
    (tmp_path / "memory.current").write_text("90000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 3000000\nactive_file 2000000\n")
    assert memory.available() == 15_000_000
    (tmp_path / "memory.max").write_text("max\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (200 << 20), hard))
        assert 150 << 20 < memory.available() < 201 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---- properties ------------------------------------------------------------------------------------------------------

HEADER = st.text("{}()[]'\":, descrfotanhp_oundeFaluTe0123456789-<>|=bifuO", max_size=60)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "descr": st.sampled_from(["<f8", "|u1", "<i4", "|O", "<U9", "<f16", "<c8", "|V4", "", 3, None, [("a", "<i4")]]),
        "fortran_order": st.sampled_from([True, False, 0, None, "x"]),
        "shape": st.one_of(
            st.lists(st.integers(-1, 7) | st.sampled_from([1 << 62, 10**30, True, 2.0]), max_size=4).map(tuple),
            st.sampled_from([6, None, "66", [6, 2]]),
        ),
        "more": st.just(1),
    },
)


@settings(max_examples=300, deadline=None)
@given(HEADER | FIELDS.map(repr), st.binary(max_size=64))
def test_any_header_of_an_array_gives_an_array_or_one_line(header: str, data: bytes) -> None:
    raw = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode("latin1") + data
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", raw)
        archive.writestr("y.npy", npy(Y))
    buffer.seek(0)
    try:
        x = npz_split(buffer, "a.npz")[0]
    except InputError:
        return
    assert np.array_equal(x, np.load(io.BytesIO(raw), allow_pickle=False), equal_nan=x.dtype.kind == "f")


CELLS = st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr) | st.sampled_from(
    ["", " 1", "nan", "1_0", "x", '"']
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=4), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_table_is_read_cell_by_cell_or_refused(tmp_path_factory: Any, rows: list[list[str]], end: str) -> None:
    path = tmp_path_factory.getbasetemp() / "table.csv"
    text = "".join(",".join(row) + end for row in rows)
    path.write_text(text, newline="")
    try:
        found = gather([path], PLAIN)
    except InputError:
        return
    cells = csv.reader(io.StringIO(text, newline=""))
    body = [row for row in cells if any(cell.strip() for cell in row)][1 if found.columns.named else 0 :]
    (x,), (y,) = found.xs, found.ys
    assert np.array_equal(x, np.array([row[:-1] for row in body], float), equal_nan=True)
    labels = [row[-1].strip() for row in body]
    if y.dtype.kind == "U":
        assert y.tolist() == labels
        assert not any(label.replace(".", "").isdigit() for label in labels)
    else:
        assert np.array_equal(y, np.array(labels, float), equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["a.npz", "a.mat", "a.gz", "a.json", "a.csv"]), st.binary(max_size=300), st.booleans())
def test_any_bytes_end_in_one_line(tmp_path_factory: Any, name: str, raw: bytes, packed: bool) -> None:
    path = tmp_path_factory.getbasetemp() / name
    begin = {"a.npz": b"PK\x03\x04", "a.mat": bytes(124) + b"\x00\x01IM", "a.gz": b"\0\0\x08\x03", "a.json": b"{"}
    raw = begin.get(name, b"") + raw
    path.write_bytes(gzip.compress(raw) if packed and name in ("a.gz", "a.json") else raw)
    readers = {
        "a.npz": npz,
        "a.mat": lambda p: matrices(p, ["X"]),
        "a.json": read_json,
        "a.csv": lambda p: gather([p], PLAIN),
    }
    with contextlib.suppress(InputError):
        readers.get(name, lambda p: idx(p, 3))(path)
