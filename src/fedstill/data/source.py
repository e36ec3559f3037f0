"""Data sources: names that the library knows, and paths to a user's own files.

A source is written `NAME[:OPTION][@SIZE][#GROUP,GROUP…]` or `PATH[@SIZE][#GROUP,GROUP…]`: SIZE is the side to which images
of differing sizes are resized, a GROUP is a domain (or a rater, or a super-category) to read alone, with the classes of the
complete set; or names joined by +, each a domain, with one `@SIZE` at the end.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import InputError, nearest
from . import download, mapped
from .aesthetics import RATINGS, flickr_set, realcur_set
from .dataset import Dataset
from .domainnet import DOMAINS, domainnet_set
from .files import IDX, cifar_set, digits, idx_set, npz_set
from .hf import Chosen, hf_set
from .images import domain_set, image_set, join_domains
from .inaturalist import inaturalist_set
from .leaf import femnist_set
from .npy import npy_set
from .rules import Preprocessing
from .silos import silo_set, table_set
from .svhn import mat_set
from .synthetic import synthetic
from .targets import AUTO

CIFAR10 = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
ARRAYS = " (train_x, train_y, test_x, test_y)"


@dataclass(frozen=True)
class Request:
    """What to read of a source: the data set's name, an option, the images' size, and the chosen groups."""

    name: str
    option: str | None = None
    size: int | None = None
    chosen: tuple[str, ...] = ()
    memory_map: str = mapped.AUTO


@dataclass(frozen=True)
class Source:
    """A named data set: a line about it, the files it needs under the root, and the function that reads it.

    `contents` describes the files where their names do not; `option` is the pattern of its options, and `example` one as a
    user would write it; `photographs` of differing sizes can be resized; `has_groups`: some groups can be read alone.
    """

    name: str
    line: str
    files: tuple[str, ...]
    read: Callable[[Path, Request], Dataset]
    contents: str = ""
    option: str = ""
    example: str = ""
    photographs: bool = False
    has_groups: bool = False

    def missing(self, root: Path) -> list[str]:
        """Return the files that are not under the root; an IDX file may lie there decompressed."""
        return [f for f in self.files if not (root / f).exists() and not (root / f.removesuffix(".gz")).exists()]

    def check(self, text: str, request: Request) -> None:
        """Refuse a request that this source cannot fulfil."""
        if request.option is not None and (not self.option or not re.fullmatch(self.option, request.option)):
            example = f" or {self.name}:{self.example}" if self.example else ""
            raise InputError("data", text, f"{self.name}{example}: there is no option {request.option!r}")
        if request.size is not None and not self.photographs:
            raise InputError("data", text, f"{self.name} without @SIZE: its images have one size")
        if request.chosen and not self.has_groups:
            raise InputError("data", text, f"{self.name} without #: it has no parts to choose among")


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue: its name, a line about it, its files, and whether they are present."""

    name: str
    line: str
    files: tuple[str, ...]
    present: bool


def _idx(name: str, line: str) -> Source:
    return Source(
        name, line, tuple(f"{name}/{stem}.gz" for stem in IDX), lambda root, request: idx_set(name, root / name)
    )


def _mat(name: str, line: str, prefix: str = "") -> Source:
    files = (f"{name}/{prefix}train_32x32.mat", f"{name}/{prefix}test_32x32.mat")
    return Source(name, line, files, lambda root, request: mat_set(name, root / files[0], root / files[1]))


def _cifar10(root: Path, request: Request) -> Dataset:
    return cifar_set("cifar10", root / "cifar-10-batches-bin", CIFAR10, "test_batch.bin", 1, 10)


def _cifar100(root: Path, request: Request) -> Dataset:
    return cifar_set("cifar100", root / "cifar-100-binary", ("train.bin",), "test.bin", 2, 100)


def _histo(root: Path, request: Request) -> Dataset:
    try:
        data = domain_set(request.name, root / "histo-fed", request.size, request.chosen, True, request.memory_map)
    except OSError as error:
        raise InputError("data", str(root / "histo-fed"), f"a folder that can be read ({error})") from None
    if data is None:
        raise InputError("data", str(root / "histo-fed"), "a folder that holds CENTRE/CLASS/*.png (or tif, jpg)")
    return data


