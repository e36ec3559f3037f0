"""Read files in the formats that their authors publish: IDX, CIFAR's binary records, npz.

Every file may be hostile: only regular files are opened, headers and declared sizes are checked before anything is
allocated, what is compressed expands within a bound, members that are not asked for stay packed, nothing is unpickled.
"""

from __future__ import annotations

import ast
import gzip
import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO, cast

import numpy as np

from ..core import memory, reading
from ..core.errors import InputError, first_line, shorten
from .dataset import Dataset, dataset
from .targets import AUTO, Array

IDX = tuple(f"{subset}-{kind}-ubyte" for subset in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CIFAR_SAMPLE = 1000  # records up to which a file of CIFAR's counts as a sample of it
EXPANSION = 200  # times its size that compressed data may expand to; published images expand 2 to 10 times
FREELY = 64 << 20  # bytes that any compressed data may expand to
CHUNK = 1 << 20  # bytes to read at a time
LONGEST_HEADER = 10_000  # bytes of an array's header in an npz file, as numpy limits it
MOST_DIMS, MOST_MEMBERS = 8, 10_000
Split = tuple[Array, Array, tuple[Array, Array] | None]  # training samples, labels, and the test split, if any


def wrong(path: Path | str, right: str) -> InputError:
    """Return the error for a file that is not what it should be."""
    return InputError("data file", str(path), right)


def expanded(size: int) -> int:
    """Return to how many bytes compressed data of this size may expand.

    >>> expanded(10), expanded(1 << 30) == 200 << 30
    (67108864, True)
    """
    return max(FREELY, EXPANSION * size)


@contextmanager
def regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file; what goes wrong within becomes an error that names it."""
    try:
        with reading.open_regular(path) as file:
            yield file
    except reading.Unreadable as error:
        raise wrong(path, str(error)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise wrong(path, f"a whole gzip file ({error})") from None
    except OSError as error:
        raise wrong(path, f"a readable file ({error.strerror or error})") from None
    except MemoryError:
        raise wrong(path, "small enough for the memory") from None


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[IO[bytes], int, bool]]:
    """Open a file, decompressed where it is gzip; yield also the most bytes that it may give, and whether it was packed."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(2)
        file.seek(0)
        if magic == b"\x1f\x8b":  # by content, since a browser may decompress a download and keep its name
            with gzip.GzipFile(fileobj=file) as stream:
                yield cast(IO[bytes], stream), expanded(size), True
        else:
            yield file, size, False


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Return the file's bytes, decompressed where it is gzip: at most `limit`, and half of the memory that is free."""
    with unpacked(path) as (stream, most, packed):
        free = memory.available() // 2
        bound = min(most, free, *([limit] if limit is not None else []))
        if not packed:
            if most > bound:
                raise _too_large(path, bound, most)
            return stream.read(most)
        chunks, size = [], 0
        while chunk := stream.read(CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > bound:
                raise _too_large(path, bound, size, packed)
        return b"".join(chunks)


def read_text(path: Path, encoding: str, times: int = 40) -> str:
    """Return a text whose lines will take `times` as much memory once they are divided into their parts."""
    raw = read_bytes(path)
    memory.require("data file", str(path), times * len(raw))
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise wrong(path, f"a text in UTF-8 (byte {error.start} is not)") from None


def _too_large(path: Path, bound: int, size: int, packed: bool = False) -> InputError:
    more = "expands to more" if packed else f"has {memory.in_words(size)}"
    return wrong(path, f"at most {memory.in_words(bound)} (it {more})")


def fill(stream: IO[bytes], into: memoryview) -> int:
    """Read bytes until `into` is full or nothing is left; return how many there were."""
    done = 0
    while done < len(into):
        chunk = stream.read(min(CHUNK, len(into) - done))
        if not chunk:
            break
        into[done : done + len(chunk)] = chunk
        done += len(chunk)
    return done


def idx(path: Path, dims: int) -> Array:
    """Read an IDX file of unsigned bytes with `dims` dimensions, gzipped or not."""
    magic, header = bytes([0, 0, 8, dims]), 4 + 4 * dims
    with unpacked(path) as (stream, most, packed):
        begin = stream.read(header)
        if begin[:4] != magic:
            raise wrong(
                path, f"an IDX file that begins with 0x{magic.hex()} (this one begins with 0x{begin[:4].hex()})"
            )
        if len(begin) < header:
            raise wrong(path, f"an IDX file with a header of {header} bytes (this one has {len(begin)})")
        shape = tuple(int(n) for n in np.frombuffer(begin, ">u4", dims, 4))
        size = math.prod(shape)
        if packed and size > most:
            raise _too_large(path, most, size, packed)
        if not packed and header + size != most:
            raise wrong(path, f"{header + size} bytes long as its header says (it has {most})")
        memory.require("data file", str(path), 5 * size)  # float32 beside it, later
        out = np.empty(size, np.uint8)
        count = fill(stream, out.data) + len(stream.read(1))
        if count != size:
            has = f"{header + count}" if count < size else "more"
            raise wrong(path, f"{header + size} bytes long as its header says (it has {has})")
    return out.reshape(shape)


def idx_set(name: str, folder: Path) -> Dataset:
    """Read MNIST or one of its relatives: four IDX files in one folder."""
    arrays = []
    for stem in IDX:
        path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.exists()), folder / f"{stem}.gz")
        arrays.append(idx(path, 3 if "images" in stem else 1))
    return dataset(name, str(folder), arrays[0], arrays[1], (arrays[2], arrays[3]), classes=10)


