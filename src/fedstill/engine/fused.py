"""A multi-layer perceptron's training loop: forward, backward and update written out, the update fused into one product.

    aᵢ₊₁ = max(0, Wᵢ·[aᵢ, 1]),   δ = softmax(z) − onehot(y),   W ← (1 − η·wd)·W − η/b·δᵀ·[a, 1]

A bias is one more column of its weight, and every activation has a column of ones: so a layer is one product forward, one for
the slope of what is below, and one that already is its update. Buffers are made once a phase. Autograd's graph, its temporaries
and a loop over parameters are most of the cost of such small steps. This is the one place besides `step` and `SGD` where a step
is written: the product that computes a gradient already applies it.

Only a chain of `nn.Linear` and ReLU with plain cross-entropy and SGD is taken, recognised by its graph; before it is
used it is compared with autograd in float64, and a model for which it differs is left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, autograd, fx, nn

from ..core.method import Phase
from ..core.optim import SGD
from ..core.tree import Params, Tree
from ..nn.net import Net
from .bench import Bench
from .progress import Course

ALIGN = 16  # rows of a weight start at multiples of so many entries: products are a tenth faster
_SHAPING = {"flatten", "view", "reshape", "size"}
_PLAIN = (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity)
_backward_of_relu = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Layer:
    """One linear layer: the names of its entries in the state, and whether a ReLU follows."""

    weight: str
    bias: str | None
    relu: bool


def recognise(bench: Bench, follow: Callable[[Net], tuple[Layer, ...]] | None = None) -> Perceptron | None:
    """Return the loop for this bench if the model is such a chain and the method trains it by cross-entropy; else None."""
    net = bench.net
    if (
        not (bench.method.plain_loss and bench.task.objective.plain)
        or net.device.type != "cpu"
        or bench.task.private is not None
    ):
        return None
    layers = (follow or _follow)(net)
    return Perceptron(layers, net.constants) if layers and _agrees(bench, layers) else None


class Perceptron:
    """Trains a chain of layers. Buffers are reused for all phases and clients, so they stay in the cache."""

    def __init__(self, layers: tuple[Layer, ...], constants: Params | None = None) -> None:
        self.layers, self.constants = layers, constants or {}
        self._loops: dict[tuple[frozenset[str], SGD, torch.dtype], _Loop] = {}

    def takes(self, phase: Phase, names: Iterable[str]) -> bool:
        """Return whether a phase that moves these names can be trained here."""
        moving = set(names)
        split = any(layer.bias and (layer.weight in moving) != (layer.bias in moving) for layer in self.layers)
        return bool(moving) and not split and phase.loss is None and phase.after_epoch is None

    def train(
        self,
        start: Params,
        names: Iterable[str],
        sgd: SGD,
        x: Tensor,
        y: Tensor,
        orders: Iterable[Tensor],
        size: int,
        kept: tuple[Course, Tree] | None = None,
    ) -> tuple[Params, Tensor]:
        """Train in batches of `size`, an epoch for each of the `orders` of the samples; return the state and Σ of the losses.

        An order may name fewer samples than there are: an incomplete epoch. `kept` is where the phase goes on and is kept,
        after whole epochs alone, and what is kept besides this loop's state.
        """
        key = frozenset(names), sgd, x.dtype
        whole = {**self.constants, **start}
        with torch.no_grad():
            if key not in self._loops:
                self._loops[key] = _Loop(self.layers, whole, key[0], sgd)
            loop = self._loops[key]
            loop.load(whole)
            total, size = x.new_zeros(()), min(size, len(y))
            course, besides = kept if kept is not None else (None, {})
            count = 0
            if course is not None and course.halfway is not None:
                past, count = course.halfway.state, course.done
                loop.load({**whole, **past["params"]})
                for velocity, value in zip(loop.velocity, past["momentum"].values(), strict=True):
                    velocity.copy_(value)
                total += past["summed"]
            for order in orders:
                total += loop.epoch(x.flatten(1), y, order, size)
                count += -(-len(order) // size)
                if course is not None and course.due(count):
                    momentum = {str(i): velocity for i, velocity in enumerate(loop.velocity)}
                    course.save(count, {**besides, "params": loop.state(), "momentum": momentum, "summed": total})
            return {**start, **loop.state()}, total


class _Loop:
    """The weights of all layers, each with its bias as last column, and the buffers that every step uses again."""

    def __init__(self, layers: tuple[Layer, ...], like: Params, moving: frozenset[str], sgd: SGD) -> None:
        self.layers, self.sgd = layers, sgd
        shapes = [like[layer.weight].shape for layer in layers]
        self.like, self.inputs, self.outputs = like[layers[0].weight], [w for _, w in shapes], shapes[-1][0]
        self.weights = [
            _aligned(self.like, out, into + (layer.bias is not None))
            for layer, (out, into) in zip(layers, shapes, strict=True)
        ]
        self.moves = [layer.weight in moving for layer in layers]
        self.lowest = self.moves.index(True)
        self.velocity = sgd.init(self.weights)
        self.data = _aligned(self.like, 0, self.inputs[0] + 1)
        self.rooms: dict[int, _Room] = {}

    def load(self, start: Params) -> None:
        """Begin from these weights, without momentum."""
        for layer, weight, inputs in zip(self.layers, self.weights, self.inputs, strict=True):
            weight[:, :inputs] = start[layer.weight]
            if layer.bias is not None:
                weight[:, inputs] = start[layer.bias]
        for velocity in self.velocity:
            velocity.zero_()

    def state(self) -> Params:
        """Return copies of the weights and biases that move, by name."""
        state: Params = {}
        for layer, weight, inputs, moves in zip(self.layers, self.weights, self.inputs, self.moves, strict=True):
            if moves:
                state[layer.weight] = weight[:, :inputs].clone(memory_format=torch.contiguous_format)
            if moves and layer.bias is not None:
                state[layer.bias] = weight[:, inputs].clone(memory_format=torch.contiguous_format)
        return state

    def epoch(self, x: Tensor, y: Tensor, order: Tensor, size: int) -> Tensor:
        """Pass once over the samples in batches of `size`; return the sum of the losses, computed from all outputs at the end."""
        samples = len(order)
        if len(self.data) < samples:
            self.data = _aligned(self.like, samples, self.inputs[0] + 1)
            self.data[:, -1] = 1
        torch.index_select(x, 0, order, out=self.data[:samples, :-1])
        y = y[order]
        target, logits = F.one_hot(y, self.outputs).to(x.dtype), x.new_empty(samples, self.outputs)
        count, rest = divmod(samples, size)
        rooms = [self._room(size)] * count + ([self._room(rest)] if rest else [])
        full, data = count * size, self.data[:samples, : self.weights[0].shape[1]]
        for room, a, z, t in zip(rooms, *(torch.split(rows, size) for rows in (data, logits, target)), strict=True):
            self._step(room, a, z, t)
        losses = F.cross_entropy(logits, y, reduction="none")
        total = losses[:full].sum() / size
        return total + losses[full:].mean() if rest else total

    def _room(self, rows: int) -> _Room:
        if rows not in self.rooms:
            self.rooms[rows] = _Room(self, rows)
        return self.rooms[rows]

    def _step(self, room: _Room, a: Tensor, z: Tensor, target: Tensor) -> None:
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            into = room.units[i] if i < last else z
            torch.mm(room.before[i - 1] if i else a, room.transposed[i], out=into)
            if layer.relu:
                into.relu_()
        torch.softmax(z, 1, out=room.slopes[last])
        room.slopes[last].sub_(target)
        for i in range(last, self.lowest - 1, -1):
            if i > self.lowest:
                torch.mm(room.slopes[i], room.kernels[i], out=room.slopes[i - 1])
                if self.layers[i - 1].relu:
                    _backward_of_relu(room.slopes[i - 1], room.units[i - 1], 0, grad_input=room.slopes[i - 1])
            if self.moves[i]:
                self._update(i, room.risen[i], room.before[i - 1] if i else a, room.rows)

    def _update(self, i: int, slope: Tensor, a: Tensor, rows: int) -> None:
        """Take `SGD.update`'s step by the gradient slope·a / rows, fused with the product that computes it."""
        sgd, weight = self.sgd, self.weights[i]
        if not sgd.momentum:
            weight.addmm_(slope, a, beta=1 - sgd.lr * sgd.weight_decay, alpha=-sgd.lr / rows)
        elif sgd.nesterov:
            sgd.update([weight], [torch.mm(slope, a).div_(rows)], [self.velocity[i]])
        else:
            velocity = self.velocity[i].addmm_(slope, a, beta=sgd.momentum, alpha=1 / rows)
            if sgd.weight_decay:
                velocity.add_(weight, alpha=sgd.weight_decay)
            weight.add_(velocity, alpha=-sgd.lr)


