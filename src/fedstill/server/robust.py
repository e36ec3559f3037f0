"""Robust rules: what the server makes of uploads of which some may be forged.

Of n uploads x_i with weights p_i, f are suspected to be forged; w is what the clients started from (`around`).

    median            each coordinate's middle value
    trimmed-mean      each coordinate's mean without its f lowest and its f highest values
    krum              x_i with the least Σ ‖x_i − x_j‖² over its n − f − 2 nearest x_j
    multi-krum        the mean of the n − f uploads with the least of these sums
    geometric-median  argmin_z Σ p_i·‖x_i − z‖
    norm-clip         w + Σ p_i·min(1, C/‖x_i − w‖)·(x_i − w)
    fltrust           w + Σ t_i·(‖g‖/‖x_i − w‖)·(x_i − w) / Σ t_i  with  t_i = max(0, cos(x_i − w, g))

g is the change that the server's own training, on samples that it owns, makes of w (`trust.py`).

Choices: (1) Median, trimmed mean, Krum and multi-Krum count every upload alike, as their papers do: an attacker may have many
samples. Geometric median and norm-clip keep the method's weights. (2) Distances, norms and angles are taken over all floating
entries that are averaged, BatchNorm's statistics included, in float64. (3) Integer entries (BatchNorm's count of batches) follow
the same rule and are rounded. (4) A round with fewer uploads than a rule needs lowers f until the rule can be followed: fewer
are then tolerated (`minimum` abandons such rounds). (5) Of equal sums the upload of the lowest client is taken. (6) Where nobody
has a positive t_i the model stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Tree

STEPS = 10_000  # at most, of the geometric median's iteration
TINY = 1e-12  # relative change of the geometric median's coefficients at which it has converged


def forged(suspected: float, n: int) -> int:
    """Return f of n uploads: `suspected` itself where it is 1 or more, else that share of them, rounded up.

    >>> forged(0.2, 20), forged(0.2, 6), forged(3, 20)
    (4, 2, 3)
    """
    return int(suspected) if suspected >= 1 else math.ceil(suspected * n - 1e-9)


# ---- by coordinate -----------------------------------------------------------------------------------------------------
def median(trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
    """Return the coordinate-wise median, which less than half of the clients cannot move out of the others' range.

    Of an even number of values it is the mean of the middle two. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018.
    """
    cut = (len(trees) - 1) // 2
    return tree.map(lambda *leaves: _middle(leaves, cut), *trees)


def trimmed_mean(
    trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None, *, suspected: float = 0.2
) -> Tree:
    """Return each coordinate's mean without its f lowest and f highest values, for 2f < n. Yin et al., ICML 2018."""
    cut = min(forged(suspected, len(trees)), (len(trees) - 1) // 2)
    return tree.map(lambda *leaves: _middle(leaves, cut), *trees)


def _middle(leaves: Sequence[Tensor], cut: int) -> Tensor:
    """Return the mean of what is left of sorted values without `cut` at each end."""
    ordered = torch.stack(list(leaves)).sort(dim=0).values[cut : len(leaves) - cut]
    value = ordered.mean(0, dtype=torch.float64)
    return (value if ordered.is_floating_point() else value.round()).to(ordered.dtype)


# ---- by distances ------------------------------------------------------------------------------------------------------
def krum(
    trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None, *, suspected: float = 0.2
) -> Tree:
    """Return the upload that is nearest to its n − f − 2 nearest, for n ≥ 2f + 3.

    Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.
    """
    f = min(forged(suspected, len(trees)), most_krum(len(trees)))
    return tree.clone(trees[int(krum_sums(trees, f).argmin())])


def multi_krum(
    trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None, *, suspected: float = 0.2
) -> Tree:
    """Return the mean of the n − f uploads that Krum finds best, in one scoring, as Blanchard et al. (2017) do."""
    f = min(forged(suspected, len(trees)), most_krum(len(trees)))
    best = krum_sums(trees, f).argsort(stable=True)[: len(trees) - f]
    chosen = sorted(int(i) for i in best)
    return tree.mean([trees[i] for i in chosen], [1.0] * len(chosen))


def most_krum(n: int) -> int:
    """Return the most forged uploads of n that Krum tolerates: n ≥ 2f + 3."""
    return max(0, (n - 3) // 2)


def krum_sums(trees: Sequence[Tree], f: int) -> Tensor:
    """Return for each upload the sum of the squared distances to its n − f − 2 nearest others (at least one)."""
    distances = squared_distances(trees)
    n = len(distances)
    near = max(1, n - f - 2)
    others = distances.masked_fill(torch.eye(n, dtype=torch.bool), math.inf)
    return others.sort(dim=1).values[:, : min(near, n - 1)].sum(1)


def squared_distances(trees: Sequence[Tree]) -> Tensor:
    """Return ‖x_i − x_j‖² for all pairs, on the host; equal uploads have 0 between them and the same row."""
    n = len(trees)
    total = torch.zeros(n, n, dtype=torch.float64)
    for rows in _columns(trees):
        for i in range(n - 1):
            total[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1).cpu()
    return total + total.T


def _columns(trees: Sequence[Tree]) -> list[Tensor]:
    """Return each floating entry of the uploads as a matrix with a row for each upload."""
    flat = [tree.flatten(one) for one in trees]
    names = [name for name, leaf in flat[0].items() if leaf.is_floating_point()]
    return [torch.stack([one[name].reshape(-1) for one in flat]).double() for name in names]


def geometric_median(trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
    """Return the point with the least weighted sum of distances, which less than half the weight cannot carry away.

    By Weiszfeld's iteration; it has to leave an upload on which it falls (Vardi and Zhang, PNAS 2000). An upload that is itself
    the geometric median is found first: the pull of the others on it is at most its own weight. Pillutla et al., "Robust
    Aggregation for Federated Learning", IEEE TSP 2022. The point is a mean of the uploads, so n coefficients are iterated.
    """
    total = float(sum(weights))
    p = torch.tensor([weight / total for weight in weights], dtype=torch.float64)
    coefficients = geometric_coefficients(squared_distances(trees), p)
    return tree.mean(trees, coefficients.tolist())


def geometric_coefficients(squared: Tensor, p: Tensor) -> Tensor:
    """Return the geometric median's coefficients c ≥ 0, Σ c = 1, given the squared distances and the weights, Σ p = 1.

    With Σ c = 1: ‖x_i − Σ c_j·x_j‖² = Σ_j c_j·D_ij − ½·Σ_jl c_j·c_l·D_jl.
    """
    for i in range(len(p)):
        if _pull(squared, p, i) <= 1:
            return torch.nn.functional.one_hot(torch.tensor(i), len(p)).double()
    c = p.clone()
    for _ in range(STEPS):
        reach = squared @ c
        apart = (reach - 0.5 * (c @ reach)).clamp(min=0).sqrt()
        apart = apart.clamp(min=1e-15 * float(apart.max()))
        new = p / apart
        new = new / new.sum()
        if bool((new - c).abs().max() <= TINY):
            return new
        c = new
    return c


def _pull(squared: Tensor, p: Tensor, i: int) -> float:
    """Return the length of Σ p_j·(x_j − x_i)/‖x_j − x_i‖ over the x_j unlike x_i, divided by the weight of the others."""
    away = squared[i] > 0
    q = torch.where(away, p / squared[i].where(away, torch.ones_like(p)).sqrt(), torch.zeros_like(p))
    # (x_j − x_i)·(x_l − x_i) = (D_ij + D_il − D_jl)/2
    inner = (squared[i][:, None] + squared[i][None, :] - squared) / 2
    return math.sqrt(max(0.0, float(q @ inner @ q))) / float(p[~away].sum())


# ---- by the length and direction of a change ---------------------------------------------------------------------------
def norm_clip(
    trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None, *, limit: float = 0.0
) -> Tree:
    """Return the mean of changes of norm at most C = `limit`; 0: the median of the round's norms. Shorter ones stay to the bit.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, where C is given.
    """
    centre = tree.zeros(trees[0]) if around is None else _like(around, trees[0])
    norms = torch.stack([norm(tree.sub(one, centre)) for one in trees])
    most = limit or float(_middle(list(norms), (len(trees) - 1) // 2))
    scales = [min(1.0, most / length) if length > 0 else 1.0 for length in norms.tolist()]
    clipped = [
        one if s == 1 else tree.add(centre, tree.sub(one, centre), s) for one, s in zip(trees, scales, strict=True)
    ]
    return tree.mean(clipped, weights)


def norm(change: Tree) -> Tensor:
    """Return the length of all floating entries together, in float64."""
    squares = [leaf.double().square().sum() for _, leaf in tree.leaves(change) if leaf.is_floating_point()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def fltrust(trees: Sequence[Tree], weights: Sequence[float], around: Tree, *, trained: Tree) -> Tree:
    """Return w moved by the changes that point where the server's own training does, each as long as the server's.

    `trained` is what the server's training makes of `around`; weights do not count. Cao et al., "FLTrust: Byzantine-robust
    Federated Learning via Trust Bootstrapping", NDSS 2021.
    """
    centre = _like(around, trees[0])
    own = tree.sub(_like(trained, trees[0]), centre)
    length = float(norm(own))
    moves, trust = [], []
    for one in trees:
        change = tree.sub(one, centre)
        by = float(norm(change))
        t = max(0.0, float(_inner(change, own)) / (by * length)) if by * length > 0 else 0.0
        if t > 0:
            moves.append(tree.add(centre, change, length / by))
            trust.append(t)
    return tree.mean(moves, trust) if moves else tree.clone(centre)


def _inner(a: Tree, b: Tree) -> Tensor:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return torch.stack([(x.double() * y.double()).sum() for (_, x), (_, y) in pairs if x.is_floating_point()]).sum()


def _like(whole: Tree, part: Tree) -> Tree:
    """Return the entries of a tree that another one has."""
    return {name: _like(whole[name], value) if isinstance(value, dict) else whole[name] for name, value in part.items()}


RULES: dict[str, Callable[..., Tree]] = {
    "mean": tree.mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "geometric-median": geometric_median,
    "norm-clip": norm_clip,
    "fltrust": fltrust,
}