def _domainnet(root: Path, request: Request) -> Dataset:
    return domainnet_set(
        request.name, root / "domainnet", request.size, bool(request.option), request.chosen, request.memory_map
    )


def _inaturalist(root: Path, request: Request) -> Dataset:
    return inaturalist_set(
        request.name, root / "inaturalist", request.size, bool(request.option), request.chosen, request.memory_map
    )


def _flickr(root: Path, request: Request) -> Dataset:
    workers = int(request.option) if request.option else None
    return flickr_set(request.name, root / "flickr-aes", request.size, workers, request.chosen, request.memory_map)


SOURCES = {
    source.name: source
    for source in (
        Source(
            "digits", "1,797 UCI handwritten digits, 8×8, shipped with the package", (), lambda root, request: digits()
        ),
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
            lambda root, request: npz_set("usps", root / "usps.npz", 10),
            ARRAYS,
        ),
        Source(
            "mnistm",
            "MNIST-M digits on colour photographs, 32×32",
            ("mnistm.npz",),
            lambda root, request: npz_set("mnistm", root / "mnistm.npz", 10),
            ARRAYS,
        ),
        _mat("svhn", "99,289 house-number digits in colour, 32×32"),
        _mat("synth", "488,953 synthetic digits in colour, 32×32", "synth_"),
        Source(
            "femnist",
            "LEAF's FEMNIST, 62 characters by their writers, 28×28; femnist:letters10: a to j",
            ("femnist/train", "femnist/test"),
            lambda root, request: femnist_set(request.name, root / "femnist", bool(request.option)),
            " (LEAF's json files)",
            "letters10",
            "letters10",
        ),
        Source(
            "domainnet",
            "DomainNet's photographs and drawings, 345 classes, 6 domains; domainnet:10: FedBN's ten classes",
            ("domainnet",),
            _domainnet,
            f" (DOMAIN/CLASS/…, DOMAIN_train.txt and DOMAIN_test.txt for {', '.join(DOMAINS)})",
            "10",
            "10",
            photographs=True,
            has_groups=True,
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
            has_groups=True,
        ),
        Source(
            "real-cur",
            "14 albums of photographs rated from 1 to 5 by their owners",
            ("real-cur/images",),
            lambda root, request: realcur_set(
                request.name, root / "real-cur", request.size, request.chosen, request.memory_map
            ),
            " (USER/SCORE/*.jpg)",
            photographs=True,
            has_groups=True,
        ),
        Source(
            "histo-fed",
            "a folder of histology patches, each medical centre a domain",
            ("histo-fed",),
            _histo,
            " (CENTRE/CLASS/*.png)",
            photographs=True,
            has_groups=True,
        ),
        Source(
            "inaturalist",
            "iNaturalist 2017, 675,170 photographs of 5,089 species; inaturalist:super: the 13 super-categories",
            ("inaturalist/train2017.json", "inaturalist/val2017.json", "inaturalist/train_val_images"),
            _inaturalist,
            "",
            "super",
            "super",
            photographs=True,
            has_groups=True,
        ),
    )
}
HF = "hf:"  # before the folder of a saved Hugging Face data set
NAMES = (*SOURCES, "synthetic")


def root_of(root: str | Path | None = None) -> Path:
    """Return the folder of data files: the argument, else the variable FEDSTILL_DATA, else ~/.cache/fedstill."""
    folder = root or os.environ.get("FEDSTILL_DATA") or "~/.cache/fedstill"
    return Path(folder).expanduser()


