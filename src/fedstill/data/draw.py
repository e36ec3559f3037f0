"""Random generators that depend on nothing but a seed and what is drawn."""

from __future__ import annotations

import hashlib

import numpy as np

from ..core.errors import InputError
from .dataset import Floats, Ints


def generator(seed: int, *what: object) -> np.random.Generator:
    """A fresh generator for (seed, what): the same key gives the same stream, whatever was drawn before."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError("seed", seed, "a whole number of at least 0")
    text = "/".join(str(part) for part in (int(seed), *what))
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def log_gammas(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> Floats:
    """Logarithms of Gamma(alpha) draws, finite at any alpha > 0 (the draws themselves underflow to 0 at small ones)."""
    # Gamma(a) = Gamma(a + 1) · U^(1/a), and the power becomes a product under the logarithm
    boosted = np.log(rng.standard_gamma(alpha + 1, shape))
    with np.errstate(over="ignore"):
        shrunk = np.log1p(-rng.random(shape)) / alpha
    return np.asarray(boosted + np.maximum(shrunk, -1e300))


def softmax(logs: Floats) -> Floats:
    """Exponentials of the last axis divided by their sum; normalised gammas are a Dirichlet draw."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def apportion(total: int, shares: Floats) -> Ints:
    """Whole numbers in proportion to `shares` that sum to `total` (largest remainders; ties to the first)."""
    exact = shares / shares.sum() * total
    whole: Ints = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    order = np.argsort(whole - exact, kind="stable")  # the most short-changed first
    whole[order[:short]] += 1
    return whole
