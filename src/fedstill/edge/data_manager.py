"""The Data Manager: the clients' samples on the device, one after another in memory, found by client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.federation import Federation
from ..errors import InputError


@dataclass(frozen=True)
class Part:
    """One part (train, val or test) of all clients: rows `starts[k] … starts[k] + sizes[k]` are client k's."""

    x: Tensor
    y: Tensor
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's own rows, without a copy."""
        rows = slice(self.starts[client], self.starts[client] + self.sizes[client])
        return self.x[rows], self.y[rows]

    def rows(self, clients: list[int], width: int) -> Tensor:
        """For each client `width` row numbers: its own, then its first one again as padding."""
        start = torch.tensor([self.starts[k] for k in clients]).unsqueeze(1)
        size = torch.tensor([self.sizes[k] for k in clients]).unsqueeze(1)
        within = torch.arange(width).unsqueeze(0).expand(len(clients), width)
        return (start + torch.where(within < size, within, 0)).to(self.x.device)


class DataManager:
    """All parts of a federation's data, in one dtype on one device."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.clients = len(federation)
        self.train = _part([(c.x_train, c.y_train) for c in federation.clients], device, dtype)
        self.test = _part([(c.x_test, c.y_test) for c in federation.clients], device, dtype)
        validation = [(c.x_val, c.y_val) for c in federation.clients if c.x_val is not None and c.y_val is not None]
        self.val = _part(validation, device, dtype) if len(validation) == len(federation) else None
        self.common = None
        if federation.test is not None:
            x, y = federation.test
            self.common = (x.to(device, dtype), y.to(device))

    def part(self, name: str) -> Part:
        """train, val or test."""
        part = {"train": self.train, "val": self.val, "test": self.test}[name]
        if part is None:
            raise ValueError(f"the federation has no {name} part")
        return part


def _part(arrays: list[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype) -> Part:
    sizes = tuple(len(y) for _, y in arrays)
    starts = tuple(sum(sizes[:k]) for k in range(len(sizes)))
    x = torch.cat([a.to(dtype) for a, _ in arrays]).to(device)
    y = torch.cat([b for _, b in arrays]).to(device)
    if not torch.isfinite(x).all():
        raise InputError("dtype", str(dtype).removeprefix("torch."), "float64, or data within the range of float32")
    return Part(x, y, starts, sizes)
