"""Download well-known data sets from their publishers, checked against the published MD5 sums."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import InputError, first_line
from ..core.memory import in_words
from ..core.reading import Unreadable, open_regular
from .files import expanded

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (where the server says)

TIMEOUT = 10.0  # seconds to connect, and between two chunks
LARGEST = 2 << 30  # bytes of a file


@dataclass(frozen=True)
class Remote:
    """Where a data set is published: base addresses in the order to try, and each file's MD5 sum.

    `folder` is the files' folder under the root; `members` names, for each archive, the files to extract.
    """

    bases: tuple[str, ...]
    files: Mapping[str, str]
    folder: str = ""
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def targets(self) -> list[str]:
        """Return the files that end up under the root."""
        return [f"{self.folder}{name}" for file in self.files for name in self.members.get(file, (file,))]


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10 = tuple(f"cifar-10-batches-bin/{n}.bin" for n in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"))
_CIFAR100 = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")

REMOTES: dict[str, Remote] = {
    "mnist": Remote(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        "mnist/",
    ),
    "fmnist": Remote(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        "fmnist/",
    ),
    "svhn": Remote(
        ("http://ufldl.stanford.edu/housenumbers/",),
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
        "svhn/",
    ),
    "cifar10": Remote(
        _TORONTO,
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        members={"cifar-10-binary.tar.gz": _CIFAR10},
    ),
    "cifar100": Remote(
        _TORONTO,
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        members={"cifar-100-binary.tar.gz": _CIFAR100},
    ),
}


def fetch(name: str, root: Path, progress: Progress | None = None) -> None:
    """Download the files of a data set that are missing under the root.

    The variable FEDSTILL_MIRROR replaces the publishers' addresses; a mirror holds the files as MIRROR/NAME/FILE.
    """
    remote = REMOTES[name]
    mirror = os.environ.get("FEDSTILL_MIRROR")
    bases = (f"{mirror.rstrip('/')}/{name}/",) if mirror else remote.bases
    if mirror and not mirror.startswith(("http://", "https://")):
        raise InputError("FEDSTILL_MIRROR", mirror, "an address that begins with http:// or https://")
    folder = root / remote.folder
    with _display(progress) as show:
        for file, md5 in remote.files.items():
            members = remote.members.get(file, ())
            if all((folder / target).exists() for target in members or (file,)):
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _download(name, remote, [base + file for base in bases], folder / file, md5, show)
                if members:
                    _unpack(folder / file, members, folder)
            except OSError as error:
                raise InputError("data", name, f"writable under {root} ({error.strerror or error})") from None


def _download(name: str, remote: Remote, urls: list[str], to: Path, md5: str, show: Progress) -> None:
    """Download one file under a temporary name and rename it once its checksum is right."""
    partial = to.with_name(f".{to.name}.{os.getpid()}.part")
    reason = ""
    try:
        for url in urls:
            try:
                digest = _stream(url, partial, show)
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reason = f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
                continue
            if digest == md5:
                os.replace(partial, to)
                return
            reason = f"{url}: the MD5 sum is {digest}, not {md5}"
        right = f"downloaded, which failed ({reason}); or put into {_root(to, remote)}: {', '.join(remote.targets())}"
        raise InputError("data", name, right)
    finally:
        partial.unlink(missing_ok=True)


def _root(to: Path, remote: Remote) -> Path:
    """Return the root above a downloaded file's folder."""
    return to.parent.parent if remote.folder else to.parent


def _stream(url: str, to: Path, show: Progress) -> str:
    """Write the content of an address to a file and return its MD5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=TIMEOUT) as reply, to.open("wb") as file:
        length = reply.headers.get("Content-Length")
        total = int(length) if length and re.fullmatch(r"\d{1,15}", length, re.ASCII) else None
        done = 0
        show(to.name, 0, total)
        while chunk := reply.read(1 << 18):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if done > LARGEST:
                raise http.client.HTTPException(f"more than {in_words(LARGEST)}")
            show(to.name, done, total)
    return digest.hexdigest()


class _Bounded(io.RawIOBase):
    """The decompressed bytes of an archive, up to a bound; headers that ask for more at once are refused as well."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self.stream, self.left = stream, most

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        raw = self.stream.read(min(size, self.left + 1)) if size >= 0 else b""
        self.left -= len(raw)
        if size < 0 or self.left < 0:
            raise tarfile.ReadError("it expands to more than a data set would")
        return raw


def _unpack(archive: Path, members: tuple[str, ...], to: Path) -> None:
    """Extract exactly the named regular files from an archive, then remove it; one that is damaged leaves nothing."""
    partials: dict[Path, Path] = {}
    try:
        with open_regular(archive) as packed, gzip.GzipFile(fileobj=packed) as stream:
            bounded = _Bounded(stream, expanded(archive.stat().st_size))
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                for entry in tar:
                    # nothing but the names we know is ever written, so no entry can point elsewhere
                    target = to / entry.name
                    if entry.name in members and target not in partials and entry.type in tarfile.REGULAR_TYPES:
                        partials[target] = target.with_name(f".{target.name}.{os.getpid()}.part")
                        _extract(tar, entry, partials[target])
            while bounded.read(1 << 20):  # to the end, for the checksum
                pass
        missing = sorted(name for name in members if to / name not in partials)
        if missing:
            raise InputError("data file", str(archive), f"an archive that holds {', '.join(missing)}")
        for target, partial in partials.items():
            os.replace(partial, target)
    except InputError:
        raise
    except Unreadable as error:
        raise InputError("data file", str(archive), str(error)) from None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, MemoryError) as error:
        raise InputError("data file", str(archive), f"a whole tar.gz archive ({first_line(error)})") from None
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        archive.unlink(missing_ok=True)


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, to: Path) -> None:
    """Write a regular file of an archive; one with holes could be of any size."""
    source = None if entry.issparse() else tar.extractfile(entry)
    if source is None:
        raise tarfile.ReadError(f"{entry.name} has holes")
    to.parent.mkdir(parents=True, exist_ok=True)
    with source, to.open("wb") as file:
        shutil.copyfileobj(source, file)


@contextlib.contextmanager
def _display(progress: Progress | None) -> Iterator[Progress]:
    """Yield the callback if there is one, else a progress bar on a terminal with rich, else plain lines."""
    if progress is not None:
        yield progress
        return
    if sys.stderr.isatty():
        try:
            from rich import progress as bars
            from rich.console import Console
        except ImportError:
            pass
        else:
            columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn())
            with bars.Progress(*columns, console=Console(stderr=True)) as live:
                tasks: dict[str, bars.TaskID] = {}

                def bar(file: str, done: int, total: int | None) -> None:
                    if file not in tasks:
                        tasks[file] = live.add_task(_final_name(file), total=total)
                    live.update(tasks[file], completed=done)

                yield bar
            return
    yield lines()


def lines(write: Callable[[str], object] | None = None) -> Progress:
    """Return a callback that writes a line at the start of a file and one at each further quarter."""
    quarters: dict[str, int] = {}  # the last one written, by file
    write_line = write or (lambda line: print(line, file=sys.stderr, flush=True))

    def show(file: str, done: int, total: int | None) -> None:
        quarter = 4 * done // total if total else 0
        if quarters.get(file, -1) < quarter:
            quarters[file] = quarter
            of = f" of {total / 1e6:.1f}" if total else ""
            write_line(f"downloading {_final_name(file)}: {done / 1e6:.1f}{of} MB")

    return show


def _final_name(name: str) -> str:
    """Return the name that a file with a temporary name will have."""
    return name.removeprefix(".").rsplit(".", 2)[0] if name.endswith(".part") else name
