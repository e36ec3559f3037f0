"""Partitions of a data set among clients, written as one word such as `dirichlet:0.1`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import InputError, Shown, nearest
from . import schemes
from .dataset import Ints, count_classes, targets
from .record import load_record

REAL = {
    "dirichlet": "ALPHA, a number above 0 and at most 1e6, for example dirichlet:0.1",
    "balanced-dirichlet": "ALPHA, a number above 0 and at most 1e6, for example balanced-dirichlet:0.1",
    "lognormal": "SIGMA, a number above 0 and at most 1e6, for example lognormal:1.0",
}
INTEGER = {
    "shards": "the number of shards a client, at least 1, for example shards:2",
    "classes": "the number of classes a client, at least 1, for example classes:2 or classes:2,lognormal:1.0",
}
SIZED = "classes:S,lognormal:SIGMA with a number above 0 and at most 1e6, for example classes:2,lognormal:1.0"
BARE = ("iid", "domain", "owner")
KINDS = (*REAL, *INTEGER, *BARE, "file")


@dataclass(frozen=True)
class Partition:
    """A kind of partition and its parameter (None, α, σ, a number of shards or classes, or a path).

    `sigma` is that of the sizes of `classes:S,lognormal:σ`; None: as the partition has them.
    """

    kind: str
    parameter: float | int | str | None = None
    sigma: float | str | None = None

    def __post_init__(self) -> None:
        value = self.parameter
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind not in KINDS:
            raise InputError("partition", self.kind, nearest(self.kind, KINDS))
        if self.kind in BARE and value is not None:
            raise InputError("partition", str(self), f"{self.kind!r} without a parameter")
        if self.kind in REAL and not _positive(value):
            raise InputError("partition", str(self), f"{self.kind}:{REAL[self.kind]}")
        if self.kind in INTEGER and not (number and isinstance(value, int) and value >= 1):
            raise InputError("partition", str(self), f"{self.kind}:{INTEGER[self.kind]}")
        if self.kind == "file" and not (isinstance(value, str) and value):
            raise InputError("partition", str(self), "file:PATH with the path of a saved partition.json")
        sigma = self.sigma
        if sigma is not None and (self.kind != "classes" or not _positive(sigma)):
            raise InputError("partition", str(self), SIZED)

    def __str__(self) -> str:
        text = self.kind if self.parameter is None else f"{self.kind}:{self.parameter}"
        return text if self.sigma is None else f"{text},lognormal:{self.sigma}"


def _positive(value: object) -> bool:
    """Return whether a value is a number above 0 and at most 1e6."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e6


def parse(text: str | Partition) -> Partition:
    """Parse a partition.

    >>> parse("dirichlet:0.1")
    Partition(kind='dirichlet', parameter=0.1, sigma=None)
    >>> str(parse("classes:2,lognormal:1.0"))
    'classes:2,lognormal:1.0'
    """
    if isinstance(text, Partition):
        return text
    if not isinstance(text, str):
        raise InputError("partition", text, "a text such as 'dirichlet:0.1'")
    kind, colon, rest = text.partition(":")
    if not colon:
        return Partition(kind)
    value: float | int | str = rest
    with contextlib.suppress(ValueError):  # what is not a number stays a string, which Partition refuses
        value = float(rest) if kind in REAL else int(rest) if kind in INTEGER else rest
    if kind != "classes" or "," not in rest:
        return Partition(kind, value)
    number, _, sizes = rest.partition(",")
    law, _, text = sizes.partition(":")
    if law != "lognormal":
        raise InputError("partition", f"{kind}:{rest}", SIZED)
    sigma: float | str = text
    value = number
    with contextlib.suppress(ValueError):
        value = int(number)
    with contextlib.suppress(ValueError):
        sigma = float(text)
    return Partition(kind, value, sigma)


