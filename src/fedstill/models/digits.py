"""FedBN's digit network with BatchNorm (Li, Jiang, Zhang, Kamp and Dou, ICLR 2021), which FedBSD also uses.

FedBN's code: 5×5 convolutions 64-64-128 that keep the size, 2×2 max-pooling after the first and the second, fully connected
2048-512, a norm after each layer but the head. FedBSD says "three convolutional layers" in one place and "six convolutional
layers" in another and gives no sizes (FedBN's network has six layers in all). Our six: each of the three twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .images import SMALL, channels_and_side

WIDTHS = (64, 64, 128)


class DigitsCNN(nn.Module):
    """`repeats` convolutions of each width, then fc1, fc2 and the head fc3. On 28×28 images fc1 has FedBN's 6272 inputs."""

    head_modules = "fc3"

    def __init__(self, shape: Sequence[int], classes: int, repeats: int = 1) -> None:
        super().__init__()
        channels, _ = channels_and_side(f"digits-cnn{3 * repeats}", shape, least=4, most=SMALL)
        layers: list[nn.Module] = []
        inputs = channels
        for i, width in enumerate(WIDTHS):
            for j in range(repeats):
                layers += [nn.Conv2d(inputs, width, 5, padding=2), nn.BatchNorm2d(width)]
                if i < 2 and j == repeats - 1:
                    layers.append(nn.MaxPool2d(2))  # before ReLU, with which it commutes: see cnn.py
                layers.append(nn.ReLU())
                inputs = width
        self.features = nn.Sequential(*layers)
        self.fc1, self.bn1 = nn.Linear(inputs * (shape[1] // 4) * (shape[2] // 4), 2048), nn.BatchNorm1d(2048)
        self.fc2, self.bn2 = nn.Linear(2048, 512), nn.BatchNorm1d(512)
        self.fc3 = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.features(x).flatten(1)
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        out: Tensor = self.fc3(x)
        return out
