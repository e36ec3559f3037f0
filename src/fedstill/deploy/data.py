"""What a site tells of its data, and federations of which a process holds one client's samples, or nobody's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.errors import InputError, Shown
from ..core.objective import OBJECTIVES, ObjectiveName
from ..core.reading import Unreadable, field
from ..data import Federation
from ..data import load as load_source
from ..data.dataset import Dataset
from ..data.federation import Client, Whole
from ..data.preprocess import Preparation
from ..data.rules import Preprocessing
from .disclosure import check_texts
from .preparation import LONGEST, Agreed, Prepared, RawSite, totals_from_dict

SPLITS = ("train", "test", "val")
USUAL: dict[str, Any] = {"objective": "classification", "target": []}  # of a site of an earlier version


@dataclass(frozen=True, eq=False)
class SiteData:
    """A site's own data, which stays where it is."""

    client: Client
    classes: int
    labels: tuple[str, ...] = ()
    objective: ObjectiveName = "classification"
    raw: RawSite | None = None  # as it was read, for a run that has rules for its samples
    preparation: Preparation | None = None  # by which the client's samples were made

    @classmethod
    def read(
        cls,
        path: str,
        split: str = "80/20",
        objective: str = "auto",
        *,
        label: str = "",
        ignore: str = "",
        encode: str = "onehot",
    ) -> SiteData:
        """Read an npz or CSV file or a folder; what has no test part of its own is divided by `split`.

        `label` and `ignore` name columns of tables, and `encode` those that are texts whatever they hold. What is done with gaps
        and texts a run says: until then `client` has the columns as they are, gaps and categories as numbers. Columns with
        texts of few rows are refused unless `encode` names them: the hub learns all texts.
        """
        rules = Preprocessing(label=label, ignore=ignore, encode=encode, impute="mean")
        dataset = _read(path, objective, rules)
        check_texts(dataset, rules.as_texts)
        raw = RawSite(dataset, split)
        if len(json.dumps(raw.about())) > LONGEST:
            raise InputError(
                "data", path, f"one whose columns and categories are named in at most {LONGEST:,} characters"
            )
        plain = dataset
        if dataset.columns is not None:
            plain = dataclasses.replace(
                dataset, x=np.nan_to_num(dataset.x).astype(np.float32), columns=None, rules=Preprocessing()
            )
        tests = plain.test_rows()
        if tests is not None:
            train = plain.rows(), torch.from_numpy(plain.y.copy())
            return cls(Client(*train, *tests), dataset.classes, dataset.labels, dataset.objective, raw)
        whole = Federation.from_dataset(plain, partition="iid", clients=1, split=split)
        return cls(whole.clients[0], dataset.classes, dataset.labels, dataset.objective, raw)

    def under(self, made: Mapping[str, Any] | None) -> SiteData:
        """Return the data with its samples made as the hub's message says (`Prepared.for_sites`); without one, as they are."""
        if made is None:
            if self.raw is not None and not self.raw.plain:
                right = "numbers without gaps, or a run that says what is done with gaps and texts (impute, encode)"
                raise InputError("data", Shown("a table with gaps or texts"), right)
            return self
        if self.raw is None:
            raise InputError("data", Shown("arrays"), "read from a file: the run prepares its samples")
        try:
            agreed = Agreed.from_dict(field(dict(made), "agreed", dict))
            totals = totals_from_dict(field(dict(made), "totals", dict)) if "totals" in made else None
        except Unreadable as error:
            raise InputError("preparation", Shown("of the hub"), str(error)) from None
        ready = self.raw.under(agreed)
        transform, data = ready.transform(totals), ready.data
        preparation = Preparation(agreed.rules, data.columns, self.raw.data.label_columns, transform)
        return dataclasses.replace(
            self, client=ready.client(transform), classes=data.classes, labels=data.labels, preparation=preparation
        )

    def about(self) -> dict[str, Any]:
        """Return what the hub must know: shape, classes and numbers of samples, and a checksum that tells of a change."""
        alone = Federation((self.client,), self.classes, "", "")
        sizes = {split: size for split in SPLITS if (size := alone.sizes(split)[0])}  # type: ignore[arg-type]
        shape = list(self.client.x_train.shape[1:])
        dtype = str(self.client.x_train.dtype).removeprefix("torch.")
        return {
            "shape": shape,
            "dtype": dtype,
            "classes": self.classes,
            "objective": self.objective,
            "target": list(self.client.y_train.shape[1:]),
            "labels": list(self.labels),
            "sizes": sizes,
            "checksum": alone.checksum() + ("" if self.raw is None else self.raw.checksum()),
            **({} if self.raw is None else self.raw.about()),
        }

    def among(self, client: int, clients: int, classes: int) -> Federation:
        """Return the federation as this site sees it: it is one of the clients, of the others it holds and knows nothing."""
        everyone = [_empty(self.client)] * clients
        everyone[client] = self.client
        alone = Federation((self.client,), self.classes, "", "")
        own = {split: alone.sizes(split)[0] for split in SPLITS}  # type: ignore[arg-type]
        sizes = tuple(own if k == client else dict.fromkeys(SPLITS, 0) for k in range(clients))
        whole = Whole(frozenset([client]), False, sizes, alone.checksum())
        record = {"format": 1, "kind": "arrays", "clients": clients}
        return Federation(
            tuple(everyone), classes, "site", whole.checksum, None, record, self.labels, whole=whole,
            objective=self.objective,
        )  # fmt: skip


