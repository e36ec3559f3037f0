"""Poisoned training data of simulated attackers, for research: labels flipped, or samples with a trigger and one label.

    label-flip    y → C − 1 − y, for C classes                             Fang et al., USENIX Security 2020
    backdoor      a share of the samples gets the trigger and the label    Gu, Dolan-Gavitt and Garg, "BadNets", 2017

Choices: (1) The trigger of an image is a square in its last corner, an eighth of its height and at least two pixels wide; of
other samples the last sixteenth of their numbers, at least one; set to the highest value of all clients' training samples, per
channel. (2) Test and validation samples stay as they are. (3) Which samples are poisoned is drawn from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..core import plan
from ..core.errors import InputError
from ..core.memory import require
from .federation import Client, Federation
from .samples import Samples, pieces, read


def poisoned(
    federation: Federation, kind: str, clients: Collection[int], share: float, seed: int, target: int = 0
) -> Federation:
    """Return the federation with `share` of these clients' training samples poisoned, each client's rounded up."""
    if kind == "backdoor" and target >= federation.classes:
        raise InputError("backdoor_target", target, f"a class from 0 to {federation.classes - 1}")
    if kind == "backdoor" and federation.whole is not None:
        raise InputError(
            "attack", kind, "another with clients in other processes: its trigger depends on everybody's samples"
        )
    value = trigger_value(_training(federation)) if kind == "backdoor" else torch.zeros(())

    if kind == "backdoor" and any(isinstance(client.x_train, Samples) for client in federation.clients):
        # samples with a trigger are in no file: all are read
        values = sum(federation.sizes("train")) * federation.clients[0].x_train.shape[1:].numel()
        require("data", federation.name, 8 * values)

    def poison(k: int, client: Client) -> Client:
        n = len(client.y_train)
        order = plan.permutation(plan.key(seed, plan.ATTACK, k), n)[: math.ceil(min(1.0, share) * n - 1e-9)]
        rows = torch.from_numpy(order)
        y = client.y_train.clone()
        if kind == "label-flip":
            y[rows] = federation.classes - 1 - y[rows]
            return replace(client, y_train=y)
        x = read(client.x_train).clone()
        x[rows], y[rows] = stamped(x[rows], value), target
        return replace(client, x_train=x, y_train=y)

    members = (poison(k, one) if k in clients else one for k, one in enumerate(federation.clients))
    return replace(federation, clients=tuple(members))


def _training(federation: Federation) -> Iterator[Tensor]:
    """Yield all clients' training samples."""
    for client in federation.clients:
        yield from pieces(client.x_train)


def trigger_value(samples: Iterable[Tensor]) -> Tensor:
    """Return the highest value of all clients' training samples: of images per channel."""
    highest = torch.stack([x.amax(0) for x in samples]).amax(0)
    return highest.amax((-2, -1)) if highest.ndim == 3 else highest.max()


def stamped(x: Tensor, value: Tensor) -> Tensor:
    """Return samples with the trigger."""
    x = x.clone()
    if x.ndim >= 3:
        width = min(max(2, x.shape[-2] // 8), x.shape[-2], x.shape[-1])
        x[..., -width:, -width:] = value.reshape(*value.shape, 1, 1) if value.ndim else value
        return x
    x[..., -max(1, x.shape[-1] // 16) :] = value
    return x
