"""Partition schemes. Each ends after a bounded number of draws, whatever its parameter.

Every scheme takes labels that `partition.deal` has checked, and returns one index array per client.
"""

from __future__ import annotations

import math

import numpy as np

from .dataset import Floats, Ints
from .draw import apportion, generator, log_gammas, softmax

DRAWS = 20  # redraws of a Dirichlet partition before it is repaired
BLOCK_DRAWS = 100  # redraws of a block of the balanced partition before the best one is taken
BLOCK = 10  # clients per block, as in the pFedSD authors' code


def iid(count: int, clients: int, seed: int) -> list[Ints]:
    """Deal samples at random in equal sizes (±1)."""
    return list(np.array_split(generator(seed, "iid").permutation(count), clients))


def lognormal(count: int, clients: int, seed: int, sigma: float, min_samples: int) -> list[Ints]:
    """Deal samples at random, sizes in proportion to lognormal(0, σ) above a floor of `min_samples`."""
    rng = generator(seed, "lognormal", sigma)
    shares = softmax(sigma * rng.standard_normal(clients))
    sizes = min_samples + apportion(count - min_samples * clients, shares)
    return list(np.split(rng.permutation(count), np.cumsum(sizes)[:-1]))


def dirichlet(y: Ints, classes: int, clients: int, seed: int, alpha: float, min_samples: int) -> list[Ints]:
    """Draw each class's proportions over the clients from Dir(α); sizes differ.

    Redrawn while the smallest client has fewer than min(10, half the mean size) samples, then repaired.
    """
    totals = np.bincount(y, minlength=classes)
    minimum = max(min_samples, min(10, len(y) // (2 * clients)))
    for attempt in range(DRAWS):
        rng = generator(seed, "dirichlet", alpha, attempt)
        shares = softmax(log_gammas(rng, alpha, (classes, clients)))
        counts = _counts(shares, totals)
        if counts.sum(axis=0).min() >= minimum:
            break
    repair(counts, minimum)
    return _by_counts(y, counts, generator(seed, "dirichlet", alpha, "order"))


def _counts(shares: Floats, totals: Ints) -> Ints:
    """Divide each class's samples at its cumulative shares: counts [classes, clients]."""
    edges = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    edges = np.minimum(edges, totals[:, None])
    edges[:, -1] = totals  # rounding must not lose the last sample
    return np.diff(edges, axis=1, prepend=0)


def repair(counts: Ints, minimum: int) -> None:
    """Fill up clients below `minimum`, in place, from the largest client's largest class.

    Taking from one class at a time keeps the receiver's labels as skewed as its neighbours'. There must be
    `minimum` samples per client in total; then the largest client always has some to spare, and the loop ends.
    """
    sizes = counts.sum(axis=0)
    assert sizes.sum() >= minimum * len(sizes)  # `deal` refuses anything else; without it the loop would not end
    while sizes[(smallest := int(sizes.argmin()))] < minimum:
        largest = int(sizes.argmax())
        label = int(counts[:, largest].argmax())
        moved = int(min(minimum - sizes[smallest], sizes[largest] - minimum, counts[label, largest]))
        counts[label, largest] -= moved
        counts[label, smallest] += moved
        sizes[largest] -= moved
        sizes[smallest] += moved


def _by_counts(y: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Deal each class's samples, shuffled, according to the counts; a client's samples are in order of class."""
    order = np.concatenate([rng.permutation(np.flatnonzero(y == label)) for label in range(len(counts))])
    owner = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
    dealt = order[np.argsort(owner, kind="stable")]
    return list(np.split(dealt, np.cumsum(counts.sum(axis=0))[:-1]))


def balanced_dirichlet(y: Ints, classes: int, clients: int, seed: int, alpha: float) -> list[Ints]:
    """Draw each class's proportions over the clients of a block from Dir(α), with equal sizes (±1).

    As in the pFedSD authors' code: within blocks of ten clients a client that has reached the mean size gets nothing
    more, a draw whose smallest client is below half the mean is redrawn, and the concatenated blocks are divided into
    equal chunks. Our bound: after 100 draws the one with the largest smallest client is taken.
    """
    order = generator(seed, "balanced-dirichlet", alpha, "blocks").permutation(len(y))
    dealt: list[Ints] = []
    for first in range(0, clients, BLOCK):
        width = min(BLOCK, clients - first)
        block = order[len(y) * first // clients : len(y) * (first + width) // clients]
        totals = np.bincount(y[block], minlength=classes)
        best: Ints | None = None
        for attempt in range(BLOCK_DRAWS):
            counts = _capped_counts(totals, width, alpha, generator(seed, "balanced-dirichlet", alpha, first, attempt))
            if best is None or counts.sum(axis=0).min() > best.sum(axis=0).min():
                best = counts
            if counts.sum(axis=0).min() >= len(block) // (2 * width):
                break
        assert best is not None  # there is at least one draw
        rng = generator(seed, "balanced-dirichlet", alpha, first, "order")
        dealt += [block[own] for own in _by_counts(y[block], best, rng)]
    return list(np.array_split(np.concatenate(dealt), clients))


def _capped_counts(totals: Ints, width: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Draw the counts [classes, clients] of a block; a client at the mean size gets nothing more."""
    counts = np.zeros((len(totals), width), np.int64)
    sizes = np.zeros(width, np.int64)
    logs = log_gammas(rng, alpha, (len(totals), width))
    for label, total in enumerate(totals):
        if total:  # while samples are left, someone is below the mean, so not every share is masked
            below = sizes * width < totals.sum()
            shares = softmax(logs[label, below])
            counts[label, below] = _counts(shares[None], np.array([total]))[0]
            sizes += counts[label]
    return counts


def shards(y: Ints, clients: int, seed: int, each: int) -> list[Ints]:
    """Sort by label, divide into clients × `each` equal shards (±1), deal `each` of them to every client."""
    all_shards = np.array_split(np.argsort(y, kind="stable"), clients * each)
    numbers = generator(seed, "shards", each).permutation(clients * each).reshape(clients, each)
    return [np.concatenate([all_shards[i] for i in own]) for own in numbers]


def holder_caps(totals: Ints, clients: int, each: int, min_samples: int) -> Ints:
    """Return the most clients that can hold each class if every client is to get at least `min_samples`."""
    return np.minimum(clients, totals // math.ceil(min_samples / each))


def by_classes(
    y: Ints, classes: int, clients: int, seed: int, each: int, min_samples: int, sigma: float = 0.0
) -> list[Ints]:
    """Deal exactly `each` classes to a client; classes have equally many holders, who share them evenly.

    Clients choose in turn among the classes with the most places left, ties at random: that choice never gets stuck,
    and it covers every class once there are enough places. With `sigma` every client draws a weight from lognormal(0, σ),
    and the holders of a class share it in proportion to their weights, above what gives everybody `min_samples`; who has
    which classes does not depend on σ.
    """
    rng = generator(seed, "classes", each)
    places = _level(holder_caps(np.bincount(y, minlength=classes), clients, each, min_samples), clients * each, rng)
    holders: list[list[int]] = [[] for _ in range(classes)]
    for k in rng.permutation(clients):
        ties = rng.permutation(classes)
        for label in ties[np.argsort(-places[ties], kind="stable")][:each]:
            places[label] -= 1
            holders[label].append(int(k))
    chunks: list[list[Ints]] = [[] for _ in range(clients)]
    logs = sigma * generator(seed, "classes", each, "lognormal", sigma).standard_normal(clients)
    for label, owners in enumerate(holders):
        if owners:
            samples = rng.permutation(np.flatnonzero(y == label))
            shares = np.array_split(samples, len(owners))
            if sigma:
                floor = math.ceil(min_samples / each)
                counts = floor + apportion(len(samples) - floor * len(owners), softmax(logs[owners]))
                shares = np.split(samples, np.cumsum(counts)[:-1])
            for k, share in zip(owners, shares, strict=True):
                chunks[k].append(share)
    return [np.concatenate(own) for own in chunks]


def _level(caps: Ints, total: int, rng: np.random.Generator) -> Ints:
    """Fill bins of these capacities to the same height, with `total` places altogether."""
    low, high = 0, int(caps.max())
    while low < high:  # the greatest height that does not overflow the total
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(caps, middle).sum() <= total else (low, middle - 1)
    places: Ints = np.minimum(caps, low)
    spare = rng.permutation(np.flatnonzero(caps > low))
    places[spare[: total - int(places.sum())]] += 1
    return places
