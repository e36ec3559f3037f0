"""The papers' convolutional networks: two 5×5 convolutions, each with ReLU and 2×2 max-pooling, then fully connected layers.

Max-pooling commutes with ReLU and with dropping complete channels, in value and in gradient (both are monotone and map zero to
zero, and a pool whose maximum is negative passes nothing either way), so both come after the pool: a quarter of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import InputError, Shown


class CNN(nn.Module):
    """Two convolutions of `channels`, then fc1 and fc2 of `hidden` units; fc3 is the head.

    `dropout2d` drops complete channels after the second convolution, `dropout` units after fc2. Images too small for two
    unpadded 5×5 convolutions (smaller than 16 pixels, the shipped digits) are padded by 2.
    """

    head_modules = "fc3"

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        channels: tuple[int, int],
        hidden: tuple[int, int],
        dropout2d: float = 0.0,
        dropout: float = 0.0,
        padding: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise InputError(
                "model", Shown(type(self).__name__), f"'mlp' for samples of shape {tuple(shape)}: these are no images"
            )
        pads = padding or ((2, 2) if min(shape[1:]) < 16 else (0, 0))
        self.conv1 = nn.Conv2d(shape[0], channels[0], 5, padding=pads[0])
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, padding=pads[1])
        self.dropout2d, self.dropout = nn.Dropout2d(dropout2d), nn.Dropout(dropout)
        with torch.no_grad():
            features = self._convolve(torch.zeros(1, *shape)).numel()
        self.fc1 = nn.Linear(features, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def _convolve(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        return F.relu(self.dropout2d(F.max_pool2d(self.conv2(x), 2))).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.fc1(self._convolve(x)))
        x = self.dropout(F.relu(self.fc2(x)))
        out: Tensor = self.fc3(x)
        return out


class LeNet5(CNN):
    """LeNet-5 as the field uses it: 6-16 channels, 120-84 units. 28×28 images are padded to its original 32×32."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        small = len(shape) == 3 and min(shape[1:]) == 28
        super().__init__(shape, classes, (6, 16), (120, 84), padding=(2, 0) if small else None)
