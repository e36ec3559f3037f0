"""Models of timm by name, fitted to the samples: `timm:vit_tiny_patch16_224`. They start from random weights.

timm imports torchvision for a class and some transforms. Where torchvision is one for another build of torch, its compiled
operators cannot be loaded and importing it fails on the two that it describes without looking; nothing here calls them, so
they are declared and it is imported all the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..core.errors import InputError, first_line, nearest

MISSING = "installed to take models of timm: pip install 'fedstill[vision]'"
DESCRIBED = {  # torchvision's operators with a description that needs them to be there
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
FETCHING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")  # downloads and pickles
_declared: list[torch.library.Library] = []  # a library's operators last as long as it does


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
        _torchvision()
        return importlib.import_module("timm")
    except ImportError:
        raise InputError("model", model, MISSING) from None


def _torchvision() -> None:
    """Import torchvision; without its compiled operators where they cannot be loaded."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
        for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator, signature in DESCRIBED.items():
            library.define(operator + signature)
        _declared.append(library)
        importlib.import_module("torchvision")