def cifar(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Read CIFAR's binary records: the label bytes (the last is the one to learn), then 3 × 32 × 32 pixels."""
    record = label_bytes + 3072
    raw = read_bytes(path, 50_000 * record)
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


def npz(path: Path) -> Split:
    """Read the arrays of an npz file that make up a data set; the others stay packed, and nothing is unpickled."""
    with regular(path) as file:
        return npz_split(file, str(path))


def npz_samples(path: Path) -> tuple[Array, Array | None]:
    """Read the samples x of an npz file and, where it has them, their labels y."""
    with regular(path) as file:
        x, *y = _npz_arrays(file, str(path), _one_set)
        return x, y[0] if y else None


def _one_set(names: list[str], where: str) -> list[str]:
    """Return the names of samples and, where they are there, of labels."""
    if "x" not in names:
        has = ", ".join(sorted(names)[:20]) or "nothing"
        raise wrong(where, f"an npz file with x, and y where the labels are known (it holds {has})")
    return [name for name in ("x", "y") if name in names]


def npz_split(file: IO[bytes], where: str) -> Split:
    """Read the arrays x and y, or train_x, train_y and, where it has them, test_x and test_y, of an open npz file."""
    arrays = _npz_arrays(file, where, _parts)
    return arrays[0], arrays[1], (arrays[2], arrays[3]) if len(arrays) == 4 else None


def _parts(names: list[str], where: str) -> list[str]:
    """Return the names of the arrays that make up a data set."""
    tests = [name for name in ("test_x", "test_y") if name in names]
    if {"train_x", "train_y"} <= set(names):
        if len(tests) == 1:
            raise wrong(where, f"an npz file with test_x and test_y, or without (it holds {tests[0]} alone)")
        return ["train_x", "train_y", *tests]
    if {"x", "y"} <= set(names):
        return ["x", "y"]
    has = ", ".join(sorted(names)[:20]) or "nothing"
    raise wrong(where, f"an npz file with x and y, or train_x, train_y, test_x and test_y (it holds {has})")


def _npz_arrays(file: IO[bytes], where: str, choose: Callable[[list[str], str], list[str]]) -> list[Array]:
    """Read those arrays of an open npz file that `choose` names, given all names."""
    if file.read(6) == b"\x93NUMPY":
        raise wrong(where, "an npz file that holds named arrays (this is a single array)")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename.removesuffix(".npy") for member in members]
            if len(members) > MOST_MEMBERS:
                raise wrong(where, f"an npz file of at most {MOST_MEMBERS:,} arrays (it holds {len(members):,})")
            wanted = choose(names, where)
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise wrong(where, f"an npz file whose arrays are there once (it has {twice[0]} twice)")
            found = [_member(archive, where, members[names.index(name)]) for name in wanted]
            for member in members:  # the directory agrees with what stands before each member; nothing is expanded
                archive.open(member).close()
            memory.require("data file", where, sum(size + 4 * math.prod(shape) for *_, shape, _, size in found))
            return [_array(archive, where, *each) for each in found]
    except (InputError, MemoryError):
        raise
    except Exception as error:  # damaged bytes raise whatever zipfile or zlib stumble over
        raise wrong(where, f"a whole npz file of plain arrays ({first_line(error)})") from None


