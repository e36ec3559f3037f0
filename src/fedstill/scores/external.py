"""Test data of a source that no client had, fitted to what the models were trained on or refused before any training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.errors import InputError, Shown
from ..core.objective import ObjectiveName
from ..data import Dataset, Federation, load
from ..data.arrays import read_samples, read_targets
from ..data.columns import Columns
from ..data.federation import Pair
from ..data.gather import unknown_note
from ..data.preprocess import Preparation, applied


@dataclass(frozen=True)
class Samples:
    """What the models of a federation take and tell apart."""

    name: str
    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...]  # the classes' names, where they are known
    mean: tuple[float, ...]  # how samples were normalised
    std: tuple[float, ...]
    objective: ObjectiveName = "classification"
    preparation: Preparation | None = None

    @classmethod
    def of(cls, data: Federation) -> Samples:
        """Return the description of a federation's samples."""
        return cls(
            data.name, data.shape, data.classes, data.labels, data.mean, data.std, data.objective, data.preparation
        )

    def read(self, data: Dataset | Sequence[Any]) -> Pair:
        """Read a data set, normalised as the federation's, or return (x, y) unchanged; refuse data that does not fit."""
        if isinstance(data, Dataset):
            if data.objective != self.objective:
                raise InputError(
                    "external", Shown(f"data for {data.objective}"), f"for {self.objective} as {self.name} is"
                )
            data = self._alike(data)
            self._same("external", data.shape, data.classes)
            if self.labels and data.labels and self.labels != data.labels:
                odd = next(
                    (a, b) for a, b in zip((*data.labels, "(none)"), (*self.labels, "(none)"), strict=False) if a != b
                )
                raise InputError(
                    "external",
                    Shown(f"{data.name} with a class {odd[0]!r}"),
                    f"{odd[1]!r} there, as {self.name} has it",
                )
            whole = data.pooled()
            return whole.rows(), torch.from_numpy(whole.y)
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise InputError("external", Shown(type(data).__name__), "a Dataset or (x, y)")
        x = read_samples("external.x", data[0])
        self._same("external", tuple(x.shape[1:]), self.classes)
        return x, read_targets("external.y", data[1], len(x), self.classes, self.objective)

    def _alike(self, data: Dataset) -> Dataset:
        """Return a data set whose samples are made as the federation's are."""
        made = self.preparation
        if made is None:
            return replace(data, mean=self.mean, std=self.std)
        if made.own:
            raise InputError(
                "external", data.name, "left out where each site's samples are prepared by its own statistics"
            )
        if made.columns is not None:
            own = data.columns or Columns.of_numbers(data.x.shape[1])
            if own.names != made.columns.names:
                raise InputError("external", data.name, f"a table with the columns {', '.join(made.columns.names)}")
            data = replace(data, x=own.recoded(data.x, made.columns), columns=made.columns)
        return applied(data, made.of(None))

    def _same(self, where: str, shape: tuple[int, ...], classes: int) -> None:
        if shape != self.shape:
            size = "×".join(map(str, self.shape))
            hint = "; PATH@SIZE resizes images" if len(shape) == 3 else ""
            shown = f"samples of shape {'×'.join(map(str, shape))}"
            raise InputError(where, Shown(shown), f"of shape {size} as {self.name} is{hint}")
        if classes != self.classes:
            raise InputError(where, Shown(f"data of {classes} classes"), f"of {self.classes} classes as {self.name} is")


def with_external(
    federation: Federation, source: str, clients_source: str, root: str | None, memory_map: str = "auto"
) -> Federation:
    """Return the federation with external data from `source`, where one is named, beside that of `clients_source`."""
    if not source or federation.external is not None:
        return federation
    if overlap(source, clients_source):
        raise InputError("external", source, f"a source that no client has, unlike a part of {clients_source}")
    try:
        made = federation.preparation
        rules = None if made is None else made.rules
        dataset = load(source, root, objective=federation.objective, preprocessing=rules, memory_map=memory_map)
    except InputError as error:
        raise InputError("external", error.value if error.field == "data" else source, error.right) from None
    columns = None if federation.preparation is None else federation.preparation.columns
    try:
        pair = Samples.of(federation).read(dataset)
        unknown = {} if columns is None or dataset.columns is None else dataset.columns.unknown(dataset.x, columns)
        notes = tuple(f"external: {note}" for note in unknown_note(unknown))
        return replace(federation, external=pair, notes=(*federation.notes, *notes))
    except InputError as error:
        raise InputError("external", Shown(f"{source} ({error.value})"), error.right) from None


def overlap(a: str, b: str) -> bool:
    """Return whether two sources, as they are written, share samples: `x#c` lies in `x` and in `x#b,c`, not in `x#a`.

    >>> overlap("x@8#c", "x@8"), overlap("x#c", "x#a,b"), overlap("mnist@28", "usps+mnist@28")
    (True, False, True)
    """
    (names_a, domains_a), (names_b, domains_b) = _written(a), _written(b)
    return bool(names_a & names_b) and (not domains_a or not domains_b or bool(domains_a & domains_b))


def _written(text: str) -> tuple[set[str], set[str]]:
    """Return (names joined by +, or the one path; domains after #)."""
    source, _, domains = text.partition("#")
    source = re.sub(r"@\d+$", "", source)
    names = source.split("+") if re.fullmatch(r"[a-z0-9+-]+", source) else [source]
    return set(names), {domain.strip() for domain in domains.split(",") if domain.strip()}
