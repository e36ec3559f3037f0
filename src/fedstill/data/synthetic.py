"""Draw FedProx's synthetic(α, β) federation (Li et al., "Federated Optimization in Heterogeneous Networks", 2020).

Client k draws u_k ~ N(0, α), B_k ~ N(0, β), its model W_k ~ N(u_k, 1) (60 × 10) and b_k ~ N(u_k, 1), its centre
v_k ~ N(B_k, 1) (60 entries), and ⌊lognormal(4, 2)⌋ + 50 samples x ~ N(v_k, Σ) with Σ = diag(j^-1.2), j = 1…60; the
label is argmax(xW_k + b_k). Two choices: α and β are standard deviations, as in the authors' code (the paper's notation
leaves it open); and each client has its own generator, so that client k is the same among 10 clients or 1,000.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.errors import InputError
from .dataset import Dataset, dataset
from .draw import generator

FEATURES, CLASSES = 60, 10
MOST = 100_000  # clients, with 450 samples each on average


def synthetic(text: str = "") -> Dataset:
    """Draw the federation of `ALPHA,BETA[,CLIENTS[,SEED]]` (by default 0.5, 0.5, 100 clients and seed 0)."""
    alpha, beta, clients, seed = _parse(text)
    std = np.arange(1, FEATURES + 1) ** -0.6  # square roots of the variances j^-1.2
    xs, ys = [], []
    for k in range(clients):
        rng = generator(seed, "synthetic", k)
        size = int(rng.lognormal(4, 2)) + 50
        u, b = alpha * rng.standard_normal(), beta * rng.standard_normal()
        weight = u + rng.standard_normal((FEATURES, CLASSES))
        bias = u + rng.standard_normal(CLASSES)
        centre = b + rng.standard_normal(FEATURES)
        x = centre + std * rng.standard_normal((size, FEATURES))
        xs.append(x)
        ys.append((x @ weight + bias).argmax(axis=1))
    owner = np.repeat(np.arange(clients), [len(y) for y in ys])
    name = f"synthetic:{alpha!r},{beta!r},{clients},{seed}"
    return dataset(name, name, np.concatenate(xs), np.concatenate(ys), classes=CLASSES, owner=owner)


def _parse(text: str) -> tuple[float, float, int, int]:
    right = (
        "synthetic:ALPHA,BETA[,CLIENTS[,SEED]] with numbers of at least 0, at most 100,000 clients: synthetic:0.5,0.5"
    )
    values = text.split(",") if text else []
    try:
        alpha, beta = (float(values[i]) if len(values) > i else 0.5 for i in (0, 1))
        clients, seed = (int(values[i]) if len(values) > i else (100, 0)[i - 2] for i in (2, 3))
    except ValueError:
        raise InputError("data", f"synthetic:{text}", right) from None
    scales = all(math.isfinite(v) and v >= 0 for v in (alpha, beta))
    if len(values) not in (0, 2, 3, 4) or not scales or not 1 <= clients <= MOST or not 0 <= seed < 1 << 63:
        raise InputError("data", f"synthetic:{text}", right)
    return alpha, beta, clients, seed
