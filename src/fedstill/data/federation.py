"""A federation: each client's training and test data."""

from __future__ import annotations

import html
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..core import objective as objectives
from ..core.errors import InputError, Shown, can_be_shown, printable
from ..core.memory import require
from ..core.objective import IGNORED, Objective, ObjectiveName
from . import adopt
from .dataset import Dataset, Ints
from .mapped import mapping
from .partition import Partition, deal, parse
from .preprocess import Preparation, fit
from .record import Record, load_record
from .samples import Rows, pieces
from .split import official_test, parse_split, split_indices
from .targets import AUTO

Pair = tuple[Rows, torch.Tensor]
LISTED = 20  # clients that a notebook lists


@dataclass(frozen=True, eq=False)
class Client:
    """One client's data; every split present has at least one sample. Samples are tensors, or lie in a file."""

    x_train: Rows
    y_train: torch.Tensor
    x_test: Rows
    y_test: torch.Tensor
    x_val: Rows | None = None
    y_val: torch.Tensor | None = None


@dataclass(frozen=True)
class Whole:
    """What a share of a federation knows of the whole."""

    held: frozenset[int]  # the clients whose samples are in the share
    tests: bool  # whether it has all clients' test samples
    sizes: tuple[dict[str, int], ...]  # by client the samples of each split
    checksum: str


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with the same classes and sample shape, and a global test set where there is one.

    `classes` is of other objectives than classification the number of labels, outputs or classes of tokens.
    `partition_record` is the content of partition.json; `hash` identifies the partition (for arrays, the data).
    """

    clients: tuple[Client, ...]
    classes: int
    name: str
    hash: str
    test: Pair | None = None
    partition_record: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()  # the classes' names, where the source has them
    mean: tuple[float, ...] = ()  # how the source's samples were normalised, per channel
    std: tuple[float, ...] = ()
    external: Pair | None = None  # test data of a source that no client had, normalised alike
    whole: Whole | None = None  # of a share (`only`): what is known of all clients
    names: tuple[str, ...] = ()  # the clients' names, where each is one owner or domain of the source
    objective: ObjectiveName = "classification"  # what the targets are for
    preparation: Preparation | None = (
        None  # how samples were made of tables, or scaled by the clients' training samples
    )
    notes: tuple[str, ...] = ()  # what that did, in words

    def __post_init__(self) -> None:
        """Make names such as any terminal and page shows."""
        for names in ("names", "labels"):
            shown = tuple(n if can_be_shown(n) else printable(n) for n in map(str, getattr(self, names)))
            object.__setattr__(self, names, shown)

    def __repr__(self) -> str:
        sizes = self.sizes("train")
        shape = "×".join(map(str, self.shape))
        return (
            f"Federation({self.name!r}: {len(self)} clients, {self.classes} {self.unit}, samples of {shape}, "
            f"{min(sizes):,} to {max(sizes):,} training samples each; hash {self.hash[:12]})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the clients' samples, for a notebook."""
        columns = {"train": self.sizes("train"), "test": self.sizes("test")}
        rows = [
            f"<tr><td>{html.escape(self.names[k] if self.names else str(k))}</td>"
            + "".join(f"<td>{sizes[k]:,}</td>" for sizes in columns.values())
            + "</tr>"
            for k in range(min(len(self), LISTED))
        ]
        more = f"<p>and {len(self) - LISTED:,} more clients</p>" if len(self) > LISTED else ""
        head = "".join(f"<th>{name}</th>" for name in ("client", *columns))
        return f"<p>{html.escape(repr(self))}</p><table><tr>{head}</tr>{''.join(rows)}</table>{more}"

    def __len__(self) -> int:
        return len(self.clients)

    def checksum(self) -> str:
        """Return a fast checksum of every client's samples and labels, to detect data that changed during a run."""
        if self.whole is not None:
            return self.whole.checksum
        crc = 0
        for client in self.clients:
            for tensor in (client.x_train, client.y_train, client.x_test, client.y_test, client.x_val, client.y_val):
                for piece in () if tensor is None else pieces(tensor):
                    crc = zlib.crc32(piece.contiguous().numpy().data, crc)
        return f"crc32:{crc:08x}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.clients[0].x_train.shape[1:])

    @property
    def target(self) -> tuple[int, ...]:
        """The shape of one sample's target: () of a class."""
        return tuple(self.clients[0].y_train.shape[1:])

    @property
    def unit(self) -> str:
        """What `classes` counts, in words."""
        unit = objectives.OBJECTIVES[self.objective].unit
        return unit.removesuffix("s") if self.classes == 1 and unit.endswith("s") and unit != "classes" else unit

    def learns(self, weights: str = "none", smoothing: float = 0.0) -> Objective:
        """Return the objective of the clients' targets."""
        return objectives.of(self.objective, self.classes, self.target, weights, smoothing)

    def sizes(self, split: Literal["train", "test", "val"]) -> tuple[int, ...]:
        """Return the samples that each client has in a split."""
        if self.whole is not None:
            return tuple(sizes.get(split, 0) for sizes in self.whole.sizes)
        return tuple(_sizes(client).get(split, 0) for client in self.clients)

    def only(self, clients: Collection[int], tests: bool = False) -> Federation:
        """Return a share: the same federation with these clients' samples only; with `tests`, all clients' tests as well."""
        held = frozenset(clients)
        whole = Whole(held, tests, tuple(map(_sizes, self.clients)), self.checksum())
        members = (c if k in held else _without_samples(c, tests) for k, c in enumerate(self.clients))
        return replace(self, clients=tuple(members), whole=whole)

    def counts(self) -> Ints:
        """Return the samples per class of every client, over all its splits: [clients, classes].

        Of labels those that have each, of tokens how many are of each class, of numbers all samples: [clients, 1].
        """
        rows = []
        for client in self.clients:
            y = torch.cat([client.y_train, client.y_test, *([] if client.y_val is None else [client.y_val])])
            rows.append(class_counts(self.objective, y, self.classes).numpy())
        return np.stack(rows)

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[Sequence[Any]] | Mapping[str, Sequence[Any]],
        *,
        classes: int | None = None,
        test: Sequence[Any] | None = None,
        name: str = "arrays",
        objective: str = AUTO,
        labels: Sequence[str] = (),
    ) -> Federation:
        """Build a federation from one (x_train, y_train, x_test, y_test) per client, numpy arrays or torch tensors.

        A dict has them by the clients' names. `objective` is "classification", "regression", "multilabel" or "tokens"; auto: as
        form and type of the targets say. `labels` are names of the classes, labels or outputs.
        Everything is copied. float64 stays float64, uint8 images become float32 from 0 to 1, other numbers float32.
        """
        members, names, calls = adopt.named(clients, adopt.FORM)
        found = adopt.adopt(
            adopt.quadruples(members, calls),
            calls,
            names=names,
            classes=classes,
            test=test,
            name=name,
            objective=objective,
        )
        return cls._adopted(found, name, names, tuple(labels))

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[Any] | Mapping[str, Any],
        *,
        input: str | Sequence[str] = (),
        label: str = "",
        split: str = "80/20",
        seed: int = 0,
        classes: int | None = None,
        name: str = "datasets",
        objective: str = AUTO,
    ) -> Federation:
        """Build a federation from one data set per client: torch's map-style `Dataset`s, or Hugging Face's.

        A dict has them by the clients' names. A client gives (train, test), (train, val, test), or one set that is divided as
        `split` says, by the seed and the client's number. Samples are pairs (x, y), or rows of which `input` names the columns
        of samples and `label` that of labels; by default those of the usual names (image, input_ids, x, …; label, y, …), else
        all others are numbers. A sample is a tensor, an array, an image of Pillow or a number; each is read once and copied, as
        `from_arrays` does, so transforms must not draw at random. Classes with names are the same where their names are.
        """
        members, names, calls = adopt.named(clients, "data set, or (train, test)")
        sets = adopt.read_sets(members, calls, input, label, split, seed)
        if sets.labels and classes is None and objective in (AUTO, "classification"):
            classes = len(sets.labels)
        found = adopt.adopt(sets.entries, calls, names=names, classes=classes, name=name, objective=objective)
        return cls._adopted(found, name, names, sets.labels if found.objective == "classification" else ())

    @classmethod
    def _adopted(cls, found: adopt.Adopted, name: str, names: tuple[str, ...], labels: tuple[str, ...]) -> Federation:
        parts = ("train", "test", "val")
        members = (Client(*(tensor for part in parts if part in own for tensor in own[part])) for own in found.clients)
        return cls(
            tuple(members), found.classes, name, found.hash, found.test, found.record, labels,
            names=names, objective=found.objective,
        )  # fmt: skip

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset,
        *,
        partition: str | Partition = "dirichlet:0.1",
        clients: int | None = 20,
        seed: int = 0,
        split: str = "80/20",
        pool: Literal["all", "train"] = "all",
    ) -> Federation:
        """Partition a data set among clients and split each client's samples.

        `pool="all"` partitions the official training and test splits together; `"train"` only the training split, with
        the official test split as the global test set. `split="official"` implies `"train"` and draws the local tests
        from the official test split. `clients=None` takes the number from the `owner`, `domain` or `file` partition.
        """
        if not isinstance(dataset, Dataset):
            right = "a Dataset of fedstill.data.load; for your own tensors, Federation.from_arrays"
            raise InputError("dataset", Shown(type(dataset).__name__), right)
        scheme, ratio = parse(partition), parse_split(split)
        if pool not in ("all", "train"):
            raise InputError("pool", pool, "'all' or 'train'")
        if ratio.official and (dataset.test_x is None or dataset.test_y is None):
            raise InputError("split", split, f"percentages such as '80/20': {dataset.name} has no official test part")
        pool = "train" if ratio.official else pool
        if scheme.kind == "file":
            seed = load_record(Path(str(scheme.parameter))).seed  # the same split into train and test, too
        samples = len(dataset.x) + (0 if dataset.test_x is None else len(dataset.test_x))
        numbers = (
            samples * math.prod(dataset.shape) * (1 if dataset.columns is None else 3)
        )  # features are float64 first
        # the clients' float32 samples, and the two official parts as one
        if mapping(dataset.x) is None:
            require("data", dataset.name, 4 * numbers + (dataset.x.itemsize * numbers if pool == "all" else 0))
        data = dataset.pooled() if pool == "all" else dataset
        indices = deal(
            scheme,
            _strata(data, scheme),
            clients,
            seed,
            domain=data.domain,
            owner=data.owner,
            classes=data.classes if data.objective == "classification" else 1,
            min_samples=ratio.min_samples,
        )
        record = _record(scheme, data, indices, seed, pool, split)
        none = np.empty(0, np.int64)
        parts = [
            (own, none, none) if ratio.official else split_indices(own, ratio, seed, k) for k, own in enumerate(indices)
        ]
        fitted = fit(data, [train for train, _, _ in parts], record.names)
        members = []
        for k, (train, val, test) in enumerate(parts):
            own = fitted.of(k)
            if ratio.official:
                members.append(_official_client(own, scheme, train, sum(map(len, indices)), seed, k))
                continue
            members.append(Client(*_take(own, train), *_take(own, test), *(_take(own, val) if len(val) else ())))
        common = data if data.test_x is None else fitted.of(None)
        mean, std = fitted.scaling()
        return cls(
            tuple(members), data.classes, data.name, record.hash, common.test_rows(), record.to_dict(),
            data.labels, mean, std, names=record.names, objective=data.objective, preparation=fitted.preparation,
            notes=(*data.notes, *fitted.notes),
        )  # fmt: skip


