"""A user's own arrays and data sets, client by client, as checked tensors; what is wrong is named by client and entry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.errors import InputError, Shown, can_be_shown
from ..core.objective import ObjectiveName
from . import arrays, selection
from .arrays import check_same, read_samples, read_targets
from .dataset import MAX_CLASSES
from .split import SplitRatio, parse_split, split_indices
from .targets import AUTO, Array, decide, size_of

Entry = Mapping[str, tuple[Any, Any]]  # of one client: train, test and, where there is one, val, each (x, y)
Tensors = tuple[torch.Tensor, torch.Tensor]
TWICE = 16  # samples of a data set that are read a second time
FORM = "(x_train, y_train, x_test, y_test)"


@dataclass(frozen=True)
class Adopted:
    """Clients' tensors by split, and what is known of all."""

    clients: tuple[Mapping[str, Tensors], ...]
    test: Tensors | None
    classes: int
    objective: ObjectiveName
    hash: str
    record: dict[str, Any]


def named(clients: Any, form: str) -> tuple[list[Any], tuple[str, ...], list[str]]:
    """Return clients, their names where they are given by name, and how an error calls each."""
    if isinstance(clients, Mapping):
        names = tuple(clients)
        for name in names:
            if not isinstance(name, str) or not name or not can_be_shown(name):
                raise InputError("clients", Shown(repr(name)), "named by texts of printable characters")
        members, calls = list(clients.values()), [f"clients[{name!r}]" for name in names]
    else:
        if isinstance(clients, str) or not isinstance(clients, Sequence):
            raise InputError("clients", type(clients).__name__, f"a list of at least one {form}, or a dict by name")
        members, names, calls = list(clients), (), [f"clients[{k}]" for k in range(len(clients))]
    if not members:
        raise InputError("clients", type(clients).__name__, f"a list of at least one {form}")
    return members, names, calls


def quadruples(members: Sequence[Any], calls: Sequence[str]) -> list[Entry]:
    """Return each client's (x_train, y_train, x_test, y_test) by split."""
    entries: list[Entry] = []
    for four, call in zip(members, calls, strict=True):
        if not isinstance(four, tuple | list) or len(four) != 4:
            size = f" of {len(four)}" if isinstance(four, tuple | list) else ""
            raise InputError(call, type(four).__name__ + size, FORM)
        entries.append({"train": (four[0], four[1]), "test": (four[2], four[3])})
    return entries


