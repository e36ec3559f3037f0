"""Whether clients of a model can be stacked, and how the steps of a stack are run."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core import tree
from ..core.errors import first_line
from ..core.tree import Params
from .bench import Bench, CompileName
from .step import over_clients

WORTH_COMPILING = 2_000  # steps of a run from which on compiling the step pays
Way: TypeAlias = Literal["plain", "traced", "compiled"]


def way_of(bench: Bench, compile: CompileName, fast: bool) -> Way:
    """Return how steps run: on a CPU one by one from Python, on a GPU traced; compiled where it was asked for or will pay."""
    if bench.task.private is not None:  # its batches have another size in each step
        return "plain"
    if not fast or (bench.net.device.type != "cuda" and compile not in ("on", "traced")):
        return "plain"
    sizes = bench.data.train.sizes
    longest = sum(bench.plan.steps(max(sizes), length) for _, length in bench.phases(1))
    return (
        "compiled"
        if compile == "on" or (longest * bench.task.rounds >= WORTH_COMPILING and compile == "auto")
        else "traced"
    )


def refusal(bench: Bench) -> str | None:
    """Return why this model cannot be stacked, or None.

    Tried in float64 without effect: two clients with three samples each and one row of padding, against the samples alone. A
    model whose samples see one another (other than through BatchNorm), or that `vmap` does not take, with a gradient or without,
    is refused.
    """
    run_net, data = bench.net, bench.data.train
    if run_net.cumulative:
        return "a BatchNorm with momentum=None keeps a cumulative average, which cannot be stacked"
    net, x = run_net.twin(torch.float64), data.x[:4]
    x = torch.cat([x, x, x, x])[:4] if len(x) < 4 else x
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=x.device)
    key = torch.tensor(7, device=x.device)
    if x.is_floating_point():
        x = x.double() + torch.linspace(0, 0.1, 4, dtype=mask.dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
    names = set(net.parameters)

    def objective(weights: Params, rest: Params, x: Tensor, key: Tensor, mask: Tensor | None) -> Any:
        copies = {name: value.clone() for name, value in rest.items()}
        out = net({**weights, **copies}, x, train=True, key=key, mask=mask)
        return (out[:3] * torch.arange(1.0, 1 + out[:3].numel(), device=x.device).reshape(out[:3].shape)).sum(), copies

    try:
        start = net.initial()
        weights, rest = ({n: p for n, p in start.items() if (n in names) is side} for side in (True, False))
        alone = grad_and_value(objective, has_aux=True)(weights, rest, x[:3], key, None)
        stacks = (tree.stack([t, t]) for t in (weights, rest))
        step = grad_and_value(objective, has_aux=True)
        both = over_clients(step, *stacks, *(torch.stack([t, t]) for t in (x, key, mask)))
        with torch.no_grad():  # as models are scored: some modules take one path with a gradient and another without
            for params, axis in ((start, None), (tree.stack([start, start]), 0)):
                vmap(lambda p, x: net(p, x, train=False), in_dims=(axis, 0))(params, torch.stack([x, x]))
    except Exception as error:
        return first_line(error)
    (g1, (v1, b1)), (g2, (v2, b2)) = alone, both
    pairs = [(v1, v2[0]), *((g1[n], g2[n][0]) for n in g1), *((b1[n], b2[n][0]) for n in b1)]
    if any((a - b).abs().max() > 1e-8 * (1 + a.abs().max()) for a, b in pairs if a.numel()):
        return "its samples see one another, so that padding a batch would change the result"
    return None
