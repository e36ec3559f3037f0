"""Read Arrow streams that may hold anything, column by column, with pyarrow alone; a column's values become arrays.

A stream is messages, one after another: metadata (a flatbuffer), then a body. Before pyarrow reads one, every message is looked
at: it lies within the file and is not compressed, so nothing is allocated that the file does not hold. pyarrow maps the file;
every batch is validated in full before its values are used. Extension types are read as what they are stored as; nothing is
unpickled.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..core.errors import InputError, Shown, first_line
from .files import regular, wrong
from .targets import Array

WHOLE = "a whole Arrow stream, as datasets.Dataset.save_to_disk writes it"
MISSING = "read with pyarrow: pip install 'fedstill[hf]'"
SCHEMA, RECORD_BATCH = 1, 3  # kinds of messages
LONGEST = 16 << 20  # bytes of a message's metadata


def check(path: Path) -> None:
    """Refuse a file that is no plain stream of record batches, or whose messages do not lie within it."""
    with regular(path) as file:
        try:
            _check(path, file, os.fstat(file.fileno()).st_size)
        except (struct.error, IndexError):
            raise wrong(path, WHOLE) from None


def _check(path: Path, file: IO[bytes], size: int) -> None:
    kinds = []
    while (head := file.read(8)) and len(head) == 8:
        mark, length = struct.unpack("<II", head)
        if mark != 0xFFFFFFFF or length > LONGEST:
            raise wrong(path, WHOLE)
        if length == 0:
            break
        table = Table(file.read(length), 0)
        kind, body = table.number(1, "<B"), table.number(3, "<q")
        if kind not in (SCHEMA, RECORD_BATCH) or not 0 <= body <= size - file.tell():
            raise wrong(path, f"{WHOLE}: plain batches, none of which is longer than the file")
        if kind == RECORD_BATCH and table.table(2).has(3):
            raise wrong(path, f"{WHOLE}: batches that are not compressed")
        file.seek(body, os.SEEK_CUR)
        kinds.append(kind)
    if not kinds or kinds[0] != SCHEMA:
        raise wrong(path, WHOLE)


class Table:
    """A table of a flatbuffer, whose root is at `at` of it."""

    def __init__(self, raw: bytes, at: int) -> None:
        self.raw = raw
        self.start = at + struct.unpack_from("<I", raw, at)[0]
        self._fields = self.start - struct.unpack_from("<i", raw, self.start)[0]
        if self._fields < 0:
            raise IndexError

    def _place(self, number: int) -> int:
        """Return where a field is; 0: it has its default."""
        if 4 + 2 * number >= struct.unpack_from("<H", self.raw, self._fields)[0]:
            return 0
        offset = struct.unpack_from("<H", self.raw, self._fields + 4 + 2 * number)[0]
        return self.start + offset if offset else 0

    def has(self, number: int) -> bool:
        """Return whether a field is there."""
        return self._place(number) > 0

    def number(self, number: int, form: str) -> int:
        """Return a number's value."""
        place = self._place(number)
        return int(struct.unpack_from(form, self.raw, place)[0]) if place else 0

    def table(self, number: int) -> Table:
        """Return a table within."""
        place = self._place(number)
        if not place:
            raise IndexError
        return Table(self.raw, place)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a stream that was checked; whatever is wrong with it becomes one error."""
    try:
        import pyarrow as pa
        from pyarrow import ipc
    except ImportError:
        raise InputError("data", str(path), MISSING) from None
    try:
        with pa.memory_map(str(path)) as source, ipc.open_stream(source) as stream:
            yield stream
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise wrong(path, f"{WHOLE} ({first_line(error)})") from None


def batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    """Yield the record batches of a stream that was checked; each has the columns that are named, in that order."""
    with _opened(path) as stream:
        for batch in stream:
            batch = batch.select(list(names))
            batch.validate(full=True)
            if len(batch):
                yield batch


def column_names(path: Path) -> list[str]:
    """Return the names of a stream's columns."""
    with _opened(path) as stream:
        return [str(name) for name in stream.schema.names]


def stored(column: Any) -> Any:
    """Return a column without extension types."""
    import pyarrow as pa

    return column.storage if isinstance(column, pa.ExtensionArray) else column


def numbers(where: str, column: Any) -> Array:
    """Return a column of numbers, or of lists of one length of them, as an array."""
    import pyarrow as pa

    column, shape = stored(column), [len(column)]
    while (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        check_whole(where, column)
        rows, inner = len(column), stored(column.flatten())
        lengths = np.diff(column.offsets.to_numpy()) if not pa.types.is_fixed_size_list(column.type) else np.zeros(0)
        if len(set(lengths.tolist())) > 1:
            shown = Shown(f"lists of {int(lengths.min())} to {int(lengths.max())} values")
            raise InputError(where, shown, "of one length in all rows (texts: padding='max_length')")
        shape.append(len(inner) // max(1, rows))
        column = inner
    check_whole(where, column)
    kinds = pa.types
    if kinds.is_boolean(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False)).astype(bool).reshape(shape)
    if not (kinds.is_integer(column.type) or kinds.is_floating(column.type)):
        raise InputError(where, Shown(f"values of type {column.type}"), "numbers, lists of numbers, or images")
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def check_whole(where: str, column: Any) -> None:
    """Refuse a column with gaps."""
    if column.null_count:
        raise InputError(where, Shown(f"{column.null_count} gaps"), "a value in every row (drop or fill them first)")


def is_text(column: Any) -> bool:
    """Return whether a column holds texts."""
    import pyarrow as pa

    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def is_image(column: Any) -> bool:
    """Return whether a column holds images as they are saved: each a struct of bytes and a path."""
    import pyarrow as pa

    kind = stored(column).type
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def image_bytes(where: str, column: Any) -> Iterator[bytes]:
    """Yield the bytes of images; one that is only a path to a file elsewhere is refused, and never opened."""
    column = stored(column)
    check_whole(where, column)
    inside = column.field("bytes")
    if inside.null_count:
        right = (
            "images whose bytes are in the data set (data.cast_column(name, Image()) and embed them); no path is opened"
        )
        raise InputError(where, Shown(f"{inside.null_count} images that are paths"), right)
    for value in inside:
        yield value.as_py()
