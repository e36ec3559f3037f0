"""Read folders of images: `class/…`, `train/class/…` with `test/class/…`, or `domain/class/…`."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ..core.errors import InputError, can_be_shown, first_line, nearest
from ..core.memory import require
from . import cached, mapped
from .dataset import Array, Dataset, Ints, dataset
from .files import regular, wrong

MOST_PIXELS = 1 << 26  # of an image: 8,192 × 8,192
GREY = ("1", "L")  # modes of Pillow
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


def images_in(folder: Path) -> list[Path]:
    """Return the image files directly in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())


def folders_in(folder: Path) -> list[Path]:
    """Return the folders directly in a folder, by name, without hidden ones."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def is_class_folder(folder: Path) -> bool:
    """Return whether the folder has one folder of images for each class."""
    return folder.is_dir() and any(images_in(child) for child in folders_in(folder))


def image_set(
    name: str, folder: Path, size: int | None = None, chosen: Sequence[str] = (), memory_map: str = mapped.OFF
) -> Dataset | None:
    """Read an image folder; return None where it has no images in a known layout.

    `chosen` names the domains to read of a folder of domains; the classes are those of all of its domains.
    """
    train = is_class_folder(folder / "train")
    if not train and not is_class_folder(folder):
        return domain_set(name, folder, size, chosen, memory_map=memory_map)
    if chosen:
        raise InputError("data", name, f"a folder of domains (domain/class/…), to read some of them: not {folder}")
    if train:
        tests = [folder / "test"] if is_class_folder(folder / "test") else []
        return _build(name, folder, [folder / "train"], tests, size, memory_map=memory_map)
    deeper = [child for child in folders_in(folder) if is_class_folder(child)]
    if deeper:  # one stray image in a domain would make classes of the domains
        raise InputError("data", str(folder), f"class folders or domain folders, not both ({deeper[0].name} is both)")
    return _build(name, folder, [folder], [], size, memory_map=memory_map)


def domain_set(
    name: str,
    folder: Path,
    size: int | None = None,
    chosen: Sequence[str] = (),
    colour: bool = False,
    memory_map: str = mapped.OFF,
) -> Dataset | None:
    """Read a folder of domains, each with class folders; return None where there are none.

    The classes are those of all domains.
    """
    all_domains = [child for child in folders_in(folder) if is_class_folder(child)]
    if not all_domains:
        return None
    names = choose(name, "domain", [child.name for child in all_domains], chosen)
    labels = sorted({child.name for domain in all_domains for child in folders_in(domain) if images_in(child)})
    chosen_domains = [folder / domain for domain in names]
    return _build(name, folder, chosen_domains, [], size, labels, tuple(names), colour, memory_map)


def choose(source: str, kind: str, known: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the chosen ones of the known names, in the order of these; all of them where none is chosen."""
    for name in chosen:
        if name not in known:
            raise InputError(
                "data", source, f"with a {kind} that there is after #, not {name!r}: {nearest(name, known)}"
            )
    if len(set(chosen)) < len(chosen):
        raise InputError("data", source, f"with each {kind} once after #")
    return [name for name in known if name in chosen] if chosen else list(known)


def inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of a file that a list names; refuse one outside the folder."""
    path = Path(name)
    if not name or path.is_absolute() or ".." in path.parts or not can_be_shown(name):
        raise InputError(where, name, f"the path of an image within {folder}")
    return folder / path


def _build(
    name: str,
    folder: Path,
    trains: list[Path],
    tests: list[Path],
    size: int | None,
    labels: list[str] | None = None,
    domains: tuple[str, ...] = (),
    colour: bool = False,
    memory_map: str = mapped.OFF,
) -> Dataset:
    """Read the folders of training and test data; the classes are the sorted class folders of all of them by default."""
    class_folders = [(d, child) for d, parent in enumerate((*trains, *tests)) for child in folders_in(parent)]
    if labels is None:
        labels = sorted({child.name for _, child in class_folders if images_in(child)})
    number = {label: c for c, label in enumerate(labels)}
    images = [(path, number[child.name], d) for d, child in class_folders for path in images_in(child)]
    x = decode([path for path, _, _ in images], size, folder, colour, memory_map)
    y = np.array([label for _, label, _ in images])
    source: Ints = np.array([d for _, _, d in images], np.int64)
    train = int((source < len(trains)).sum())  # the training folders come first
    test = (x[train:], y[train:]) if tests else None
    return dataset(
        name,
        str(folder),
        x[:train],
        y[:train],
        test,
        len(labels),
        domain=source if domains else None,
        labels=tuple(labels),
        groups=domains,
    )


def contained(paths: Iterable[Path], folder: Path) -> None:
    """Refuse a file that links lead out of the folder that it is in; links within the folder are followed."""
    root = Path(os.path.realpath(folder))
    parents: dict[Path, Path] = {}
    for path in paths:
        if path.parent not in parents:
            parents[path.parent] = Path(os.path.realpath(path.parent))
        real = Path(os.path.realpath(path)) if os.path.islink(path) else parents[path.parent]
        if not real.is_relative_to(root):
            raise wrong(path, f"within {root}, where its links do not stay (it is {real})")


def decode(
    paths: Sequence[Path], size: int | None, folder: Path, colour: bool = False, memory_map: str = mapped.OFF
) -> Array:
    """Read images in a folder as NCHW uint8, resized only if `size` is set.

    They are grey where every one is grey and `colour` is not set, else RGB. A path that is repeated is read once. Only
    PNG, JPEG and TIFF are read, whatever a file's name says: other formats of Pillow run other programs. As `memory_map` says,
    they are decoded once into a file and stay there.
    """
    pillow = _pillow(paths[0])
    distinct = dict.fromkeys(paths)
    contained(distinct, folder)
    made_of = ("images", folder, paths, size, colour, pillow.__version__)
    key = ""
    if memory_map != mapped.OFF:
        key = cached.digest(*made_of)
        found = cached.find(key)
        if found is not None and mapped.pays(memory_map, found.size):
            return found
    shape = _shape(pillow, distinct, size, colour)
    shape = (len(paths), *shape[1:])

    def write(out: Array) -> None:
        _decode_into(out, pillow, paths)
        if key:
            cached.check_unchanged(key, *made_of)

    if mapped.pays(memory_map, math.prod(shape)):
        return cached.make(key, np.uint8, shape, write)
    require("data", str(folder), 5 * math.prod(shape))  # bytes, and later float32 beside them
    out = np.empty(shape, np.uint8)
    write(out)
    return out


def _shape(pillow: Any, paths: Iterable[Path], size: int | None, colour: bool) -> tuple[int, ...]:
    """Return the form of the images once they are decoded, from their headers: a refusal then costs little."""
    first: tuple[Path, tuple[int, int]] | None = None
    grey = not colour
    for path in paths:
        with _opened(pillow, path, "a readable image") as image:
            shape, mode = _checked_size(path, image), image.mode
        grey = grey and mode in GREY
        first = first or (path, shape)
        if size is None and shape != first[1]:
            sizes = f"{first[1][0]}×{first[1][1]} as {first[0].name} is (it is {shape[0]}×{shape[1]})"
            raise wrong(path, f"{sizes}; or write PATH@32 to resize all images to 32×32")
    assert first is not None  # there is at least one image
    width, height = (size, size) if size is not None else first[1]
    return 0, 1 if grey else 3, height, width


def _decode_into(out: Array, pillow: Any, paths: Sequence[Path]) -> None:
    """Write the images' bytes; those in a file go there as they come."""
    channels, height, width = out.shape[1:]
    often, position = mapped.step(out), dict[Path, int]()
    for i, path in enumerate(paths):
        if path in position:
            out[i] = out[position[path]]
            continue
        with _opened(pillow, path, "a whole image") as image:
            out[i] = _pixels(pillow, image, channels, (width, height))
        position[path] = i
        if i % often == 0:
            mapped.release(out)


