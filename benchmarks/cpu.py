"""How fast `one` is on a CPU, beside the loop that most people write: DataLoader + optim.SGD + deepcopy.

    python benchmarks/cpu.py [--rounds N] [--threads N]

Both train the same model on the same data for the same number of SGD steps, FedAvg, one thread pool. Rounds are interleaved
in one process, and the ratio is the median of the ratios round by round, since timings of a shared machine wander.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedstill as fs
from fedstill import models, simulation
from fedstill.experiment import Training


class PlainCNN(nn.Module):
    """The first paper's CNN for Fashion-MNIST, written as it is described: convolution, ReLU, pool."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2, self.drop = nn.Conv2d(1, 64, 5), nn.Conv2d(64, 64, 5), nn.Dropout2d(0.5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1024, 128), nn.Linear(128, 64), nn.Linear(64, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.drop(self.conv2(x))), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class PlainMLP(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 128), nn.Linear(128, classes)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def plain_round(server: nn.Module, loaders: list[DataLoader], lr: float, momentum: float, epochs: int) -> None:
    """A round of FedAvg as people write it."""
    total, mean = sum(len(loader.dataset) for loader in loaders), None
    for loader in loaders:
        client = copy.deepcopy(server)
        optimiser = torch.optim.SGD(client.parameters(), lr=lr, momentum=momentum)
        client.train()
        for _ in range(epochs):
            for x, y in loader:
                optimiser.zero_grad()
                F.cross_entropy(client(x), y).backward()
                optimiser.step()
        share = len(loader.dataset) / total
        part = {name: value * share for name, value in client.state_dict().items()}
        mean = part if mean is None else {name: mean[name] + part[name] for name in mean}
    server.load_state_dict(mean)


def compare(name: str, plain: nn.Module, model: str, clients: int, samples: int, batch: int, momentum: float, rounds: int) -> float:
    g = torch.Generator().manual_seed(0)
    data = [(torch.rand(samples, 1, 28, 28, generator=g), torch.randint(0, 10, (samples,), generator=g)) for _ in range(clients)]
    loaders = [DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True) for x, y in data]
    fed = fs.Federation.from_arrays([(x, y, x[:2], y[:2]) for x, y in data], classes=10)
    how = Training(rounds=1, epochs=1, batch_size=batch, lr=0.01, momentum=momentum, engine="one", device="cpu")
    ours = simulation.prepare(fs.FedAvg(), models.build(model, (1, 28, 28), 10), fed, None, how)
    times: list[tuple[float, float]] = []
    for i in range(rounds + 1):
        began = time.perf_counter()
        plain_round(plain, loaders, 0.01, momentum, 1)
        theirs = time.perf_counter() - began
        mine = ours.run().history[0]["train_seconds"]
        if i:  # the first warms up
            times.append((theirs, mine))
    ratio = statistics.median(a / b for a, b in times)
    steps = clients * -(-samples // batch)
    a, b = (statistics.median(t) / steps * 1e3 for t in zip(*times, strict=True))
    print(f"{name:<34} plain {a:8.3f} ms/step   fedstill {b:8.3f} ms/step   ratio {ratio:5.2f}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each, interleaved (default 9)")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: as torch chooses)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds each, interleaved")
    cnn = compare("CNN of the FMNIST paper, batch 64", PlainCNN(), "cnn-fmnist", 4, 256, 64, 0.9, options.rounds)
    mlp = compare("MLP 784-128-10, batch 20", PlainMLP(), "mlp", 10, 200, 20, 0.0, options.rounds)
    print(f"targets: CNN ≥ 1.3 {'met' if cnn >= 1.3 else 'MISSED'}, MLP ≥ 1.4 {'met' if mlp >= 1.4 else 'MISSED'}")


if __name__ == "__main__":
    main()
