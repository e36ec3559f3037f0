"""Where data comes from: names that the library knows, and paths to a user's own files.

A source is written `NAME[:OPTION][@SIZE][#PART,PART…]` or `PATH[@SIZE][#PART,PART…]`: SIZE is the side to which images of
differing sizes are resized, a PART is a domain (or a rater, or a super-category) to read by itself, while the classes
stay those of the whole; or names joined by +, each a domain, with one `@SIZE` at the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import InputError, nearest
from . import download
from .aesthetics import RATINGS, flickr_set, realcur_set
from .dataset import Dataset
from .domainnet import DOMAINS, domainnet_set
from .files import IDX, cifar_set, digits, idx_set, npz_set
from .images import domain_set, domains, image_set
from .inaturalist import inaturalist_set
from .leaf import femnist_set
from .silos import silo_set
from .svhn import mat_set
from .synthetic import synthetic

CIFAR10 = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
ARRAYS = " (train_x, train_y, test_x, test_y)"


@dataclass(frozen=True)
class Ask:
    """What is asked of a source: the name that the data set gets, an option, a size, and the parts to read."""

    name: str
    option: str | None = None
    size: int | None = None
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A data set that can be named: one line about it, the files it wants under the root, and how it is read.

    `inside` says what the files hold where their names do not; `option` is the pattern of the options there are, and
    `shown` how a user would write one; `photographs` of differing sizes can be resized, and `parts` can be chosen.
    """

    name: str
    line: str
    files: tuple[str, ...]
    read: Callable[[Path, Ask], Dataset]
    inside: str = ""
    option: str = ""
    shown: str = ""
    photographs: bool = False
    parts: bool = False

    def missing(self, root: Path) -> list[str]:
        """The files that are not under the root; an IDX file may lie there unpacked."""
        return [f for f in self.files if not (root / f).exists() and not (root / f.removesuffix(".gz")).exists()]

    def check(self, text: str, ask: Ask) -> None:
        """Refuse what this source cannot give."""
        if ask.option is not None and (not self.option or not re.fullmatch(self.option, ask.option)):
            shown = f" or {self.name}:{self.shown}" if self.shown else ""
            raise InputError("data", text, f"{self.name}{shown}: there is no option {ask.option!r}")
        if ask.size is not None and not self.photographs:
            raise InputError("data", text, f"{self.name} without @SIZE: its images have one size")
        if ask.chosen and not self.parts:
            raise InputError("data", text, f"{self.name} without #: it has no parts to choose among")


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue."""

    name: str
    line: str
    files: tuple[str, ...]
    present: bool


def _idx(name: str, line: str) -> Source:
    return Source(name, line, tuple(f"{name}/{stem}.gz" for stem in IDX), lambda root, ask: idx_set(name, root / name))


def _mat(name: str, line: str, prefix: str = "") -> Source:
    files = (f"{name}/{prefix}train_32x32.mat", f"{name}/{prefix}test_32x32.mat")
    return Source(name, line, files, lambda root, ask: mat_set(name, root / files[0], root / files[1]))


def _cifar10(root: Path, ask: Ask) -> Dataset:
    return cifar_set("cifar10", root / "cifar-10-batches-bin", CIFAR10, "test_batch.bin", 1, 10)


def _cifar100(root: Path, ask: Ask) -> Dataset:
    return cifar_set("cifar100", root / "cifar-100-binary", ("train.bin",), "test.bin", 2, 100)


def _histo(root: Path, ask: Ask) -> Dataset:
    try:
        found = domain_set(ask.name, root / "histo-fed", ask.size, ask.chosen, colour=True)
    except OSError as error:
        raise InputError("data", str(root / "histo-fed"), f"a folder that can be read ({error})") from None
    if found is None:
        raise InputError("data", str(root / "histo-fed"), "a folder that holds CENTRE/CLASS/*.png (or tif, jpg)")
    return found


def _flickr(root: Path, ask: Ask) -> Dataset:
    workers = int(ask.option) if ask.option else None
    return flickr_set(ask.name, root / "flickr-aes", ask.size, workers, ask.chosen)


SOURCES = {
    source.name: source
    for source in (
        Source("digits", "1,797 UCI handwritten digits, 8×8, shipped with the package", (), lambda root, ask: digits()),
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
        Source(
            "usps",
            "9,298 USPS digits, 16×16",
            ("usps.npz",),
            lambda root, ask: npz_set("usps", root / "usps.npz", 10),
            ARRAYS,
        ),
        Source(
            "mnistm",
            "MNIST-M digits on colour photographs, 32×32",
            ("mnistm.npz",),
            lambda root, ask: npz_set("mnistm", root / "mnistm.npz", 10),
            ARRAYS,
        ),
        _mat("svhn", "99,289 house-number digits in colour, 32×32"),
        _mat("synth", "488,953 synthetic digits in colour, 32×32", "synth_"),
        Source(
            "femnist",
            "LEAF's FEMNIST, 62 characters by their writers, 28×28; femnist:letters10: a to j",
            ("femnist/train", "femnist/test"),
            lambda root, ask: femnist_set(ask.name, root / "femnist", bool(ask.option)),
            " (LEAF's json files)",
            "letters10",
            "letters10",
        ),
        Source(
            "domainnet",
            "DomainNet's photographs and drawings, 345 classes, 6 domains; domainnet:10: FedBN's ten classes",
            ("domainnet",),
            lambda root, ask: domainnet_set(ask.name, root / "domainnet", ask.size, bool(ask.option), ask.chosen),
            f" (DOMAIN/CLASS/…, DOMAIN_train.txt and DOMAIN_test.txt for {', '.join(DOMAINS)})",
            "10",
            "10",
            photographs=True,
            parts=True,
        ),
        Source(
            "flickr-aes",
            "40,000 photographs rated from 1 to 5 by their raters; flickr-aes:30: 30 of the raters",
            (f"flickr-aes/{RATINGS}", "flickr-aes/40K"),
            _flickr,
            " (40K: the images)",
            r"\d{1,6}",
            "WORKERS",
            photographs=True,
            parts=True,
        ),
        Source(
            "real-cur",
            "14 albums of photographs rated from 1 to 5 by their owners",
            ("real-cur/images",),
            lambda root, ask: realcur_set(ask.name, root / "real-cur", ask.size, ask.chosen),
            " (USER/SCORE/*.jpg)",
            photographs=True,
            parts=True,
        ),
        Source(
            "histo-fed",
            "a folder of histology patches, each medical centre a domain",
            ("histo-fed",),
            _histo,
            " (CENTRE/CLASS/*.png)",
            photographs=True,
            parts=True,
        ),
        Source(
            "inaturalist",
            "iNaturalist 2017, 675,170 photographs of 5,089 species; inaturalist:super: the 13 super-categories",
            ("inaturalist/train2017.json", "inaturalist/val2017.json", "inaturalist/train_val_images"),
            lambda root, ask: inaturalist_set(ask.name, root / "inaturalist", ask.size, bool(ask.option), ask.chosen),
            "",
            "super",
            "super",
            photographs=True,
            parts=True,
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
    resizes, `PATH#DOMAIN,DOMAIN` reads some domains with the classes of all) or of silos (one CSV or npz file a
    client). What is missing is downloaded unless `fetch` is False.
    """
    text = str(source)
    folder = root_of(root)
    if isinstance(source, str):
        name, _, parameter = text.partition(":")
        if name == "synthetic":
            return synthetic(parameter)
        named = re.fullmatch(r"([a-z0-9-]+)(?::([^@#+]*))?(?:@(\d+))?(?:#(.*))?", text)
        if named and named[1] in SOURCES:
            whole = named[1] if named[2] is None else f"{named[1]}:{named[2]}"
            chosen = _chosen(named[4])
            ask = Ask(_with_parts(whole, chosen), named[2], _size(text, named[3]), chosen)
            return _named(named[1], text, ask, folder, fetch, progress)
        joined = re.fullmatch(r"(.+?)(?:@(\d+))?", text, re.DOTALL)
        parts = joined[1].split("+") if joined else []
        if joined and len(parts) > 1 and all(part in SOURCES for part in parts):
            size = _size(text, joined[2])
            if len(set(parts)) < len(parts):
                raise InputError("data", text, "names that are each given once")
            for part in parts:
                if SOURCES[part].photographs:
                    raise InputError("data", text, f"sets whose images have one size each, unlike {part}")
            return domains(text, (_named(p, p, Ask(p), folder, fetch, progress) for p in parts), size)
    return _path(text)