Found = tuple[zipfile.ZipInfo, "np.dtype[np.generic]", tuple[int, ...], bool, int]


def _member(archive: zipfile.ZipFile, where: str, member: zipfile.ZipInfo) -> Found:
    """Return a member's dtype, shape, order and number of bytes from its header, checked against its declared size."""
    name = member.filename
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
        raise wrong(where, f"an npz file as numpy writes it ({name} is encrypted or compressed in another way)")
    if member.file_size > expanded(member.compress_size):
        sizes = f"{memory.in_words(member.compress_size)} to {memory.in_words(member.file_size)}"
        raise wrong(
            where, f"one whose arrays expand at most {EXPANSION} times ({name}: {sizes}; np.savez packs nothing)"
        )
    with archive.open(member) as stream:
        dtype, shape, fortran, start = array_header(stream, where, name)
    size = math.prod(shape) * dtype.itemsize
    if start + size != member.file_size:
        raise wrong(
            where, f"one whose {name} has {start + size:,} bytes as its header says (it has {member.file_size:,})"
        )
    return member, dtype, shape, fortran, size


def array_header(
    stream: IO[bytes], where: str, name: str, whole: str = "a whole npz file of plain arrays"
) -> tuple[np.dtype[np.generic], tuple[int, ...], bool, int]:
    """Read an array's header (numpy.lib.format); return dtype, shape, whether columns come first, and its length."""
    begin = stream.read(8)
    if begin[:6] != b"\x93NUMPY" or begin[6:] not in (b"\x01\0", b"\x02\0", b"\x03\0"):
        raise wrong(where, f"{whole} ({name} is none)")
    raw = stream.read(2 if begin[6] == 1 else 4)
    length = int.from_bytes(raw, "little")
    if length > LONGEST_HEADER:
        raise wrong(where, f"one whose arrays have a header of at most {LONGEST_HEADER:,} bytes ({name}: {length:,})")
    try:
        fields = ast.literal_eval(stream.read(length).decode("latin1").strip())
        descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
        if len(fields) != 3 or type(fortran) is not bool or type(shape) is not tuple or len(shape) > MOST_DIMS:
            raise ValueError(f"at most {MOST_DIMS} dimensions")
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
            raise ValueError("lengths of at least 0")
    except Exception as error:  # a literal that is none raises SyntaxError, TypeError, RecursionError, …
        raise wrong(where, f"{whole} ({name}: {first_line(error)})") from None
    if not isinstance(descr, str) or not re.fullmatch(r"[<>|=]?(b1|[iu][1248]|f[248])", descr, re.ASCII):
        right = f"{whole} of whole numbers or real numbers; nothing is unpickled"
        raise wrong(where, f"{right} ({name} holds {shorten(repr(descr), 60)})")
    return np.dtype(descr), shape, fortran, len(begin) + len(raw) + length


def _array(
    archive: zipfile.ZipFile,
    where: str,
    member: zipfile.ZipInfo,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    fortran: bool,
    size: int,
) -> Array:
    """Read a member's numbers; its checksum is verified at its end."""
    out = np.empty(size, np.uint8)
    with archive.open(member) as stream:
        array_header(stream, where, member.filename)
        if fill(stream, out.data) != size or stream.read(1):
            raise wrong(where, f"a whole npz file of plain arrays ({member.filename} ends too early)")
    if dtype.kind == "b" and size and out.max() > 1:
        raise wrong(where, f"a whole npz file of plain arrays ({member.filename} has truth values other than 0 and 1)")
    array = out.view(dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def npz_set(name: str, path: Path, classes: int | None = None, objective: str = AUTO) -> Dataset:
    """Read a data set from one npz file."""
    x, y, test = npz(path)
    return dataset(name, str(path), x, y, test, classes, objective)


def digits() -> Dataset:
    """Read the 1,797 UCI digits that the package ships: 1 × 8 × 8, values 0 to 16."""
    raw = resources.files(__package__).joinpath("digits", "digits.npz").read_bytes()
    x, y, _ = npz_split(io.BytesIO(raw), "digits.npz")
    return dataset("digits", "digits", x, y, classes=10)
