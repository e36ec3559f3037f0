"""Hostile files: every reader on mutated files, mutated experiments, and bombs in processes whose memory is limited.

A mutated file must end in a data set that is sound or in one printable line, within seconds and without memory growing.
Where the format has a checksum, what is accepted must be what was written; where it has none, what a plain reader of our own,
written below from the format's definition, makes of it.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import typing
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.cli import main
from fedstill.core import settings
from fedstill.core.errors import InputError, TrainingError
from fedstill.data import Dataset, load
from fedstill.data.dataset import MAX_CLASSES
from fedstill.data.download import _unpack
from fedstill.data.record import load_record
from fedstill.methods import METHODS, get
from fedstill.run.experiment import Experiment
from fedstill.run.prepare import from_experiment
from fedstill.timing import clock

Row = tuple[str, str, str]
SECONDS = 10  # that a file may take
GROWTH = 250 << 20  # bytes that memory may grow by while thousands of small files are read
SILENT = {"FEDSTILL_MIRROR": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}  # nothing is downloaded

# ---- mutations -------------------------------------------------------------------------------------------------------

TOKENS = [
    *(
        b"0",
        b"-1",
        b"1e999",
        b"nan",
        b"NaN",
        b"-Infinity",
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
        b"9" * 400,
        b"9" * 5000,
    ),
    *(b"\0", b"\xff\xfe", b"\n", b",", b'"', b"'", b"[" * 40, b"{" * 40, b"../../x", b"/etc/passwd", b"\xef\xbb\xbf"),
    *(b"4294967296", b"9223372036854775808", b"0.5", b"1_0", b" ", b"\r\n", b"\x1b[2J", b"\xed\xa0\x80", b"\\ud800"),
]
WORDS = [struct.pack(f, v) for f in ("<i", ">i", "<q") for v in (0, 1, -1, 2**31 - 1, -(2**31), 255, 65536)]


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes with one random change, at times with more."""
    out = bytearray(raw)
    if rng.random() < 0.25 and out:  # the lightest: one other byte of the same kind
        at = int(rng.integers(0, len(out)))
        alike = b"0123456789" if 48 <= out[at] <= 57 else b'\n ,.-:"{}[]' if out[at] < 128 else bytes(range(256))
        out[at] = alike[int(rng.integers(0, len(alike)))]
        return bytes(out)
    for _ in range(1 if rng.random() < 0.7 else int(rng.integers(2, 5))):
        at = int(rng.integers(0, len(out) + 1))
        if rng.random() < 0.3:  # the beginning, where headers are
            at = min(at, int(rng.integers(0, 64)))
        length = int(rng.integers(1, 16))
        kind = int(rng.integers(0, 10))
        if kind <= 1 and at < len(out):
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2:
            out[at : at + length] = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
        elif kind == 3:
            del out[at : at + length]
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            out[at:at] = TOKENS[int(rng.integers(0, len(TOKENS)))]
        elif kind == 6:
            token = TOKENS[int(rng.integers(0, len(TOKENS)))]
            out[at : at + len(token)] = token
        elif kind == 7:
            word = WORDS[int(rng.integers(0, len(WORDS)))]
            out[at : at + len(word)] = word
        elif kind == 8:
            start = int(rng.integers(0, len(out) + 1))
            out[at:at] = out[start : start + length * 8]
        else:  # a number within a text
            digits = [i for i, c in enumerate(out[:4096]) if 48 <= c <= 57]
            if digits:
                i = digits[int(rng.integers(0, len(digits)))]
                out[i : i + 1] = TOKENS[int(rng.integers(0, len(TOKENS)))]
    return bytes(out)


# ---- one file, and what became of it ---------------------------------------------------------------------------------


