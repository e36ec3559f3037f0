"""MobileNetV2: Sandler, Howard, Zhu, Zhmoginov and Chen, "Inverted Residuals and Linear Bottlenecks", CVPR 2018.

Choices:

1. For images of up to 64 pixels the first convolution and the stage of 24 channels keep the resolution (stride 1, not 2), as
   is common on CIFAR: a 32×32 image ends as 4×4. The number of parameters stays the same.
2. A block has a shortcut exactly where stride and width allow it, as in the paper: no projections.
3. Dropout 0.2 before the head, as torchvision has it; the paper's table of layers shows none.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .images import SMALL, channels_and_side, he_normal

# The paper's Table 2: expansion t, output channels c, blocks n, stride s of the first one.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
FIRST, LAST = 32, 1280


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class InvertedResidual(nn.Module):
    """1×1 to `expansion` times the channels, depthwise 3×3, 1×1 back without activation; a shortcut if the sizes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        expand = [*_normed(inputs, wide, 1), nn.ReLU6()] if expansion > 1 else []
        self.conv = nn.Sequential(
            *expand, *_normed(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_normed(wide, outputs, 1)
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the narrow output, plus the narrow input where the sizes agree."""
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """The paper's network at width 1. `fc` is the head."""

    head_modules = "fc"

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, side = channels_and_side("mobilenetv2", shape, least=8)
        small = side <= SMALL
        layers: list[nn.Module] = [*_normed(channels, FIRST, 3, 1 if small else 2), nn.ReLU6()]
        inputs = FIRST
        for expansion, outputs, count, first_stride in STAGES:
            for i in range(count):
                stride = 1 if i > 0 or (small and outputs == 24) else first_stride
                layers.append(InvertedResidual(inputs, outputs, stride, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, *_normed(inputs, LAST, 1), nn.ReLU6())
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(LAST, classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.fc(self.dropout(self.features(x).mean((2, 3))))
        return out
