"""Where data comes from: names that the library knows, and paths to a user's own files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, nearest
from . import download
from .dataset import Dataset
from .files import IDX, cifar_set, digits, idx_set, npz_set
from .images import domains, image_set
from .silos import silo_set
from .synthetic import synthetic

CIFAR10 = tuple(f"data_batch_{i}.bin" for i in range(1, 6))


@dataclass(frozen=True)
class Source:
    """A data set that can be named: one line about it, the files it wants under the root, and how it is read."""

    name: str
    line: str
    files: tuple[str, ...]
    read: Callable[[Path], Dataset]

    def missing(self, root: Path) -> list[str]:
        """The files that are not under the root; an IDX file may lie there unpacked."""
        return [f for f in self.files if not (root / f).exists() and not (root / f.removesuffix(".gz")).exists()]


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue."""

    name: str
    line: str
    files: tuple[str, ...]
    present: bool


def _idx(name: str, line: str) -> Source:
    return Source(name, line, tuple(f"{name}/{stem}.gz" for stem in IDX), lambda root: idx_set(name, root / name))


def _cifar10(root: Path) -> Dataset:
    return cifar_set("cifar10", root / "cifar-10-batches-bin", CIFAR10, "test_batch.bin", 1, 10)


def _cifar100(root: Path) -> Dataset:
    return cifar_set("cifar100", root / "cifar-100-binary", ("train.bin",), "test.bin", 2, 100)


SOURCES = {
    source.name: source
    for source in (
        Source("digits", "1,797 UCI handwritten digits, 8×8, shipped with the package", (), lambda root: digits()),
        _idx("mnist", "70,000 handwritten digits, 28×28"),
        _idx("fmnist", "70,000 Fashion-MNIST articles of clothing, 28×28"),
        Source(
            "cifar10",
            "60,000 colour photographs in 10 classes, 32×32",
            tuple(f"cifar-10-batches-bin/{file}" for file in (*CIFAR10, "test_batch.bin")),
            _cifar10,
        ),
        Source(
            "cifar100",
            "60,000 colour photographs in 100 classes (the fine labels), 32×32",
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
            _cifar100,
        ),
        Source("usps", "9,298 USPS digits, 16×16", ("usps.npz",), lambda root: npz_set("usps", root / "usps.npz", 10)),
        Source(
            "mnistm",
            "MNIST-M digits on colour photographs, 32×32",
            ("mnistm.npz",),
            lambda root: npz_set("mnistm", root / "mnistm.npz", 10),
        ),
    )
}
NAMES = (*SOURCES, "synthetic")


def root_of(root: str | Path | None = None) -> Path:
    """The folder of data files: the argument, else the variable FEDSTILL_DATA, else ~/.cache/fedstill."""
    chosen = root or os.environ.get("FEDSTILL_DATA") or "~/.cache/fedstill"
    return Path(chosen).expanduser()


def catalogue(root: str | Path | None = None) -> list[Entry]:
    """Every data set that has a name, with the files it wants and whether they are under the root."""
    folder = root_of(root)
    known = [Entry(s.name, s.line, s.files, not s.missing(folder)) for s in SOURCES.values()]
    line = "the FedProx generator: synthetic:ALPHA,BETA[,CLIENTS[,SEED]], 60 features, 10 classes"
    return [*known, Entry("synthetic", line, (), True)]


def load(
    source: str | Path,
    root: str | Path | None = None,
    *,
    fetch: bool = True,
    progress: download.Progress | None = None,
) -> Dataset:
    """A data set by name or path.

    `source` is a name of the catalogue; several names joined by + (each a domain; `@SIZE` at the end sets the images'
    size); the path of an npz file; or a folder of images (`class/…`, `train/class/…`, `domain/class/…`; `PATH@SIZE`
    resizes) or of silos (one CSV or npz file a client). What is missing is downloaded unless `fetch` is False.
    """
    text = str(source)
    folder = root_of(root)
    if isinstance(source, str):
        name, _, parameter = text.partition(":")
        if name == "synthetic":
            return synthetic(parameter)
        if text in SOURCES:
            return _named(text, folder, fetch, progress)
        names, size = _sized(text)
        parts = names.split("+")
        if len(parts) > 1 and all(part in SOURCES for part in parts):
            if len(set(parts)) < len(parts):
                raise InputError("data", text, "names that are each given once")
            return domains(text, (_named(part, folder, fetch, progress) for part in parts), size)
    return _path(text)


def _named(name: str, root: Path, fetch: bool, progress: download.Progress | None) -> Dataset:
    source = SOURCES[name]
    missing = source.missing(root)
    if missing and fetch and name in download.REMOTES:
        download.fetch(name, root, progress)
        missing = source.missing(root)
    if missing:
        keys = " (train_x, train_y, test_x, test_y)" if missing[0].endswith(".npz") else ""
        raise InputError("data", name, f"present: put {', '.join(missing)}{keys} into {root}")
    return source.read(root)


def _sized(text: str) -> tuple[str, int | None]:
    """The text without its `@SIZE`, and the size."""
    match = re.fullmatch(r"(.+)@(\d+)", text)
    if match is None:
        return text, None
    size = int(match[2])
    if not 1 <= size <= 4096:
        raise InputError("data", text, "a size after @ from 1 to 4096")
    return match[1], size


def _path(text: str) -> Dataset:
    path, size = Path(text).expanduser(), None
    if not path.exists():  # a path that has an @ in its own name is taken as it stands
        bare, size = _sized(text)
        path = Path(bare).expanduser()
    if path.is_file() and path.suffix.lower() == ".npz":
        return npz_set(path.stem, path)
    if path.is_dir():
        name = path.resolve().name
        try:
            found = silo_set(name, path)
            if found is None:
                found = image_set(name, path, size)
        except OSError as error:
            raise InputError("data", text, f"a folder that can be read ({error})") from None
        if found is None:
            layouts = "class folders of png or jpg images, or one CSV or npz file for each client"
            raise InputError("data", text, f"a folder that holds {layouts}")
        return found
    if path.is_file():
        raise InputError("data", text, "an npz file or a folder")
    if os.sep in text or path.suffix:
        raise InputError("data", text, "an npz file or a folder that exists")
    raise InputError("data", text, f"{nearest(text.partition(':')[0], NAMES)} or a path to your own files")