def class_counts(objective: str, y: torch.Tensor, size: int) -> torch.Tensor:
    """Return how many of the targets are of each class (see `Federation.counts`)."""
    if objective == "regression":
        return torch.tensor([len(y)])
    if objective == "multilabel":
        return (y > 0.5).sum(0)
    return torch.bincount(y[y != IGNORED], minlength=size)


BY_CLASS = ("dirichlet", "balanced-dirichlet", "shards", "classes")  # partitions that look at a sample's class


def _strata(data: Dataset, scheme: Partition) -> Ints:
    """Return the classes by which samples are dealt; where they have no single class, one for all."""
    if data.objective == "classification":
        return data.y
    if scheme.kind in BY_CLASS:
        right = f"iid, lognormal:σ, owner, domain or file with {data.objective}, where a sample is not of one class"
        raise InputError("partition", str(scheme), right)
    return np.zeros(len(data.y), np.int64)


def _sizes(client: Client) -> dict[str, int]:
    splits = {"train": client.y_train, "test": client.y_test, "val": client.y_val}
    return {name: len(y) for name, y in splits.items() if y is not None}


def _without_samples(client: Client, tests: bool) -> Client:
    """Return a client without its samples, or with its tests alone; what is left out takes no memory."""
    tensors = {f.name: getattr(client, f.name) for f in fields(client)}
    kept = ("x_test", "y_test") if tests else ()
    return Client(**{n: t if t is None or n in kept else t[:0].clone() for n, t in tensors.items()})


