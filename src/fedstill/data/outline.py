"""What is to be known of a federation without its samples: enough to make its model again and to read other samples alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import printable
from ..core.objective import OBJECTIVES, ObjectiveName
from ..core.reading import Unreadable, field, items
from .dataset import MAX_CLASSES
from .federation import Client, Federation, Whole
from .preprocess import Preparation

SPLITS = ("train", "test", "val")


@dataclass(frozen=True)
class Outline:
    """The form of a federation's samples, and the names of its clients and classes where they have names."""

    shape: tuple[int, ...]  # of a sample
    dtype: str
    classes: int
    labels: tuple[str, ...] = ()  # the classes' names
    names: tuple[str, ...] = ()  # the clients' names
    mean: tuple[float, ...] = ()  # how samples were normalised, per channel
    std: tuple[float, ...] = ()
    sizes: tuple[Mapping[str, int], ...] = ()  # by client the samples of each split
    name: str = ""  # of the data set
    objective: ObjectiveName = "classification"
    target: tuple[int, ...] = ()  # the shape of one sample's target
    preparation: Preparation | None = (
        None  # how samples were made of tables, or scaled by the clients' training samples
    )

    def __post_init__(self) -> None:
        """Make names such as any terminal shows: they may come from a file."""
        for field_name in ("names", "labels"):
            object.__setattr__(self, field_name, tuple(map(printable, getattr(self, field_name))))

    @classmethod
    def of(cls, federation: Federation) -> Outline:
        """Return the outline of a federation."""
        known = [split for split in SPLITS if split != "val" or federation.clients[0].y_val is not None]
        columns = [federation.sizes(split) for split in known]  # type: ignore[arg-type]
        return cls(
            shape=federation.shape,
            dtype=str(federation.clients[0].x_train.dtype).removeprefix("torch."),
            classes=federation.classes,
            labels=federation.labels,
            names=federation.names,
            mean=federation.mean,
            std=federation.std,
            sizes=tuple(dict(zip(known, sizes, strict=True)) for sizes in zip(*columns, strict=True)),
            name=federation.name,
            objective=federation.objective,
            target=federation.target,
            preparation=federation.preparation,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the outline as plain JSON values."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "objective": self.objective,
            "target": list(self.target),
            "classes": self.classes,
            "labels": list(self.labels),
            "names": list(self.names),
            "mean": list(self.mean),
            "std": list(self.std),
            "sizes": {split: [sizes[split] for sizes in self.sizes] for split in self.sizes[0]} if self.sizes else {},
            **({} if self.preparation is None else {"preprocessing": self.preparation.to_dict()}),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Outline:
        """Return the outline that `to_dict` wrote; raise `Unreadable` where it is none."""
        record = dict(record)
        sizes = field(record, "sizes", dict)
        splits = {split: items(sizes, split, int) for split in sizes}
        if not set(splits) >= {"train", "test"} or len({len(column) for column in splits.values()}) != 1:
            raise Unreadable("the numbers of samples of each client in train and test")
        rows = zip(*splits.values(), strict=True)
        dtype = field(record, "dtype", str)
        if dtype not in ("float32", "float64", "int64"):
            raise Unreadable("float32, float64 or int64 as dtype")
        objective = field(record, "objective", str, "classification")
        if objective not in OBJECTIVES:
            raise Unreadable(f"one of {', '.join(OBJECTIVES)} as objective")
        shape, prepared = tuple(items(record, "shape", int)), field(record, "preprocessing", dict, None)
        return cls(
            shape=shape,
            dtype=dtype,
            classes=field(record, "classes", int, least=1, most=MAX_CLASSES),
            labels=tuple(items(record, "labels", str)),
            names=tuple(items(record, "names", str)),
            mean=tuple(items(record, "mean", float)),
            std=tuple(items(record, "std", float)),
            sizes=tuple(dict(zip(splits, row, strict=True)) for row in rows),
            name=field(record, "name", str, ""),
            objective=OBJECTIVES[objective].name,
            target=tuple(items(record, "target", int)) if "target" in record else (),
            preparation=None
            if prepared is None
            else Preparation.from_dict(prepared, len(splits["train"]), shape[0] if shape else 0),
        )

    def federation(self, partition: Mapping[str, Any]) -> Federation:
        """Return the federation without any samples, whose division is this one."""
        x = torch.empty((0, *self.shape), dtype=getattr(torch, self.dtype))
        whole = OBJECTIVES[self.objective].whole
        y = torch.empty((0, *self.target), dtype=torch.int64 if whole else torch.promote_types(x.dtype, torch.float32))
        nobody = Client(x, y, x, y, *((x, y) if self.sizes and "val" in self.sizes[0] else ()))
        checksum = str(partition.get("contents", ""))
        known = Whole(frozenset(), False, tuple(dict(sizes) for sizes in self.sizes), checksum)
        return Federation(
            (nobody,) * len(self.sizes), self.classes, self.name, str(partition.get("hash", "")), None, dict(partition),
            self.labels, self.mean, self.std, None, known, self.names, self.objective, self.preparation,
        )  # fmt: skip

    def client(self, k: int) -> str:
        """Return a client's name, or its number where it has none."""
        return self.names[k] if k < len(self.names) else str(k)

    def label(self, c: int) -> str:
        """Return a class's name, or its number where it has none."""
        return self.labels[c] if c < len(self.labels) else str(c)

    def find(self, client: str | int) -> int | None:
        """Return the number of the client with this name or number; None where there is none."""
        if isinstance(client, str) and client in self.names:
            return self.names.index(client)
        try:
            number = int(client)
        except ValueError:
            return None
        return number if 0 <= number < len(self.sizes) else None
