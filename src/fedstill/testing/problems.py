"""Small problems on which the laws are tried: ragged federations, models for them, and what two runs are compared by.

Ragged on purpose: sizes differ, batches are partial, one client has one sample.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.method import Method
from ..core.objective import IGNORED
from ..core.tree import Params
from ..data import Federation
from ..run.result import Run

SIZES = ((13, 5), (7, 3), (1, 2), (10, 4), (5, 1))  # training and test samples of each client
CLASSES = 3
OUTPUTS = types.MappingProxyType({"regression": 2, "multilabel": 3, "tokens": 5})
LENGTH = 3  # tokens of a sample
SETTINGS: Mapping[str, Any] = types.MappingProxyType(
    dict(
        rounds=3,
        participation=0.6,
        epochs=2,
        batch_size=4,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-3,
        seed=2,
        dtype="float64",
        device="cpu",
    )
)
ADAPTED = "r=2,alpha=3,targets=*,head=freeze"  # of some models the head is the only linear layer


def needed(method: Method) -> dict[str, Any]:
    """Return the settings that a method cannot do without: adapters, for methods that are about them."""
    return {"lora": ADAPTED} if method.needs_lora else {}


# ---- federations ---------------------------------------------------------------------------------------------------------
def ragged(sizes: Sequence[tuple[int, int]] = SIZES, shape: tuple[int, ...] = (4,), seed: int = 0) -> Federation:
    """Return clients with their own label balance and sizes."""
    g = np.random.default_rng(seed)
    centres = g.normal(size=(CLASSES, *shape))
    clients = []
    for sizes_k in sizes:
        balance = g.dirichlet([0.7] * CLASSES)
        y = [g.choice(CLASSES, size=n, p=balance) for n in sizes_k]
        x = [centres[labels] + 0.7 * g.normal(size=(len(labels), *shape)) for labels in y]
        clients.append((x[0], y[0], x[1], y[1]))
    return Federation.from_arrays(clients, classes=CLASSES)


def federation(objective: str, sizes: Sequence[tuple[int, int]] = SIZES) -> Federation:
    """Return ragged clients of an objective; each has relations of its own between samples and targets."""
    if objective == "classification":
        return ragged(sizes)
    g, outputs = np.random.default_rng(3), OUTPUTS[objective]
    clients = []
    for sizes_k in sizes:
        shift = g.normal(size=outputs)
        parts: list[NDArray[Any]] = []
        for n in sizes_k:
            x: NDArray[Any] = g.normal(size=(n, 4))
            if objective == "tokens":
                x = g.integers(0, outputs, (n, LENGTH))
                y = np.where(g.random((n, LENGTH)) < 0.3, IGNORED, (x + int(abs(shift[0]) * 3)) % outputs)
                y[:, 0] = x[:, -1]
            else:
                y = np.tanh(x[:, :outputs]) * 2 + shift
                y = (y > 0).astype(int) if objective == "multilabel" else y
            parts += [x, y]
        clients.append(tuple(parts))
    return Federation.from_arrays(clients, objective=objective, classes=outputs)


# ---- models --------------------------------------------------------------------------------------------------------------
class Plain(nn.Module):
    """Two linear layers."""

    head_modules = "fc2"

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc2(torch.tanh(self.fc1(x)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """BatchNorm in body and head, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.head = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.drop(torch.relu(self.bn(self.fc1(x)))))  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """A convolution, spatial BatchNorm and channel dropout, on 1×2×2 images."""

    head_modules = ("fc",)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.Dropout2d(0.25)
        self.fc = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.drop(torch.relu(self.bn(self.conv(x.reshape(-1, 1, 2, 2))))).flatten(1))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two layers under BatchNorm and dropout."""

    head_modules = "fc2"

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.fc1, self.bn, self.drop, self.fc2 = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.2),
            nn.Linear(6, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc2(self.drop(torch.tanh(self.bn(self.fc1(x)))))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Sees a token and the mean of all: [n, L] → [n, L, C]."""

    head_modules = "fc2"

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.drop, self.fc2 = nn.Embedding(outputs, 6), nn.Dropout(0.2), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        seen = self.embed(x.long())
        return self.fc2(self.drop(torch.tanh(seen + seen.mean(1, keepdim=True))))  # type: ignore[no-any-return]


MODELS = {"plain": Plain, "normed": Normed, "convolved": Convolved}


def make(name: str, seed: int = 5) -> nn.Module:
    """Return a model with fixed weights, in float64 so that nothing is lost on the way in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().double()


def model(objective: str) -> nn.Module:
    """Return a model for `federation`'s samples, with fixed weights."""
    if objective == "classification":
        return make("normed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return (Reader if objective == "tokens" else Net)(OUTPUTS[objective]).double()


# ---- comparisons ---------------------------------------------------------------------------------------------------------
def states(run: Run) -> dict[str, Params]:
    """Return every model that a run ends with."""
    models = {"generic": run.generic()}
    return models | {f"personal {k}": run.personal(k) for k in range(run.task.clients)}


def farthest(a: Mapping[str, Params], b: Mapping[str, Params]) -> tuple[float, str]:
    """Return the largest difference between two runs' models, and where it is; infinite where one is no number."""
    if a.keys() != b.keys():
        raise ValueError(f"the runs end with other models: {', '.join(a)} and {', '.join(b)}")
    gaps = [
        (float(torch.nan_to_num((a[m][n].double() - b[m][n].double()).abs(), nan=torch.inf).max()), f"{m} {n}")
        for m in a
        for n in a[m]
        if a[m][n].numel()
    ]
    return max(gaps, key=lambda gap: gap[0])


def distance(a: Mapping[str, Params], b: Mapping[str, Params]) -> float:
    """Return the largest difference between two runs' models."""
    return farthest(a, b)[0]


def identical(a: Mapping[str, Params], b: Mapping[str, Params]) -> bool:
    """Return whether two runs' models agree to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[m][n], b[m][n]) for m in a for n in a[m])
