"""Linear models and multi-layer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import InputError, Shown


class MLR(nn.Module):
    """Multinomial logistic regression. It has no body, so methods that share a body cannot use it."""

    head_modules = None

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.fc(x.flatten(1))
        return out


class MLP(nn.Module):
    """Hidden layers with ReLU; the last layer is the head."""

    def __init__(self, shape: Sequence[int], classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        if not hidden:
            raise InputError("hidden", Shown("()"), "at least one hidden layer (mlr has none)")
        widths = [math.prod(shape), *hidden, classes]
        for i, (a, b) in enumerate(itertools.pairwise(widths), start=1):
            self.add_module(f"fc{i}", nn.Linear(a, b))
        self.depth = len(widths) - 1
        self.head_modules = f"fc{self.depth}"

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = x.flatten(1)
        for i in range(1, self.depth):
            x = F.relu(self.get_submodule(f"fc{i}")(x))
        out: Tensor = self.get_submodule(self.head_modules)(x)
        return out
