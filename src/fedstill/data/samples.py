"""All clients' samples on a device, concatenated client by client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import NoSamples
from ..core.tree import put


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples on a device: floating-point numbers, or bytes that indexing converts by a lookup table.

    On a GPU images stay bytes, a quarter of the memory; `values[c, x]` is (x/255 − mean_c)/std_c as the data set computed it.
    """

    raw: Tensor
    values: Tensor | None = None  # [channels, 256]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        raw = self.raw[rows]
        if self.values is None:
            return raw
        channel = 256 * torch.arange(len(self.values), device=raw.device).reshape(-1, 1, 1)
        return self.values.reshape(-1)[raw.long() + channel]

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def shape(self) -> torch.Size:
        """The number of samples, then the shape of one."""
        return self.raw.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a model's input."""
        return self.raw.dtype if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.raw.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that make up the samples, by name."""
        return {"raw": self.raw} if self.values is None else {"raw": self.raw, "values": self.values}

    def over(self, tensors: dict[str, Tensor]) -> Samples:
        """Return samples made of other tensors with the names of `tensors()`."""
        return Samples(tensors["raw"], tensors.get("values"))


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

    def all(self) -> tuple[Tensor, Tensor]:
        """Return all clients' samples and labels."""
        self.check_held(range(len(self.sizes)))
        return self.x[:], self.y

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's samples and labels; a view where they are floating-point numbers."""
        self.check_held([client])
        rows = slice(self.starts[client], self.starts[client] + self.sizes[client])
        return self.x[rows], self.y[rows]

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
