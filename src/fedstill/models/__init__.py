"""Models by name: plain `nn.Module`s that name their head (`head_modules`) and adapt to the shape of the samples.

Besides those that come with fedstill there are timm's (`timm:NAME`), those of transformers (`hf:NAME`, `hf:FOLDER`) and code of
one's own (`net.py:Net`, `package.module:Net`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..core import own
from ..core.errors import InputError, first_line, nearest
from . import arguments, from_hf, from_timm
from .alexnet import AlexNet
from .cnn import CNN, LeNet5
from .digits import DigitsCNN
from .mlp import MLP, MLR
from .mobilenet import MobileNetV2
from .resnet import resnet8, resnet18, resnet32, resnet34, resnet50

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Builder: TypeAlias = Callable[[Sequence[int], int], nn.Module]

MODELS: dict[str, tuple[Builder, str]] = {
    "mlr": (MLR, "multinomial logistic regression: one linear layer"),
    "mlp": (lambda s, c: MLP(s, c, (128,)), "one hidden layer of 128 units"),
    "mlp2": (lambda s, c: MLP(s, c, (200, 100)), "two hidden layers of 200 and 100 units"),
    "lenet5": (LeNet5, "LeNet-5: convolutions 6-16, fully connected 120-84"),
    "cnn-fmnist": (
        lambda s, c: CNN(s, c, (64, 64), (128, 64), dropout2d=0.5),
        "pFedSD's CNN for Fashion-MNIST: 5×5 convolutions 64-64, dropout, fully connected 128-64",
    ),
    "cnn-cifar10": (
        lambda s, c: CNN(s, c, (6, 16), (120, 84)),
        "pFedSD's CNN for CIFAR-10: 5×5 convolutions 6-16, 120-84",
    ),
    "cnn-cifar100": (
        lambda s, c: CNN(s, c, (64, 128), (256, 128), dropout=0.6),
        "pFedSD's CNN for CIFAR-100: 5×5 convolutions 64-128, 256-128, dropout",
    ),
    "digits-cnn3": (DigitsCNN, "FedBN's CNN for digits: 5×5 convolutions 64-64-128, 2048-512, BatchNorm"),
    "digits-cnn6": (lambda s, c: DigitsCNN(s, c, repeats=2), "the same with each convolution twice (FedBSD)"),
    "alexnet": (AlexNet, "AlexNet: convolutions 64-192-384-256-256, 4096-4096, dropout"),
    "alexnet-bn": (lambda s, c: AlexNet(s, c, norm=True), "AlexNet with BatchNorm, no dropout: FedBN's for DomainNet"),
    "resnet8": (resnet8, "ResNet-8: one block each of 16-32-64, as pFedSD's"),
    "resnet32": (resnet32, "ResNet-32: five blocks each of 16-32-64"),
    "resnet18": (resnet18, "ResNet-18: basic blocks 2-2-2-2 of 64-128-256-512"),
    "resnet34": (resnet34, "ResNet-34: basic blocks 3-4-6-3 of 64-128-256-512"),
    "resnet50": (resnet50, "ResNet-50: bottlenecks 3-4-6-3 of 64-128-256-512"),
    "mobilenetv2": (MobileNetV2, "MobileNetV2: inverted residuals, width 1"),
}


OTHERS = {
    "timm:NAME": "a model of timm, as timm:vit_tiny_patch16_224; its size of images is the samples' (extra vision)",
    "hf:NAME": "a model of transformers, as hf:bert-tiny, hf:bert, or hf:FOLDER with config.json (extra hf)",
    "FILE.py:NET": "a class of your own, or MODULE:NET",
}
LIBRARIES: dict[str, Callable[[str, Sequence[int], int, Mapping[str, Any]], nn.Module]] = {
    "timm": from_timm.build,
    "hf": from_hf.build,
}


def build(name: str, shape: Sequence[int], classes: int, seed: int = 0, given: str = "") -> nn.Module:
    """Build a model for samples of this shape, with arguments as in `--model-args`.

    The same seed gives the same weights, and global generators are untouched.
    """
    taken = arguments.parse(given)
    library, _, rest = name.partition(":")
    if library in LIBRARIES:
        return seeded(lambda: LIBRARIES[library](rest, shape, classes, taken), seed)
    if own.is_reference(name):
        return seeded(lambda: _own(name, shape, classes, taken), seed)
    if name not in MODELS:
        also = "; or timm:NAME, hf:NAME, FILE.py:CLASS, MODULE:CLASS"
        raise InputError("model", name, f"a known model: {nearest(name, MODELS)}{also}")
    if taken:
        raise InputError("model_args", given, f"left out: {name} takes none")
    return seeded(lambda: MODELS[name][0](shape, classes), seed)


def settled(name: str) -> str:
    """Return a name as it is kept with results: code with its checksum, a folder by its whole path.

    >>> settled("mlp"), settled("hf:bert-tiny")
    ('mlp', 'hf:bert-tiny')
    """
    library, _, rest = name.partition(":")
    if library == "hf":
        return f"hf:{from_hf.place(rest)}"
    return own.reference_of(own.load("model", name)) if own.is_reference(name) else name


def _own(reference: str, shape: Sequence[int], classes: int, taken: Mapping[str, Any]) -> nn.Module:
    """Build a model of one's own: a class or function that takes nothing, or the samples' shape and the number of classes."""
    make = own.load("model", reference)
    if not (inspect.isfunction(make) or (isinstance(make, type) and issubclass(make, nn.Module))):
        raise InputError("model", reference, "a class of modules, or a function that returns one")
    try:
        required = [
            p for p in inspect.signature(make).parameters.values() if p.default is p.empty and p.kind in POSITIONAL
        ]
        model = make(shape, classes, **taken) if required else make(**taken)
    except Exception as error:
        right = f"one that can be built with (shape, classes), or with nothing ({type(error).__name__}: {first_line(error)})"
        raise InputError("model", reference, right) from error
    if not isinstance(model, nn.Module):
        raise InputError("model", reference, f"one that makes a torch.nn.Module, not {type(model).__name__}")
    return model


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return `make()` with torch's generator seeded; restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
