"""What the image models share: which samples they take, and how their convolutions begin."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..core.errors import InputError, Shown

SMALL = 64  # up to this many pixels a network keeps its first layers at full resolution, as the CIFAR variants do


def channels_and_side(model: str, shape: Sequence[int], least: int, most: int | None = None) -> tuple[int, int]:
    """Channels and shorter side of samples [C, H, W]; a shape that the model cannot take is refused."""
    if len(shape) != 3:
        raise InputError("model", model, f"'mlp' for samples of shape {tuple(shape)}: these are no images")
    side = min(shape[1:])
    if side < least or (most is not None and max(shape[1:]) > most):
        right = f"given images of at least {least} pixels a side"
        if most is not None:
            right = f"given images of {least} to {most} pixels a side ('resnet18' takes larger ones)"
        raise InputError("model", Shown(f"{model} on {shape[1]}×{shape[2]} images"), right)
    return shape[0], side


def he_normal(module: nn.Module) -> None:
    """He's initialisation for every convolution: normal, with variance 2 / (kernel area · output channels)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
