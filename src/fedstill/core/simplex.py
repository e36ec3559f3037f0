"""An exact solver for quadratic programmes over the simplex (weights that are at least 0 and sum to one)."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_minimum(matrix: Tensor) -> Tensor:
    """Return argmin α′Pα over α ≥ 0, Σα = 1, for a positive semi-definite P, by an active set.

    On its support the minimum has P·α = const; it is the minimum over the simplex if no other entry of P·α is below that
    constant. Until this holds, add the lowest entry to the support, or remove the one whose weight would fall below 0.
    """
    matrix = matrix + (1e-10 * matrix.diagonal().mean() + 1e-30) * torch.eye(len(matrix), dtype=matrix.dtype)
    support = [int(matrix.diagonal().argmin())]
    alpha = matrix.new_zeros(len(matrix))
    alpha[support] = 1.0
    for _ in range(20 * len(matrix)):
        best = torch.linalg.solve(matrix[support][:, support], matrix.new_ones(len(support)))
        best = best / best.sum()
        if best.min() < 0:  # step towards it until the first weight is 0; remove that from the support
            current = alpha[support]
            step = torch.where(best < 0, current / (current - best), torch.inf)
            alpha[support] = (current + step.min() * (best - current)).clamp(min=0)
            alpha[support[int(step.argmin())]] = 0.0
            del support[int(step.argmin())]
            continue
        alpha[support] = best
        slope = matrix @ alpha
        lowest = int(slope.argmin())
        if lowest in support or slope[lowest] >= (1 - 1e-12) * (alpha @ slope):
            break
        support.append(lowest)
    return alpha
