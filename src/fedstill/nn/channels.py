"""A model divided by channels: of every layer's C output channels the last ⌊p·C⌋ are private, the others shared.

The model's graph is followed once (torch.fx), so that each layer is known with the channels that feed it: a flattened image has
H·W features a channel, a residual sum adds like to like, BatchNorm belongs to the channels it normalises. The classifier, whose
outputs are classes, is divided by its input channels. What cannot be followed is refused by the module's name. A module of the
user's own can be followed if it has an integer attribute `channel_factor`: its channel i becomes channel `channel_factor`·i.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..core.errors import InputError, Shown, first_line
from .lora import Adapter

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PLAIN = (  # they do not mix channels, and have no parameters
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.Flatten,
)  # fmt: skip
ADDS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
SEPARATE: set[Any] = {  # functions and methods of one tensor that do not mix channels
    F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid, torch.flatten,
    F.dropout, F.dropout1d, F.dropout2d, F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, torch.mean,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.max_pool2d, F.pad,
    "relu", "relu_", "tanh", "sigmoid", "flatten", "mean", "contiguous", "view", "reshape",
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A tensor whose features come in `channels` groups of `block` features each."""

    channels: int
    block: int = 1


@dataclass
class Channels:
    """The layers of a model by the channels that they put out and that feed them."""

    out: dict[str, int] = field(default_factory=dict)  # layer or BatchNorm -> its channels
    fed: dict[str, Mark] = field(default_factory=dict)  # layer -> the channels at its input (not the raw data)
    spatial: dict[str, int] = field(default_factory=dict)  # layer -> dimensions of its input after the channels
    classifier: str = ""

    def private(self, channels: int, p: float) -> int:
        """Return how many of `channels` are private: ⌊p·C⌋ (guarded against the rounding of p·C)."""
        return min(channels, math.floor(p * channels + 1e-9))

    def both(self, p: float) -> bool:
        """Return whether every layer has private and shared channels."""
        return all(0 < self.private(c, p) < c for c in self.out.values())

    def divided(self, name: str) -> tuple[int, Mark] | None:
        """Return the dimension along which an entry of the state is divided, and its channels; None if it is not divided."""
        owner, _, leaf = name.rpartition(".")
        if owner == self.classifier:
            return (1, self.fed[owner]) if leaf == "weight" else None
        return None if leaf == "num_batches_tracked" else (0, Mark(self.out[owner]))

    def shared(self, name: str, value: Tensor, p: float) -> Tensor:
        """Return the shared slice of an entry, as a view; an entry that is not divided is shared while p < 1."""
        division = self.divided(name)
        if division is None:
            return value if p < 1 else value.new_empty(0)
        dim, mark = division
        return value.narrow(dim, 0, (mark.channels - self.private(mark.channels, p)) * mark.block)

    def is_private(self, name: str, value: Tensor, p: Tensor) -> Tensor:
        """Return where an entry is private for a p that is a (float64) tensor: True or False for every element, broadcast."""
        division = self.divided(name)
        if division is None:
            return p >= 1
        dim, mark = division
        place = torch.arange(mark.channels, device=value.device).repeat_interleave(mark.block)
        first = mark.channels - torch.floor(p * mark.channels + 1e-9)
        return (place >= first).reshape([-1 if d == dim else 1 for d in range(value.ndim)])

    def gates(self, p: Tensor, private: bool, like: Tensor) -> dict[str, Tensor]:
        """Return for every layer's input 1 where its channels are private (or shared) for a (float64) p, 0 elsewhere."""
        gates = {}
        for name, mark in self.fed.items():
            place = torch.arange(mark.channels, device=like.device).repeat_interleave(mark.block)
            own = place >= mark.channels - torch.floor(p * mark.channels + 1e-9)
            gate = (own if private else ~own).to(like.dtype)
            gates[name] = gate.reshape(1, -1, *[1] * self.spatial[name])
        return gates


def follow(module: nn.Module, x: Tensor) -> Channels:
    """Follow the graph of a model on an example; refuse by name what cannot be followed."""
    try:
        graph = fx.GraphModule(module, _Tracer().trace(module))
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            "model", Shown(type(module).__name__), f"a model whose graph can be followed ({reason})"
        ) from error
    walk = _Follow(graph)
    try:
        with torch.no_grad():
            walk.run(x)
    except InputError as error:  # fx adds its own account of where it was; ours is one line
        raise InputError(error.field, Shown(str(error.value)), error.right) from None
    return walk.channels


