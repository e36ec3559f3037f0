"""The Data Manager: holds the clients' samples on the device, concatenated in memory and indexed by client."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.errors import CannotStack, InputError
from ..data.federation import Client, Federation
from ..data.samples import Part, Rows, Samples, Splits, at_once, moved, one_file, together


class DataManager(Splits):
    """All splits of a federation's data, in one dtype and on one device."""

    clients: int
    common: tuple[Rows, Tensor] | None  # a test set that belongs to no client

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        norm = (federation.mean, federation.std) if device.type == "cuda" else None
        validation = [(c.x_val, c.y_val) for c in federation.clients if c.x_val is not None and c.y_val is not None]
        train = _split([(c.x_train, c.y_train) for c in federation.clients], device, dtype, norm)
        test = _split([(c.x_test, c.y_test) for c in federation.clients], device, dtype, norm)
        val = _split(validation, device, dtype, norm) if len(validation) == len(federation) else None
        whole = federation.whole
        if whole is not None:  # a share: the others' samples are with other processes, their numbers are known
            train = replace(train, sizes=federation.sizes("train"), held=whole.held)
            test = replace(test, sizes=federation.sizes("test"), held=None if whole.tests else whole.held)
            val = val and replace(val, sizes=federation.sizes("val"), held=whole.held)
        super().__init__(train, test, val)
        common = (
            None
            if federation.test is None
            else (moved(federation.test[0], device, dtype), _targets(federation.test[1], device, dtype))
        )
        object.__setattr__(self, "clients", len(federation))
        object.__setattr__(self, "common", common)


_resident: weakref.WeakKeyDictionary[Federation, tuple[Any, DataManager]] = weakref.WeakKeyDictionary()


def on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> DataManager:
    """Return a federation's data on a device; on a GPU, runs on the same federation share what was uploaded last.

    Tensors that were written to since are uploaded again.
    """
    if device.type == "cpu":
        return DataManager(federation, device, dtype)
    tensors = [getattr(client, f.name) for client in federation.clients for f in fields(Client)]
    key = (device, dtype, tuple((id(t), t._version) for t in tensors if isinstance(t, Tensor)))
    known = _resident.get(federation)
    if known is None or known[0] != key:
        known = _resident[federation] = key, DataManager(federation, device, dtype)
    return known[1]


def join(managers: Sequence[DataManager]) -> Splits:
    """Concatenate the data of several runs: slot r·K + k is client k of run r. Runs on the same data share it."""
    if len({manager.clients for manager in managers}) > 1:
        raise CannotStack("their numbers of clients differ")
    validation = [manager.val for manager in managers if manager.val is not None]
    if len(validation) not in (0, len(managers)):
        raise CannotStack("not all of them have validation data")
    train, test = (_joined([manager.part(name) for manager in managers]) for name in ("train", "test"))
    return Splits(train, test, _joined(validation) if validation else None)


def _joined(splits: Sequence[Part]) -> Part:
    """Concatenate one split of several runs; equal ones are stored once."""
    distinct: list[Part] = []
    positions = []  # for each split its index among the distinct ones
    for split in splits:
        same = [i for i, other in enumerate(distinct) if _same(split, other)]
        positions.append(same[0] if same else len(distinct))
        distinct += [] if same else [split]
    offsets = list(itertools.accumulate((len(split.y) for split in distinct), initial=0))
    x = distinct[0].x
    for split in distinct[1:]:
        for name, tensor in x.tensors().items():
            other = split.x.tensors().get(name)
            if name == "values" and (other is None or not torch.equal(tensor, other)):
                raise CannotStack("their samples are normalised differently")
        if split.x.raw.dtype != x.raw.dtype:
            raise CannotStack("their samples have different dtypes")
    joined = _concatenated([split.x for split in distinct])
    starts = tuple(offsets[i] + start for i, split in zip(positions, splits, strict=True) for start in split.starts)
    sizes = tuple(size for split in splits for size in split.sizes)
    y = torch.cat([split.y for split in distinct]) if len(distinct) > 1 else distinct[0].y
    held = None
    if any(split.held is not None for split in splits):
        everybody = [frozenset(range(len(split.sizes))) if split.held is None else split.held for split in splits]
        first = itertools.accumulate((len(split.sizes) for split in splits), initial=0)
        held = frozenset(start + k for start, each in zip(first, everybody, strict=False) for k in each)
    return Part(joined, y, starts, sizes, held)


