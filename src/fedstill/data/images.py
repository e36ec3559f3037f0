"""Folders of images: `class/…`, `train/class/…` with `test/class/…`, or `domain/class/…`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from ..core.errors import InputError, nearest
from .dataset import Array, Dataset, Ints, dataset
from .files import wrong

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


def images_in(folder: Path) -> list[Path]:
    """The image files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())


def folders_in(folder: Path) -> list[Path]:
    """The folders directly in a folder, by name; hidden ones do not count."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def is_class_folder(folder: Path) -> bool:
    """Whether the folder holds one folder of images for each class."""
    return folder.is_dir() and any(images_in(child) for child in folders_in(folder))


def image_set(name: str, folder: Path, size: int | None = None, chosen: Sequence[str] = ()) -> Dataset | None:
    """The data set of an image folder, or None where the folder holds no images in a known layout.

    `chosen` names the domains to read, where the folder holds domains; the classes are those of all of them.
    """
    train = is_class_folder(folder / "train")
    if not train and not is_class_folder(folder):
        return domain_set(name, folder, size, chosen)
    if chosen:
        raise InputError("data", name, f"a folder of domains (domain/class/…), to read some of them: not {folder}")
    if train:
        tests = [folder / "test"] if is_class_folder(folder / "test") else []
        return _build(name, folder, [folder / "train"], tests, size)
    deeper = [child for child in folders_in(folder) if is_class_folder(child)]
    if deeper:  # one stray image in a domain would make classes of the domains
        raise InputError("data", str(folder), f"class folders or domain folders, not both ({deeper[0].name} is both)")
    return _build(name, folder, [folder], [], size)


def domain_set(
    name: str, folder: Path, size: int | None = None, chosen: Sequence[str] = (), colour: bool = False
) -> Dataset | None:
    """A folder of domains, each with class folders, or None where there is none; all domains name the classes."""
    found = [child for child in folders_in(folder) if is_class_folder(child)]
    if not found:
        return None
    names = choose(name, "domain", [child.name for child in found], chosen)
    labels = sorted({child.name for domain in found for child in folders_in(domain) if images_in(child)})
    return _build(name, folder, [folder / domain for domain in names], [], size, labels, tuple(names), colour)


def choose(source: str, what: str, known: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The chosen names among those there are, in their order; all of them where none is chosen."""
    for name in chosen:
        if name not in known:
            raise InputError(
                "data", source, f"with a {what} that there is after #, not {name!r}: {nearest(name, known)}"
            )
    if len(set(chosen)) < len(chosen):
        raise InputError("data", source, f"with each {what} once after #")
    return [name for name in known if name in chosen] if chosen else list(known)


def inside(folder: Path, name: str, where: str) -> Path:
    """The path of a file that a list names, which must lie within the folder."""
    path = Path(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise InputError(where, name, f"the path of an image within {folder}")
    return folder / path


def _build(
    name: str,
    folder: Path,
    parts: list[Path],
    tests: list[Path],
    size: int | None,
    labels: list[str] | None = None,
    domains: tuple[str, ...] = (),
    colour: bool = False,
) -> Dataset:
    """Read the parts; classes are the sorted names of the class folders of all of them, unless they are given."""
    class_folders = [(d, child) for d, part in enumerate((*parts, *tests)) for child in folders_in(part)]
    if labels is None:
        labels = sorted({child.name for _, child in class_folders if images_in(child)})
    number = {label: c for c, label in enumerate(labels)}
    listed = [(path, number[child.name], d) for d, child in class_folders for path in images_in(child)]
    x = decode([path for path, _, _ in listed], size, colour)
    y = np.array([label for _, label, _ in listed])
    source: Ints = np.array([d for _, _, d in listed], np.int64)
    cut = int((source < len(parts)).sum())  # the training parts come first
    test = (x[cut:], y[cut:]) if tests else None
    domain = source if domains else None
    return dataset(
        name, str(folder), x[:cut], y[:cut], test, len(labels), domain=domain, labels=tuple(labels), groups=domains
    )


def decode(paths: Sequence[Path], size: int | None, colour: bool = False) -> Array:
    """All images as NCHW uint8; resized only where a size is given.

    Grey where every one is grey and `colour` is not asked for, RGB otherwise. A path that comes again is read once.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("data", str(paths[0]), "read with Pillow: pip install 'fedstill[images]'") from None
    broken = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    first: tuple[int, int] | None = None
    grey = not colour
    for path in dict.fromkeys(paths):  # the headers first: a refusal then costs little
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
    assert first is not None  # there is at least one image
    width, height = (size, size) if size is not None else first
    try:
        out = np.empty((len(paths), 1 if grey else 3, height, width), np.uint8)
    except MemoryError:
        raise InputError("data", str(paths[0].parent), f"images that fit into memory ({len(paths)} here)") from None
    seen: dict[Path, int] = {}
    for i, path in enumerate(paths):
        if path in seen:
            out[i] = out[seen[path]]
            continue
        try:
            with Image.open(path) as image:
                pixels = image.convert("L" if grey else "RGB")
        except broken as error:
            raise wrong(path, f"a whole image ({error})") from None
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, dtype=np.uint8)
        out[i] = array[None] if grey else array.transpose(2, 0, 1)
        seen[path] = i
    return out


def fit(x: Array, out: Array) -> None:
    """Write uint8 images into `out`, which has another size and number of channels: bilinear, grey repeated."""
    if x.shape[2:] == out.shape[2:]:
        out[:] = x
        return
    for start in range(0, len(x), 4096):
        part = torch.from_numpy(x[start : start + 4096].astype(np.float32))
        part = torch.nn.functional.interpolate(part, out.shape[2:], mode="bilinear", antialias=True)
        out[start : start + 4096] = part.round_().clamp_(0, 255).to(torch.uint8).numpy()


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
    tested = [p for p in sets if p.test_x is not None and p.test_y is not None]
    test = test_domain = None
    if tested:
        test_x = _fitted([(p, p.test_x) for p in tested if p.test_x is not None], channels, side)
        test = (test_x, np.concatenate([p.test_y for p in tested if p.test_y is not None]))
        test_domain = np.repeat(
            [sets.index(p) for p in tested], [len(p.test_y) for p in tested if p.test_y is not None]
        )
    return dataset(
        name,
        name,
        _fitted([(p, p.x) for p in sets], channels, side),
        np.concatenate([part.y for part in sets]),
        test,
        sets[0].classes,
        domain=np.repeat(np.arange(len(sets)), [len(part) for part in sets]),
        test_domain=test_domain,
        groups=tuple(part.name for part in sets),
    )


def _fitted(parts: list[tuple[Dataset, Array]], channels: int, side: int) -> Array:
    """The sets' images end to end in one array, written in place: SYNTH alone fills 1.5 GB."""
    out = np.empty((sum(len(x) for _, x in parts), channels, side, side), np.uint8)
    start = 0
    for part, x in parts:
        fit(_full_range(part, x), out[start : start + len(x)])
        start += len(x)
    return out


def _full_range(part: Dataset, x: Array) -> Array:
    """The shipped digits count to 16, not to 255: brightness is not meant to tell the domains apart."""
    return np.round(x * (255 / 16)).astype(np.uint8) if part.name == "digits" else x
