"""AlexNet in its single-GPU form: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.

Convolutions 64-192-384-256-256, fully connected 4096-4096. With BatchNorm it is the DomainNet model of FedBN (Li, Jiang,
Zhang, Kamp and Dou, ICLR 2021): a norm after each layer but the head, no dropout. Choices:

1. For images of up to 64 pixels the first convolution is 3×3 with stride 1 (not 11×11 with stride 4), and the pools are
   padded by one pixel so that each of the three halves the image: 32×32 ends as 4×4, 8×8 as 1×1.
2. fc1 takes 6×6 pixels, or fewer where fewer are left. A larger map is averaged down to 6×6 by equal windows (for 224 and
   FedBN's 256 pixels the same windows as an adaptive pool, whose gradient on a GPU depends on the order of sums).
3. Without BatchNorm: dropout 0.5 before fc1 and fc2, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .images import SMALL, channels_and_side

HIDDEN, GRID = 4096, 6


class AlexNet(nn.Module):
    """Five convolutions and three fully connected layers; fc3 is the head. `norm` replaces dropout by BatchNorm."""

    head_modules = "fc3"

    def __init__(self, shape: Sequence[int], classes: int, norm: bool = False) -> None:
        super().__init__()
        channels, side = channels_and_side("alexnet-bn" if norm else "alexnet", shape, least=8)
        small = side <= SMALL
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1) if small else nn.Conv2d(channels, 64, 11, 4, padding=2)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 2, padding=1 if small else 0)
        sides = [_side_after_pools(n, small) for n in shape[1:]]
        strides = [max(1, n // GRID) for n in sides]
        windows = [max(1, n - (GRID - 1) * stride) for n, stride in zip(sides, strides, strict=True)]
        self.average = nn.AvgPool2d((windows[0], windows[1]), (strides[0], strides[1]))
        self.fc1 = nn.Linear(256 * min(GRID, sides[0]) * min(GRID, sides[1]), HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = nn.Linear(HIDDEN, classes)
        self.bn1, self.bn2, self.bn3, self.bn4, self.bn5 = (
            nn.BatchNorm2d(n) if norm else nn.Identity() for n in (64, 192, 384, 256, 256)
        )
        self.bn6, self.bn7 = (nn.BatchNorm1d(HIDDEN) if norm else nn.Identity() for _ in range(2))
        self.dropout1, self.dropout2 = (nn.Dropout(0.0 if norm else 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.pool(self.bn1(self.conv1(x))))  # max-pool and ReLU commute: see cnn.py
        x = F.relu(self.pool(self.bn2(self.conv2(x))))
        x = F.relu(self.bn3(self.conv3(x)))
        x = F.relu(self.bn4(self.conv4(x)))
        x = F.relu(self.pool(self.bn5(self.conv5(x))))
        x = self.average(x).flatten(1)
        x = F.relu(self.bn6(self.fc1(self.dropout1(x))))
        x = F.relu(self.bn7(self.fc2(self.dropout2(x))))
        out: Tensor = self.fc3(x)
        return out


def _side_after_pools(side: int, small: bool) -> int:
    """Return the side of the last pool's output."""
    if not small:
        side = (side + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side + (2 if small else 0) - 3) // 2 + 1
    return side
