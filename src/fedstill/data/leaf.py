"""FEMNIST as LEAF writes it (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018): a writer is a client.

From `data/femnist` of the repository TalwalkarLab/leaf (preprocess/data_to_json.py): JSON files, at most 100 writers in
each, of the form {users, num_samples, user_data: {user: {x: [[784 numbers from 0 to 1] …], y: [class …]}}}; classes 0–9
are the digits, 10–35 the capitals, 36–61 the small letters. `preprocess.sh -s niid --sf 1.0 -k 0 -t sample` leaves them
in `train/` and `test/`. `femnist:letters10` keeps the small letters a to j, numbered 0 to 9, as FedProx's FEMNIST does;
FedBSD says "10 handwritten letters" and not which.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError, Shown
from .dataset import Array, Dataset, Ints, dataset, samples, targets
from .files import content, wrong

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
LETTERS10 = CHARACTERS.index("a")

Hands = dict[str, tuple[Array, Ints]]  # each writer's images and labels


def femnist_set(name: str, folder: Path, letters10: bool = False) -> Dataset:
    """FEMNIST, whole or its ten letters; writers are owners, those with training samples first."""
    train, test = (_part(folder / part, letters10) for part in ("train", "test"))
    if not train or not test:
        raise InputError("data", name, f"with samples of these classes in train and in test under {folder}")
    writers = [*train, *(writer for writer in test if writer not in train)]
    numbers = {writer: k for k, writer in enumerate(writers)}
    characters = CHARACTERS[LETTERS10 : LETTERS10 + 10] if letters10 else CHARACTERS
    return dataset(
        name,
        str(folder),
        np.concatenate([x for x, _ in train.values()]),
        np.concatenate([y for _, y in train.values()]),
        (np.concatenate([x for x, _ in test.values()]), np.concatenate([y for _, y in test.values()])),
        len(characters),
        owner=_owners(train, numbers),
        test_owner=_owners(test, numbers),
        labels=tuple(characters),
        groups=tuple(writers),
    )


def _owners(hands: Hands, numbers: dict[str, int]) -> Ints:
    return np.repeat([numbers[w] for w in hands], [len(y) for _, y in hands.values()]).astype(np.int64)


def _part(folder: Path, letters10: bool) -> Hands:
    """All writers of a folder's files that have a sample to keep."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise InputError("data", str(folder), "a folder with LEAF's json files")
    hands: Hands = {}
    seen: dict[str, Path] = {}
    for path in files:
        for writer, (x, y) in _file(path).items():
            if writer in seen:
                raise wrong(path, f"one whose writers are in no other file ({writer} is also in {seen[writer].name})")
            seen[writer] = path
            if letters10:
                kept = (y >= LETTERS10) & (y < LETTERS10 + 10)
                x, y = x[kept], y[kept] - LETTERS10
            if len(y):
                hands[writer] = x, y
    return hands


def _file(path: Path) -> Hands:
    """One file's writers; the numbers turn into arrays writer by writer, so that the text is the largest thing here."""
    given = read_json(path)
    users, counts, data = (given.get(key) for key in ("users", "num_samples", "user_data"))
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)):
        raise wrong(path, "a JSON object with users, num_samples and user_data")
    if len(users) != len(counts) or set(map(str, users)) != set(data) or len(users) != len(data):
        raise wrong(path, "one whose users, num_samples and user_data name the same writers")
    hands: Hands = {}
    for user, count in zip(map(str, users), counts, strict=True):
        where = f"{path}, writer {user}"
        own = data.pop(user)
        x, y = (own.get("x"), own.get("y")) if isinstance(own, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != count or len(y) != count:
            raise InputError(where, Shown("its samples"), f"{count} images x and {count} labels y as num_samples says")
        if not count:
            continue
        pixels = _array(where, x)
        if pixels.shape != (count, 784):
            raise InputError(where, Shown(f"x of shape {pixels.shape}"), "images of 784 numbers")
        pixels = samples(where, pixels)
        if pixels.min() < 0 or pixels.max() > 1:
            raise InputError(where, Shown(f"x from {pixels.min():g} to {pixels.max():g}"), "numbers from 0 to 1")
        hands[user] = pixels.reshape(-1, 1, 28, 28), targets(where, _array(where, y), count, len(CHARACTERS))
    return hands


def _array(where: str, given: list[Any]) -> Array:
    try:
        return np.asarray(given)
    except ValueError:
        raise InputError(where, Shown("lists of differing lengths"), "images of 784 numbers") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        given = json.loads(content(path))
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"a whole JSON file ({error})") from None
    if not isinstance(given, dict):
        raise wrong(path, "a JSON file that holds an object")
    return given
