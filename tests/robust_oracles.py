"""Robust rules written a second time, otherwise: with loops, over all subsets, by a search with gradients. In numpy and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy.optimize import minimize

from fedstill.core import tree
from fedstill.core.tree import Tree


def uploads(n: int, seed: int = 0, spread: float = 1.0) -> list[Tree]:
    """Uploads with two floating entries, one of them nested, and a count."""
    g = np.random.default_rng(seed)

    def one(i: int) -> Tree:
        return {
            "a": torch.from_numpy(g.normal(size=(2, 3)) * spread),
            "deep": {"b": torch.from_numpy(g.normal(size=4) + 3)},
            "n": torch.tensor(int(g.integers(0, 50))),
        }

    return [one(i) for i in range(n)]


def vector(one: Tree) -> np.ndarray:
    return np.concatenate([one["a"].numpy().ravel(), one["deep"]["b"].numpy().ravel()])


def matrix(trees: list[Tree]) -> np.ndarray:
    return np.stack([vector(one) for one in trees])


def counts(trees: list[Tree]) -> list[int]:
    return [int(one["n"]) for one in trees]


def tied(trees: list[Tree]) -> list[Tree]:
    """The same uploads, of which two are equal and one coordinate is equal in all."""
    for one in trees:
        one["a"][0, 0] = 1.5
    return [*trees[:-1], tree.clone(trees[0])]


# ---- oracles -------------------------------------------------------------------------------------------------------------
def trimmed_by_loops(x: np.ndarray, cut: int) -> np.ndarray:
    """Strike the lowest and the highest value out, `cut` times."""
    out = []
    for column in x.T:
        values = list(column)
        for _ in range(cut):
            values.remove(min(values))
            values.remove(max(values))
        out.append(sum(values) / len(values))
    return np.array(out)


def krum_by_force(x: np.ndarray, f: int) -> list[float]:
    """For each upload the cheapest choice of n − f − 2 others, over all choices."""
    n = len(x)
    sums = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        price = {j: sum((a - b) ** 2 for a, b in zip(x[i], x[j], strict=True)) for j in others}
        sums.append(min(sum(price[j] for j in some) for some in itertools.combinations(others, n - f - 2)))
    return sums


def middle_by_scipy(x: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The least Σ p‖x − z‖, searched with gradients from several beginnings, an upload itself included."""

    def price(z: np.ndarray) -> float:
        return float(sum(w * np.sqrt(((z - row) ** 2).sum()) for w, row in zip(p, x, strict=True)))

    def slope(z: np.ndarray) -> np.ndarray:
        return sum(w * (z - row) / max(np.sqrt(((z - row) ** 2).sum()), 1e-300) for w, row in zip(p, x, strict=True))

    starts = [np.average(x, 0, p), np.median(x, 0) + 0.01]
    found = [minimize(price, s, jac=slope, method="BFGS", options={"gtol": 1e-11, "maxiter": 5000}).x for s in starts]
    return min([*found, *x], key=price)


def clipped_by_formula(x: np.ndarray, p: np.ndarray, w: np.ndarray, limit: float) -> np.ndarray:
    """w + Σ p_i·min(1, C/‖x_i − w‖)·(x_i − w), with the median of the norms for C = 0."""
    lengths = [math.sqrt(sum((row - w) ** 2)) for row in x]
    most = limit or float(np.median(lengths))
    return w + sum(q * min(1.0, most / length) * (row - w) for q, row, length in zip(p, x, lengths, strict=True))


def trusted_by_formula(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> np.ndarray:
    """In FLTrust's original form, with unit vectors: w + ‖g‖·Σ t_i·e_i / Σ t_i."""
    e = [(row - w) / math.sqrt(sum((row - w) ** 2)) for row in x]
    t = [max(0.0, float(sum(a * b for a, b in zip(row, g, strict=True))) / math.sqrt(sum(g**2))) for row in e]
    return w + math.sqrt(sum(g**2)) * sum(a * row for a, row in zip(t, e, strict=True)) / sum(t) if sum(t) else w
