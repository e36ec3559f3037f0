"""What a method may know: the model as functions, the numbers that define local work, and the client's own data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch
from .errors import InputError, Shown
from .functional import Net
from .split import Split, pick
from .tree import Params

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

    def trainable(self, params: Params) -> Params:
        """The parameters that training may move, without buffers."""
        return {name: params[name] for name in self.net.parameters}

    def head(self, params: Params) -> Params:
        """The head's part of a state."""
        return pick(params, self.need_split().head)

    def body(self, params: Params) -> Params:
        """The body's part of a state."""
        return pick(params, self.need_split().body)

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
