"""Folders of images: `class/…`, `train/class/…` with `test/class/…`, or `domain/class/…`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from ..errors import InputError
from .dataset import Array, Dataset, Ints, dataset
from .files import wrong

SUFFIXES = (".png", ".jpg", ".jpeg")


def images_in(folder: Path) -> list[Path]:
    """The image files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())


def folders_in(folder: Path) -> list[Path]:
    """The folders directly in a folder, by name; hidden ones do not count."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def is_class_folder(folder: Path) -> bool:
    """Whether the folder holds one folder of images for each class."""
    return folder.is_dir() and any(images_in(child) for child in folders_in(folder))


def image_set(name: str, folder: Path, size: int | None = None) -> Dataset | None:
    """The data set of an image folder, or None where the folder holds no images in a known layout."""
    if is_class_folder(folder / "train"):
        parts = [folder / "train"]
        tests = [folder / "test"] if is_class_folder(folder / "test") else []
        return _build(name, folder, parts, tests, (), size)
    if is_class_folder(folder):
        return _build(name, folder, [folder], [], (), size)
    domains = [child for child in folders_in(folder) if is_class_folder(child)]
    if domains:
        return _build(name, folder, domains, [], tuple(d.name for d in domains), size)
    return None


def _build(
    name: str, folder: Path, parts: list[Path], tests: list[Path], domains: tuple[str, ...], size: int | None
) -> Dataset:
    """Read the parts; classes are the sorted names of the class folders of all of them."""
    class_folders = [child for part in (*parts, *tests) for child in folders_in(part) if images_in(child)]
    labels = sorted({child.name for child in class_folders})
    listed = [
        (path, labels.index(child.name), d)
        for d, part in enumerate((*parts, *tests))
        for child in folders_in(part)
        for path in images_in(child)
    ]
    x = decode([path for path, _, _ in listed], size)
    y = np.array([label for _, label, _ in listed])
    source: Ints = np.array([d for _, _, d in listed], np.int64)
    here = source < len(parts)
    test = (x[~here], y[~here]) if tests else None
    domain = source if domains else None
    return dataset(
        name, str(folder), x[here], y[here], test, len(labels), domain=domain, labels=tuple(labels), groups=domains
    )


def decode(paths: list[Path], size: int | None) -> Array:
    """All images as NCHW uint8: grey where every one is grey, RGB otherwise; resized only where a size is given."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("data", str(paths[0]), "read with Pillow: pip install 'fedstill[images]'") from None
    broken = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    first: tuple[int, int] | None = None
    grey = True
    for path in paths:  # the headers first: a refusal then costs little
        try:
            with Image.open(path) as image:
                shape, mode = image.size, image.mode
        except broken as error:
            raise wrong(path, f"a readable image ({error})") from None
        grey = grey and mode in ("1", "L")
        first = first or shape
        if size is None and shape != first:
            sizes = f"{first[0]}×{first[1]} as {paths[0].name} is (it is {shape[0]}×{shape[1]})"
            raise wrong(path, f"{sizes}; or write PATH@32 to resize all images to 32×32")
    out = []
    for path in paths:
        try:
            with Image.open(path) as image:
                pixels = image.convert("L" if grey else "RGB")
        except broken as error:
            raise wrong(path, f"a whole image ({error})") from None
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, dtype=np.uint8)
        out.append(array[None] if grey else array.transpose(2, 0, 1))
    return np.stack(out)


def fit(x: Array, size: int, channels: int) -> Array:
    """Uint8 images of another size and number of channels: bilinear, and grey repeated into colour."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array may be read-only; nothing here writes to it
        images = torch.from_numpy(x)
    out = []
    for start in range(0, len(images), 4096):
        part = images[start : start + 4096].float()
        if tuple(part.shape[2:]) != (size, size):
            part = torch.nn.functional.interpolate(part, (size, size), mode="bilinear", antialias=True)
        out.append(part.round_().clamp_(0, 255).to(torch.uint8))
    resized = torch.cat(out)
    return resized.expand(-1, channels, -1, -1).contiguous().numpy()


def domains(name: str, parts: Iterable[Dataset], size: int | None = None) -> Dataset:
    """Several image sets with the same classes as one, each a domain; sizes and channels are made equal."""
    sets = list(parts)
    for part in sets:
        if part.x.dtype != np.uint8 or part.x.ndim != 4:
            raise InputError("data", part.name, "a set of images to be one domain among others")
        if part.classes != sets[0].classes:
            raise InputError("data", part.name, f"a set of {sets[0].classes} classes as {sets[0].name} is")
    side = size or max(max(part.shape[1:]) for part in sets)
    channels = max(part.shape[0] for part in sets)
    for part in sets:
        if part.shape[0] not in (1, channels):
            raise InputError("data", part.name, f"images of 1 or {channels} channels")
    xs = [fit(_full_range(part, part.x), side, channels) for part in sets]
    tested = [part for part in sets if part.test_x is not None and part.test_y is not None]
    test = test_domain = None
    if tested:
        test_x = [fit(_full_range(p, p.test_x), side, channels) for p in tested if p.test_x is not None]
        test = (np.concatenate(test_x), np.concatenate([p.test_y for p in tested if p.test_y is not None]))
        test_domain = np.repeat([sets.index(p) for p in tested], [len(t) for t in test_x])
    return dataset(
        name,
        name,
        np.concatenate(xs),
        np.concatenate([part.y for part in sets]),
        test,
        sets[0].classes,
        domain=np.repeat(np.arange(len(sets)), [len(x) for x in xs]),
        test_domain=test_domain,
        groups=tuple(part.name for part in sets),
    )


def _full_range(part: Dataset, x: Array) -> Array:
    """The shipped digits count to 16, not to 255: brightness is not meant to tell the domains apart."""
    return np.round(x * (255 / 16)).astype(np.uint8) if part.name == "digits" else x
