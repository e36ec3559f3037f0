"""A federation: what each client trains and is tested on."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..core.errors import InputError, Shown
from .arrays import check_same, read_labels, read_samples
from .dataset import Dataset, Ints
from .partition import Partition, deal, parse
from .record import Record, load_record
from .split import cut, official_test, parse_split

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Client:
    """One client's data; every part that is there has at least one sample."""

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    x_val: torch.Tensor | None = None
    y_val: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with the same classes and the same shape of sample, and a global test set where there is one.

    `partition_record` is what partition.json holds; `hash` identifies the partition (or, for arrays, the data).
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

    def __len__(self) -> int:
        return len(self.clients)

    def checksum(self) -> str:
        """A fast checksum of every client's samples and labels, to notice data that has changed under a run."""
        crc = 0
        for client in self.clients:
            for part in (client.x_train, client.y_train, client.x_test, client.y_test, client.x_val, client.y_val):
                if part is not None:
                    crc = zlib.crc32(part.contiguous().numpy().tobytes(), crc)
        return f"crc32:{crc:08x}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.clients[0].x_train.shape[1:])

    def counts(self) -> Ints:
        """How many samples of each class every client has in all its parts: [clients, classes]."""
        rows = []
        for client in self.clients:
            parts = [client.y_train, client.y_test, *([] if client.y_val is None else [client.y_val])]
            rows.append(torch.bincount(torch.cat(parts), minlength=self.classes).numpy())
        return np.stack(rows)

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[Sequence[Any]],
        *,
        classes: int | None = None,
        test: Sequence[Any] | None = None,
        name: str = "arrays",
    ) -> Federation:
        """A federation from one (x_train, y_train, x_test, y_test) a client, in numpy arrays or torch tensors.

        Everything is copied. float64 stays float64, uint8 images become float32 from 0 to 1, other numbers float32.
        """
        if isinstance(classes, np.integer):
            classes = int(classes)
        if isinstance(classes, bool) or not (classes is None or (isinstance(classes, int) and classes >= 1)):
            raise InputError("classes", classes, "a whole number of at least 1")
        if not isinstance(clients, Sequence) or len(clients) == 0:
            raise InputError(
                "clients", type(clients).__name__, "a list of at least one (x_train, y_train, x_test, y_test)"
            )
        xs: dict[str, torch.Tensor] = {}
        ys: dict[str, torch.Tensor] = {}
        for k, given in enumerate(clients):
            if not isinstance(given, tuple | list) or len(given) != 4:
                size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
                raise InputError(f"clients[{k}]", type(given).__name__ + size, "(x_train, y_train, x_test, y_test)")
            for part, x, y in (("train", given[0], given[1]), ("test", given[2], given[3])):
                where = f"clients[{k}].x_{part}"
                xs[where] = read_samples(where, x)
                ys[where] = read_labels(f"clients[{k}].y_{part}", y, len(xs[where]), classes)
        if test is not None:
            if not isinstance(test, tuple | list) or len(test) != 2:
                raise InputError("test", type(test).__name__, "(x, y)")
            xs["test.x"] = read_samples("test.x", test[0])
            ys["test.x"] = read_labels("test.y", test[1], len(xs["test.x"]), classes)
        xs = check_same(xs)
        digest = hashlib.sha256()
        for where, x in xs.items():
            digest.update(f"{where} {x.dtype} {tuple(x.shape)}\n".encode())
            digest.update(x.numpy().tobytes())
            digest.update(ys[where].numpy().tobytes())
        top = classes if classes is not None else 1 + max(int(y.max()) for y in ys.values())
        parts = [(f"clients[{k}].x_train", f"clients[{k}].x_test") for k in range(len(clients))]
        members = tuple(Client(xs[a], ys[a], xs[b], ys[b]) for a, b in parts)
        sizes = [[len(ys[a]), len(ys[b])] for a, b in parts]
        record = {"format": 1, "kind": "arrays", "clients": len(members), "source": name, "sizes": sizes}
        whole = (xs["test.x"], ys["test.x"]) if test is not None else None
        return cls(members, top, name, digest.hexdigest(), whole, {**record, "hash": digest.hexdigest()})

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
        """Deal a data set to clients and split each client's samples.

        `pool="all"` deals the official training and test parts together; `"train"` deals the training part and keeps
        the official test part as the global test set. `split="official"` implies `"train"` and draws the local tests
        from the official test part. `clients=None` takes the number from the `owner`, `domain` or `file` partition.
        """
        if not isinstance(dataset, Dataset):
            right = (
                "a fedstill.data.Dataset, as fedstill.data.load('digits') returns; arrays go to Federation.from_arrays"
            )
            raise InputError("dataset", Shown(type(dataset).__name__), right)
        how, parts = parse(partition), parse_split(split)
        if pool not in ("all", "train"):
            raise InputError("pool", pool, "'all' or 'train'")
        if parts.official and (dataset.test_x is None or dataset.test_y is None):
            raise InputError("split", split, f"percentages such as '80/20': {dataset.name} has no official test part")
        used = "train" if parts.official else pool
        if how.kind == "file":
            seed = load_record(Path(str(how.parameter))).seed  # the same division into train and test, too
        data = dataset.pooled() if used == "all" else dataset
        hands = deal(
            how,
            data.y,
            clients,
            seed,
            domain=data.domain,
            owner=data.owner,
            classes=data.classes,
            least=parts.least,
        )
        record = _record(how, data, hands, seed, used, split)
        members = []
        for k, hand in enumerate(hands):
            if parts.official:
                members.append(_official(data, how, hand, sum(map(len, hands)), seed, k))
                continue
            train, val, test = cut(hand, parts, seed, k)
            members.append(Client(*_take(data, train), *_take(data, test), *(_take(data, val) if len(val) else ())))
        return cls(
            tuple(members), data.classes, data.name, record.hash, data.test_tensors(), record.as_dict(),
            data.labels, data.mean, data.std,
        )  # fmt: skip


