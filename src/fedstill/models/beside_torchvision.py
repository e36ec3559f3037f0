"""Import torchvision, which timm and transformers ask for, also where it is one for another build of torch.

Its compiled operators cannot be loaded there, as with PyPI's torchvision beside a torch for CPUs only, and importing it fails on
the two operators that it describes without looking. Nothing here calls them: they are declared, and the rest is imported.
"""

from __future__ import annotations

import importlib
import sys

import torch

DESCRIBED = {  # torchvision's operators with a description that needs them to be there
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a library's operators last as long as it does


def import_torchvision() -> None:
    """Import torchvision; raise `ImportError` where it is not installed."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
        for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator, signature in DESCRIBED.items():
            library.define(operator + signature)  # type: ignore[no-untyped-call]
        _declared.append(library)
        importlib.import_module("torchvision")