def _concatenated(xs: Sequence[Samples]) -> Samples:
    """Return samples of several runs as one; of those in one file, what says which they are."""
    first = xs[0]
    if len(xs) == 1:
        return first
    if all(x.order is None for x in xs):
        return first.over({**first.tensors(), "raw": torch.cat([x.raw for x in xs])})
    orders = [x.order for x in xs if x.order is not None and one_file(x, first)]
    if len(orders) < len(xs):
        raise CannotStack("their samples lie in different files")
    return replace(first, order=torch.cat(orders))


def _same(a: Part, b: Part) -> bool:
    """Return whether two splits hold the same samples and labels."""
    if a is b:
        return True
    if a.x.order is not None or b.x.order is not None:
        both = a.x.order is not None and b.x.order is not None and one_file(a.x, b.x)
        return both and torch.equal(a.x.order, b.x.order) and torch.equal(a.y, b.y)  # type: ignore[arg-type]
    return a.x.raw.dtype == b.x.raw.dtype and torch.equal(a.x.raw, b.x.raw) and torch.equal(a.y, b.y)


Normalised: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


def _split(
    arrays: list[tuple[Rows, Tensor]], device: torch.device, dtype: torch.dtype, norm: Normalised | None
) -> Part:
    """Concatenate the clients' samples (x, y) of one split on the device; on a CPU those in a file stay there."""
    sizes = tuple(len(y) for _, y in arrays)
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    targets = _targets(torch.cat([y for _, y in arrays]), device, dtype)
    x = together([x for x, _ in arrays])
    if isinstance(x, Samples):
        return Part(_placed(x, device, dtype), targets, starts, sizes)
    packed = _packed(x, dtype, *norm) if norm is not None else None
    if packed is None:
        packed = Samples(x.to(dtype).to(device))
        if not torch.isfinite(packed.raw).all():
            raise InputError("dtype", str(dtype).removeprefix("torch."), "float64, or data within the range of float32")
    return Part(
        packed.over({name: tensor.to(device) for name, tensor in packed.tensors().items()}), targets, starts, sizes
    )


def _placed(x: Samples, device: torch.device, dtype: torch.dtype) -> Samples:
    """Return samples in a file for an engine on the device: on a CPU they stay there, a GPU gets them as they are."""
    if device.type == "cpu":
        return x if x.dtype == dtype else x.to(dtype)
    return _uploaded(x, device, dtype)


def _uploaded(x: Samples, device: torch.device, dtype: torch.dtype) -> Samples:
    """Return samples of a file on the device, bytes as bytes; the host's memory holds a few at a time."""
    raw = torch.empty(x.shape, dtype=x.raw.dtype if x.values is not None else dtype, device=device)
    plain, rows = replace(x, values=None, kind=None, normal=None), at_once(x)
    for first in range(0, len(x), rows):
        raw[first : first + rows] = plain[first : first + rows].to(device)
    return Samples(raw, None if x.values is None else x.values.to(device, dtype))


def _targets(y: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return targets on the device: classes as they are, numbers in the model's dtype."""
    if not y.is_floating_point():
        return y.to(device)
    y = y.to(dtype)
    if not torch.isfinite(y).all():
        raise InputError("dtype", str(dtype).removeprefix("torch."), "float64, or targets within the range of float32")
    return y.to(device)


def _packed(x: Tensor, dtype: torch.dtype, mean: tuple[float, ...], std: tuple[float, ...]) -> Samples | None:
    """Return the samples as bytes if normalising those bytes gives exactly these values, else None."""
    if x.dtype != torch.float32 or x.ndim != 4 or len(mean) not in (0, x.shape[1]):
        return None
    centre = torch.tensor(mean or [0.0] * x.shape[1]).unsqueeze(1)
    spread = torch.tensor(std or [1.0] * x.shape[1]).unsqueeze(1)
    values = (torch.arange(256.0) / 255 - centre) / spread
    raw = ((x * spread.unsqueeze(2) + centre.unsqueeze(2)) * 255).round_().clamp_(0, 255).to(torch.uint8)
    restored = Samples(raw, values)
    same = all(torch.equal(restored[rows], x[rows]) for rows in (slice(i, i + 8192) for i in range(0, len(x), 8192)))
    return Samples(raw, values.to(dtype)) if same else None
