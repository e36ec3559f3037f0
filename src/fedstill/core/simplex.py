"""A quadratic programme over weights that are not negative and sum to one, solved exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_minimum(matrix: Tensor) -> Tensor:
    """Return argmin α′Pα over α ≥ 0, Σα = 1, for a positive semi-definite P, by an active set.

    On its support the minimum has P·α = const; it is the minimum over the simplex when no other entry of P·α is below that
    constant. So the support grows by the lowest entry, and shrinks where a weight would fall below 0, until that holds.
    """
    matrix = matrix + (1e-10 * matrix.diagonal().mean() + 1e-30) * torch.eye(len(matrix), dtype=matrix.dtype)
    support = [int(matrix.diagonal().argmin())]
    alpha = matrix.new_zeros(len(matrix))
    alpha[support] = 1.0
    for _ in range(20 * len(matrix)):
        best = torch.linalg.solve(matrix[support][:, support], matrix.new_ones(len(support)))
        best = best / best.sum()
        if best.min() < 0:  # go towards it until the first entry is 0, which leaves the support
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
