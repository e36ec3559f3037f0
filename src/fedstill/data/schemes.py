"""The ways to deal samples to clients. Each ends after a bounded number of draws, whatever its parameter.

Every scheme takes labels that `partition.deal` has found possible to deal, and returns one index array a client.
"""

from __future__ import annotations

import math

import numpy as np

from .dataset import Floats, Ints
from .draw import apportion, generator, log_gammas, softmax

DRAWS = 20  # redraws of a Dirichlet partition before it is repaired
BLOCK_DRAWS = 100  # redraws of a block of the balanced partition before the best one is taken
BLOCK = 10  # clients a block, as in the pFedSD authors' code


def iid(count: int, clients: int, seed: int) -> list[Ints]:
    """Equal sizes (±1), samples at random."""
    return list(np.array_split(generator(seed, "iid").permutation(count), clients))


def lognormal(count: int, clients: int, seed: int, sigma: float, least: int) -> list[Ints]:
    """Samples at random, sizes in proportion to lognormal(0, σ) above a floor of `least`."""
    rng = generator(seed, "lognormal", sigma)
    shares = softmax(sigma * rng.standard_normal(clients))
    sizes = least + apportion(count - least * clients, shares)
    return list(np.split(rng.permutation(count), np.cumsum(sizes)[:-1]))


