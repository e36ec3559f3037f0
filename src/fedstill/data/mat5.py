"""Read MATLAB's file format, level 5 (`save -v6` and `-v7`), as far as a data set of numbers needs it.

The layout is The MathWorks' "MAT-File Format" (R2014a, chapter 1): a header of 128 bytes (text, version 0x0100, `IM`
where little-endian), then one element for each variable: a tag (type, number of bytes) and its data, where a compressed
element is a zlib stream that holds one such element. A matrix is made of its flags, dimensions, name and numbers, each
padded to eight bytes; the numbers are in column-major order and may be stored in a smaller type than the variable's.
Real, full, numeric arrays in little-endian files can be read; anything else is refused, and nothing is unpickled.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from ..core import memory
from .dataset import Array
from .files import EXPANSION, MOST_DIMS, expanded, regular, wrong

MATRIX, COMPRESSED = 14, 15
STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x0800
CHUNK = 1 << 20  # bytes to read at a time


class FormatError(Exception):
    """What should be right about the bytes; the reader of the file adds its path."""


class Stream:
    """The bytes of one element, decompressed while they are read where `compressed`; never more than the element has."""

    def __init__(self, file: IO[bytes], size: int, compressed: bool) -> None:
        self.file, self.size = file, size
        self.decompressor = zlib.decompressobj() if compressed else None

    def take(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        out = bytearray(count)
        self.fill(memoryview(out))
        return bytes(out)

    def fill(self, into: memoryview) -> None:
        """Read bytes until `into` is full."""
        done = 0
        while done < len(into):
            chunk = self._read(min(CHUNK, len(into) - done))
            if not chunk:
                raise FormatError("whole: an element ends too early")
            into[done : done + len(chunk)] = chunk
            done += len(chunk)

    def end(self) -> None:
        """Check that nothing is left; reading a compressed stream to its end verifies its checksum as well."""
        if self._read(1):
            raise FormatError("whose elements end where their tags say")
        if self.decompressor is not None and not self.decompressor.eof:
            raise FormatError("whole: a compressed element ends too early")

    def _read(self, most: int) -> bytes:
        if self.decompressor is None:
            return self._read_raw(most)
        while not self.decompressor.eof:
            raw = self.decompressor.unconsumed_tail or self._read_raw(CHUNK)
            try:
                chunk = self.decompressor.decompress(raw, most)
            except zlib.error as error:
                raise FormatError(f"whole ({error})") from None
            if chunk or not (raw or self.decompressor.eof):
                return chunk
        return b""

    def _read_raw(self, most: int) -> bytes:
        raw = self.file.read(min(most, self.size))
        self.size -= len(raw)
        return raw


def matrices(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """Read the named variables of a MATLAB file, in MATLAB's shapes (column-major), and skip the others."""
    requested = set(names)
    arrays: dict[str, Array] = {}
    try:
        with regular(path) as file:
            length = file.seek(0, 2)
            file.seek(0)
            _check_header(file.read(128))
            while requested - arrays.keys() and file.tell() < length:
                start = file.tell() + 8
                kind, size = _two_words(file.read(8))
                if size > length - start:
                    raise FormatError(f"whole: an element of {size} bytes has {length - start}")
                if kind not in (MATRIX, COMPRESSED):
                    raise FormatError(f"of matrices (it has an element of type {kind})")
                stream = Stream(file, size, kind == COMPRESSED)
                most = expanded(size) if kind == COMPRESSED else size
                name, array = _read_matrix(str(path), stream, size if kind == MATRIX else None, most, requested)
                if array is not None:
                    arrays[name] = array
                file.seek(start + size)
    except FormatError as error:
        raise wrong(path, f"a MATLAB 5 file, {error}") from None
    if missing := sorted(requested - arrays.keys()):
        raise wrong(path, f"a MATLAB 5 file that holds {' and '.join(missing)}")
    return arrays


