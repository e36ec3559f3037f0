"""Which models have a loop of their own (`fused`), and a try of the loop before it is used.

Only a chain of `nn.Linear` and ReLU is taken, recognised by its graph, for a method whose objective has a closed form
(`Method.closed_form`), trained by SGD. Some ragged steps in float64 are compared with what the method's own hooks and autograd
give; where they differ, or the try fails, everything is left to autograd.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..core import tree
from ..core.closed import ClosedForm
from ..core.method import Method, Phase, not_known
from ..core.plan import Plan
from ..core.tree import Params, Tree
from ..data.samples import Part, Samples, Splits
from ..nn.net import Net
from . import nested
from .bench import Bench
from .fused import MANY, TAUGHT, Layer, Perceptron
from .one import run_phase

_SHAPING = {"flatten", "view", "reshape", "size"}
_PLAIN = (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity)
SAMPLES, BATCH, STEPS = 5, 2, 4  # of a try: two epochs, the first with a smaller last batch, the second incomplete
RATE, DECAY = 0.01, 0.1  # with which every term of a step has an effect
ROUND, LAST = 2, 1  # in which a client has taken part before, so that what it remembers has an effect


def recognise(bench: Bench, follow: Callable[[Net], tuple[Layer, ...]] | None = None) -> Perceptron | None:
    """Return the loop for this bench if the model is such a chain and the method's objective is known; else None."""
    net = bench.net
    if (
        type(bench.method).closed_form is not_known
        or not bench.task.objective.plain
        or net.device.type != "cpu"
        or bench.task.private is not None
    ):
        return None
    if not bench.task.recipe.plain or bench.task.recipe.keep or bench.task.augment is not None:
        return None
    layers = (follow or _follow)(net)
    forms = _agreed(bench, layers) if layers else []
    if not forms:
        return None
    more = any(form.taught or form.pull for form in forms) and not any(form.nested for form in forms)
    return Perceptron(layers, net.constants, nested.LOOPS, TAUGHT if more else MANY)


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


def _agreed(bench: Bench, layers: tuple[Layer, ...]) -> list[ClosedForm]:
    """Return the objectives of the method's phases that the loop trains; none if it trains one of them not as autograd does."""
    net = bench.net.twin(torch.float64)
    train = bench.data.train
    x, y = train.x[:SAMPLES].double(), train.y[:SAMPLES]
    if not len(x) or x[0].numel() != net.module.get_parameter(layers[0].weight).shape[1]:
        return []
    part = Part(Samples(x), y, (0,), (len(y),))
    task = dataclasses.replace(bench.task, net=net, round=ROUND, lr=RATE, weight_decay=DECAY)
    bench = dataclasses.replace(bench, task=task, plan=Plan(0, BATCH), data=Splits(part, part))
    try:
        return _tried(bench, Perceptron(layers, net.constants, nested.LOOPS))
    except Exception:  # a hook's mistake: it is explained when the round begins
        return []


def _tried(bench: Bench, perceptron: Perceptron) -> list[ClosedForm]:
    """Return the objectives of the phases that the loop trains; none if one of them is trained otherwise than by autograd."""
    method, task, forms = bench.method, bench.home(ROUND, 0, LAST), []
    for phase in method.phases(task):
        local = _begun(method, bench, phase)
        names = [name for name in bench.moving(phase)[0] if name in local[phase.model]]
        form = perceptron.form(method, task, local, phase, names, BATCH)
        if form is None:
            continue
        forms.append(form)
        both = []
        for own in (perceptron, None):
            total, entered = torch.zeros((), dtype=torch.float64), dataclasses.replace(phase, enter=None)
            with torch.enable_grad():
                trained, _ = run_phase(bench, task, ROUND, 0, local, entered, STEPS, total, own)
            both.append({"local": trained, "total": total})
        if not all(_near(a, b) for (_, a), (_, b) in zip(*map(tree.leaves, both), strict=True)):
            return []
    return forms


def _begun(method: Method, bench: Bench, phase: Phase) -> Tree:
    """Return where local work begins, with a model of the phase that is not its own anchor or teacher."""
    task, first = bench.home(ROUND, 0, LAST), bench.net.initial()
    local: Tree = {phase.model: first}
    if type(method).closed_form is not Method.closed_form:
        with torch.no_grad():
            down = method.send(task, method.init_server(task, first), 0)
            memory = tree.fit_rows(method.init_client(task, first), method.per_sample, len(task.here().y))
            local = method.begin(task, down, memory)
    moved: Params = {
        name: value + 0.1 * torch.arange(value.numel()).sin().view_as(value)
        for name, value in local[phase.model].items()
    }
    return {**local, phase.model: moved}


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * (1 + b.abs().max()))
