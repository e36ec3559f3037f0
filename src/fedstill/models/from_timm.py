"""Models of timm by name, fitted to the samples: `timm:vit_tiny_patch16_224`. They start from random weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from ..core.errors import InputError, first_line, nearest
from .beside_torchvision import import_torchvision

MISSING = "installed to take models of timm: pip install 'fedstill[vision]'"
FETCHING = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)  # downloads and pickles


def build(name: str, shape: Sequence[int], classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a model for images of this shape; its size of images is the samples' where it has one."""
    full = f"timm:{name}"
    fetching = [argument for argument in arguments if argument in FETCHING]
    if fetching:
        raise InputError("model_args", fetching[0], "left out: --weights FILE.safetensors starts from weights")
    timm = _timm(full)
    if not timm.is_model(name):
        close = nearest(name, timm.list_models()) if len(name) < 100 else ""
        raise InputError("model", full, f"a model of timm: {close.partition('(')[0] or 'timm.list_models() has them'}")
    if len(shape) != 3:
        raise InputError("model", full, f"one for samples of shape {'×'.join(map(str, shape))}: it takes images")
    own = {"num_classes": classes, "in_chans": shape[0], **arguments}
    try:
        try:
            return timm.create_model(name, **{"img_size": tuple(shape[1:]), **own})  # type: ignore[no-any-return]
        except TypeError as error:
            if "img_size" not in str(error) or "img_size" in arguments:
                raise
            return timm.create_model(name, **own)  # type: ignore[no-any-return]
    except Exception as error:
        right = f"one that can be made for images of {'×'.join(map(str, shape))} ({type(error).__name__}: {first_line(error)})"
        raise InputError("model", full, right) from error


def _timm(model: str) -> ModuleType:
    """Import timm."""
    try:
        import_torchvision()
        return importlib.import_module("timm")
    except ImportError:
        raise InputError("model", model, MISSING) from None
