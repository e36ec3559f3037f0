"""Whether an upload gives away a private leaf: by its name, as it is, or as an affine function of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Params, Tree

ROUNDING = 1e-9  # of the length of the upload's leaf
ENOUGH = 6  # numbers in a leaf, from which on four columns do not explain it by chance


def leaks(up: Tree, before: Tree, after: Tree, initial: Params, private: frozenset[str]) -> list[str]:
    """Return "what went up ← what is private" for every leaf of an upload that a private leaf explains.

    `before` and `after` are the client's memory around its round, `initial` is the state that everybody begins with. A leaf that
    constants and initial values alone explain says nothing of the client.
    """
    sent = dict(tree.leaves(up))
    findings = [f"{name} ← its own name" for name in sent if name.split(tree.SEPARATOR)[-1] in private]
    old, new = (
        {name: leaf for name, leaf in tree.leaves(memory) if name.split(tree.SEPARATOR)[-1] in private}
        for memory in (before, after)
    )
    for secret, now in new.items():
        start = initial[secret.split(tree.SEPARATOR)[-1]]
        for name, leaf in sent.items():
            if leaf.numel() == now.numel() > 1 and explains(leaf, old.get(secret, now), now, start):
                findings.append(f"{name} ← {secret}")
    return findings


def explains(leaf: Tensor, old: Tensor, new: Tensor, start: Tensor) -> bool:
    """Whether the leaf is a·new + b·old + c·start + d, and not c·start + d alone.

    Of a leaf with few numbers, which any columns explain: whether it is a multiple of new or old, or of a difference.
    """
    u, old, new, start = (value.double().flatten() for value in (leaf, old, new, start))
    one = torch.ones_like(u)
    if in_span(u, one, start):
        return False
    if len(u) >= ENOUGH:
        return in_span(u, one, start, old, new)
    return any(in_span(u, line) for line in (new, old, new - start, old - start, new - old))


def in_span(u: Tensor, *columns: Tensor) -> bool:
    """Whether the vector is a combination of the columns, to rounding."""
    scaled = torch.stack([c / c.norm() for c in columns if c.norm() > 0] or [torch.zeros_like(u)], 1)
    combination = scaled @ torch.linalg.lstsq(scaled, u.unsqueeze(1), driver="gelsd").solution
    return bool((combination.squeeze(1) - u).norm() <= ROUNDING * u.norm())