def _named(name: str, text: str, ask: Ask, root: Path, fetch: bool, progress: download.Progress | None) -> Dataset:
    source = SOURCES[name]
    source.check(text, ask)
    missing = source.missing(root)
    if missing and fetch and name in download.REMOTES:
        download.fetch(name, root, progress)
        missing = source.missing(root)
    if missing:
        raise InputError("data", name, f"present: put {', '.join(missing)}{source.inside} into {root}")
    return source.read(root, ask)


def _size(text: str, digits: str | None) -> int | None:
    """The size after an @."""
    if digits is None:
        return None
    size = int(digits) if len(digits) < 5 else 0
    if not 1 <= size <= 4096:
        raise InputError("data", text, "a size after @ from 1 to 4096")
    return size


def _chosen(names: str | None) -> tuple[str, ...]:
    """The parts after a #."""
    return () if names is None else tuple(name.strip() for name in names.split(","))


def _with_parts(name: str, chosen: tuple[str, ...]) -> str:
    """The name of some parts of a set: the same whatever order they are given in."""
    return f"{name}#{','.join(sorted(chosen))}" if chosen else name


def _path(text: str) -> Dataset:
    path, size, chosen = _place(text)
    if path.is_file() and (size is not None or chosen):
        raise InputError("data", text, f"{path} without @SIZE and #: it is a file")
    if path.is_file() and path.suffix.lower() == ".npz":
        return npz_set(path.stem, path)
    if path.is_dir():
        name = _with_parts(path.resolve().name, chosen)
        try:
            found = silo_set(name, path)
            if found is not None and chosen:
                raise InputError("data", text, f"{path} without #: only folders of domains have parts to choose among")
            if found is None:
                found = image_set(name, path, size, chosen)
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
    raise InputError("data", text, f"{nearest(re.split('[:@#]', text)[0], NAMES)} or a path to your own files")


def _place(text: str) -> tuple[Path, int | None, tuple[str, ...]]:
    """The path that a text begins with, its size and its parts; an @ or # in a path's own name is taken as it stands."""
    for pattern in (r"(.+)()()", r"(.+)@(\d+)()", r"(.+)()#([^#]*)", r"(.+)@(\d+)#([^#]*)"):
        found = re.fullmatch(pattern, text, re.DOTALL)
        try:
            path = Path(found[1]).expanduser() if found else None
            if found is None or path is None or not path.exists():
                continue
        except (OSError, RuntimeError) as error:  # a name too long, a user that is not there
            raise InputError("data", text, f"a path that can be read ({error})") from None
        return path, _size(text, found[2] or None), _chosen(found[3]) if "#" in pattern else ()
    return Path(text), None, ()