class Hang(BaseException):
    """A file took too long."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang within if it takes longer."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(read: Callable[[], Any], what: str) -> Any:
    """Return what was read, or None where it was refused in one line."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            return read()
    except (InputError, TrainingError) as error:
        line = str(error)
        assert line.isprintable(), f"{what}: {line!r} cannot be printed"
        assert len(line) < 2500, f"{what}: a line of {len(line)} characters"
        return None
    except Hang:
        raise AssertionError(f"{what}: no end within {SECONDS} s") from None
    except BaseException as error:
        keep = Path(tempfile.gettempdir(), "fedstill-soak-crash")
        keep.write_text(traceback.format_exc())
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def check_dataset(data: Dataset, what: str) -> None:
    """Assert that a data set is sound: finite, consistent, with classes that occur."""
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        if x is None or y is None:
            continue
        assert x.dtype in (np.uint8, np.float32), what
        assert np.isfinite(x).all(), f"{what}: not finite"
        assert len(x) == len(y) > 0, what
        if data.objective == "regression":  # labels with fractions
            assert np.isfinite(y).all(), f"{what}: not finite"
            continue
        assert y.dtype == np.int64, what
        assert 0 <= y.min() <= y.max() < data.classes <= MAX_CLASSES, f"{what}: labels {y.min()} to {y.max()}"
    for group, names in ((data.owner, data.groups), (data.domain, data.groups)):
        if group is not None:
            assert len(group) == len(data.x), what
            assert group.max() < max(1, len(names)), what


def same(a: Dataset, b: Dataset) -> bool:
    """Return whether two data sets are the same to the bit."""
    return all(
        (p is None) == (q is None) and (p is None or np.array_equal(p, q))
        for p, q in ((a.x, b.x), (a.y, b.y), (a.test_x, b.test_x), (a.test_y, b.test_y))
    )


# ---- the corpus: for each reader small files, the one to mutate, and what an accepted one must be ----------------------


@dataclass(frozen=True)
class Case:
    """Files of one source; `target` is mutated, and `accepted` checks what was made of it."""

    name: str
    target: Path
    read: Callable[[], Any]
    accepted: Callable[[bytes, Any, Any], None]  # mutated bytes, what they gave, what the original gave
    checksummed: bool = False


RNG = np.random.Generator(np.random.Philox(key=13))
IMAGES = RNG.integers(0, 256, (6, 8, 8), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2], np.uint8)


def intact(raw: bytes, data: Any, original: Any) -> None:
    """With a checksum: what is accepted is what was written."""
    check_dataset(data, "checksummed")
    assert same(data, original), "accepted, though the checksum cannot be right"


def sound(raw: bytes, data: Any, original: Any) -> None:
    check_dataset(data, "sound")


def idx_oracle(raw: bytes, data: Any, original: Any) -> None:
    """IDX by its definition: four bytes, big-endian lengths, the rest is data."""
    check_dataset(data, "idx")
    assert raw[:4] == b"\x00\x00\x08\x03"
    n, rows, columns = struct.unpack(">3I", raw[4:16])
    assert len(raw) == 16 + n * rows * columns
    assert data.x.tobytes() == raw[16:]
    assert data.x.shape == (n, 1, rows, columns)


def csv_oracle(raw: bytes, data: Any, original: Any) -> None:
    """CSV, cell by cell."""
    check_dataset(data, "csv")
    text = raw.decode("utf-8-sig")
    for separator in "\t;,":  # the first that divides all rows alike
        table = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        rows = [r for r in table if any(c.strip() for c in r)]
        if len(rows[0]) > 1 and len({len(r) for r in rows}) == 1:
            break
    if separator != ",":
        rows = [
            [c.replace(",", ".") if re.fullmatch(r"[+-]?\d+,\d+(e\d+)?", c.strip()) else c for c in r] for r in rows
        ]
    names = [c.strip().lower() for c in rows[0]]
    label = next((i for i, c in enumerate(names) if c in ("label", "y")), len(names) - 1)
    body = rows[1:] if any(c in ("label", "y") for c in names) or not any(map(numeric, rows[0])) else rows
    values = [[float(c) for c in r] for r in body]
    assert not any("_" in c for r in body for c in r)
    mine = [k for k in range(len(data.y)) if data.owner is None or data.owner[k] == 0]
    assert [r[label] for r in values] == data.y[mine].ravel().tolist()
    x = np.array([[c for i, c in enumerate(r) if i != label] for r in values], np.float32)
    assert np.array_equal(x, data.x[mine])


