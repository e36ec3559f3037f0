"""All clients' samples on a device, concatenated client by client, or in a file that is read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.errors import NoSamples
from ..core.tree import put
from .mapped import PIECE, Pages

ALIGNED = 64  # bytes at whose multiples torch's memory begins
CACHED = 1 << 19  # bytes of samples that a processor's cache holds while they are computed


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples on a device: floating-point numbers, or bytes that indexing converts by a lookup table.

    On a GPU images stay bytes, a quarter of the memory; `values[c, x]` is (x/255 − mean_c)/std_c as the data set computed it.
    Samples that lie in a file are rows of all that is in it: `order` says which, and `raw` is never written to. Bytes of a file
    are computed by `normal`, by the operations of `Dataset.tensor`: on a processor four times as fast as the table.
    """

    raw: Tensor
    values: Tensor | None = None  # [channels, 256]
    order: Tensor | None = None  # the rows of `raw`; None: all
    kind: torch.dtype | None = None  # of numbers, if another than they have in `raw`
    pages: Pages | None = None  # of the file
    normal: tuple[Tensor, Tensor] | None = None  # mean and standard deviation, which broadcast to a sample

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        if self.order is not None:
            rows = self.order[rows]
        if self.pages is not None and type(rows) is Tensor and rows.ndim:  # a traced one is of another type
            return _Gathered.apply(rows, self)  # type: ignore[no-any-return, no-untyped-call]
        return self._numbers(self.raw[rows] if self.pages is None else self.raw[rows].contiguous())

    def _numbers(self, raw: Tensor) -> Tensor:
        """Return what stands for these values of `raw`."""
        if self.values is None:
            return raw if self.kind is None else raw.to(self.kind)
        channel = 256 * torch.arange(len(self.values), device=raw.device).reshape(-1, *[1] * (self.raw.ndim - 2))
        return self.values.reshape(-1)[raw.long() + channel]

    def gathered(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return samples of a file, a few at a time: what is computed stays in the cache, and pages do not pile up.

        `out` is where to write them, if not to new memory: [rows, …] as samples have it.
        """
        assert self.pages is not None
        shape = self.raw.shape[1:]
        out = torch.empty((*rows.shape, *shape), dtype=self.dtype) if out is None else out
        flat, places, few = out.flatten(0, rows.ndim - 1), rows.reshape(-1), max(1, CACHED // max(1, 4 * shape.numel()))
        for first in range(0, len(places), few):
            into = flat[first : first + few]
            raw = self.raw.index_select(0, places[first : first + few])  # of bytes five times as fast as indexing
            self.pages.looked_at(len(raw))
            if self.values is None:
                into.copy_(raw)
                continue
            x = into if into.dtype == torch.float32 else torch.empty(raw.shape)
            torch.div(raw, 255, out=x)
            if self.normal is not None:
                x.sub_(self.normal[0]).div_(self.normal[1])
            if x is not into:
                into.copy_(x)
        return out

    def __len__(self) -> int:
        return len(self.raw) if self.order is None else len(self.order)

    @property
    def shape(self) -> torch.Size:
        """The number of samples, then the shape of one."""
        return torch.Size((len(self), *self.raw.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a model's input."""
        return (self.kind or self.raw.dtype) if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.raw.device

    @property
    def nbytes(self) -> int:
        """The bytes that the samples take in memory."""
        tensors = (self.values, self.order) if self.pages is not None else (self.raw, self.values, self.order)
        return sum(t.nbytes for t in tensors if t is not None)

    def is_floating_point(self) -> bool:
        """Return whether samples are numbers, not ids."""
        return self.dtype.is_floating_point

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that make up the samples, by name."""
        found = {"raw": self.raw, "values": self.values, "order": self.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def over(self, tensors: dict[str, Tensor]) -> Samples:
        """Return samples made of other tensors with the names of `tensors()`."""
        return replace(self, raw=tensors["raw"], values=tensors.get("values"), order=tensors.get("order"))

    def at(self, rows: Tensor | slice) -> Samples:
        """Return some of the samples without reading them."""
        order = torch.arange(len(self.raw), device=self.device) if self.order is None else self.order
        return replace(self, order=order[rows])

    def to(self, dtype: torch.dtype) -> Samples:
        """Return the same samples, read as numbers of this dtype (bytes and numbers, not ids)."""
        if self.values is not None:
            return replace(self, values=self.values.to(dtype))
        return replace(self, kind=dtype)


class _Gathered(torch.autograd.Function):
    """Reads samples from a file; under `vmap` those of all clients at once."""

    @staticmethod
    def forward(rows: Tensor, samples: Samples) -> Tensor:
        return samples.gathered(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor, samples: Samples) -> tuple[Tensor, int]:
        return _Gathered.apply(rows.movedim(in_dims[0], 0), samples), 0  # type: ignore[no-untyped-call]


Rows: TypeAlias = Tensor | Samples  # samples in memory, or read when they are needed


def one_file(a: Samples, b: Samples) -> bool:
    """Return whether both are rows of the same samples in a file, which stand for the same numbers."""
    mapped = a.pages is not None and a.pages is b.pages
    if not mapped or (a.raw.data_ptr(), a.raw.shape, a.dtype) != (b.raw.data_ptr(), b.raw.shape, b.dtype):
        return False
    return a.values is b.values or (a.values is not None and b.values is not None and torch.equal(a.values, b.values))


def together(xs: Sequence[Rows]) -> Rows:
    """Concatenate samples: those that all lie in one file stay there."""
    there = [x for x in xs if isinstance(x, Samples)]
    if not there or any(isinstance(x, Tensor) and len(x) for x in xs) or not all(one_file(x, there[0]) for x in there):
        return torch.cat([read(x) for x in xs])
    return replace(there[0], order=torch.cat([x.order for x in there if x.order is not None]))


def at(x: Rows, rows: Tensor | slice) -> Rows:
    """Return some of the samples; those in a file are not read."""
    return x[rows] if isinstance(x, Tensor) else x.at(rows)


def read(x: Rows, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return all samples as one tensor."""
    x = x if isinstance(x, Tensor) else x[:]
    return x.to(device or x.device, dtype or x.dtype)


def moved(x: Rows, device: torch.device, dtype: torch.dtype) -> Rows:
    """Return samples as an engine takes them: those in a file stay there, for an engine that works in the host's memory."""
    if isinstance(x, Samples) and device.type == "cpu" and x.device.type == "cpu":
        return x.to(dtype) if x.dtype != dtype else x
    return read(x, device, dtype)


def at_once(x: Rows, size: int = PIECE) -> int:
    """Return how many samples to read at a time: all that are in memory already."""
    if isinstance(x, Tensor) or x.pages is None:
        return max(1, len(x))
    return max(1, size // max(1, x.raw.shape[1:].numel() * x.dtype.itemsize))


def pieces(x: Rows) -> Iterator[Tensor]:
    """Yield all samples, those in a file a few at a time."""
    rows = at_once(x)
    for first in range(0, len(x), rows):
        yield x[first : first + rows]


def gather(x: Rows, order: Tensor, out: Tensor) -> None:
    """Write samples in an order, each as one row of numbers."""
    if isinstance(x, Tensor):
        torch.index_select(x, 0, order, out=out)
        return
    if x.pages is None:
        out.copy_(x[order].flatten(1))
    else:
        x.gathered(order if x.order is None else x.order[order], out.unflatten(1, x.raw.shape[1:]))  # type: ignore[no-untyped-call]


def batches_at_once(x: Rows, size: int, count: int) -> int:
    """Return how many batches of `size` samples to gather at a time, of `count` samples in all.

    Those in a file are gathered one at a time, or so few that a batch begins as far from a multiple of `ALIGNED` bytes as it
    would if all were gathered at once: what a processor's kernels compute may depend on that.
    """
    if isinstance(x, Tensor) or x.pages is None:
        return max(1, -(-count // size))
    return ALIGNED // math.gcd(ALIGNED, size * x.shape[1:].numel() * x.dtype.itemsize)


@dataclass(frozen=True)
class Part:
    """One split (train, val or test) of all clients: rows `starts[k] … starts[k] + sizes[k]` are client k's."""

    x: Samples
    y: Tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    held: frozenset[int] | None = None  # the clients whose rows are here; None: all

    def check_held(self, clients: Iterable[int]) -> None:
        """Refuse clients whose samples are with another process."""
        missing = [] if self.held is None else [k for k in clients if k not in self.held]
        if missing:
            raise NoSamples(missing[0])

    def all(self) -> tuple[Rows, Tensor]:
        """Return all clients' samples and labels."""
        self.check_held(range(len(self.sizes)))
        return self._rows(slice(None)), self.y

    def of(self, client: int) -> tuple[Rows, Tensor]:
        """Return a client's samples and labels; a view where they are floating-point numbers, or lie in a file."""
        self.check_held([client])
        rows = slice(self.starts[client], self.starts[client] + self.sizes[client])
        return self._rows(rows), self.y[rows]

    def _rows(self, rows: slice) -> Rows:
        return self.x[rows] if self.x.pages is None else self.x.at(rows)

    def rows(self, clients: list[int], width: int) -> Tensor:
        """Return `width` row numbers for each client: its own, then its first one repeated as padding."""
        self.check_held(clients)
        start, size = (
            put([each[k] for k in clients], self.x.device).unsqueeze(1) for each in (self.starts, self.sizes)
        )
        within = torch.arange(width, device=self.x.device)
        return start + torch.where(within < size, within, 0)


@dataclass(frozen=True, eq=False)
class Splits:
    """The training, test and, where there is one, validation samples of all clients."""

    train: Part
    test: Part
    val: Part | None = None

    def part(self, name: str) -> Part:
        """Return a split: train, val or test."""
        part = {"train": self.train, "val": self.val, "test": self.test}[name]
        if part is None:
            raise ValueError(f"the federation has no {name} split")
        return part
