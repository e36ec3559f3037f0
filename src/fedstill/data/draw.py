"""Random generators keyed by a seed and the name of the draw, and the draws that partitions share."""

from __future__ import annotations

import hashlib

import numpy as np

from ..core.errors import InputError
from .dataset import Floats, Ints


def generator(seed: int, *key: object) -> np.random.Generator:
    """Return a fresh generator: the same seed and key give the same stream, whatever was drawn before."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError("seed", seed, "a whole number of at least 0")
    text = "/".join(str(item) for item in (int(seed), *key))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=digest))


def log_gammas(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> Floats:
    """Return logarithms of Gamma(alpha) draws, finite at any alpha > 0 (the draws underflow to 0 at small ones)."""
    # Gamma(a) = Gamma(a + 1) · U^(1/a), and the power becomes a product under the logarithm
    boosted = np.log(rng.standard_gamma(alpha + 1, shape))
    with np.errstate(over="ignore"):
        shrunk = np.log1p(-rng.random(shape)) / alpha
    return np.asarray(boosted + np.maximum(shrunk, -1e300))


def softmax(logs: Floats) -> Floats:
    """Return the softmax over the last axis; normalised gammas are a Dirichlet draw."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def apportion(total: int, shares: Floats) -> Ints:
    """Return integers in proportion to `shares` that sum to `total` (largest remainders; ties to the first)."""
    exact = shares / shares.sum() * total
    rounded: Ints = np.floor(exact).astype(np.int64)
    remainder = total - int(rounded.sum())
    order = np.argsort(rounded - exact, kind="stable")  # those rounded down the most first
    rounded[order[:remainder]] += 1
    return rounded