def _take(data: Dataset, index: Ints) -> Pair:
    return data.rows(index), torch.from_numpy(data.y[index])


def _official_client(data: Dataset, scheme: Partition, indices: Ints, total: int, seed: int, client: int) -> Client:
    """Return a client tested on its share of the official test split; all of it that is of its own domain or owner."""
    assert data.test_x is not None  # refused before anything was dealt
    assert data.test_y is not None
    group, test_group = {"domain": (data.domain, data.test_domain), "owner": (data.owner, data.test_owner)}.get(
        scheme.kind, (None, None)
    )
    if group is not None and test_group is not None:
        index = np.flatnonzero(test_group == group[indices[0]])
        if len(index) == 0:
            raise InputError("split", "official", f"percentages such as '80/20': client {client} has no official tests")
    else:
        own, asked = data.y[indices], data.test_y
        if data.objective != "classification":  # as if all were of one class
            own, asked = np.zeros(len(own), np.int64), np.zeros(len(asked), np.int64)
        index = official_test(own, asked, data.classes, total, seed, client)
    tests = data.rows(index, test=True), torch.from_numpy(data.test_y[index])
    return Client(*_take(data, indices), *tests)


def _record(scheme: Partition, data: Dataset, indices: list[Ints], seed: int, pool: str, split: str) -> Record:
    """Return the record for partition.json; a partition read from a file keeps the record of how it was drawn."""
    lists = tuple(tuple(int(i) for i in own) for own in indices)
    if scheme.kind != "file":
        parameter = scheme.parameter if scheme.sigma is None else str(scheme).partition(":")[2]
        names = _client_names(scheme.kind, data, indices)
        return Record(
            scheme.kind, parameter, len(lists), seed, data.name, len(data), lists, pool, split, names, data.labels
        )
    saved = load_record(Path(str(scheme.parameter)))
    for name, value, right in (("source", saved.source, data.name), ("pool", saved.pool, pool)):
        if value != right:
            raise InputError("partition", str(scheme), f"one whose {name} is {right!r} (this one's is {value!r})")
    return replace(saved, split=split, indices=lists)


def _client_names(kind: str, data: Dataset, indices: Sequence[Ints]) -> tuple[str, ...]:
    """Return the clients' names where each client is one owner or domain that has a name; else none."""
    group = {"owner": data.owner, "domain": data.domain}.get(kind)
    if group is None or not data.groups:
        return ()
    return tuple(data.groups[int(group[own[0]])] for own in indices)