def _checked_size(where: Path | str, image: Any) -> tuple[int, int]:
    """Return an image's width and height; refuse what would take more memory than any image should."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise wrong(where, f"an image of at most {MOST_PIXELS:,} pixels (it is {width}×{height})")
    return width, height


def _pixels(pillow: Any, image: Any, channels: int, size: tuple[int, int]) -> Array:
    """Return an image's bytes, channels first."""
    pixels = image.convert("L" if channels == 1 else "RGB")
    if pixels.size != size:
        pixels = pixels.resize(size, pillow.Resampling.BILINEAR)
    array = np.asarray(pixels, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def decode_bytes(where: str, images: Iterable[bytes], channels: int, size: tuple[int, int] | None) -> Iterator[Array]:
    """Yield images of a data set as [1, channels, height, width], as `decode` does those in files."""
    pillow = _pillow(where)
    for number, raw in enumerate(images):
        with _decoded(pillow, io.BytesIO(raw), f"{where}, image {number}", "a whole image") as image:
            pixels = _pixels(pillow, image, channels, size or _checked_size(where, image))
        yield pixels[None]


def form_of_bytes(where: str, images: Iterable[bytes]) -> Iterator[tuple[bool, tuple[int, int]]]:
    """Yield for each image whether it is grey, and its width and height, from its header."""
    pillow = _pillow(where)
    for number, raw in enumerate(images):
        with _decoded(pillow, io.BytesIO(raw), f"{where}, image {number}", "a readable image") as image:
            yield image.mode in GREY, _checked_size(where, image)


def _pillow(where: object) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("data", str(where), "read with Pillow: pip install 'fedstill[images]'") from None
    return Image


@contextmanager
def _opened(pillow: Any, path: Path, right: str) -> Iterator[Any]:
    """Open an image; whatever is wrong with it becomes one error that says what it should be."""
    with regular(path) as file, _decoded(pillow, file, path, right) as image:
        yield image


@contextmanager
def _decoded(pillow: Any, file: IO[bytes], where: Path | str, right: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of broken metadata, and of sizes that are checked here
        try:
            with pillow.open(file, formats=("PNG", "JPEG", "TIFF")) as image:
                yield image
        except (InputError, MemoryError):
            raise
        except Exception as error:  # damaged bytes raise whatever Pillow stumbles over (struct.error, KeyError, …)
            raise wrong(where, f"{right} ({first_line(error)})") from None


def resize_into(x: Array, out: Array) -> None:
    """Write uint8 images into `out` of another size and number of channels: bilinear, grey repeated."""
    if x.shape[2:] == out.shape[2:]:
        out[:] = x
        return
    for start in range(0, len(x), 4096):
        chunk = torch.from_numpy(x[start : start + 4096].astype(np.float32))
        chunk = torch.nn.functional.interpolate(chunk, out.shape[2:], mode="bilinear", antialias=True)
        out[start : start + 4096] = chunk.round_().clamp_(0, 255).to(torch.uint8).numpy()


def join_domains(name: str, domains: Iterable[Dataset], size: int | None = None) -> Dataset:
    """Join image sets with the same classes, each a domain; sizes and channels are made equal."""
    sets = list(domains)
    for data in sets:
        if data.x.dtype != np.uint8 or data.x.ndim != 4:
            raise InputError("data", data.name, "a set of images to be one domain among others")
        if data.classes != sets[0].classes:
            raise InputError("data", data.name, f"a set of {sets[0].classes} classes as {sets[0].name} is")
    side = size or max(max(data.shape[1:]) for data in sets)
    channels = max(data.shape[0] for data in sets)
    for data in sets:
        if data.shape[0] not in (1, channels):
            raise InputError("data", data.name, f"images of 1 or {channels} channels")
    tested = [(d, data) for d, data in enumerate(sets) if data.test_x is not None]
    test = test_domain = None
    if tested:
        test_x = _concatenate([(data, data.test_x) for _, data in tested if data.test_x is not None], channels, side)
        test_ys = [data.test_y for _, data in tested if data.test_y is not None]
        test = (test_x, np.concatenate(test_ys))
        test_domain = np.repeat([d for d, _ in tested], [len(y) for y in test_ys])
    return dataset(
        name,
        name,
        _concatenate([(data, data.x) for data in sets], channels, side),
        np.concatenate([data.y for data in sets]),
        test,
        sets[0].classes,
        domain=np.repeat(np.arange(len(sets)), [len(data) for data in sets]),
        test_domain=test_domain,
        groups=tuple(data.name for data in sets),
    )


def _concatenate(images: list[tuple[Dataset, Array]], channels: int, side: int) -> Array:
    """Resize and concatenate the sets' images in place, since SYNTH alone fills 1.5 GB."""
    out = np.empty((sum(len(x) for _, x in images), channels, side, side), np.uint8)
    start = 0
    for data, x in images:
        resize_into(_full_range(data, x), out[start : start + len(x)])
        start += len(x)
    return out


def _full_range(data: Dataset, x: Array) -> Array:
    """Scale the shipped digits from 0…16 to 0…255, so that brightness does not distinguish the domains."""
    return np.round(x * (255 / 16)).astype(np.uint8) if data.name == "digits" else x