class _Room:
    """Buffers for batches of one size, and the views of weights that a step uses."""

    def __init__(self, loop: _Loop, rows: int) -> None:
        widths = [len(w) for w in loop.weights]
        wide = [_aligned(loop.like, rows, width + 1) for width in widths[:-1]]
        for a in wide:
            a[:, -1] = 1
        self.rows, self.units = rows, [a[:, :-1] for a in wide]
        self.before = [a[:, : w.shape[1]] for a, w in zip(wide, loop.weights[1:], strict=True)]
        self.transposed = [w.t() for w in loop.weights]
        self.kernels = [w[:, :inputs] for w, inputs in zip(loop.weights, loop.inputs, strict=True)]
        self.slopes = [loop.like.new_empty(rows, width) for width in widths]
        self.risen = [slope.t() for slope in self.slopes]


def _aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix of zeros whose rows start at aligned places."""
    return like.new_zeros(rows, -(-columns // ALIGN) * ALIGN)[:, :columns]


def _follow(net: Net) -> tuple[Layer, ...]:
    """Return the chain of layers that the model is; an empty one if it is anything else."""
    module = net.module
    leaves = [
        layer
        for layer in module.modules()
        if type(layer).__module__.startswith("torch.") and not list(layer.children())
    ]
    hooked = any(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in module.modules()
    )
    linear = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
    known, state = {f"{name}.{leaf}" for name in linear for leaf in ("weight", "bias")}, {*net.names, *net.constants}
    if hooked or not linear or not state <= known or any(type(layer) not in _PLAIN for layer in leaves):
        return ()
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:
        return ()
    layers: list[Layer] = []
    last: fx.Node | None = None
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        layer = module.get_submodule(target) if node.op == "call_module" else None
        if node.op == "output":
            return tuple(layers) if node.args == (last,) and _covers(layers, net) else ()
        if target == "size" and not layers:
            continue
        if node.op != "placeholder" and (not node.args or node.args[0] is not last):
            return ()
        if isinstance(layer, nn.Linear):
            bias = None if layer.bias is None else f"{target}.bias"
            layers.append(Layer(f"{target}.weight", bias, False))
        elif isinstance(layer, nn.ReLU) or (layer is None and target in ("relu", "relu_") and layers):
            if not layers or layers[-1].relu:
                return ()
            layers[-1] = Layer(layers[-1].weight, layers[-1].bias, True)
        elif not (node.op == "placeholder" and last is None) and not isinstance(layer, nn.Identity):
            shapes = isinstance(layer, nn.Flatten) or (layer is None and target in _SHAPING)
            if layers or not shapes:
                return ()
        last = node
    return ()


def _covers(layers: list[Layer], net: Net) -> bool:
    """Return whether every entry of the state is in exactly one layer, and the last layer's output is the model's."""
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    return bool(layers) and sorted(used) == sorted([*net.names, *net.constants]) and not layers[-1].relu


def _agrees(bench: Bench, layers: tuple[Layer, ...]) -> bool:
    """Return whether three ragged steps in float64 give what autograd gives, for each form of the update."""
    net = bench.net.twin(torch.float64)
    x, y = bench.data.train.x[:5].double(), bench.data.train.y[:5]
    if not len(x) or x[0].numel() != net.module.get_parameter(layers[0].weight).shape[1]:
        return False
    order = torch.arange(len(y)).flip(0)
    forms = [SGD(0.01, 0.0, False, 0.1), SGD(0.01, 0.9, False, 0.1), SGD(0.01, 0.9, True, 0.1)]
    return all(_agrees_by(sgd, net, layers, x, y, order) for sgd in forms)


def _agrees_by(sgd: SGD, net: Net, layers: tuple[Layer, ...], x: Tensor, y: Tensor, order: Tensor) -> bool:
    start = {
        name: value + 0.1 * torch.arange(value.numel()).sin().view_as(value) for name, value in net.initial().items()
    }
    ours, total = Perceptron(layers, net.constants).train(start, net.parameters, sgd, x, y, [order], 2)
    with torch.enable_grad():
        params = {name: value.clone() for name, value in start.items()}
        weights = [params[name].requires_grad_() for name in net.parameters]
        state, sum_of = sgd.init(weights), 0.0
        for rows in torch.split(order, 2):
            loss = F.cross_entropy(net(params, x[rows], train=True), y[rows])
            sgd.update(weights, list(autograd.grad(loss, weights)), state)
            sum_of += float(loss.detach())
    gaps = [((ours[name] - params[name]).abs().max(), params[name].abs().max()) for name in start]
    gaps.append(((total - sum_of).abs(), total.abs()))
    return all(bool(gap <= 1e-9 * (1 + scale)) for gap, scale in gaps)