def catalogue(root: str | Path | None = None) -> list[Entry]:
    """Return every named data set, with the files it needs and whether they are under the root."""
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
    objective: str = AUTO,
    preprocessing: Preprocessing | None = None,
    memory_map: str = mapped.AUTO,
    input: str = "",
    label: str = "",
    owner: str = "",
) -> Dataset:
    """Load a data set by name or path.

    `source` is a name of the catalogue; several names joined by + (each a domain; `@SIZE` at the end sets the images'
    size); the path of an npz file; or a folder of images (`class/…`, `train/class/…`, `domain/class/…`; `PATH@SIZE`
    resizes, `PATH#DOMAIN,DOMAIN` reads some domains with the classes of all), of silos (one CSV or npz file per client)
    or of npy files; one CSV file; or hf:FOLDER, a saved Hugging Face data set, of which `input` and `owner` name columns.
    Missing files are downloaded unless `fetch` is False. `objective` says what the targets are for; auto: as their form and
    type say. `preprocessing` says what is done with columns, gaps, texts and scales; `label`, the column of the labels, may be
    said apart from it. `memory_map` says whether images and npy files stay on disk and are read when they are needed; auto: where
    they would take more than half of the memory. The samples are the same.
    """
    mapped.check(memory_map)
    rules = preprocessing or Preprocessing()
    chosen = Chosen(input, label or rules.label, owner)
    if str(source).startswith(HF):
        rules = dataclasses.replace(rules, label="")
    else:
        rules = dataclasses.replace(rules, label=chosen.label)
        for name, value in (("input", input), ("owner", owner)):
            if value:
                raise InputError(name, value, f"left out with {source}: it names a column of hf:FOLDER")
    try:
        data = _load(source, root_of(root), fetch, progress, objective, rules, memory_map, chosen)
        return _with_rules(_as(data, str(source), objective), str(source), rules)
    except MemoryError:
        raise InputError("data", str(source), "small enough for the memory") from None


def _as(data: Dataset, source: str, objective: str) -> Dataset:
    """Return a data set for the objective that is said: labels of a class can also be learned as numbers."""
    if objective in (AUTO, data.objective):
        return data
    if objective != "regression" or data.objective != "classification":
        raise InputError("objective", objective, f"{data.objective!r}, as the targets of {source} are")
    y, test_y = (None if y is None else y.astype("float32")[:, None] for y in (data.y, data.test_y))
    assert y is not None
    return dataclasses.replace(data, y=y, test_y=test_y, classes=1, labels=(), objective="regression")


def _with_rules(data: Dataset, source: str, rules: Preprocessing) -> Dataset:
    """Return a data set with what is to be done with its samples; refuse rules that it cannot follow."""
    if data.columns is None:
        for name, value in rules.of_tables.items():
            raise InputError(name, value, f"left out: {source} is no table (CSV files)")
    return dataclasses.replace(data, rules=rules)


def _load(
    source: str | Path,
    folder: Path,
    fetch: bool,
    progress: download.Progress | None,
    objective: str,
    rules: Preprocessing,
    memory_map: str,
    chosen_columns: Chosen,
) -> Dataset:
    text = str(source)
    if text.startswith(HF):
        return _load_hf(text, chosen_columns, objective, memory_map)
    if isinstance(source, str):
        name, _, parameter = text.partition(":")
        if name == "synthetic":
            return synthetic(parameter)
        named = re.fullmatch(r"([a-z0-9-]+)(?::([^@#+]*))?(?:@(\d+))?(?:#(.*))?", text)
        if named and named[1] in SOURCES:
            name = named[1] if named[2] is None else f"{named[1]}:{named[2]}"
            chosen = _parse_groups(named[4])
            size = _parse_size(text, named[3])
            request = Request(_name_with_groups(name, chosen), named[2], size, chosen, memory_map)
            return _load_named(named[1], text, request, folder, fetch, progress)
        joined = re.fullmatch(r"(.+?)(?:@(\d+))?", text, re.DOTALL)
        names = joined[1].split("+") if joined else []
        if joined and len(names) > 1 and all(name in SOURCES for name in names):
            size = _parse_size(text, joined[2])
            if len(set(names)) < len(names):
                raise InputError("data", text, "names that are each given once")
            for name in names:
                if SOURCES[name].photographs:
                    raise InputError("data", text, f"sets whose images have one size each, unlike {name}")
            domains = (_load_named(name, name, Request(name), folder, fetch, progress) for name in names)
            return join_domains(text, domains, size)
    return _load_path(text, objective, rules, memory_map)