def _check_header(header: bytes) -> None:
    if header.startswith(b"MATLAB 7.3"):
        raise FormatError("not one of version 7.3 (HDF5): save it with -v7")
    if len(header) < 128 or header[126:] not in (b"IM", b"MI"):
        raise FormatError("which begins with a header of 128 bytes")
    if header[124:] != b"\x00\x01IM":
        raise FormatError("little-endian and of version 0x0100")


def _two_words(raw: bytes) -> tuple[int, int]:
    if len(raw) < 8:
        raise FormatError("whole: it ends within a tag")
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:8], "little")


def _read_matrix(
    where: str, stream: Stream, size: int | None, most: int, requested: set[str]
) -> tuple[str, Array | None]:
    """Read a matrix's name and, if it is requested, its numbers: at most `most` bytes."""
    if size is None:
        kind, size = _two_words(stream.take(8))
        if kind != MATRIX:
            raise FormatError(f"of matrices (it has a compressed element of type {kind})")
    kind, flags, used = _subelement(stream, 16)
    if kind != 6 or len(flags) != 8:
        raise FormatError("whose matrices begin with their flags")
    kind, raw, length = _subelement(stream, 1024)
    used += length
    dims = [int(n) for n in np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")]
    if kind != 5 or len(raw) % 4 or not 2 <= len(dims) <= MOST_DIMS or min(dims) < 0:
        raise FormatError(f"whose matrices have at least two dimensions, at most {MOST_DIMS}, none below 0")
    kind, raw, length = _subelement(stream, 1024)
    used += length
    name = raw.decode("ascii", "replace")
    if name not in requested:
        return name, None
    word = int.from_bytes(flags[:4], "little")
    if word & 0xFF not in CLASSES or word & COMPLEX:
        raise FormatError(f"in which {name} is an array of real numbers")
    kind, bytes_, small = _tag(stream)
    if kind not in STORED:
        raise FormatError(f"in which {name} is stored as numbers (it is of type {kind})")
    stored = np.dtype(STORED[kind])
    if bytes_ != math.prod(dims) * stored.itemsize or (small is None and used + 8 + bytes_ > size):
        raise FormatError(f"in which {name} has as many numbers as its dimensions {dims} say")
    if bytes_ > most:
        raise FormatError(f"whose arrays expand at most {EXPANSION} times ({name} more); save it with -v6")
    memory.require("data file", where, bytes_ + math.prod(dims) * (4 + np.dtype(CLASSES[word & 0xFF]).itemsize))
    out = np.empty(math.prod(dims), stored)
    if small is None:
        stream.fill(out.view(np.uint8).data)
        used += 8 + bytes_
    else:
        out.view(np.uint8)[:] = np.frombuffer(small[:bytes_], np.uint8)
        used += 8
    if not 0 <= size - used < 8:
        raise FormatError(f"in which {name} ends where its tag says")
    stream.take(size - used)
    stream.end()
    dtype = np.dtype(CLASSES[word & 0xFF])
    with np.errstate(invalid="ignore", over="ignore"):
        values = out.astype(dtype, copy=False)
    if values is not out and not np.array_equal(values, out, equal_nan=dtype.kind == "f"):
        raise FormatError(f"in which the numbers of {name} are of its class, {dtype}")
    return name, values.reshape(dims, order="F")


def _tag(stream: Stream) -> tuple[int, int, bytes | None]:
    """Read a subelement's type and number of bytes, and its data where the tag itself has them (at most four bytes)."""
    raw = stream.take(8)
    first, size = _two_words(raw)
    if first >> 16:
        if first >> 16 > 4:
            raise FormatError("whose small elements have at most 4 bytes")
        return first & 0xFFFF, first >> 16, raw[4:]
    return first, size, None


def _subelement(stream: Stream, most: int) -> tuple[int, bytes, int]:
    """Read the type and data of a short subelement, and its length in bytes with tag and padding."""
    kind, size, small = _tag(stream)
    if small is not None:
        return kind, small[:size], 8
    if size > most:
        raise FormatError(f"whose flags, dimensions and names have at most {most} bytes")
    padded = -(-size // 8) * 8
    return kind, stream.take(padded)[:size], 8 + padded
