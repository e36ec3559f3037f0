"""Clients' samples on a device, one client after another in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.device import put


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as they lie in memory and as a model takes them: floating numbers, or bytes that are looked up when asked for.

    On a GPU images stay bytes, a quarter of the memory; `values[c, x]` is (x/255 − mean_c)/std_c as the data set computed it.
    """

    raw: Tensor
    values: Tensor | None = None  # [channels, 256]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        found = self.raw[rows]
        if self.values is None:
            return found
        channel = 256 * torch.arange(len(self.values), device=found.device).reshape(-1, 1, 1)
        return self.values.reshape(-1)[found.long() + channel]

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def shape(self) -> torch.Size:
        """Number of samples, then the shape of one."""
        return self.raw.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what a model is given."""
        return self.raw.dtype if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.raw.device

    def tensors(self) -> dict[str, Tensor]:
        """What they are made of."""
        return {"raw": self.raw} if self.values is None else {"raw": self.raw, "values": self.values}

    def over(self, parts: dict[str, Tensor]) -> Samples:
        """The same made of other tensors."""
        return Samples(parts["raw"], parts.get("values"))


@dataclass(frozen=True)
class Part:
    """One part (train, val or test) of all clients: rows `starts[k] … starts[k] + sizes[k]` are client k's."""

    x: Samples
    y: Tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's own rows; without a copy where they lie as floating numbers."""
        rows = slice(self.starts[client], self.starts[client] + self.sizes[client])
        return self.x[rows], self.y[rows]

    def rows(self, clients: list[int], width: int) -> Tensor:
        """For each client `width` row numbers: its own, then its first one again as padding."""
        start, size = (
            put([each[k] for k in clients], self.x.device).unsqueeze(1) for each in (self.starts, self.sizes)
        )
        within = torch.arange(width, device=self.x.device)
        return start + torch.where(within < size, within, 0)
