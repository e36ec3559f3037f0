"""The Data Manager: the clients' samples on the device, one after another in memory, found by client."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.errors import InputError
from ..data.federation import Federation
from ..data.samples import Part, Samples


class DataManager:
    """All parts of a federation's data, in one dtype on one device."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.clients = len(federation)
        bytes_ = (federation.mean, federation.std) if device.type == "cuda" else None
        self.train = _part([(c.x_train, c.y_train) for c in federation.clients], device, dtype, bytes_)
        self.test = _part([(c.x_test, c.y_test) for c in federation.clients], device, dtype, bytes_)
        validation = [(c.x_val, c.y_val) for c in federation.clients if c.x_val is not None and c.y_val is not None]
        self.val = _part(validation, device, dtype, bytes_) if len(validation) == len(federation) else None
        self.common: tuple[Tensor, Tensor] | None = None
        if federation.test is not None:
            x, y = federation.test
            self.common = (x.to(device, dtype), y.to(device))

    def part(self, name: str) -> Part:
        """train, val or test."""
        part = {"train": self.train, "val": self.val, "test": self.test}[name]
        if part is None:
            raise ValueError(f"the federation has no {name} part")
        return part


Normalised: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


def _part(
    arrays: list[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype, bytes_: Normalised | None
) -> Part:
    sizes = tuple(len(y) for _, y in arrays)
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    y = torch.cat([b for _, b in arrays]).to(device)
    x = torch.cat([a for a, _ in arrays])
    packed = _packed(x, dtype, *bytes_) if bytes_ is not None else None
    if packed is None:
        packed = Samples(x.to(dtype).to(device))
        if not torch.isfinite(packed.raw).all():
            raise InputError("dtype", str(dtype).removeprefix("torch."), "float64, or data within the range of float32")
    return Part(packed.over({name: part.to(device) for name, part in packed.tensors().items()}), y, starts, sizes)


def _packed(x: Tensor, dtype: torch.dtype, mean: tuple[float, ...], std: tuple[float, ...]) -> Samples | None:
    """The samples as bytes, where they are exactly what normalising bytes gives; None otherwise."""
    if x.dtype != torch.float32 or x.ndim != 4 or len(mean) not in (0, x.shape[1]):
        return None
    centre = torch.tensor(mean or [0.0] * x.shape[1]).unsqueeze(1)
    spread = torch.tensor(std or [1.0] * x.shape[1]).unsqueeze(1)
    values = (torch.arange(256.0) / 255 - centre) / spread
    raw = ((x * spread.unsqueeze(2) + centre.unsqueeze(2)) * 255).round_().clamp_(0, 255).to(torch.uint8)
    made = Samples(raw, values)
    same = all(torch.equal(made[rows], x[rows]) for rows in (slice(i, i + 8192) for i in range(0, len(x), 8192)))
    return Samples(raw, values.to(dtype)) if same else None