def _load_named(
    name: str, text: str, request: Request, root: Path, fetch: bool, progress: download.Progress | None
) -> Dataset:
    source = SOURCES[name]
    source.check(text, request)
    missing = source.missing(root)
    if missing and fetch and name in download.REMOTES:
        download.fetch(name, root, progress)
        missing = source.missing(root)
    if missing:
        raise InputError("data", name, f"present: put {', '.join(missing)}{source.contents} into {root}")
    return source.read(root, request)


def _parse_size(text: str, digits: str | None) -> int | None:
    """Return the size after an @."""
    if digits is None:
        return None
    size = int(digits) if len(digits) < 5 else 0
    if not 1 <= size <= 4096:
        raise InputError("data", text, "a size after @ from 1 to 4096")
    return size


def _parse_groups(names: str | None) -> tuple[str, ...]:
    """Return the groups after a #."""
    return () if names is None else tuple(name.strip() for name in names.split(","))


def _name_with_groups(name: str, chosen: tuple[str, ...]) -> str:
    """Return the name of some groups of a set, which does not depend on their order."""
    return f"{name}#{','.join(sorted(chosen))}" if chosen else name


def _load_hf(text: str, columns: Chosen, objective: str, memory_map: str) -> Dataset:
    path, size, chosen = _parse_path(text.removeprefix(HF))
    if chosen or not path.is_dir():
        raise InputError("data", text, "hf:FOLDER of a folder that exists, written by datasets.Dataset.save_to_disk")
    try:
        return hf_set(path.resolve().name, path, columns, size, memory_map, objective)
    except OSError as error:
        raise InputError("data", text, f"a folder that can be read ({error})") from None


def _load_path(text: str, objective: str, rules: Preprocessing, memory_map: str) -> Dataset:
    path, size, chosen = _parse_path(text)
    if path.is_file() and (size is not None or chosen):
        raise InputError("data", text, f"{path} without @SIZE and #: it is a file")
    if path.is_file() and path.suffix.lower() == ".npz":
        return npz_set(path.stem, path, objective=objective)
    if path.is_file() and path.suffix.lower() == ".csv":
        return table_set(path.stem, [path], objective, rules)
    if path.is_dir():
        name = _name_with_groups(path.resolve().name, chosen)
        try:
            data = silo_set(name, path, objective, rules) or npy_set(name, path, memory_map, objective)
            if data is not None and chosen:
                raise InputError("data", text, f"{path} without #: only folders of domains have parts to choose among")
            if data is None:
                data = image_set(name, path, size, chosen, memory_map)
        except OSError as error:
            raise InputError("data", text, f"a folder that can be read ({error})") from None
        if data is None:
            layouts = "class folders of png or jpg images, one CSV or npz file for each client, or x.npy and y.npy"
            raise InputError("data", text, f"a folder that holds {layouts}")
        return data
    if path.is_file():
        raise InputError("data", text, "an npz or CSV file, or a folder")
    if os.sep in text or path.suffix:
        raise InputError("data", text, "an npz or CSV file, or a folder, that exists")
    raise InputError("data", text, f"{nearest(re.split('[:@#]', text)[0], NAMES)} or a path to your own files")


def _parse_path(text: str) -> tuple[Path, int | None, tuple[str, ...]]:
    """Return the path, size and groups of a source; an @ or # in the name of a path that exists belongs to the name."""
    for pattern in (r"(.+)()()", r"(.+)@(\d+)()", r"(.+)()#([^#]*)", r"(.+)@(\d+)#([^#]*)"):
        match = re.fullmatch(pattern, text, re.DOTALL)
        try:
            path = Path(match[1]).expanduser() if match else None
            if match is None or path is None or not path.exists():
                continue
        except (OSError, RuntimeError) as error:  # a name too long, an unknown user
            raise InputError("data", text, f"a path that can be read ({error})") from None
        return path, _parse_size(text, match[2] or None), _parse_groups(match[3]) if "#" in pattern else ()
    return Path(text), None, ()