def numeric(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def leaf_oracle(raw: bytes, data: Any, original: Any) -> None:
    """JSON as LEAF defines it."""
    check_dataset(data, "leaf")
    content = json.loads(raw)
    assert [content["num_samples"][i] for i in range(2)] == [
        len(content["user_data"][u]["y"]) for u in content["users"]
    ]
    x = [image for user in content["users"] for image in content["user_data"][user]["x"]]
    assert np.array_equal(np.array(x, np.float32).reshape(-1, 1, 28, 28), data.x)
    assert [label for user in content["users"] for label in content["user_data"][user]["y"]] == data.y.tolist()


def corpus(root: Path) -> list[Case]:
    """Write the files of every reader; return the cases."""
    cases: list[Case] = []

    def case(name: str, target: Path, source: str | Path, accepted: Any = sound, checksummed: bool = False) -> None:
        cases.append(Case(name, target, lambda: load(source, root), accepted, checksummed))

    x = RNG.normal(size=(6, 3))
    np.savez(root / "stored.npz", x=x, y=LABELS)
    np.savez_compressed(
        root / "packed.npz", train_x=IMAGES, train_y=LABELS, test_x=IMAGES[:2], test_y=LABELS[:2], more=x
    )
    case("npz, stored", root / "stored.npz", root / "stored.npz", intact, True)
    case("npz, compressed", root / "packed.npz", root / "packed.npz", intact, True)
    for name, packed in (("mnist", False), ("fmnist", True)):
        (root / name).mkdir()
        for stem, array in (("train-images-idx3", IMAGES), ("train-labels-idx1", LABELS)):
            for part in (stem, stem.replace("train", "t10k")):
                raw = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
                file = root / name / f"{part}-ubyte{'.gz' if packed else ''}"
                file.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
    case("IDX", root / "mnist" / "train-images-idx3-ubyte", "mnist", idx_oracle)
    case("IDX in gzip", root / "fmnist" / "train-images-idx3-ubyte.gz", "fmnist", intact, True)
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    record = bytes([3]) + bytes(range(256)) * 12
    for file in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (folder / file).write_bytes(record * 2)
    case("CIFAR", folder / "data_batch_2.bin", "cifar10")
    silos = root / "silos"
    silos.mkdir()
    (silos / "a.csv").write_text("age,bmi,label\n0.5,1.25,0\n-3e2,7,1\n0,0,2\n")
    (silos / "b.csv").write_text("age,bmi,label\n0.5,1.5,0\n-3,7,1\n")
    case("CSV", silos / "a.csv", silos, csv_oracle)
    for name, packed in (("svhn", False), ("synth", True)):
        (root / name).mkdir()
        prefix = "synth_" if packed else ""
        for part in ("train", "test"):
            matlab(root / name / f"{prefix}{part}_32x32.mat", packed)
        case(f"MATLAB{', compressed' if packed else ''}", root / name / f"{prefix}train_32x32.mat", name, sound)
    for part in ("train", "test"):
        (root / "femnist" / part).mkdir(parents=True)
        users = {u: {"x": [[(i % 5) / 4 for i in range(784)]] * 2, "y": [3, 61]} for u in ("a", "b")}
        content = {"users": ["a", "b"], "num_samples": [2, 2], "user_data": users}
        (root / "femnist" / part / "all.json").write_text(json.dumps(content))
    case("LEAF's JSON", root / "femnist" / "train" / "all.json", "femnist", leaf_oracle)
    pictures(root, case)
    lists(root, case)
    record_file = root / "partition.json"
    from fedstill.data import Federation
    from fedstill.data.record import save_record

    save_record(Federation.from_dataset(load("digits"), partition="iid", clients=4).partition_record, record_file)
    cases.append(Case("partition.json", record_file, lambda: load_record(record_file), record_oracle))
    devices = root / "devices.csv"
    devices.write_text("client,speed,uplink,downlink,drop\n0,500,1e6,5e6,0.1\n1,20,1e5,1e6,0\n2,1,1,1,1\n")
    cases.append(Case("file of devices", devices, lambda: clock.read(devices, 3), devices_oracle))
    archive = root / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("a/b", "c"):
            info = tarfile.TarInfo(name)
            info.size = 3000
            tar.addfile(info, io.BytesIO(bytes(3000)))
    cases.append(Case("tar.gz", archive, lambda: unpack(root), archive_oracle, True))
    return cases


def matlab(path: Path, packed: bool) -> None:
    """Write X and y as MATLAB does."""

    def item(kind: int, data: bytes) -> bytes:
        return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)

    elements = []
    for name, array in (
        ("X", RNG.integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)),
        ("y", np.array([[1], [10], [2]], "u1")),
    ):
        body = item(6, struct.pack("<II", 9, 0)) + item(5, struct.pack(f"<{array.ndim}i", *array.shape))
        body += item(1, name.encode()) + item(2, array.tobytes(order="F"))
        element = struct.pack("<II", 14, len(body)) + body
        squeezed = zlib.compress(element)
        elements.append(struct.pack("<II", 15, len(squeezed)) + squeezed if packed else element)
    path.write_bytes(bytes(124) + b"\x00\x01IM" + b"".join(elements))


