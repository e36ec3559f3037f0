"""The models and the data of the workloads, for every competitor on PyTorch."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class CNN(nn.Module):
    """Two 5×5 convolutions, 1-32-64, and 1024-512-10; padded to the same size 3136-512-10."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=padding), nn.Conv2d(32, 64, 5, padding=padding)
        self.fc1, self.fc2 = nn.Linear(3136 if padding else 1024, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


class MLP(nn.Module):
    """784-128-10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MLP() if name == "mlp" else CNN(padding=2 if name == "cnn-same" else 0)


@functools.cache
def clients(path: str) -> list[tuple[Tensor, Tensor]]:
    """Every client's (x, y), read once a process."""
    with np.load(path) as found:
        xs, ys = torch.from_numpy(found["x"])[:, :, None], torch.from_numpy(found["y"])
    return list(zip(xs, ys, strict=True))


def loader(path: str, client: int, batch: int, generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(TensorDataset(*clients(path)[client]), batch_size=batch, shuffle=True, generator=generator)


@torch.no_grad()
def loss(model: nn.Module, path: str) -> float:
    """The mean cross-entropy of a global model on the first 50 samples of every client."""
    x, y = (torch.cat([part[:50] for part in parts]) for parts in zip(*clients(path), strict=True))
    return F.cross_entropy(model(x), y).item()