def problems(names: Sequence[str], abouts: Sequence[Mapping[str, Any]]) -> list[InputError]:
    """Return what does not fit together in how the sites describe their data, each with the site's name."""
    first, found = abouts[0], []
    for name, about in zip(names, abouts, strict=True):
        for what in ("shape", "dtype", "objective", "target"):
            if about.get(what, USUAL.get(what)) != first.get(what, USUAL.get(what)):
                right = f"{first[what]} as at site {names[0]!r}"
                found.append(
                    InputError(f"{what} of site {name!r}", Shown(str(about.get(what, USUAL.get(what)))), right)
                )
        tables = "table" in about and "table" in first  # these agree on their classes by name
        if about["labels"] and first["labels"] and about["labels"] != first["labels"] and not tables:
            right = f"{', '.join(first['labels'])}, as at site {names[0]!r}"
            found.append(InputError(f"classes of site {name!r}", Shown(", ".join(about["labels"])), right))
        if bool(about["sizes"].get("val")) != bool(first["sizes"].get("val")):
            right = f"there or not as at site {names[0]!r}"
            found.append(InputError(f"validation data of site {name!r}", Shown("there or not"), right))
    return found


def skeleton(names: Sequence[str], abouts: Sequence[Mapping[str, Any]], prepared: Prepared | None = None) -> Federation:
    """Return the federation as the hub sees it: no samples, but how the sites describe theirs. Refuse what does not fit."""
    first = abouts[0]
    for problem in problems(names, abouts):
        raise problem
    validated = {bool(first["sizes"].get("val"))}
    x = torch.empty((0, *first["shape"]), dtype=getattr(torch, first["dtype"]))
    learned = OBJECTIVES[first.get("objective", "classification")]
    y = torch.empty(
        (0, *first.get("target", ())),
        dtype=torch.int64 if learned.whole else torch.promote_types(x.dtype, torch.float32),
    )
    nobody = Client(x, y, x, y, *((x, y) if True in validated else ()))
    sums = ",".join(str(about["checksum"]) for about in abouts)
    sizes = tuple({split: int(about["sizes"].get(split, 0)) for split in SPLITS} for about in abouts)
    record = {"format": 1, "kind": "sites", "clients": len(names), "names": list(names), "sizes": list(sizes)}
    labels = tuple(first["labels"])
    classes = max(int(about["classes"]) for about in abouts)
    whole = Whole(frozenset(), False, sizes, sums)
    return Federation(
        (nobody,) * len(names),
        classes,
        "sites",
        sums,
        None,
        record,
        labels,
        whole=whole,
        names=tuple(names),
        objective=learned.name,
        preparation=None if prepared is None else prepared.preparation(),
    )


def _read(path: str, objective: str, rules: Preprocessing) -> Dataset:
    """Read a source, by the rules where it is a table."""
    try:
        return load_source(path, fetch=False, objective=objective, preprocessing=rules)
    except InputError as error:
        if error.field not in ("encode", "impute") or rules.label or rules.ignore or rules.as_texts:
            raise
        return load_source(path, fetch=False, objective=objective)


def _empty(client: Client) -> Client:
    """Return a client without samples, of the same shapes and types."""
    tensors = {f.name: getattr(client, f.name) for f in dataclasses.fields(client)}
    empty: dict[str, Any] = {name: t if t is None else t[:0].clone() for name, t in tensors.items()}
    return Client(**empty)