def pictures(root: Path, case: Any) -> None:
    """Write folders of images in each format."""
    from PIL import Image

    for suffix, accepted in (("png", intact), ("jpg", sound), ("tif", sound)):
        for label in ("cat", "dog"):
            folder = root / f"in-{suffix}" / label
            folder.mkdir(parents=True)
            for i in range(2):
                picture = Image.fromarray(RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                picture.save(folder / f"{i}.{suffix}", **({"compression": "tiff_lzw"} if suffix == "tif" else {}))
        case(
            suffix.upper(),
            root / f"in-{suffix}" / "cat" / f"0.{suffix}",
            root / f"in-{suffix}",
            accepted,
            suffix == "png",
        )


def lists(root: Path, case: Any) -> None:
    """Write the sets that name their images in lists."""
    from PIL import Image

    picture = Image.fromarray(IMAGES[0])
    folder = root / "domainnet" / "real" / "bird"
    folder.mkdir(parents=True)
    for i in range(3):
        picture.save(folder / f"{i}.png")
    for part in ("train", "test"):
        (root / "domainnet" / f"real_{part}.txt").write_text("".join(f"real/bird/{i}.png 0\n" for i in range(3)))
    case("DomainNet's lists", root / "domainnet" / "real_train.txt", "domainnet#real")
    folder = root / "flickr-aes" / "40K"
    folder.mkdir(parents=True)
    for i in range(3):
        picture.save(folder / f"{i}.png")
    ratings = root / "flickr-aes" / "FLICKR-AES_image_labeled_by_each_worker.csv"
    ratings.write_text("worker, imagePair, score\nA,0.png,1\nA,1.png,5\nB,2.png,3\n")
    case("FLICKR-AES's ratings", ratings, "flickr-aes")
    folder = root / "inaturalist" / "train_val_images"
    folder.mkdir(parents=True)
    for i in range(3):
        picture.save(folder / f"{i}.png")
    content = {
        "images": [{"id": i, "file_name": f"train_val_images/{i}.png"} for i in range(3)],
        "annotations": [{"image_id": i, "category_id": i % 2} for i in range(3)],
        "categories": [{"id": i, "name": f"s{i}", "supercategory": "g"} for i in range(2)],
    }
    for part in ("train2017", "val2017"):
        (root / "inaturalist" / f"{part}.json").write_text(json.dumps(content))
    case("iNaturalist's JSON", root / "inaturalist" / "train2017.json", "inaturalist")


def record_oracle(raw: bytes, record: Any, original: Any) -> None:
    """The index lists have a hash, so they are what was dealt."""
    assert record.indices == original.indices
    assert record.hash == json.loads(raw)["hash"]


def devices_oracle(raw: bytes, columns: Any, original: Any) -> None:
    for name, values in columns.items():
        low, high = clock.COLUMNS[name]
        assert np.isfinite(values).all()
        assert ((values >= low) & (values <= high)).all()


def unpack(root: Path) -> list[bytes]:
    """Unpack a copy of the archive; return the files' contents."""
    to = root / "unpacked"
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    shutil.copy(root / "a.tar.gz", to / "a.tar.gz")
    try:
        _unpack(to / "a.tar.gz", ("a/b", "c"), to)
        return [(to / "a" / "b").read_bytes(), (to / "c").read_bytes()]
    finally:
        left = {str(p.relative_to(to)) for p in to.rglob("*") if p.is_file()}
        assert left <= {"a/b", "c"}, left


def archive_oracle(raw: bytes, contents: Any, original: Any) -> None:
    assert contents == original


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def files(short: bool) -> list[Row]:
    """Mutate a file of every reader, hundreds of times each."""
    os.environ.update(SILENT)
    rows, each = [], 20 if short else 700
    with tempfile.TemporaryDirectory() as name:
        cases = corpus(Path(name))
        first = 0
        for number, case in enumerate(cases):
            rng = np.random.Generator(np.random.Philox(key=[number, 1]))
            raw = case.target.read_bytes()
            original = case.read()
            first = first or peak()
            outcome: Counter[str] = Counter()
            slowest = 0.0
            for i in range(each):
                changed = mutated(raw, rng)
                case.target.write_bytes(changed)
                began = time.perf_counter()
                found = attempt(case.read, f"{case.name}, mutation {i}")
                slowest = max(slowest, time.perf_counter() - began)
                if found is not None:
                    try:
                        case.accepted(changed, found, original)
                    except Exception as error:
                        keep = Path(tempfile.gettempdir(), f"fedstill-soak-{case.target.name}")
                        keep.write_bytes(changed)
                        raise AssertionError(f"{case.name}, mutation {i}, kept as {keep}: {error!r}") from error
                outcome["refused" if found is None else "sound"] += 1
                case.target.write_bytes(raw)
            figure = f"{each} mutated: {outcome['refused']} refused, {outcome['sound']} read and sound; slowest {slowest:.2f} s"
            rows.append((f"mutated file: {case.name}", "one line, or what the format says", figure))
        growth = peak() - first
        assert growth < GROWTH, f"memory grew by {growth >> 20} MB"
    total = each * len(cases)
    rows.append((f"{total:,} mutated files", "no crash, no hang, memory bounded", f"peak grew by {growth >> 20} MB"))
    return rows


# ---- experiments -----------------------------------------------------------------------------------------------------


def experiments(short: bool) -> list[Row]:
    """Mutate experiment files: by bytes, and by values of other fields and types."""
    os.environ.update(SILENT)
    count = 400 if short else 12_000
    rng = np.random.Generator(np.random.Philox(key=99))
    outcome: Counter[str] = Counter()
    texts = [Experiment(method=get(name)()).to_toml().encode() for name in ("fedavg", "pfedsd", "cd2-pfed")]
    values = [
        b'"x"',
        b"0",
        b"-1",
        b"1e308",
        b"nan",
        b"inf",
        b"[]",
        b"{}",
        b"true",
        b"9" * 400,
        b"0x" + b"f" * 40,
        b"[[1]]",
    ]
    values += [
        b'"lognormal:0.5"',
        b'"file:/dev/zero"',
        b'"/dev/zero"',
        b"{id = 'fedprox'}",
        b"1979-05-27",
        b'"a\\u0000"',
        b"3",
    ]
    first = slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "e.toml")
        for i in range(count):
            text = texts[i % len(texts)]
            if i % 2:
                lines = text.split(b"\n")
                for _ in range(int(rng.integers(1, 3))):
                    at = int(rng.integers(0, len(lines)))
                    key = lines[at].partition(b" = ")[0]
                    lines[at] = key + b" = " + values[int(rng.integers(0, len(values)))]
                text = b"\n".join(lines)
            else:
                text = mutated(text, rng)
            file.write_bytes(text)
            began = time.perf_counter()
            found = attempt(lambda: Experiment.from_toml(file), f"experiment {i}")
            slowest = max(slowest, time.perf_counter() - began)
            if found is not None:
                file.write_text(found.to_toml())
                assert Experiment.from_toml(file) == found, f"experiment {i}: it does not read back"
                outcome["valid"] += 1
            else:
                outcome["refused"] += 1
            first = first or peak()
    growth = int(peak() - first)
    assert growth < GROWTH, f"memory grew by {growth >> 20} MB"
    figure = (
        f"{outcome['refused']:,} refused, {outcome['valid']:,} valid; slowest {slowest:.2f} s, peak +{growth >> 20} MB"
    )
    return [(f"{count:,} mutated experiment files", "one line, or an experiment that reads back", figure)]


