"""Rewrite a model to run max-pooling before ReLU, where it is written the other way round.

    max(relu(x₁), relu(x₂), …) = relu(max(x₁, x₂, …))

ReLU is monotone, so the values agree. So do the gradients: where a window's maximum is positive it is at the same place, and
where it is not, nothing passes either way. After a 2×2 pool ReLU has a quarter of the work, forward and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .lora import Adapter

Forward: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
POOLS: set[Any] = {F.max_pool2d, torch.max_pool2d}
RELUS: set[Any] = {F.relu, torch.relu, "relu"}
IN_PLACE: set[Any] = {torch.relu_, "relu_"}
OUT_OF_PLACE = (nn.Conv2d, nn.BatchNorm2d)  # they return new memory


def pool_first(module: nn.Module) -> Forward | None:
    """Return a function that does what `module.forward` does with pools before ReLU; None if there is nothing to exchange.

    It is called with the module (or with a copy that holds other weights) and its input, and calls the module's own layers. None
    also where the graph cannot be followed, or where a hook would no longer be called.
    """
    if any(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in module.modules()):
        return None
    root = copy.deepcopy(module)  # following a model runs its code, which may leave traces on it
    try:
        graph = _Tracer().trace(root)
        if not sum(_exchange(node, root) for node in list(graph.nodes)):
            return None
        forward: Forward = type(fx.GraphModule(root, graph)).forward
    except Exception:  # a branch on a value, a step that has no symbol: such a model stays as it is
        return None
    return forward


class _Tracer(fx.Tracer):
    """Traces buffers as buffers, not as constants."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Adapter) or super().is_leaf_module(m, module_qualified_name)


def _exchange(pool: fx.Node, root: nn.Module) -> bool:
    """Put ReLU after this node if it is a max-pool of a ReLU's output alone; return whether it was."""
    relu = pool.args[0] if pool.args else None
    if not _is_pool(pool, root) or not isinstance(relu, fx.Node) or pool.all_input_nodes != [relu]:
        return False
    source = relu.args[0] if relu.args else None
    if not _is_relu(relu, root) or not isinstance(source, fx.Node) or len(relu.users) != 1:
        return False
    if _in_place(relu, root) and not (len(source.users) == 1 and isinstance(_module(source, root), OUT_OF_PLACE)):
        return False
    pool.replace_all_uses_with(relu)
    pool.replace_input_with(relu, source)
    relu.prepend(pool)
    relu.replace_input_with(source, pool)
    return True


def _module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_pool(node: fx.Node, root: nn.Module) -> bool:
    module = _module(node, root)
    if isinstance(module, nn.MaxPool2d):
        return not module.return_indices
    return node.op == "call_function" and node.target in POOLS


def _is_relu(node: fx.Node, root: nn.Module) -> bool:
    function = node.op in ("call_function", "call_method") and node.target in RELUS | IN_PLACE
    return function or isinstance(_module(node, root), nn.ReLU)


def _in_place(relu: fx.Node, root: nn.Module) -> bool:
    """Return whether this ReLU overwrites its input."""
    module = _module(relu, root)
    if isinstance(module, nn.ReLU):
        return module.inplace
    return relu.target in IN_PLACE or bool(relu.kwargs.get("inplace")) or len(relu.args) > 1
