"""Partitions: how a data set is dealt to clients, written as one word such as `dirichlet:0.1`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import InputError, Shown, nearest
from . import schemes
from .dataset import Ints, targets
from .record import load_record

REAL = {
    "dirichlet": "ALPHA, a number above 0 and at most 1e6, for example dirichlet:0.1",
    "balanced-dirichlet": "ALPHA, a number above 0 and at most 1e6, for example balanced-dirichlet:0.1",
    "lognormal": "SIGMA, a number above 0 and at most 1e6, for example lognormal:1.0",
}
WHOLE = {
    "shards": "the number of shards a client, at least 1, for example shards:2",
    "classes": "the number of classes a client, at least 1, for example classes:2",
}
BARE = ("iid", "domain", "owner")
KINDS = (*REAL, *WHOLE, *BARE, "file")


@dataclass(frozen=True)
class Partition:
    """A kind of partition and its parameter (None, α, σ, a number of shards or classes, or a path)."""

    kind: str
    parameter: float | int | str | None = None

    def __post_init__(self) -> None:
        value = self.parameter
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind not in KINDS:
            raise InputError("partition", self.kind, nearest(self.kind, KINDS))
        if self.kind in BARE and value is not None:
            raise InputError("partition", str(self), f"{self.kind!r} without a parameter")
        if self.kind in REAL and not (number and 0 < float(value or 0) <= 1e6):
            raise InputError("partition", str(self), f"{self.kind}:{REAL[self.kind]}")
        if self.kind in WHOLE and not (number and isinstance(value, int) and value >= 1):
            raise InputError("partition", str(self), f"{self.kind}:{WHOLE[self.kind]}")
        if self.kind == "file" and not (isinstance(value, str) and value):
            raise InputError("partition", str(self), "file:PATH with the path of a saved partition.json")

    def __str__(self) -> str:
        return self.kind if self.parameter is None else f"{self.kind}:{self.parameter}"


def parse(text: str | Partition) -> Partition:
    """Read a partition.

    >>> parse("dirichlet:0.1")
    Partition(kind='dirichlet', parameter=0.1)
    """
    if isinstance(text, Partition):
        return text
    if not isinstance(text, str):
        raise InputError("partition", text, "a text such as 'dirichlet:0.1'")
    kind, colon, rest = text.partition(":")
    if not colon:
        return Partition(kind)
    value: float | int | str = rest
    with contextlib.suppress(ValueError):  # what is no number stays a text, which Partition refuses
        value = float(rest) if kind in REAL else int(rest) if kind in WHOLE else rest
    return Partition(kind, value)


def deal(
    partition: str | Partition,
    labels: Ints,
    clients: int | None,
    seed: int,
    *,
    domain: Ints | None = None,
    owner: Ints | None = None,
    classes: int | None = None,
    least: int = 2,
) -> list[Ints]:
    """The sorted indices of each client's samples; no sample is dealt twice, and every client gets at least `least`.

    All samples are dealt, except by `classes:S` (classes without a holder) and `file`. `clients` may be None where the
    partition says it: `domain`, `owner` and `file`. What cannot be done is refused before anything is drawn.
    """
    how = parse(partition)
    raw = np.asarray(labels)
    y = targets("labels", raw, len(raw), classes)
    kinds = classes if classes is not None else int(y.max(initial=-1)) + 1
    if clients is not None and (isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1):
        raise InputError("clients", clients, "a whole number of at least 1")
    if how.kind in ("domain", "owner"):
        hands = _grouped(how.kind, domain if how.kind == "domain" else owner, len(y), clients)
    elif how.kind == "file":
        hands = _from_file(Path(str(how.parameter)), len(y), clients)
    elif clients is None:
        raise InputError("clients", None, f"a whole number of at least 1 for the partition {how}")
    else:
        _possible(how, y, kinds, clients, least)
        hands = _drawn(how, y, kinds, clients, seed, least)
    small = min(range(len(hands)), key=lambda k: len(hands[k]))
    if len(hands[small]) < least:
        shown = Shown(f"{how}, which gives client {small} {len(hands[small])} of the samples")
        raise InputError("partition", shown, f"one that gives every client at least {least}, for training and testing")
    return [np.sort(hand).astype(np.int64) for hand in hands]


def _possible(how: Partition, y: Ints, classes: int, clients: int, least: int) -> None:
    """Refuse what cannot be done with this many samples, clients and classes."""
    if clients * least > len(y):
        most = f"at most {len(y) // least}: {len(y)} samples, at least {least} for each client"
        raise InputError("clients", clients, most)
    each = how.parameter
    if how.kind == "shards" and isinstance(each, int) and clients * each > len(y):
        raise InputError(
            "partition", str(how), f"at most shards:{len(y) // clients} ({len(y)} samples, {clients} clients)"
        )
    if how.kind == "classes" and isinstance(each, int):
        if each > classes:
            raise InputError("partition", str(how), f"at most classes:{classes}, the number of classes")
        caps = schemes.holder_caps(np.bincount(y, minlength=classes), clients, each, least)
        if int(caps.sum()) < clients * each:
            reason = (
                f"{clients} clients with {each} classes each want {clients * each} shares, the data has {caps.sum()}"
            )
            raise InputError("partition", str(how), f"possible with fewer clients or fewer classes ({reason})")


def _drawn(how: Partition, y: Ints, classes: int, clients: int, seed: int, least: int) -> list[Ints]:
    value = how.parameter
    if how.kind in REAL:
        real = float(value or 0)
        if how.kind == "dirichlet":
            return schemes.dirichlet(y, classes, clients, seed, real, least)
        if how.kind == "balanced-dirichlet":
            return schemes.balanced_dirichlet(y, classes, clients, seed, real)
        return schemes.lognormal(len(y), clients, seed, real, least)
    if how.kind in WHOLE:
        whole = int(value or 0)
        if how.kind == "shards":
            return schemes.shards(y, clients, seed, whole)
        return schemes.by_classes(y, classes, clients, seed, whole, least)
    return schemes.iid(len(y), clients, seed)


def _grouped(kind: str, group: Ints | None, count: int, clients: int | None) -> list[Ints]:
    """One client for each domain or owner."""
    if group is None:
        raise InputError("partition", kind, f"another one: this data does not say which {kind} a sample belongs to")
    if len(group) != count or count == 0:
        raise InputError(kind, Shown(f"{len(group)} entries"), f"one entry for each of the {count} samples")
    names, of = np.unique(group, return_inverse=True)
    if clients is not None and clients != len(names):
        raise InputError("clients", clients, f"{len(names)}, one client for each {kind}")
    order = np.argsort(of, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(of))[:-1]))


def _from_file(path: Path, count: int, clients: int | None) -> list[Ints]:
    record = load_record(path)
    if record.samples != count:
        raise InputError("partition", f"file:{path}", f"one of {count} samples (it deals {record.samples})")
    if clients is not None and clients != record.clients:
        raise InputError("clients", clients, f"{record.clients}, as {path} says")
    return [np.array(hand, np.int64) for hand in record.indices]
