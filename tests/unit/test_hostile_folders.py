"""Folders, lists, archives and images that lie about what they hold or lead out of their folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.core.errors import InputError
from fedstill.data import load
from fedstill.data.download import _unpack
from fedstill.data.federation import Federation
from fedstill.data.images import decode
from fedstill.data.leaf import _read_file
from fedstill.data.mat5 import matrices
from fedstill.data.record import load_record, save_record

Image = pytest.importorskip("PIL.Image")


def refused(says: str, read: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(*arguments, **named)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2500


# ---- CSV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"1,2,0\n" + b"1," * (9 << 20), "lines of at most 16.8 MB"),
        (b"1_0,2,0\n", "line 1, column 1 = '1_0'"),
        (b"9" * 140_000 + b",2,0\n", "a CSV file in UTF-8 .field larger than"),
        (b"1,2,0\n" + b"9" * 100_000 + b",2,0\n", "line 2, column 1 = inf: should be a finite number"),
        (b'1,2,0\n1,"2,0\n' * 20, "line"),
        (b"1,2,0\n\xff,2,0\n", "UTF-8"),
        (b"1,2,0\n\0,2,0\n", "line"),
        (b"", "at least one row"),
        (b"\n\n\n", "at least one row"),
        (b"a,b,label\n", "at least one row"),
        (b"7\n8\n", "at least one feature"),
        (b"1,2,0\n1,2,99999\n", "label 99999 where 2"),
        (b"1,2,nan\n", "line 1, column 3 = nothing: should be a label"),
    ],
    ids=range(13),
)
def test_hostile_csv(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "silos").mkdir()
    (tmp_path / "silos" / "a.csv").write_bytes(text)
    refused(says, load, tmp_path / "silos")


def test_a_csv_file_that_does_not_fit_is_refused_before_it_is_divided(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "a.csv").write_text("1,2,0\n" * 50_000)
    monkeypatch.setenv("FEDSTILL_MEMORY", "2M")
    refused("it takes 3.0 MB, and 2.1 MB are free", load, tmp_path)
    monkeypatch.setenv("FEDSTILL_MEMORY", "5M")
    assert len(load(tmp_path)) == 50_000
    (tmp_path / "a.csv").write_text(
        "1,2,0\n" * 25_000 + '"1","2",0\n' * 25_000
    )  # one row within quotes for all we know
    refused("it takes 12.0 MB", load, tmp_path)


# ---- MATLAB ----------------------------------------------------------------------------------------------------------


def element(dims: tuple[int, ...], data: bytes, *, kind: int = 2, of: int = 9, size: int | None = None) -> bytes:
    shape = struct.pack(f"<{len(dims)}i", *dims)
    shape += bytes(-len(shape) % 8)
    body = struct.pack("<IIII", 6, 8, of, 0) + struct.pack("<II", 5, 4 * len(dims)) + shape
    body += struct.pack("<HHI", 1, 1, ord("X")) + struct.pack("<II", kind, len(data) if size is None else size) + data
    body += bytes(-len(body) % 8)
    return struct.pack("<II", 14, len(body)) + body


def mat(path: Path, *elements: bytes, packed: bool = False) -> Path:
    if packed:
        elements = tuple(struct.pack("<II", 15, len(z)) + z for z in (zlib.compress(e, 9) for e in elements))
    path.write_bytes(bytes(124) + b"\x00\x01IM" + b"".join(elements))
    return path


def test_hostile_matlab_files(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.mat"
    assert matrices(mat(path, element((2, 4), bytes(8))), ["X"])["X"].shape == (2, 4)
    refused("at most 8, none below 0", matrices, mat(path, element((2, 4, *[1] * 60), bytes(8))), ["X"])
    huge = element((1 << 20, 100), bytes(100 << 20))
    refused("expand at most 200 times .X more", matrices, mat(path, huge, packed=True), ["X"])
    lie = element((1 << 30, 1), b"", size=1 << 30)
    for packed in (False, True):
        refused("a MATLAB 5 file", matrices, mat(path, lie, packed=packed), ["X"])
    for data, kind, of in ((struct.pack("<4h", 300, 0, 0, 0), 3, 9), (struct.pack("<2d", np.nan, 1), 9, 8)):
        count = len(data) // {3: 2, 9: 8}[kind]
        refused("of its class", matrices, mat(path, element((count, 1), data, kind=kind, of=of)), ["X"])
    monkeypatch.setenv("FEDSTILL_MEMORY", "1M")
    refused("it takes 1.2 MB", matrices, mat(path, element((1000, 200), bytes(200_000))), ["X"])
    os.mkfifo(tmp_path / "pipe.mat")
    refused("regular file", matrices, tmp_path / "pipe.mat", ["X"])


# ---- LEAF and other JSON ---------------------------------------------------------------------------------------------


def leaf(path: Path, change: Any = None, text: str = "") -> Path:
    content = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.5] * 784] * 2, "y": [3, 4]}}}
    if change is not None:
        change(content)
    path.write_text(text or json.dumps(content))
    return path


LEAF = {
    "a long text among pixels": (lambda c: c["user_data"]["a"]["x"][0].__setitem__(0, "x" * 10**6), "numbers"),
    "a list among pixels": (lambda c: c["user_data"]["a"]["x"][0].__setitem__(0, [1]), "numbers"),
    "a row that is none": (lambda c: c["user_data"]["a"]["x"].__setitem__(0, 3), "784 numbers"),
    "a short row": (lambda c: c["user_data"]["a"]["x"].__setitem__(1, [1.0]), "784 numbers"),
    "400 digits": (lambda c: c["user_data"]["a"]["x"][0].__setitem__(0, 10**400), "too large"),
    "a label of 400 digits": (lambda c: c["user_data"]["a"].__setitem__("y", [10**400, 1]), "too large"),
    "a label that is a text": (lambda c: c["user_data"]["a"].__setitem__("y", ["1", 1]), "something else"),
    "a count that is none": (lambda c: c.__setitem__("num_samples", [2.0]), "whole number"),
    "a negative count": (lambda c: c.__setitem__("num_samples", [-2]), "at least 0"),
    "a user that is a list": (lambda c: c.__setitem__("users", [["a"]]), "a text"),
    "the same user twice": (
        lambda c: (c.__setitem__("users", ["a", "a"]), c.__setitem__("num_samples", [2, 2])),
        "same",
    ),
}


@pytest.mark.parametrize("name", LEAF)
def test_hostile_leaf_files(name: str, tmp_path: Path) -> None:
    change, says = LEAF[name]
    refused(says, _read_file, leaf(tmp_path / "a.json", change))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "a whole JSON file"),
        ('{"users": NaN}', "without NaN"),
        ('{"users": 1, "users": 2}', "there twice"),
        ('{"users": ' + "9" * 5000 + "}", "a whole JSON file"),
        ("[]", "holds an object"),
        ("{}", "users"),
        ("", "a whole JSON file"),
    ],
    ids=range(7),
)
def test_hostile_json_of_data(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    refused(says, _read_file, path)


def test_objects_of_json_are_counted_before_they_are_made(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [' + "{}," * 1_000_000 + "{}]}")
    monkeypatch.setenv("FEDSTILL_MEMORY", "200M")
    refused("it takes 302.0 MB", _read_file, path)
    leaf(path)
    assert list(_read_file(path)) == ["a"]


def test_a_partition_file_with_odd_numbers(tmp_path: Path) -> None:
    federation = Federation.from_dataset(load("digits"), partition="iid", clients=3)
    whole = federation.partition_record
    path = tmp_path / "partition.json"
    for name, value, says in (
        ("clients", 1 << 63, "at most 9,223"),
        ("samples", 1 << 63, "at most 9,223"),
        ("seed", -1, "at least 0"),
        ("parameter", [1], "parameter is"),
        ("indices", [[1 << 63]] * 3, "below 1797"),
        ("indices", [[]] * 3, "below 1797"),
        ("indices", [[True]] * 3, "whole numbers"),
        ("format", True, "format 1"),
        ("split", 3, "a text"),
    ):
        save_record({**whole, name: value}, path)
        refused(says, load_record, path)
    path.write_text('{"format": ' + "[" * 5000)
    refused("brackets deep", load_record, path)


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / "pets" / name / f"{i}.png")
    return tmp_path / "pets"


def test_links_may_not_lead_out_of_an_image_folder(pets: Path, tmp_path: Path) -> None:
    (pets / "cat" / "again.png").symlink_to(pets / "dog" / "1.png")  # within the folder
    assert len(load(pets)) == 7
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    for target in (tmp_path / "secret.png", Path("../../secret.png")):
        (pets / "cat" / "out.png").symlink_to(target)
        refused(r"out.png.*within .*pets, where its links do not stay", load, pets)
        (pets / "cat" / "out.png").unlink()
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "elsewhere" / "0.png")
    (pets / "bird").symlink_to(tmp_path / "elsewhere")
    refused("links do not stay", load, pets)
    (pets / "bird").unlink()
    (tmp_path / "door").symlink_to(pets)  # the folder itself may be a link
    assert len(load(tmp_path / "door")) == 7
    (pets / "loop").symlink_to(pets / "loop")
    (pets / "cat" / "loop.png").symlink_to("loop.png")
    assert len(load(pets)) == 7


def test_lists_cannot_name_files_outside(tmp_path: Path) -> None:
    folder = tmp_path / "domainnet"
    (folder / "real" / "bird").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(folder / "real" / "bird" / "a.png")
    os.mkfifo(folder / "real" / "bird" / "pipe.png")
    (folder / "real" / "bird" / "out.png").symlink_to("/etc/hostname")
    for line, says in (
        ("real/../a.png 0", "within"),
        ("/etc/hostname 0", "CLASS/FILE"),
        ("real/bird/out.png 0", "links do not stay"),
        ("real/bird/pipe.png 0", "regular file"),
        (f"real/bird/{'a' * 400}.png 0", "File name too long"),
        ("real/bird/a.png " + "9" * 5000, "a label"),
        ("real/bird/a.png 99999", "label 99999 where 1 "),
        ("real/bird/a.png 123456", "a label"),
        ("real/bird/\x1b[2J.png 0", "within"),
    ):
        for split in ("train", "test"):
            (folder / f"real_{split}.txt").write_text(line + "\n")
        refused(says, load, "domainnet#real", tmp_path)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_hostile_images(pets: Path, monkeypatch: Any) -> None:
    path = pets / "cat" / "0.png"
    whole = path.read_bytes()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"
    bmp = io.BytesIO()
    Image.new("RGB", (4, 4)).save(bmp, "BMP")
    for content, says in (
        (png(50_000, 50_000, zlib.compress(b"")), "2500000000 pixels"),
        (png(8193, 8192, zlib.compress(b"")), r"at most 67,108,864 pixels \(it is 8193×8192"),
        (png(4, 4, zlib.compress(b"")), "a whole image"),
        (png(4, 4, b"no zlib"), "a whole image"),
        (whole[:-30], "a whole image|a readable image"),
        (whole[:20], "a readable image"),
        (eps, "a readable image"),
        (bmp.getvalue(), "a readable image"),
        (b"", "a readable image"),
    ):
        path.write_bytes(content)
        refused(says, load, pets)
    path.write_bytes(whole)
    monkeypatch.setenv("FEDSTILL_MEMORY", "10M")
    refused("it takes 94.4 MB", load, f"{pets}@1024", memory_map="off")
    assert load(f"{pets}@1024").shape == (3, 1024, 1024)  # decoded into a file
    monkeypatch.setenv("FEDSTILL_CACHE_SIZE", "10M")
    refused("at least 18.8 MB", load, f"{pets}@1023")
    refused("a file that exists", decode, [pets / "none.png"], None, pets)


@pytest.mark.skipif(os.fsencode("ä") != "ä".encode(), reason="the file system has another encoding")
def test_names_that_cannot_be_shown_are_refused(pets: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe")
    os.rename(pets / "cat", pets / odd)
    refused("printable characters", load, pets)
    os.rename(pets / odd, pets / "ein Name\u3000mit Lücken")
    assert load(pets).classes == 2


# ---- archives --------------------------------------------------------------------------------------------------------


def archive(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_an_archive_writes_nothing_but_the_files_asked_for(tmp_path: Path) -> None:
    to = tmp_path / "root" / "data"
    to.mkdir(parents=True)
    evil = [(entry(name), b"evil") for name in ("../evil", "/tmp/fedstill-evil", "a/../../evil", "other", ".")]
    links = [(entry("c", kind, "/etc/passwd"), b"") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)]
    _unpack(
        archive(tmp_path / "a.tar.gz", *evil, *links, (entry("a/b"), b"good"), (entry("c"), b"too")), ("a/b", "c"), to
    )
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["root/data/a/b", "root/data/c"]
    assert ((to / "a/b").read_bytes(), (to / "c").read_bytes()) == (b"good", b"too")
    assert not Path("/tmp/fedstill-evil").exists()
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
        path = archive(tmp_path / "a.tar.gz", (entry("d", kind, "/etc/passwd"), b""))
        refused("an archive that holds d", _unpack, path, ("d",), to)
        assert not path.exists()
        assert not (to / "d").exists()


def test_an_archive_does_not_expand_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive(path, (entry("x"), bytes(70 << 20)))
    refused("a whole tar.gz archive .it expands to more", _unpack, path, ("x",), tmp_path)
    head = bytearray(entry("h", tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT))
    for size in (b"77777777777\0", b"\x80\0\0\x7f" + b"\xff" * 8):  # a header that asks for 8 GB, and for 2⁷¹ bytes
        head[124:136] = size
        head[148:156] = b"        "
        head[148:156] = b"%06o\0 " % sum(head)
        path.write_bytes(gzip.compress(bytes(head) + bytes(10240)))
        refused("a whole tar.gz archive", _unpack, path, ("x",), tmp_path)
    whole = archive(path, (entry("x"), bytes(range(256)) * 40)).read_bytes()
    for broken in (
        whole[: len(whole) // 2],
        whole[:-4] + b"abcd",
        b"",
        b"\x1f\x8b" + bytes(50),
        gzip.compress(b"x" * 512),
    ):
        path.write_bytes(broken)
        refused("a whole tar.gz archive|an archive that holds x", _unpack, path, ("x",), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] in ([], ["x"])