def dirichlet(y: Ints, classes: int, clients: int, seed: int, alpha: float, least: int) -> list[Ints]:
    """For each class, proportions over the clients from Dir(α); sizes differ.

    Redrawn while the smallest client has fewer than min(10, half the mean size) samples, then repaired.
    """
    totals = np.bincount(y, minlength=classes)
    minimum = max(least, min(10, len(y) // (2 * clients)))
    for attempt in range(DRAWS):
        rng = generator(seed, "dirichlet", alpha, attempt)
        shares = softmax(log_gammas(rng, alpha, (classes, clients)))
        counts = _cut(shares, totals)
        if counts.sum(axis=0).min() >= minimum:
            break
    repair(counts, minimum)
    return _by_counts(y, counts, generator(seed, "dirichlet", alpha, "order"))


def _cut(shares: Floats, totals: Ints) -> Ints:
    """Each class's samples cut at its cumulative shares: counts [classes, clients]."""
    edges = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    edges = np.minimum(edges, totals[:, None])
    edges[:, -1] = totals  # rounding must not lose the last sample
    return np.diff(edges, axis=1, prepend=0)


def repair(counts: Ints, minimum: int) -> None:
    """Fill up clients below `minimum`, in place, from the largest client's largest class.

    Taking from one class at a time keeps the receiver's labels as skewed as its neighbours'. There must be
    `minimum` samples a client in all; then the largest client always has some to spare, and the loop ends.
    """
    sizes = counts.sum(axis=0)
    assert sizes.sum() >= minimum * len(sizes)  # `deal` refuses anything else; without it the loop would not end
    while sizes[(poor := int(sizes.argmin()))] < minimum:
        rich = int(sizes.argmax())
        label = int(counts[:, rich].argmax())
        moved = int(min(minimum - sizes[poor], sizes[rich] - minimum, counts[label, rich]))
        counts[label, rich] -= moved
        counts[label, poor] += moved
        sizes[rich] -= moved
        sizes[poor] += moved


def _by_counts(y: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Deal each class's samples, shuffled, as the counts say; a client's samples lie class by class."""
    order = np.concatenate([rng.permutation(np.flatnonzero(y == label)) for label in range(len(counts))])
    owner = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
    dealt = order[np.argsort(owner, kind="stable")]
    return list(np.split(dealt, np.cumsum(counts.sum(axis=0))[:-1]))


def balanced_dirichlet(y: Ints, classes: int, clients: int, seed: int, alpha: float) -> list[Ints]:
    """Dir(α) over the clients of a block for each class, sizes equal (±1).

    As the pFedSD authors deal: within blocks of ten clients a client that has reached the mean size gets nothing
    more, a draw whose smallest client is below half the mean is redrawn, and the blocks end to end are cut into
    equal chunks. Our bound: after 100 draws the one with the largest smallest client is cut.
    """
    order = generator(seed, "balanced-dirichlet", alpha, "blocks").permutation(len(y))
    dealt: list[Ints] = []
    for first in range(0, clients, BLOCK):
        width = min(BLOCK, clients - first)
        block = order[len(y) * first // clients : len(y) * (first + width) // clients]
        totals = np.bincount(y[block], minlength=classes)
        best: Ints | None = None
        for attempt in range(BLOCK_DRAWS):
            counts = _capped(totals, width, alpha, generator(seed, "balanced-dirichlet", alpha, first, attempt))
            if best is None or counts.sum(axis=0).min() > best.sum(axis=0).min():
                best = counts
            if counts.sum(axis=0).min() >= len(block) // (2 * width):
                break
        assert best is not None  # there is at least one draw
        rng = generator(seed, "balanced-dirichlet", alpha, first, "order")
        dealt += [block[hand] for hand in _by_counts(y[block], best, rng)]
    return list(np.array_split(np.concatenate(dealt), clients))


def _capped(totals: Ints, width: int, alpha: float, rng: np.random.Generator) -> Ints:
    """One draw of a block: counts [classes, clients], nothing more for a client at the mean size."""
    counts = np.zeros((len(totals), width), np.int64)
    sizes = np.zeros(width, np.int64)
    logs = log_gammas(rng, alpha, (len(totals), width))
    for label, total in enumerate(totals):
        if total:  # while samples are left, someone is below the mean, so not every share is masked
            open_to = sizes * width < totals.sum()
            shares = softmax(logs[label, open_to])
            counts[label, open_to] = _cut(shares[None], np.array([total]))[0]
            sizes += counts[label]
    return counts


def shards(y: Ints, clients: int, seed: int, each: int) -> list[Ints]:
    """Sort by label, cut into clients × `each` equal shards (±1), deal `each` of them to every client."""
    pieces = np.array_split(np.argsort(y, kind="stable"), clients * each)
    hands = generator(seed, "shards", each).permutation(clients * each).reshape(clients, each)
    return [np.concatenate([pieces[i] for i in hand]) for hand in hands]


def holder_caps(totals: Ints, clients: int, each: int, least: int) -> Ints:
    """The most clients that can hold each class if every client is to get at least `least` samples."""
    return np.minimum(clients, totals // math.ceil(least / each))


def by_classes(y: Ints, classes: int, clients: int, seed: int, each: int, least: int) -> list[Ints]:
    """Exactly `each` classes a client; every class has as many holders as another and is shared evenly among them.

    Clients choose in turn among the classes with the most places left, ties at random: that choice never gets stuck,
    and it covers every class once there are enough places.
    """
    rng = generator(seed, "classes", each)
    places = _level(holder_caps(np.bincount(y, minlength=classes), clients, each, least), clients * each, rng)
    holders: list[list[int]] = [[] for _ in range(classes)]
    for k in rng.permutation(clients):
        ties = rng.permutation(classes)
        for label in ties[np.argsort(-places[ties], kind="stable")][:each]:
            places[label] -= 1
            holders[label].append(int(k))
    hands: list[list[Ints]] = [[] for _ in range(clients)]
    for label, owners in enumerate(holders):
        if owners:
            pieces = np.array_split(rng.permutation(np.flatnonzero(y == label)), len(owners))
            for k, piece in zip(owners, pieces, strict=True):
                hands[k].append(piece)
    return [np.concatenate(hand) for hand in hands]


def _level(caps: Ints, total: int, rng: np.random.Generator) -> Ints:
    """Fill bins with the given capacities to the same height until `total` places are given."""
    low, high = 0, int(caps.max())
    while low < high:  # the greatest height that does not overflow the total
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(caps, middle).sum() <= total else (low, middle - 1)
    places: Ints = np.minimum(caps, low)
    spare = rng.permutation(np.flatnonzero(caps > low))
    places[spare[: total - int(places.sum())]] += 1
    return places