def _take(data: Dataset, index: Ints) -> Pair:
    return data.tensor(data.x[index]), torch.from_numpy(data.y[index])


def _official(data: Dataset, how: Partition, hand: Ints, total: int, seed: int, client: int) -> Client:
    """A client tested on its share of the official test part; a domain's or owner's own tests are taken whole."""
    assert data.test_x is not None  # refused before anything was dealt
    assert data.test_y is not None
    group, of_test = {"domain": (data.domain, data.test_domain), "owner": (data.owner, data.test_owner)}.get(
        how.kind, (None, None)
    )
    if group is not None and of_test is not None:
        index = np.flatnonzero(of_test == group[hand[0]])
        if len(index) == 0:
            raise InputError("split", "official", f"percentages such as '80/20': client {client} has no official tests")
    else:
        index = official_test(data.y[hand], data.test_y, data.classes, total, seed, client)
    tests = data.tensor(data.test_x[index]), torch.from_numpy(data.test_y[index])
    return Client(*_take(data, hand), *tests)


def _record(how: Partition, data: Dataset, hands: list[Ints], seed: int, pool: str, split: str) -> Record:
    """What partition.json holds; a partition that was read from a file keeps the account of how it was drawn."""
    lists = tuple(tuple(int(i) for i in hand) for hand in hands)
    if how.kind != "file":
        return Record(how.kind, how.parameter, len(hands), seed, data.name, len(data), lists, pool, split)
    saved = load_record(Path(str(how.parameter)))
    for name, found, wanted in (("source", saved.source, data.name), ("pool", saved.pool, pool)):
        if found != wanted:
            raise InputError("partition", str(how), f"one whose {name} is {wanted!r} (this one's is {found!r})")
    return replace(saved, split=split, indices=lists)
