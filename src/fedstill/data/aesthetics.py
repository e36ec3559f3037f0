"""FLICKR-AES and REAL-CUR (Ren et al., "Personalized Image Aesthetics", ICCV 2017): a rater is a client.

FLICKR-AES as the repository alanspike/personalizedImageAesthetics publishes it: FLICKR-AES_image_labeled_by_each_worker.csv
with the columns worker, imagePair and score (1 to 5; the header has spaces after its commas), and FLICKR-AES-001.zip,
which unpacks to the folder `40K` (as baselines/FedPer of the repository adap/flower reads both). An image rated by several
workers is a sample of each. FedPer and CD²-pFed take 30 workers and do not say which: `flickr-aes:30` draws 30 among
those with 60 to 290 ratings that use all five scores (Flower's reading of FedPer), always the same ones.

REAL-CUR has 14 albums rated by their owners: `images/USER/SCORE/FILE`, as one public reader expects it; the archive itself
was not available to us. Labels are score − 1, so that either set can test models that were trained on the other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.errors import InputError, Shown
from . import mapped
from .dataset import Dataset, dataset
from .draw import generator
from .files import read_text, wrong
from .images import choose, decode, folders_in, images_in, inside

RATINGS = "FLICKR-AES_image_labeled_by_each_worker.csv"
SCORES = ("1", "2", "3", "4", "5")
FEWEST, MOST = 60, 290  # ratings of a worker that `flickr-aes:NUMBER` may draw

Ratings = dict[str, list[tuple[Path, int]]]  # each rater's images and labels


def flickr_set(
    name: str,
    folder: Path,
    size: int | None,
    workers: int | None = None,
    chosen: Sequence[str] = (),
    memory_map: str = mapped.OFF,
) -> Dataset:
    """Read FLICKR-AES: all workers, a fixed draw of a number of them, or the chosen ones."""
    ratings = _read_ratings(folder / RATINGS, folder / "40K")
    if workers is not None and chosen:
        raise InputError("data", name, "with a number of workers or their names, not both")
    if workers is not None:
        chosen = _draw_workers(name, ratings, workers)
    return _build(
        name, folder, {w: ratings[w] for w in choose(name, "worker", sorted(ratings), chosen)}, size, memory_map
    )


def realcur_set(
    name: str, folder: Path, size: int | None, chosen: Sequence[str] = (), memory_map: str = mapped.OFF
) -> Dataset:
    """Read REAL-CUR: all users or the chosen ones."""
    ratings: Ratings = {}
    try:
        for user in folders_in(folder / "images"):
            for score in folders_in(user):
                if score.name not in SCORES:
                    raise InputError("data", str(score), "a folder named by a score from 1 to 5")
                images = [(path, SCORES.index(score.name)) for path in images_in(score)]
                if images:
                    ratings.setdefault(user.name, []).extend(images)
    except OSError as error:
        raise InputError("data", str(folder), f"a folder that can be read ({error})") from None
    if not ratings:
        raise InputError("data", str(folder / "images"), "a folder that holds USER/SCORE/*.jpg")
    return _build(
        name, folder, {u: ratings[u] for u in choose(name, "user", sorted(ratings), chosen)}, size, memory_map
    )


def _build(name: str, folder: Path, ratings: Ratings, size: int | None, memory_map: str) -> Dataset:
    samples = [(path, label, k) for k, images in enumerate(ratings.values()) for path, label in images]
    return dataset(
        name,
        str(folder),
        decode([path for path, _, _ in samples], size, folder, True, memory_map),
        np.array([label for _, label, _ in samples]),
        None,
        len(SCORES),
        owner=np.array([k for _, _, k in samples], np.int64),
        labels=SCORES,
        groups=tuple(ratings),
    )


def _draw_workers(name: str, ratings: Ratings, workers: int) -> list[str]:
    eligible = [
        worker
        for worker, images in sorted(ratings.items())
        if FEWEST <= len(images) <= MOST and len({label for _, label in images}) == len(SCORES)
    ]
    if not 1 <= workers <= len(eligible):
        right = f"from 1 to {len(eligible)} workers: so many have {FEWEST} to {MOST} ratings that use all five scores"
        raise InputError("data", name, right)
    return [eligible[i] for i in generator(0, "flickr-aes", workers).permutation(len(eligible))[:workers]]


def _read_ratings(path: Path, images: Path) -> Ratings:
    """Read the published file of workers, images and scores."""
    text = read_text(path, "utf-8-sig")
    try:
        rows = [(n, [c.strip() for c in row]) for n, row in enumerate(csv.reader(io.StringIO(text)), 1) if any(row)]
    except csv.Error as error:
        raise wrong(path, f"a CSV file in UTF-8 ({error})") from None
    if not rows or [cell.lower() for cell in rows[0][1]] != ["worker", "imagepair", "score"]:
        raise wrong(path, "a CSV file with the columns worker, imagePair, score")
    ratings: Ratings = {}
    for number, row in rows[1:]:
        where = f"{path}, line {number}"
        if len(row) != 3 or not row[0]:
            raise InputError(where, Shown(f"{len(row)} cells"), "a worker, an image and a score")
        if row[2].removesuffix(".0") not in SCORES:
            raise InputError(where, row[2], "a score from 1 to 5")
        label = SCORES.index(row[2].removesuffix(".0"))
        ratings.setdefault(row[0], []).append((inside(images, row[1], where), label))
    if not ratings:
        raise wrong(path, "a CSV file with at least one rating")
    return ratings
