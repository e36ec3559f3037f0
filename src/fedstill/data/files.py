"""Read files in the formats that their authors publish: IDX, CIFAR's binary records, npz."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import IO

import numpy as np

from ..core.errors import InputError
from .dataset import Array, Dataset, dataset

IDX = tuple(f"{subset}-{kind}-ubyte" for subset in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CIFAR_SAMPLE = 1000  # records up to which a file of CIFAR's counts as a sample of it


def wrong(path: Path | str, right: str) -> InputError:
    """Return the error for a file that is not what it should be."""
    return InputError("data file", str(path), right)


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes, decompressed where it is gzip."""
    try:
        raw = path.read_bytes()
        # by content, since a browser may decompress a download and keep its name
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise wrong(path, f"a whole gzip file ({error})") from None
    except OSError as error:
        raise wrong(path, f"a readable file ({error.strerror})") from None


def idx(path: Path, dims: int) -> Array:
    """Read an IDX file of unsigned bytes with `dims` dimensions, gzipped or not."""
    raw = read_bytes(path)
    magic = bytes([0, 0, 8, dims])
    if raw[:4] != magic:
        raise wrong(path, f"an IDX file that begins with 0x{magic.hex()} (this one begins with 0x{raw[:4].hex()})")
    header = 4 + 4 * dims
    if len(raw) < header:
        raise wrong(path, f"an IDX file with a header of {header} bytes (this one has {len(raw)})")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dims, 4))
    size = 1
    for n in shape:
        size *= n
    if len(raw) != header + size:
        raise wrong(path, f"{header + size} bytes long as its header says (it has {len(raw)})")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def idx_set(name: str, folder: Path) -> Dataset:
    """Read MNIST or one of its relatives: four IDX files in one folder."""
    arrays = []
    for stem in IDX:
        path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.exists()), folder / f"{stem}.gz")
        arrays.append(idx(path, 3 if "images" in stem else 1))
    return dataset(name, str(folder), arrays[0], arrays[1], (arrays[2], arrays[3]), classes=10)


def cifar(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Read CIFAR's binary records: the label bytes (the last is the one to learn), then 3 × 32 × 32 pixels."""
    raw = read_bytes(path)
    record = label_bytes + 3072
    if not raw or len(raw) % record:
        raise wrong(path, f"a whole number of records of {record} bytes (it has {len(raw)} bytes)")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def cifar_set(name: str, folder: Path, train: Sequence[str], test: str, label_bytes: int, classes: int) -> Dataset:
    """Read CIFAR-10 or CIFAR-100 from the binary version's files: 50,000 training and 10,000 test records in total.

    The format has no header, so a file truncated between two records is recognised by its number of records alone: all
    files have the published number, or all are samples of at most 1,000 that someone took on purpose.
    """
    files = [cifar(folder / file, label_bytes) for file in (*train, test)]
    published = [50_000 // len(train)] * len(train) + [10_000]
    if any(len(y) > CIFAR_SAMPLE for _, y in files):
        for file, (_, y), count in zip((*train, test), files, published, strict=True):
            if len(y) != count:
                raise wrong(folder / file, f"{count} records long as it is published (it has {len(y)})")
    x, y = (np.concatenate(column) for column in zip(*files[:-1], strict=True))
    return dataset(name, str(folder), x, y, files[-1], classes=classes)


def npz(path: Path) -> dict[str, Array]:
    """Read all arrays of an npz file; nothing in it is unpickled."""
    try:
        with path.open("rb") as file:
            return npz_arrays(file, str(path))
    except OSError as error:
        raise wrong(path, f"a readable file ({error.strerror or error})") from None


def npz_arrays(file: IO[bytes], where: str) -> dict[str, Array]:
    """Read all arrays of an open npz file."""
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise wrong(where, "an npz file that holds named arrays (this is a single array)")
        with loaded:
            return {key: loaded[key] for key in loaded.files}
    except InputError:
        raise
    except Exception as error:  # damaged bytes raise whatever numpy, zipfile or zlib stumble over (even a TokenError)
        raise wrong(where, f"a whole npz file of plain arrays ({error})") from None


def split_arrays(where: str, arrays: dict[str, Array]) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Return the training samples, the labels and the test split, if any, of an npz file's arrays."""
    if {"train_x", "train_y"} <= arrays.keys():
        test = (arrays["test_x"], arrays["test_y"]) if {"test_x", "test_y"} <= arrays.keys() else None
        return arrays["train_x"], arrays["train_y"], test
    if {"x", "y"} <= arrays.keys():
        return arrays["x"], arrays["y"], None
    has = ", ".join(sorted(arrays)) or "nothing"
    raise wrong(where, f"an npz file with x and y, or train_x, train_y, test_x and test_y (it holds {has})")


def npz_set(name: str, path: Path, classes: int | None = None) -> Dataset:
    """Read a data set from one npz file."""
    x, y, test = split_arrays(str(path), npz(path))
    return dataset(name, str(path), x, y, test, classes)


def digits() -> Dataset:
    """Read the 1,797 UCI digits that the package ships: 1 × 8 × 8, values 0 to 16."""
    raw = resources.files(__package__).joinpath("digits", "digits.npz").read_bytes()
    arrays = npz_arrays(io.BytesIO(raw), "digits.npz")
    return dataset("digits", "digits", arrays["x"], arrays["y"], classes=10)
