"""The Data Manager: the clients' samples on the device, one after another in memory, found by client."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.errors import CannotStack, InputError
from ..data.federation import Federation
from ..data.samples import Part, Samples, Splits


class DataManager(Splits):
    """All splits of a federation's data, in one dtype on one device."""

    clients: int
    common: tuple[Tensor, Tensor] | None  # a test set that belongs to no client

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        norm = (federation.mean, federation.std) if device.type == "cuda" else None
        validation = [(c.x_val, c.y_val) for c in federation.clients if c.x_val is not None and c.y_val is not None]
        super().__init__(
            _part([(c.x_train, c.y_train) for c in federation.clients], device, dtype, norm),
            _part([(c.x_test, c.y_test) for c in federation.clients], device, dtype, norm),
            _part(validation, device, dtype, norm) if len(validation) == len(federation) else None,
        )
        common = (
            None if federation.test is None else (federation.test[0].to(device, dtype), federation.test[1].to(device))
        )
        object.__setattr__(self, "clients", len(federation))
        object.__setattr__(self, "common", common)


def join(managers: Sequence[DataManager]) -> Splits:
    """Return the data of several runs, one after another: slot r·K + k is client k of run r. Runs on the same data share it."""
    if len({manager.clients for manager in managers}) > 1:
        raise CannotStack("their numbers of clients differ")
    validation = [manager.val for manager in managers if manager.val is not None]
    if len(validation) not in (0, len(managers)):
        raise CannotStack("not all of them have validation data")
    train, test = (_joined([manager.part(name) for manager in managers]) for name in ("train", "test"))
    return Splits(train, test, _joined(validation) if validation else None)


def _joined(parts: Sequence[Part]) -> Part:
    distinct: list[Part] = []
    which = []  # for each part its place among the distinct ones
    for part in parts:
        same = [i for i, other in enumerate(distinct) if _same(part, other)]
        which.append(same[0] if same else len(distinct))
        distinct += [] if same else [part]
    places = list(itertools.accumulate((len(part.y) for part in distinct), initial=0))
    x = distinct[0].x
    for part in distinct[1:]:
        for name, tensor in x.tensors().items():
            other = part.x.tensors().get(name)
            if name != "raw" and (other is None or not torch.equal(tensor, other)):
                raise CannotStack("their samples are normalised differently")
        if part.x.raw.dtype != x.raw.dtype:
            raise CannotStack("their samples have different dtypes")
    joined = x.over({**x.tensors(), "raw": torch.cat([part.x.raw for part in distinct])}) if len(distinct) > 1 else x
    starts = tuple(places[i] + start for i, part in zip(which, parts, strict=True) for start in part.starts)
    sizes = tuple(size for part in parts for size in part.sizes)
    return Part(joined, torch.cat([part.y for part in distinct]) if len(distinct) > 1 else distinct[0].y, starts, sizes)


def _same(a: Part, b: Part) -> bool:
    if a is b:
        return True
    return a.x.raw.dtype == b.x.raw.dtype and torch.equal(a.x.raw, b.x.raw) and torch.equal(a.y, b.y)


Normalised: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


def _part(
    arrays: list[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype, norm: Normalised | None
) -> Part:
    sizes = tuple(len(y) for _, y in arrays)
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    y = torch.cat([b for _, b in arrays]).to(device)
    x = torch.cat([a for a, _ in arrays])
    packed = _packed(x, dtype, *norm) if norm is not None else None
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