# ---- bombs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a process ended: its message ('' where all was well), the growth of its peak memory, and its seconds."""

    said: str
    growth: int
    seconds: float


def apart(act: Callable[[], Any], headroom: int, seconds: float = 60.0) -> End:
    """Run a function in a forked process that may take so many bytes more than this one has."""
    read_end, write_end = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        said = "?"
        try:
            os.close(read_end)
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak that was inherited
            before = status("VmRSS")
            limit = status("VmSize") + headroom
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                result = act()
                said = "" if result is None else str(result)
            except (InputError, TrainingError) as error:
                said = f"{type(error).__name__}: {error}"
            except BaseException as error:
                said = f"CRASH {type(error).__name__}: {error}"
            growth = max(0, status("VmHWM") - before)
            os.write(write_end, f"{growth}\n{said[:3000]}".encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(write_end)
    while time.perf_counter() - began < seconds:
        done, _ = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.005)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        return End("HANG", 0, seconds)
    with os.fdopen(read_end, "rb") as pipe:
        growth, _, said = pipe.read().decode().partition("\n")
    return End(said if growth else "KILLED", int(growth or 0), time.perf_counter() - began)


def status(name: str) -> int:
    """Return a figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def zeros_npz(path: Path, size: int, into: str) -> Path:
    """Write an npz file with a member of so many zeros beside small x and y."""
    small = {"x": np.zeros((6, 2)), "y": LABELS}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in small.items():
            if name != into:
                buffer = io.BytesIO()
                np.save(buffer, array)
                archive.writestr(f"{name}.npy", buffer.getvalue())
        buffer = io.BytesIO()
        np.save(buffer, np.zeros((0, 784), np.uint8))
        head = buffer.getvalue().replace(b"(0, 784)", f"({size // 784}, 784)".encode())
        head = head[:8] + struct.pack("<H", len(head) - 10) + head[10:]
        with archive.open(f"{into}.npy", "w", force_zip64=True) as member:
            member.write(head)
            left = size // 784 * 784
            while left:
                left -= member.write(bytes(min(left, 1 << 22)))
    return path


def zeros_gz(path: Path, size: int, head: bytes = b"") -> Path:
    with gzip.open(path, "wb", 9) as file:
        file.write(head)
        for _ in range(size >> 22):
            file.write(bytes(1 << 22))
    return path


def bombs(short: bool) -> list[Row]:
    """Read bombs and traps, each in a process whose memory is limited, and measure what it took."""
    os.environ.update(SILENT)
    rows = []
    size = 96 << 20 if short else 2 << 30
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for label, act, right in bomb_cases(root, size):
            end = apart(act, 3 << 29)
            assert not end.said.startswith(("CRASH", "HANG", "KILLED")), f"{label}: {end.said}"
            if right:
                assert end.said.startswith("InputError"), f"{label}: {end.said or 'was accepted'}"
                assert "\n" not in end.said, f"{label}: {end.said}"
            else:
                assert end.said == "", f"{label}: {end.said}"
            assert end.growth < 256 << 20, f"{label}: the peak grew by {end.growth >> 20} MB"
            assert end.seconds < 20, f"{label}: {end.seconds:.0f} s"
            outcome = "refused in one line" if right else "read"
            rows.append((label, outcome, f"peak +{end.growth >> 20} MB, {end.seconds:.1f} s"))
        rows += memory_limits(root, short)
    return rows


def bomb_cases(root: Path, size: int) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield (description, what to do, whether it is to be refused)."""

    def reading(source: Path | str) -> Callable[[], None]:
        def act() -> None:
            load(source, root)

        return act

    shown = f"{size / 1e9:.1f} GB"
    path = zeros_npz(root / "x.npz", size, "x")
    yield f"npz of {path.stat().st_size / 1e6:.1f} MB whose x expands to {shown}", reading(path), True
    yield f"npz whose unused member expands to {shown}", reading(zeros_npz(root / "more.npz", size, "more")), False
    (root / "mnist").mkdir()
    shape = struct.pack(">BBBB3I", 0, 0, 8, 3, size // 784, 28, 28)
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        zeros_gz(root / "mnist" / f"{stem}-ubyte.gz", size if stem == "train-images-idx3" else 0, shape)
    yield f"gzip that expands to {shown}, with a header that says so", reading("mnist"), True
    zeros_gz(root / "mnist" / "train-images-idx3-ubyte.gz", size, struct.pack(">BBBB3I", 0, 0, 8, 3, 10, 28, 28))
    yield f"gzip that expands to {shown}, with a header of 10 images", reading("mnist"), True
    np.savez(root / "sparse.npz", x=np.zeros((60, 3)), y=np.array([0] * 59 + [999_999]))
    yield "one label 999,999 in 60 rows", reading(root / "sparse.npz"), True
    part = size // 20  # of a plain file
    few = min(part, 48 << 20)
    for kind, content in (
        (f"CSV of one line of {part / 1e6:.0f} MB", b"1," * (part // 2)),
        (f"CSV of {part:,} short cells", b"1,2,3,4,5,6,7,8,9,0\n" * (part // 10) + b"1,2\n"),
    ):
        folder = root / f"silo-{len(content)}"
        folder.mkdir()
        (folder / "a.csv").write_bytes(content)
        yield kind, reading(folder), True
        shutil.rmtree(folder)
    for split in ("train", "test"):
        (root / "femnist" / split).mkdir(parents=True)
    file = root / "femnist" / "train" / "a.json"
    for kind, content in (
        (f"JSON of {few:,} brackets", b"[" * few),
        (f"JSON of {few // 3:,} objects", b"[" + b"{}," * (few // 3) + b"{}]"),
        (f"JSON with a number of {few:,} digits", b'{"a": ' + b"9" * few + b"}"),
    ):
        file.write_bytes(content)
        yield kind, reading("femnist"), True
    user = {"x": [["x" * 1_000_000] + [0] * 783] * 50, "y": [1] * 50}
    file.write_text(json.dumps({"users": ["a"], "num_samples": [50], "user_data": {"a": user}}))
    yield "LEAF's JSON with long texts for pixels", reading("femnist"), True
    file.unlink()
    with gzip.open(root / "femnist" / "train" / "b.json", "wb", 9) as packed:
        packed.write(b" " * (size >> 1))
    yield f"gzip in place of JSON, {size / 2e9:.1f} GB of blanks", reading("femnist"), True
    yield from picture_bombs(root, reading)
    for kind, make in (
        ("a pipe", os.mkfifo),
        ("a link to /dev/zero", lambda p: os.symlink("/dev/zero", p)),
        ("a folder", os.mkdir),
    ):
        path = root / f"{kind.split()[-1].replace('/', '')}.npz"
        make(path)
        yield f"{kind} in place of a file", reading(path), True

        def toml(path: Path = path) -> None:
            Experiment.from_toml(path)

        yield f"{kind} in place of an experiment", toml, True
    hole = root / "hole.npz"
    for suffix in ("npz", "toml"):
        hole = root / f"hole.{suffix}"
        with hole.open("wb") as empty:
            empty.truncate(1 << 40)
        act = reading(hole) if suffix == "npz" else lambda: str(Experiment.from_toml(root / "hole.toml"))[:0] or None
        yield f"a {suffix} file of 1 TB of holes", act, True
    for text, kind in (
        ("rounds = " + "9" * 200_000, "200,000 digits"),
        ("head = " + "[" * 100_000, "100,000 brackets"),
        (".".join("a" * 100_000) + " = 1", "a key of 100,000 parts"),
    ):
        (root / "e.toml").write_text(text)

        def read_toml() -> None:
            Experiment.from_toml(root / "e.toml")

        yield f"experiment with {kind}", read_toml, True
    yield "synthetic with a billion clients", reading("synthetic:1,1,1000000000"), True
    with tarfile.open(root / "a.tar.gz", "w:gz", compresslevel=9) as tar:
        info = tarfile.TarInfo("x")
        info.size = size
        tar.addfile(info, Zeros(size))
    before = {p.name for p in root.iterdir()}

    def unpacking() -> None:
        try:
            _unpack(root / "a.tar.gz", ("x",), root)
        finally:
            assert {p.name for p in root.iterdir()} < before, "something was left"

    yield f"tar.gz whose member expands to {shown}", unpacking, True


class Zeros(io.RawIOBase):
    """So many zeros to read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        """Return the next zeros."""
        count = min(self.left, size if size >= 0 else self.left)
        self.left -= count
        return bytes(count)


def picture_bombs(root: Path, reading: Any) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    from PIL import Image

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    folder = root / "pets" / "cat"
    folder.mkdir(parents=True)
    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    raw = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**7))) + chunk(b"IEND", b"")
    )
    (folder / "a.png").write_bytes(raw)
    yield "PNG of 100,000 × 100,000 pixels", reading(f"{root}/pets@8"), True
    Image.new("1", (16_000, 10_000)).save(folder / "a.png")
    yield "PNG of 160 million pixels, whole", reading(f"{root}/pets@8"), True
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 << 20), 9))
    small = io.BytesIO()
    Image.new("L", (8, 8)).save(small, "PNG")
    (folder / "a.png").write_bytes(small.getvalue()[:33] + text * 4 + small.getvalue()[33:])
    yield "PNG with 800 MB of compressed comments", reading(f"{root}/pets@8"), True
    (folder / "a.png").unlink()
    Image.new("L", (8000, 8000)).save(folder / "a.tif", compression="tiff_deflate")
    yield "TIFF of 64 million pixels", reading(f"{root}/pets@8"), False
    shutil.rmtree(root / "pets")
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").symlink_to("/dev/zero")
    (folder / "b.png").symlink_to("b.png")
    os.mkfifo(folder / "c.png")
    yield "image folder of pipes, devices and links in a circle", reading(root / "pets"), True
    shutil.rmtree(root / "pets")


def memory_limits(root: Path, short: bool) -> list[Row]:
    """Run the command where memory ends at some point of the run."""
    outcomes: Counter[str] = Counter()
    limits = [16] if short else [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024]
    commands = ("run fedavg --rounds 1 --workers 1", "run pfedsd --rounds 1", "data show --data synthetic:1,1")
    for megabytes, command in itertools.product(limits, commands):
        log = root / "stderr.txt"

        def act(command: str = command, log: Path = log) -> str:
            with log.open("w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
                os.dup2(sys.stderr.fileno(), 2)
                return f"status {main(command.split())}"

        end = apart(act, megabytes << 20, 120)
        said = log.read_text(errors="replace")
        assert "Traceback" not in said, f"{command}, {megabytes} MB: {said[-2000:]}"
        assert not end.said.startswith(("CRASH", "HANG")), f"{command}, {megabytes} MB: {end.said} {said[-300:]}"
        assert end.said == "status 0" or said.strip(), f"{command}, {megabytes} MB: {end.said} without a line"
        outcomes["ended well" if end.said == "status 0" else "stopped with a line"] += 1
    figure = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return [(f"a run with {limits[0]} to {limits[-1]} MB left", "one line, no traceback", figure)]


# ---- extreme settings ------------------------------------------------------------------------------------------------

NUMBERS = {
    int: [0, 1, 2, 3, 7, 64, 1000, 10**6, 10**9, 2**31, 2**40, 2**62, 2**63 - 1],
    float: [0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0, 1.5, 10.0, 1e6, 1e38, 1e200, 1e308],
    bool: [True, False],
    str: [
        "",
        "x",
        "iid",
        "shards:2",
        "lognormal:0.5",
        "uniform",
        "owner",
        "file:/dev/null",
        "cpu",
        "official",
        "70/10/20",
        "mlp",
        "lenet5",
        "synthetic:1,1,5",
        "a\x00b",
        "/",
    ],
}


def extremes(short: bool) -> list[Row]:
    """Prepare experiments whose fields have extreme values, each in a process whose memory is limited."""
    os.environ.update(SILENT)
    count = 12 if short else 400
    rng = np.random.Generator(np.random.Philox(key=7))
    outcome: Counter[str] = Counter()
    fields, types = settings.fields_of(Experiment), settings.types_of(Experiment)
    for _ in range(count):
        values: dict[str, Any] = {}
        for i in rng.choice(len(fields), int(rng.integers(1, 4)), replace=False):
            kind = types[fields[i].name]
            choices = (
                typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else NUMBERS.get(kind, [(), ("x",)])
            )
            values[fields[i].name] = choices[int(rng.integers(0, len(choices)))]
        method = get(sorted(METHODS)[int(rng.integers(0, len(METHODS)))])()
        try:
            experiment = Experiment(**values, method=method)
        except InputError:
            outcome["refused"] += 1
            continue

        def act(experiment: Experiment = experiment) -> None:
            from_experiment(experiment)

        end = apart(act, 3 << 30)
        assert end.said == "" or end.said.startswith("InputError"), f"{method.id} {values}: {end.said}"
        assert end.growth < 1 << 30, f"{method.id} {values}: the peak grew by {end.growth >> 20} MB"
        outcome["refused with the data" if end.said else "ready to train"] += 1
    figure = ", ".join(f"{number} {words}" for words, number in sorted(outcome.items()))
    return [(f"{count} experiments with extreme values", "one line, or ready to train", figure)]


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {
    "files": files,
    "experiments": experiments,
    "extremes": extremes,
    "bombs": bombs,
}

if __name__ == "__main__":
    for section in sys.argv[1:] or SECTIONS:
        for row in SECTIONS[section]("--short" in sys.argv):
            print(" | ".join(row))
