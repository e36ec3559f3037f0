"""FEMNIST as LEAF writes it (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018): a writer is a client.

From `data/femnist` of the repository TalwalkarLab/leaf (preprocess/data_to_json.py): JSON files, at most 100 writers in
each, of the form {users, num_samples, user_data: {user: {x: [[784 numbers from 0 to 1] …], y: [class …]}}}; classes 0–9
are the digits, 10–35 the capitals, 36–61 the small letters. `preprocess.sh -s niid --sf 1.0 -k 0 -t sample` writes them
to `train/` and `test/`. `femnist:letters10` has only the small letters a to j, numbered 0 to 9, as FedProx's FEMNIST;
FedBSD says "10 handwritten letters" and not which.
"""

from __future__ import annotations

import json
import string
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from ..core import memory
from ..core.errors import InputError, Shown
from ..core.reading import Unreadable, described, field, items, refuse_constant, unique
from .dataset import Array, Dataset, Ints, dataset, samples, targets
from .files import read_bytes, wrong

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
LETTERS10 = CHARACTERS.index("a")

Writers = dict[str, tuple[Array, Ints]]  # each writer's images and labels


def femnist_set(name: str, folder: Path, letters10: bool = False) -> Dataset:
    """Read FEMNIST, or only ten letters of it; writers are owners, those with training samples first."""
    train, test = (_read_split(folder / split, letters10) for split in ("train", "test"))
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


def _owners(writers: Writers, numbers: dict[str, int]) -> Ints:
    return np.repeat([numbers[w] for w in writers], [len(y) for _, y in writers.values()]).astype(np.int64)


def _read_split(folder: Path, letters10: bool) -> Writers:
    """Read the writers of a folder's files, without those that have no sample of these classes."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise InputError("data", str(folder), "a folder with LEAF's json files")
    writers: Writers = {}
    file_of: dict[str, Path] = {}
    for path in files:
        for writer, (x, y) in _read_file(path).items():
            if writer in file_of:
                other = file_of[writer].name
                raise wrong(path, f"one whose writers are in no other file ({writer} is also in {other})")
            file_of[writer] = path
            if letters10:
                selected = (y >= LETTERS10) & (y < LETTERS10 + 10)
                x, y = x[selected], y[selected] - LETTERS10
            if len(y):
                writers[writer] = x, y
    return writers


def _read_file(path: Path) -> Writers:
    """Read one file's writers, converted to arrays one after another so that the parsed text dominates the memory."""
    content = read_json(path)
    try:
        users, counts = items(content, "users", str), items(content, "num_samples", int, least=0)
        data = field(content, "user_data", dict)
    except Unreadable as error:
        raise wrong(path, f"a JSON object with users, num_samples and user_data: {error}") from None
    if len(users) != len(counts) or set(users) != set(data) or len(users) != len(data):
        raise wrong(path, "one whose users, num_samples and user_data name the same writers")
    writers: Writers = {}
    for user, count in zip(users, counts, strict=True):
        where = f"{path}, writer {user}"
        own = data.pop(user)
        x, y = (own.get("x"), own.get("y")) if isinstance(own, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != count or len(y) != count:
            raise InputError(where, Shown("its samples"), f"{count} images x and {count} labels y as num_samples says")
        if not count:
            continue
        pixels = samples(where, np.stack([_numbers(where, image, 784) for image in x]))
        if pixels.min() < 0 or pixels.max() > 1:
            raise InputError(where, Shown(f"x from {pixels.min():g} to {pixels.max():g}"), "numbers from 0 to 1")
        writers[user] = pixels.reshape(-1, 1, 28, 28), targets(where, _numbers(where, y, count), count, len(CHARACTERS))
    return writers


def _numbers(where: str, values: object, count: int) -> Array:
    """Return a list of so many numbers as an array; one by one, since numpy would make texts of all if one is a text."""
    if not isinstance(values, list) or len(values) != count:
        raise InputError(where, Shown(described(values)), f"images of 784 numbers, and here {count} numbers")
    try:
        with np.errstate(over="ignore"):
            return np.frombuffer(array("d", values)).astype(np.float32)
    except (TypeError, OverflowError):
        raise InputError(where, Shown("something else than numbers, or too large ones"), f"{count} numbers") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, unless its values would not fit into the memory."""
    raw = read_bytes(path)
    weights = {b"{": 250, b"[": 64, b",": 40, b'"': 30}  # bytes that Python's objects take
    memory.require("data file", str(path), 4 * len(raw) + sum(n * raw.count(mark) for mark, n in weights.items()))
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"a whole JSON file ({error})") from None
    if not isinstance(value, dict):
        raise wrong(path, "a JSON file that holds an object")
    return value
