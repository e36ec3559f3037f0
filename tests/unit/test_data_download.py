"""Downloads against a server on this machine: right and wrong sums, archives, and a closed port."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import os
import socket
import struct
import tarfile
import threading

import numpy as np
import pytest

from fedstill.core.errors import InputError
from fedstill.data import download, load
from fedstill.data.download import REMOTES, Remote, fetch, lines


def md5(raw):
    return hashlib.md5(raw).hexdigest()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror at 127.0.0.1 that serves a folder."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("FEDSTILL_MIRROR", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def small_mnist(mirror, monkeypatch):
    """The mirror holds four small files whose sums the library believes to be the published ones."""
    (mirror / "mnist").mkdir()
    sums = {}
    for name in REMOTES["mnist"].files:
        shape = (3, 28, 28) if "images" in name else (3,)
        raw = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))
        packed = gzip.compress(raw)
        (mirror / "mnist" / name).write_bytes(packed)
        sums[name] = md5(packed)
    monkeypatch.setitem(REMOTES, "mnist", Remote((), sums, "mnist/"))
    return mirror / "mnist"


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_missing_set_is_downloaded_once(small_mnist, tmp_path):
    root, seen = tmp_path / "root", []
    data = load("mnist", root, progress=lambda file, done, total: seen.append((file, done, total)))
    assert data.x.shape == (3, 1, 28, 28)
    assert files(root) == sorted(f"mnist/{name}" for name in REMOTES["mnist"].files)
    size = (small_mnist / "train-labels-idx1-ubyte.gz").stat().st_size
    assert any("train-labels" in file and (done, total) == (size, size) for file, done, total in seen)
    seen.clear()
    load("mnist", root, progress=lambda *what: seen.append(what))
    assert seen == []


def test_only_what_is_missing_is_fetched(small_mnist, tmp_path):
    root, seen = tmp_path / "root", set()
    load("mnist", root, progress=lambda *what: None)
    (root / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist", root, progress=lambda file, done, total: seen.add(file))
    assert len(seen) == 1


def test_wrong_sum_is_refused_and_nothing_is_kept(small_mnist, tmp_path):
    (small_mnist / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(InputError, match=f"the MD5 sum is {md5(b'something else')}"):
        load("mnist", tmp_path / "root", progress=lambda *what: None)
    assert files(tmp_path / "root") == []


def test_missing_on_the_mirror(small_mnist, tmp_path):
    (small_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match="File not found"):
        load("mnist", tmp_path / "root", progress=lambda *what: None)


def closed_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_without_network_the_files_and_their_place_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_MIRROR", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, file in (
        ("fmnist", "fmnist/t10k-labels-idx1-ubyte.gz"),
        ("cifar10", "cifar-10-batches-bin/test_batch.bin"),
    ):
        with pytest.raises(InputError) as caught:
            load(name, tmp_path, progress=lambda *what: None)
        message = str(caught.value)
        assert f"put into {tmp_path}: " in message
        assert file in message
        assert "\n" not in message
    assert files(tmp_path) == []


def test_mirror_must_be_a_web_address(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_MIRROR", "file:///somewhere")
    with pytest.raises(InputError, match="FEDSTILL_MIRROR"):
        load("mnist", tmp_path)


def archive(entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, raw in entries:
            info = tarfile.TarInfo(name)
            if raw is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(info)
            else:
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def serve_cifar100(mirror, monkeypatch, raw):
    file = "cifar-100-binary.tar.gz"
    (mirror / "cifar100").mkdir(exist_ok=True)
    (mirror / "cifar100" / file).write_bytes(raw)
    monkeypatch.setitem(REMOTES, "cifar100", Remote((), {file: md5(raw)}, members=REMOTES["cifar100"].members))


def test_archive_gives_only_the_files_we_know(mirror, monkeypatch, tmp_path):
    record = bytes([1, 42]) + bytes(3072)
    raw = archive(
        [
            ("../evil.bin", b"x"),
            ("/abs.bin", b"x"),
            ("cifar-100-binary/fine_label_names.txt", b"x"),
            ("cifar-100-binary/train.bin", record * 2),
            ("cifar-100-binary/test.bin", record),
        ]
    )
    serve_cifar100(mirror, monkeypatch, raw)
    data = load("cifar100", tmp_path / "root", progress=lambda *what: None)
    assert data.y.tolist() == [42, 42]
    assert files(tmp_path / "root") == ["cifar-100-binary/test.bin", "cifar-100-binary/train.bin"]
    assert not (tmp_path / "evil.bin").exists()


def test_archive_without_a_file_or_with_a_link_for_it(mirror, monkeypatch, tmp_path):
    raw = archive([("cifar-100-binary/train.bin", b"x"), ("cifar-100-binary/test.bin", None)])
    serve_cifar100(mirror, monkeypatch, raw)
    with pytest.raises(InputError, match=r"an archive that holds cifar-100-binary/test\.bin"):
        fetch("cifar100", tmp_path / "root", lambda *what: None)
    serve_cifar100(mirror, monkeypatch, archive([("cifar-100-binary/train.bin", bytes(99999))])[:-40])
    with pytest.raises(InputError, match=r"a whole tar\.gz archive"):
        fetch("cifar100", tmp_path / "two", lambda *what: None)
    assert files(tmp_path / "two") == []


def test_second_address_is_tried(small_mnist, tmp_path, monkeypatch):
    port = closed_port()
    good = os.environ["FEDSTILL_MIRROR"] + "mnist/"
    monkeypatch.delenv("FEDSTILL_MIRROR")
    remote = REMOTES["mnist"]
    monkeypatch.setitem(REMOTES, "mnist", Remote((f"http://127.0.0.1:{port}/", good), remote.files, "mnist/"))
    assert len(load("mnist", tmp_path / "root", progress=lambda *what: None)) == 3


def test_published_sums_are_well_formed():
    for remote in REMOTES.values():
        assert all(len(total) == 32 and int(total, 16) >= 0 for total in remote.files.values())
        assert all(base.endswith("/") for base in remote.bases)


def test_plain_lines_at_each_quarter():
    written = []
    show = lines(written.append)
    for done in range(0, 101, 5):
        show(".a.gz.123.part", done * 10**6, 100 * 10**6)
    assert written == [f"downloading a.gz: {mb:.1f} of 100.0 MB" for mb in (0, 25, 50, 75, 100)]
    written.clear()
    show = lines(written.append)
    show("b", 0, None)
    show("b", 5, None)
    assert written == ["downloading b: 0.0 MB"]


def test_bar_on_a_terminal(small_mnist, tmp_path, monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(download.sys, "stderr", Terminal())
    fetch("mnist", tmp_path / "root")
    assert len(files(tmp_path / "root")) == 4
