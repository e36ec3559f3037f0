"""iNaturalist 2017 (Van Horn et al., "The iNaturalist Species Classification and Detection Dataset", 2018).

As 2017/README.md of the repository visipedia/inat_comp describes it: train_val_images.tar.gz unpacks to
`train_val_images/SuperCategory/Species/FILE.jpg`; train_val2017.zip to `train2017.json` and `val2017.json` in COCO's
format, images {id, file_name}, categories {id, name, supercategory}, annotations {image_id, category_id}, one for each
image; 5,089 species in 13 super-categories, 579,184 + 95,986 images. A `file_name` counts from the folder that holds
`train_val_images`. The published test part has no labels: the validation part is the official test part here.
Classes are the species in the order of their ids or, as `inaturalist:super`, the super-categories by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from .dataset import Dataset, dataset
from .files import wrong
from .images import choose, decode, inside
from .leaf import read_json

FILES = ("train2017.json", "val2017.json")

Categories = dict[int, tuple[str, str]]  # name and super-category of each id


def inaturalist_set(
    name: str, folder: Path, size: int | None, coarse: bool = False, chosen: Sequence[str] = ()
) -> Dataset:
    """All images or those of the chosen super-categories; the classes are those of all."""
    known: Categories = {}
    parts = [_annotated(folder / file, known) for file in FILES]
    groups = sorted({group for _, group in known.values()})
    kept = set(choose(name, "super-category", groups, chosen))
    species = sorted(known)
    number = {c: groups.index(known[c][1]) if coarse else k for k, c in enumerate(species)}
    listed = [[(path, number[c]) for path, c in part if known[c][1] in kept] for part in parts]
    for file, part in zip(FILES, listed, strict=True):
        if not part:
            raise wrong(folder / file, f"one with images of {', '.join(sorted(kept))}")
    cut = len(listed[0])
    x = decode([path for part in listed for path, _ in part], size, colour=True)
    y = np.array([label for part in listed for _, label in part])
    labels = tuple(groups) if coarse else tuple(known[c][0] for c in species)
    return dataset(name, str(folder), x[:cut], y[:cut], (x[cut:], y[cut:]), len(labels), labels=labels)


def _annotated(path: Path, known: Categories) -> list[tuple[Path, int]]:
    """Image files and category ids of one JSON file, in the order of its images; categories are added to those known."""
    given = read_json(path)
    images, categories, annotations = (given.get(key) for key in ("images", "categories", "annotations"))
    if not (isinstance(images, list) and isinstance(categories, list) and isinstance(annotations, list)):
        raise wrong(path, "a JSON object with images, categories and annotations")
    own = set()
    for i, entry in enumerate(categories):
        c, label, group = _entry(path, "categories", i, entry, {"id": int, "name": str, "supercategory": str})
        if known.setdefault(c, (label, group)) != (label, group):
            raise InputError(
                f"{path}, categories[{i}]", label, f"{known[c][0]} of {known[c][1]}, as id {c} is elsewhere"
            )
        own.add(c)
    label_of: dict[int, int] = {}
    for i, entry in enumerate(annotations):
        image, c = _entry(path, "annotations", i, entry, {"image_id": int, "category_id": int})
        if c not in own:
            raise InputError(f"{path}, annotations[{i}]", c, "the id of a category")
        if image in label_of:
            raise InputError(f"{path}, annotations[{i}]", image, "an image that has one annotation")
        label_of[image] = c
    listed = []
    for i, entry in enumerate(images):
        image, file = _entry(path, "images", i, entry, {"id": int, "file_name": str})
        if image not in label_of:
            raise InputError(f"{path}, images[{i}]", image, "an image that has an annotation")
        listed.append((inside(path.parent, file, f"{path}, images[{i}]"), label_of[image]))
    return listed


def _entry(path: Path, key: str, i: int, entry: Any, kinds: dict[str, type]) -> list[Any]:
    """The wanted fields of one entry of a list."""
    if not isinstance(entry, dict) or any(type(entry.get(k)) is not kind for k, kind in kinds.items()):
        right = " and ".join(f"{k} ({kind.__name__})" for k, kind in kinds.items())
        raise InputError(f"{path}, {key}[{i}]", entry, f"an object with {right}")
    return [entry[k] for k in kinds]
