"""iNaturalist 2017 (Van Horn et al., "The iNaturalist Species Classification and Detection Dataset", 2018).

As 2017/README.md of the repository visipedia/inat_comp describes it: train_val_images.tar.gz unpacks to
`train_val_images/SuperCategory/Species/FILE.jpg`; train_val2017.zip to `train2017.json` and `val2017.json` in COCO's
format, images {id, file_name}, categories {id, name, supercategory}, annotations {image_id, category_id}, one for each
image; 5,089 species in 13 super-categories, 579,184 + 95,986 images. A `file_name` is relative to the folder that holds
`train_val_images`. The published test split has no labels: the validation split is the official test split here.
Classes are the species in the order of their ids or, as `inaturalist:super`, the super-categories by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from . import mapped
from .dataset import Dataset, dataset
from .files import wrong
from .images import choose, decode, inside
from .leaf import read_json

FILES = ("train2017.json", "val2017.json")

Categories = dict[int, tuple[str, str]]  # name and super-category of each id


def inaturalist_set(
    name: str,
    folder: Path,
    size: int | None,
    coarse: bool = False,
    chosen: Sequence[str] = (),
    memory_map: str = mapped.OFF,
) -> Dataset:
    """Read all images or those of the chosen super-categories; the classes are those of all."""
    known: Categories = {}
    annotated = [_read_annotations(folder / file, known) for file in FILES]
    groups = sorted({group for _, group in known.values()})
    selected = set(choose(name, "super-category", groups, chosen))
    species = sorted(known)
    number = {c: groups.index(known[c][1]) if coarse else k for k, c in enumerate(species)}
    splits = [[(path, number[c]) for path, c in images if known[c][1] in selected] for images in annotated]
    for file, images in zip(FILES, splits, strict=True):
        if not images:
            raise wrong(folder / file, f"one with images of {', '.join(sorted(selected))}")
    train = len(splits[0])
    x = decode([path for images in splits for path, _ in images], size, folder, True, memory_map)
    y = np.array([label for images in splits for _, label in images])
    labels = tuple(groups) if coarse else tuple(known[c][0] for c in species)
    return dataset(name, str(folder), x[:train], y[:train], (x[train:], y[train:]), len(labels), labels=labels)


def _read_annotations(path: Path, known: Categories) -> list[tuple[Path, int]]:
    """Read the image files and category ids of one JSON file, in the order of its images; add its categories to `known`."""
    content = read_json(path)
    images, categories, annotations = (content.get(key) for key in ("images", "categories", "annotations"))
    if not (isinstance(images, list) and isinstance(categories, list) and isinstance(annotations, list)):
        raise wrong(path, "a JSON object with images, categories and annotations")
    listed = set()  # the ids of this file's categories
    for i, entry in enumerate(categories):
        c, label, group = _entry(path, "categories", i, entry, {"id": int, "name": str, "supercategory": str})
        if known.setdefault(c, (label, group)) != (label, group):
            raise InputError(
                f"{path}, categories[{i}]", label, f"{known[c][0]} of {known[c][1]}, as id {c} is elsewhere"
            )
        listed.add(c)
    label_of: dict[int, int] = {}
    for i, entry in enumerate(annotations):
        image, c = _entry(path, "annotations", i, entry, {"image_id": int, "category_id": int})
        if c not in listed:
            raise InputError(f"{path}, annotations[{i}]", c, "the id of a category")
        if image in label_of:
            raise InputError(f"{path}, annotations[{i}]", image, "an image that has one annotation")
        label_of[image] = c
    files = []
    for i, entry in enumerate(images):
        image, file = _entry(path, "images", i, entry, {"id": int, "file_name": str})
        if image not in label_of:
            raise InputError(f"{path}, images[{i}]", image, "an image that has an annotation")
        files.append((inside(path.parent, file, f"{path}, images[{i}]"), label_of[image]))
    return files


def _entry(path: Path, key: str, i: int, entry: Any, kinds: dict[str, type]) -> list[Any]:
    """Return the fields of one entry of a list, checked for their types."""
    if not isinstance(entry, dict) or any(type(entry.get(k)) is not kind for k, kind in kinds.items()):
        right = " and ".join(f"{k} ({kind.__name__})" for k, kind in kinds.items())
        raise InputError(f"{path}, {key}[{i}]", entry, f"an object with {right}")
    return [entry[k] for k in kinds]