class _Tracer(fx.Tracer):
    """Treats an adapted layer, and a module that says how it widens channels (`channel_factor`), as one step."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = hasattr(m, "channel_factor") or isinstance(m, Adapter)
        return own or super().is_leaf_module(m, module_qualified_name)


class _Follow(fx.Interpreter):
    """Runs the graph and marks every tensor with the channels that it carries (None: the raw data)."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph.eval())
        self.channels = Channels()
        self.marks: dict[fx.Node, Mark | None] = {}
        self.made_by: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        sources = [a for a in n.all_input_nodes if isinstance(self.env.get(a), Tensor)]
        if n.op == "output":
            self._end(n)
        elif n.op == "call_module":
            self.marks[n] = self._module(n, sources[0], self.fetch_attr(str(n.target)), result)
        elif n.op in ("call_function", "call_method") and isinstance(result, Tensor):
            self.marks[n] = self._function(n, sources, result)
        else:
            self.marks[n] = None
        return result

    def _module(self, n: fx.Node, source: fx.Node, part: nn.Module, result: Tensor) -> Mark | None:
        name, mark = str(n.target), self.marks[source]
        if isinstance(part, Adapter):
            raise _refuse(name, part, "a model without LoRA, whose adapters have no channels")
        if isinstance(part, (nn.Linear, *CONVOLUTIONS)):
            inputs = self.env[source]
            if isinstance(part, nn.Linear) and inputs.ndim != 2:
                raise _refuse(name, part, "a Linear layer on a flat input")
            if mark is not None:
                if name in self.channels.fed and self.channels.fed[name] != mark:
                    raise _refuse(name, part, "a layer that is used with one set of channels")
                self.channels.fed[name], self.channels.spatial[name] = mark, inputs.ndim - 2
            self.made_by[n] = name
            self.channels.out[name] = part.out_features if isinstance(part, nn.Linear) else part.out_channels
            return Mark(self.channels.out[name])
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if mark is None or mark.block != 1 or mark.channels != part.num_features:
                raise _refuse(name, part, "a BatchNorm right after the layer whose channels it normalises")
            self.channels.out[name] = part.num_features
            return mark
        if (factor := getattr(part, "channel_factor", None)) is not None:  # the last share of channels stays the last
            return Mark(mark.channels * int(factor)) if mark is not None else None
        if isinstance(part, PLAIN):
            return self._reshaped(n, mark, result, name)
        raise _refuse(name, part, "made of Linear, Conv, BatchNorm, pooling, activations, dropout and flattening")

    def _function(self, n: fx.Node, sources: list[fx.Node], result: Tensor) -> Mark | None:
        what = getattr(n.target, "__name__", str(n.target))
        if n.target in ADDS and len(sources) == 2:
            a, b = (self.marks[s] for s in sources)
            if a != b:
                raise InputError(
                    "model",
                    Shown(f"{n.name} ({what})"),
                    "a sum of tensors with the same channels, so that like adds to like",
                )
            return a
        if n.target in SEPARATE and len(sources) == 1:
            return self._reshaped(n, self.marks[sources[0]], result, n.name)
        raise InputError(
            "model", Shown(f"{n.name} ({what})"), "a step that keeps channels apart: CD² cannot follow this one"
        )

    def _reshaped(self, n: fx.Node, mark: Mark | None, result: Tensor, name: str) -> Mark | None:
        """Return the mark after pooling or flattening: the same channels, with as many features each as there are now."""
        if mark is None or result.shape[1] == mark.channels * mark.block:
            return mark
        if result.ndim == 2 and result.shape[1] % mark.channels == 0:
            return Mark(mark.channels, result.shape[1] // mark.channels)
        raise InputError("model", Shown(name), "a step that keeps channels apart: CD² cannot follow this one")

    def _end(self, n: fx.Node) -> None:
        last = n.all_input_nodes[0]
        name = self.made_by.get(last, "")
        if not name or not isinstance(self.fetch_attr(name), nn.Linear):
            raise InputError("model", Shown(str(last.target)), "a model that ends in a Linear classifier")
        if name not in self.channels.fed:
            raise InputError("model", Shown(name), "a model with at least one layer before its classifier")
        del self.channels.out[name]
        self.channels.classifier = name


def _refuse(name: str, part: nn.Module, right: str) -> InputError:
    return InputError("model", Shown(f"{name} ({type(part).__name__})"), f"{right}: CD² cannot follow this one")
