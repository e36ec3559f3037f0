"""Residual networks: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.

Choices:

1. ResNet-18, -34 and -50 begin with a 7×7 convolution of stride 2 and a 3×3 max-pool, as on ImageNet. For images of up to
   64 pixels they begin with a 3×3 convolution of stride 1 and no pool, as is common on CIFAR.
2. Where a block changes its size, "project" puts a 1×1 convolution with BatchNorm on the shortcut (the paper's option B),
   "zeros" takes every second pixel and adds channels of zeros (option A, no parameters). The paper's CIFAR networks (6n+2
   layers) use zeros, and so does resnet32 (CD²-pFed says no more than its name). resnet8 projects, as pFedSD's code does.
3. The paper does not say where the added channels go, and training does not depend on it. Ours lie between the others
   (channel i becomes channel 2i), so that the last ⌊pC⌋ channels stay among the last ⌊2pC⌋ and the first among the first, for
   every p: a method that divides the model by channels can divide the shortcut too.
4. A bottleneck has its stride in the 3×3 convolution, as torchvision has it (the paper: in the first 1×1).

Parameters are named as torchvision names them, so its weights for ResNet-18, -34 and -50 can be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from .images import SMALL, channels_and_side, he_normal

Shortcut: TypeAlias = Literal["project", "zeros"]


class Zeros(nn.Module):
    """The shortcut without parameters: every `stride`-th pixel, and after each channel `factor` − 1 channels of zeros."""

    def __init__(self, factor: int, stride: int) -> None:
        super().__init__()
        self.channel_factor, self.stride = factor, stride  # `nn.channels` asks for the factor by this name

    def forward(self, x: Tensor) -> Tensor:
        """Subsample the pixels and add channels of zeros."""
        x = F.avg_pool2d(x, 1, self.stride).unsqueeze(2)
        return F.pad(x, (0, 0, 0, 0, 0, self.channel_factor - 1)).flatten(1, 2)


def _shortcut(kind: Shortcut, inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "zeros":
        return Zeros(outputs // inputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class Basic(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion, layers = 1, 2

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.downsample = _shortcut(shortcut, inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(F(x) + shortcut(x))."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1×1 to `width`, 3×3, 1×1 to four times `width`, and a shortcut."""

    expansion, layers = 4, 3

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(shortcut, inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(F(x) + shortcut(x))."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class ResNet(nn.Module):
    """`blocks` per stage; each stage after the first halves the image and doubles `width`. `fc` is the head.

    `stem` "auto" adapts the first layers to the image's size (choice 1); "small" never reduces the resolution there.
    """

    head_modules = "fc"

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        block: type[Basic] | type[Bottleneck],
        blocks: Sequence[int],
        width: int = 64,
        shortcut: Shortcut = "project",
        stem: Literal["auto", "small"] = "auto",
    ) -> None:
        super().__init__()
        name = f"resnet{sum(blocks) * block.layers + 2}"
        channels, side = channels_and_side(name, shape, least=2 ** (len(blocks) - 1))
        small = stem == "small" or side <= SMALL
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        self.stages, inputs = len(blocks), width
        for i, count in enumerate(blocks):
            stage: list[nn.Module] = []
            for j in range(count):
                stage.append(block(inputs, width * 2**i, 2 if i > 0 and j == 0 else 1, shortcut))
                inputs = width * 2**i * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*stage))
        self.fc = nn.Linear(inputs, classes)
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.maxpool(self.bn1(self.conv1(x))))  # pool and ReLU commute: see cnn.py
        for i in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{i}")(x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def resnet8(shape: Sequence[int], classes: int) -> ResNet:
    """Build 6n+2 layers with n = 1, widths 16-32-64, projections."""
    return ResNet(shape, classes, Basic, (1, 1, 1), 16, "project", "small")


def resnet32(shape: Sequence[int], classes: int) -> ResNet:
    """Build 6n+2 layers with n = 5, widths 16-32-64, shortcuts without parameters."""
    return ResNet(shape, classes, Basic, (5, 5, 5), 16, "zeros", "small")


def resnet18(shape: Sequence[int], classes: int) -> ResNet:
    """Build basic blocks 2-2-2-2 of widths 64-128-256-512."""
    return ResNet(shape, classes, Basic, (2, 2, 2, 2))


def resnet34(shape: Sequence[int], classes: int) -> ResNet:
    """Build basic blocks 3-4-6-3 of widths 64-128-256-512."""
    return ResNet(shape, classes, Basic, (3, 4, 6, 3))


def resnet50(shape: Sequence[int], classes: int) -> ResNet:
    """Build bottlenecks 3-4-6-3 of widths 64-128-256-512 (times 4 at their ends)."""
    return ResNet(shape, classes, Bottleneck, (3, 4, 6, 3))