def deal(
    partition: str | Partition,
    labels: Ints,
    clients: int | None,
    seed: int,
    *,
    domain: Ints | None = None,
    owner: Ints | None = None,
    classes: int | None = None,
    min_samples: int = 2,
) -> list[Ints]:
    """Return the sorted indices of each client's samples; no sample is dealt twice, every client has `min_samples`.

    All samples are dealt, except by `classes:S` (classes that no client has) and `file`. `clients` may be None where the
    partition determines it: `domain`, `owner` and `file`. The impossible is refused before anything is drawn.
    """
    scheme = parse(partition)
    raw = np.asarray(labels)
    y = targets("labels", raw, len(raw), classes)
    if classes is None:
        classes = count_classes("labels", [y]) if len(y) else 0
    if clients is not None and (isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1):
        raise InputError("clients", clients, "a whole number of at least 1")
    if scheme.kind in ("domain", "owner"):
        indices = _by_group(scheme.kind, domain if scheme.kind == "domain" else owner, len(y), clients)
    elif scheme.kind == "file":
        indices = _from_file(Path(str(scheme.parameter)), len(y), clients)
    elif clients is None:
        raise InputError("clients", None, f"a whole number of at least 1 for the partition {scheme}")
    else:
        _check(scheme, y, classes, clients, min_samples)
        indices = _draw(scheme, y, classes, clients, seed, min_samples)
    smallest = min(range(len(indices)), key=lambda k: len(indices[k]))
    if len(indices[smallest]) < min_samples:
        shown = Shown(f"{scheme}, which gives client {smallest} {len(indices[smallest])} of the samples")
        right = f"one that gives every client at least {min_samples}, for training and testing"
        raise InputError("partition", shown, right)
    return [np.sort(own).astype(np.int64) for own in indices]


def _check(scheme: Partition, y: Ints, classes: int, clients: int, min_samples: int) -> None:
    """Refuse what is impossible with this many samples, clients and classes."""
    if clients * min_samples > len(y):
        most = f"at most {len(y) // min_samples}: {len(y)} samples, at least {min_samples} for each client"
        raise InputError("clients", clients, most)
    each = scheme.parameter
    if scheme.kind == "shards" and isinstance(each, int) and clients * each > len(y):
        raise InputError(
            "partition", str(scheme), f"at most shards:{len(y) // clients} ({len(y)} samples, {clients} clients)"
        )
    if scheme.kind == "classes" and isinstance(each, int):
        if each > classes:
            raise InputError("partition", str(scheme), f"at most classes:{classes}, the number of classes")
        caps = schemes.holder_caps(np.bincount(y, minlength=classes), clients, each, min_samples)
        if int(caps.sum()) < clients * each:
            reason = (
                f"{clients} clients with {each} classes each want {clients * each} shares, the data has {caps.sum()}"
            )
            raise InputError("partition", str(scheme), f"possible with fewer clients or fewer classes ({reason})")


def _draw(scheme: Partition, y: Ints, classes: int, clients: int, seed: int, min_samples: int) -> list[Ints]:
    value = scheme.parameter
    if scheme.kind in REAL:
        real = float(value or 0)
        if scheme.kind == "dirichlet":
            return schemes.dirichlet(y, classes, clients, seed, real, min_samples)
        if scheme.kind == "balanced-dirichlet":
            return schemes.balanced_dirichlet(y, classes, clients, seed, real)
        return schemes.lognormal(len(y), clients, seed, real, min_samples)
    if scheme.kind in INTEGER:
        each = int(value or 0)
        if scheme.kind == "shards":
            return schemes.shards(y, clients, seed, each)
        sigma = 0.0 if scheme.sigma is None else float(scheme.sigma)
        return schemes.by_classes(y, classes, clients, seed, each, min_samples, sigma)
    return schemes.iid(len(y), clients, seed)


def _by_group(kind: str, group: Ints | None, count: int, clients: int | None) -> list[Ints]:
    """Return one client's indices for each domain or owner."""
    if group is None:
        raise InputError("partition", kind, f"another one: this data does not say which {kind} a sample belongs to")
    if len(group) != count or count == 0:
        raise InputError(kind, Shown(f"{len(group)} entries"), f"one entry for each of the {count} samples")
    names, client_of = np.unique(group, return_inverse=True)
    if clients is not None and clients != len(names):
        raise InputError("clients", clients, f"{len(names)}, one client for each {kind}")
    order = np.argsort(client_of, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(client_of))[:-1]))


def _from_file(path: Path, count: int, clients: int | None) -> list[Ints]:
    record = load_record(path)
    if record.samples != count:
        raise InputError("partition", f"file:{path}", f"one of {count} samples (it deals {record.samples})")
    if clients is not None and clients != record.clients:
        raise InputError("clients", clients, f"{record.clients}, as {path} says")
    return [np.array(own, np.int64) for own in record.indices]