def adopt(
    entries: Sequence[Entry],
    calls: Sequence[str],
    *,
    names: tuple[str, ...] = (),
    classes: int | None = None,
    test: Any = None,
    name: str,
    objective: str = AUTO,
) -> Adopted:
    """Copy everything into tensors of one dtype. The hash is of numbers alone: names play no part in it."""
    if isinstance(classes, np.integer):
        classes = int(classes)
    if isinstance(classes, bool) or not (classes is None or (isinstance(classes, int) and 1 <= classes <= MAX_CLASSES)):
        raise InputError("classes", classes, f"a whole number of at least 1 and at most {MAX_CLASSES:,}")
    xs: dict[str, torch.Tensor] = {}
    raw: dict[str, tuple[str, Any]] = {}
    called: dict[str, str] = {}
    keys: dict[tuple[int, str], str] = {}
    for k, (entry, call) in enumerate(zip(entries, calls, strict=True)):
        for subset, (x, y) in entry.items():
            key = keys[k, subset] = f"clients[{k}].x_{subset}"
            called[key] = f"{call}.x_{subset}"
            xs[key] = read_samples(called[key], x)
            raw[key] = f"{call}.y_{subset}", y
    if test is not None:
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise InputError("test", type(test).__name__, "(x, y)")
        called["test.x"] = "test.x"
        xs["test.x"] = read_samples("test.x", test[0])
        raw["test.x"] = "test.y", test[1]
    found = {key: arrays.array(*pair) for key, pair in raw.items()}
    kind = decide(f"{calls[0]}.y_train", list(found.values()), objective)
    ys = {key: read_targets(raw[key][0], y, len(xs[key]), classes, kind) for key, y in found.items()}
    xs = check_same(xs, called)
    digest = hashlib.sha256()
    for key, x in xs.items():
        digest.update(f"{key} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.numpy().tobytes())
        digest.update(ys[key].numpy().tobytes())
    if classes is None:
        classes = size_of("clients", [y.numpy() for y in ys.values()], kind)
    members = tuple({s: (xs[keys[k, s]], ys[keys[k, s]]) for s in entry} for k, entry in enumerate(entries))
    sizes = [[len(splits[s][1]) for s in ("train", "test")] for splits in members]
    record = {"format": 1, "kind": "arrays", "clients": len(members), "source": name, "sizes": sizes}
    record |= {"names": list(names)} if names else {}
    tests = (xs["test.x"], ys["test.x"]) if test is not None else None
    return Adopted(members, tests, classes, kind, digest.hexdigest(), {**record, "hash": digest.hexdigest()})


@dataclass
class Read:
    """One data set as arrays: samples, labels (numbers or names), and the names of classes that numbers stand for."""

    x: Array
    y: Array
    labels: tuple[str, ...] = ()


@dataclass
class Sets:
    """Data sets of clients, read."""

    entries: list[Entry] = field(default_factory=list)
    labels: tuple[str, ...] = ()


def read_sets(
    members: Sequence[Any], calls: Sequence[str], input: str | Sequence[str], label: str, split: str, seed: int
) -> Sets:
    """Read each client's data set, or (train, test) or (train, val, test); one alone is divided as `split` says."""
    ratio = parse_split(split)
    if ratio.official:
        raise InputError("split", split, "percentages such as '80/20'; a test set is given as (train, test)")
    read: list[dict[str, Read]] = []
    for k, (member, call) in enumerate(zip(members, calls, strict=True)):
        given = _parts(member, call)
        found = {
            part: _read(f"{call}.{part}" if len(given) > 1 else call, of, input, label) for part, of in given.items()
        }
        read.append(_divided(found["train"], ratio, seed, k, call) if len(found) == 1 else found)
    if len({"val" in parts for parts in read}) > 1:
        odd = next(call for call, parts in zip(calls, read, strict=True) if "val" not in parts)
        raise InputError(odd, Shown("a client without validation data"), "(train, val, test), as others have some")
    labels = _same_labels([one for parts in read for one in parts.values()])
    return Sets([{part: (one.x, one.y) for part, one in parts.items()} for parts in read], labels)


def _parts(member: Any, call: str) -> dict[str, Any]:
    """Return the data sets of a client by split."""
    if isinstance(member, Mapping):  # a DatasetDict
        names = {"train": "train", "val": "validation", "test": "test"}
        found = {part: member[name] for part, name in names.items() if name in member}
        if "train" not in found or ("val" in found and "test" not in found):
            raise InputError(call, Shown(f"one with {', '.join(map(str, member))}"), "one with train and test")
        return found
    if isinstance(member, tuple | list):
        if len(member) not in (2, 3):
            raise InputError(call, Shown(f"{len(member)} data sets"), "a data set, (train, test) or (train, val, test)")
        return dict(zip(("train", "test") if len(member) == 2 else ("train", "val", "test"), member, strict=True))
    return {"train": member}


def _divided(whole: Read, ratio: SplitRatio, seed: int, client: int, call: str) -> dict[str, Read]:
    """Divide a client's samples at random, by the seed and its number."""
    if len(whole.y) < ratio.min_samples:
        raise InputError(call, Shown(f"{len(whole.y)} samples"), f"at least {ratio.min_samples}, to train and to test")
    train, val, test = split_indices(np.arange(len(whole.y)), ratio, seed, client)
    rows = {"train": train, "test": test, **({"val": val} if len(val) else {})}
    return {part: Read(whole.x[index], whole.y[index], whole.labels) for part, index in rows.items()}


def _read(where: str, data: Any, input: str | Sequence[str], label: str) -> Read:
    """Read a map-style data set whole: torch's, or one of Hugging Face."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        right = "a data set with __len__ and __getitem__ (an iterable one has no samples by number)"
        raise InputError(where, Shown(type(data).__name__), right)
    count = len(data)
    if count == 0:
        raise InputError(where, Shown("a data set without samples"), "one of at least one sample")
    features = getattr(data, "features", None)
    fields = None
    if isinstance(features, Mapping) and hasattr(data, "column_names"):  # of Hugging Face
        fields = selection.choose(where, list(features), input, label)
    for i in dict.fromkeys(np.linspace(0, count - 1, min(TWICE, count)).astype(int).tolist()):
        first, again = _sample(where, data, i, fields, input, label), _sample(where, data, i, fields, input, label)
        same = np.array_equal(first[0], again[0], equal_nan=first[0].dtype.kind == "f") and np.array_equal(
            first[1], again[1]
        )
        if not same:
            right = "the same each time that it is read: leave transforms that draw at random to augment (--augment)"
            raise InputError(where, Shown(f"sample {i}, which differs when it is read again"), right)
    x, y = selection.Column(where, count), []
    for i in range(count):
        sample, target = _sample(where, data, i, fields, input, label)
        x.add(sample)
        y.append(target)
    try:
        targets = np.stack(y)
    except ValueError:
        raise InputError(where, Shown("labels of differing shapes"), "one label, or equally many, a sample") from None
    return Read(x.out, targets, _class_names(data, fields[1] if fields else ""))


def _sample(
    where: str, data: Any, i: int, fields: tuple[tuple[str, ...], str] | None, input: str | Sequence[str], label: str
) -> tuple[Array, Array]:
    """Return a sample and its target: of a pair (x, y), or of a row by column."""
    try:
        item = data[i]
    except Exception as error:  # of somebody else's code
        raise InputError(
            where, Shown(f"sample {i}"), f"one that can be read ({type(error).__name__}: {error})"
        ) from None
    if isinstance(item, Mapping):
        inputs, target = fields or selection.choose(where, list(item), input, label)
        return selection.joined(where, [item[name] for name in inputs]), _target(where, item[target])
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(where, Shown(f"sample {i}, {type(item).__name__}"), "a pair (x, y), or a row by column")
    return selection.value_of(where, item[0]), _target(where, item[1])


def _target(where: str, value: Any) -> Array:
    """Return a label: a number, a name, or an array."""
    found = np.asarray(value) if isinstance(value, str) else arrays.array(where, value)
    if found.dtype.kind not in "buifU":
        raise InputError(where, Shown(f"a label of type {type(value).__name__}"), "a number, a name or an array")
    return found


def _class_names(data: Any, label: str) -> tuple[str, ...]:
    """Return the names of classes that a data set has: of its label's feature, or its own `classes`, as torchvision's have."""
    names = getattr(getattr(data, "features", {}).get(label) if label else None, "names", None)
    inner = data
    while names is None and inner is not None:
        names, inner = getattr(inner, "classes", None), getattr(inner, "dataset", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()


def _same_labels(sets: Sequence[Read]) -> tuple[str, ...]:
    """Make labels numbers of the same classes everywhere, by their names where they have some; return the names."""
    texts = [one.y.dtype.kind == "U" for one in sets]
    if any(texts) and not all(texts):
        raise InputError("label", Shown("names in some data sets and numbers in others"), "names or numbers in all")
    if all(texts):
        labels = tuple(sorted({str(name) for one in sets for name in np.unique(one.y)}))
        for one in sets:
            one.y = np.searchsorted(np.array(labels), one.y)
        return labels
    known = {one.labels for one in sets}
    if len(known) == 1:
        return known.pop()
    if () in known:
        return ()
    labels = tuple(sorted({name for names in known for name in names}))
    for one in sets:  # a folder for each class at each site: number 0 is not the same class everywhere
        if one.y.ndim != 1 or one.y.dtype.kind not in "iu" or one.y.min() < 0 or one.y.max() >= len(one.labels):
            raise InputError("label", Shown("classes named in differing ways"), "a number of a name in each sample")
        one.y = np.array([labels.index(name) for name in one.labels])[one.y]
    return labels
