"""A quadratic programme over weights that are not negative and sum to one, solved exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_minimum(matrix: Tensor) -> Tensor:
    """argmin α′Pα over α ≥ 0, Σα = 1, for a positive semi-definite P: the support grows and shrinks until no slope is lower.

    On its support the minimum has P·α = const; it is the whole minimum when no other entry of P·α is below that constant.
    """
    matrix = matrix + (1e-10 * matrix.diagonal().mean() + 1e-30) * torch.eye(len(matrix), dtype=matrix.dtype)
    support = [int(matrix.diagonal().argmin())]
    alpha = matrix.new_zeros(len(matrix))
    alpha[support] = 1.0
    for _ in range(20 * len(matrix)):
        best = torch.linalg.solve(matrix[support][:, support], matrix.new_ones(len(support)))
        best = best / best.sum()
        if best.min() < 0:  # go towards it until the first entry is 0, which leaves the support
            now = alpha[support]
            reach = torch.where(best < 0, now / (now - best), torch.inf)
            alpha[support] = (now + reach.min() * (best - now)).clamp(min=0)
            alpha[support[int(reach.argmin())]] = 0.0
            del support[int(reach.argmin())]
            continue
        alpha[support] = best
        slope = matrix @ alpha
        lowest = int(slope.argmin())
        if lowest in support or slope[lowest] >= (1 - 1e-12) * (alpha @ slope):
            break
        support.append(lowest)
    return alpha
