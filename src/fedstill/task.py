"""What a method may know: the model as functions, the numbers that define local work, and the client's own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from .batch import Batch
from .channels import Channels
from .errors import InputError, Shown
from .functional import Net
from .split import Split, pick
from .tree import Params

SAMPLES = 16  # per pass where each sample has a gradient of its own
CHUNK = 512  # samples per forward pass where no gradient is needed; the result does not depend on it


@dataclass(frozen=True)
class Site:
    """One client's own training data, and how much work it does this round. Under `vmap` these are that client's slices."""

    x: Tensor  # all training samples of the client, or of the stack's clients one after another
    y: Tensor
    index: Tensor  # which rows of x are this client's (padded at the end)
    samples: Tensor  # how many there are
    steps: Tensor  # how many SGD steps the method's phases take this round


@dataclass(frozen=True)
class Task:
    """The setting of local work, handed to every hook of a method. `round` counts from 1; `site` is set at a client."""

    net: Net
    split: Split | None
    clients: int
    rounds: int
    epochs: int
    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    round: int = 0
    site: Site | None = None

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The model's output in training: dropout on, BatchNorm over the batch (its running statistics move)."""
        return self.net(params, batch.x, train=True, key=batch.key, mask=batch.mask)

    def gated_logits(self, params: Params, batch: Batch, gates: Mapping[str, Tensor]) -> Tensor:
        """Training output with some modules' inputs multiplied by gates; BatchNorm's running statistics do not move."""
        copies = {name: params[name].clone() for name in self.net.buffers}
        return self.net({**params, **copies}, batch.x, train=True, key=batch.key, mask=batch.mask, gates=gates)

    @property
    def channels(self) -> Channels:
        """The model's layers by channel, followed once; a model that cannot be followed is refused by name."""
        return self.net.channels()

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """The model's output in evaluation, no gradient, in chunks."""
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            return torch.cat([self.net(params, part, train=False) for part in torch.split(x, CHUNK)])

    def local_logits(self, params: Params) -> Tensor:
        """Evaluation output for every one of the client's own training samples; `batch.index` looks them up."""
        site = self.here()
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            return torch.cat([self.net(params, site.x[rows], train=False) for rows in torch.split(site.index, CHUNK)])

    def features(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Training output, and the head's input flattened: (logits, features)."""
        taps = {name: batch.x for name in self.need_split().modules}
        logits = self.net(params, batch.x, train=True, key=batch.key, mask=batch.mask, taps=taps)
        return logits, taps[self.need_split().modules[0]].flatten(1)

    def local_features(self, params: Params) -> Tensor:
        """The head's input in evaluation, for every one of the client's own training samples."""
        site, first = self.here(), self.need_split().modules[0]
        parts = []
        with torch.no_grad():
            params = {name: self.net.fast_layout(value) for name, value in params.items()}
            for rows in torch.split(site.index, CHUNK):
                taps = {first: site.x}
                self.net(params, site.x[rows], train=False, taps=taps)
                parts.append(taps[first].flatten(1))
        return torch.cat(parts)

    def local_gradient(self, value: Callable[[Params, Batch], Tensor], params: Params, squared: bool = False) -> Params:
        """The mean over the client's own training samples of ∇value, or of its square sample by sample (a Fisher diagonal).

        `value(params, batch)` gives one number a sample; the gradient is by the trainable parameters.
        """
        site = self.here()
        rest = {name: params[name] for name in params if name not in self.net.parameters}
        real = (torch.arange(len(site.index), device=site.x.device) < site.samples).to(site.x.dtype)
        zero = torch.zeros((), dtype=torch.int64, device=site.x.device)

        def at(weights: Params, x: Tensor, y: Tensor, index: Tensor, keep: Tensor) -> Tensor:
            batch = Batch(x, y, index, zero, keep)
            return (value({**rest, **weights}, batch) * keep).sum()

        total = {name: torch.zeros_like(params[name]) for name in self.net.parameters}
        positions = torch.arange(len(site.index), device=site.x.device)
        for where in torch.split(positions, SAMPLES if squared else CHUNK):
            rows = site.index[where]
            given = (site.x[rows], site.y[rows], where, real[where])
            if squared:
                each = vmap(grad(at), in_dims=(None, 0, 0, 0, 0))
                grads = each(self.trainable(params), *(part.unsqueeze(1) for part in given))
                grads = {name: g.square().sum(0) for name, g in grads.items()}
            else:
                grads = grad(at)(self.trainable(params), *given)
            total = {name: total[name] + grads[name] for name in total}
        return {name: value / site.samples for name, value in total.items()}

    def trainable(self, params: Params) -> Params:
        """The parameters that training may move, without buffers."""
        return {name: params[name] for name in self.net.parameters}

    def head(self, params: Params) -> Params:
        """The head's part of a state."""
        return pick(params, self.need_split().head)

    def body(self, params: Params) -> Params:
        """The body's part of a state."""
        return pick(params, self.need_split().body)

    def head_modules(self) -> tuple[str, ...]:
        """The names of the head's modules; empty where the model has none."""
        return () if self.split is None else self.split.modules

    def need_split(self) -> Split:
        """The split into head and body, or a clear refusal."""
        if self.split is None:
            modules = [name for name, _ in self.net.module.named_modules() if name]
            raise InputError(
                "head",
                Shown("(none)"),
                f"named, since the model does not name its head: one or more of {', '.join(modules)}",
            )
        return self.split

    def here(self) -> Site:
        """The client's own data; only hooks that run at a client may ask."""
        if self.site is None:
            raise RuntimeError("this hook runs at the server, which has no client data")
        return self.site
