"""What the image models share: the check of their input's shape, and the initialisation of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..core.errors import InputError, Shown

SMALL = 64  # up to this many pixels a network keeps its first layers at full resolution, as the CIFAR variants do


def channels_and_side(model: str, shape: Sequence[int], least: int, most: int | None = None) -> tuple[int, int]:
    """Return the channels and shorter side of samples [C, H, W]; refuse a shape that the model cannot take."""
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
    """Initialise every convolution as He et al. do: normal, with variance 2 / (kernel area · output channels)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
