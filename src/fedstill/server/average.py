"""What can stand behind `task.average`: the server's mean, and robust rules in its place.

A rule takes the clients' trees and their weights and returns one tree. Methods call it through the task, so a rule written here
serves every method that averages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Tree

mean = tree.mean


def median(trees: Sequence[Tree], weights: Sequence[float], around: Tree | None = None) -> Tree:
    """Return the coordinate-wise median, which less than half of the clients cannot move far; weights do not count.

    Of an even number of values it is the mean of the middle two. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018.
    """

    def middle(*leaves: Tensor) -> Tensor:
        stacked = torch.stack(leaves)
        values = torch.quantile(stacked.double(), 0.5, dim=0)
        return (values if stacked.is_floating_point() else values.round()).to(stacked.dtype)

    return tree.map(middle, *trees)
