"""How fast `one` is on a CPU, beside the loop that most people write: DataLoader + optim.SGD + deepcopy.

    python benchmarks/cpu.py [--rounds N] [--threads N]

Both train the same model on the same data for the same number of SGD steps, by FedAvg, each in a process of its own as a user
would run it (threads and memory are a process's own affair). Their rounds alternate, one waiting while the other works, and the
ratio is the median of the ratios round by round, since timings of a shared machine wander.

Then, in the same way, ourselves beside ourselves: one worker and two, and a perceptron by autograd and by its own loop.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedstill as fs
from fedstill import models
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.run.session import Start, start


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


class MiddleCNN(nn.Module):
    """Two 5×5 convolutions of 32 and 64 channels, a hidden layer of 512 units."""

    head_modules = "fc2"

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = nn.Linear(1024, 512), nn.Linear(512, classes)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


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


@dataclass(frozen=True)
class Workload:
    """One row of the table."""

    name: str
    plain: type[nn.Module]
    model: str  # by its name here, or "plain" for the module above
    clients: int
    samples: int
    batch: int
    momentum: float
    target: float

    def data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        g = torch.Generator().manual_seed(0)
        shape = (self.samples, 1, 28, 28)
        return [
            (torch.rand(shape, generator=g), torch.randint(0, 10, shape[:1], generator=g)) for _ in range(self.clients)
        ]

    def steps(self) -> int:
        return self.clients * -(-self.samples // self.batch)


WORKLOADS = [
    Workload("CNN of the first paper for FMNIST, batch 64", PlainCNN, "cnn-fmnist", 4, 256, 64, 0.9, 1.3),
    Workload("MLP 784-128-10, batch 20", PlainMLP, "mlp", 10, 200, 20, 0.0, 1.4),
]
OURSELVES = [  # a workload, what the first is, and what the second
    (
        Workload("CNN 32-64-512, 20 clients, batch 64", MiddleCNN, "plain", 20, 128, 64, 0.0, 1.6),
        {"workers": 1},
        {"workers": 2},
    ),
    (
        Workload("MLP 784-128-10, 5 clients, batch 20", PlainMLP, "mlp", 5, 400, 20, 0.0, 2.0),
        {"workers": 1, "fast": False},
        {"workers": 1},
    ),
]


def plain_worker(pipe: Connection, work: Workload, threads: int, changes: dict) -> None:
    if threads:
        torch.set_num_threads(threads)
    loaders = [DataLoader(TensorDataset(x, y), batch_size=work.batch, shuffle=True) for x, y in work.data()]
    server = work.plain()
    while pipe.recv():
        began = time.perf_counter()
        plain_round(server, loaders, 0.01, work.momentum, 1)
        pipe.send(time.perf_counter() - began)


def our_worker(pipe: Connection, work: Workload, threads: int, changes: dict) -> None:
    if threads:
        torch.set_num_threads(threads)
    fed = fs.Federation.from_arrays([(x, y, x[:2], y[:2]) for x, y in work.data()], classes=10)
    how = Training(
        rounds=1_000_000, eval_every=1_000_000, epochs=1, batch_size=work.batch, lr=0.01, momentum=work.momentum,
        engine="one", device="cpu", **changes,
    )  # fmt: skip
    model = work.plain() if work.model == "plain" else models.build(work.model, (1, 28, 28), 10)
    ours = prepare(fs.FedAvg(), model, fed, None, how)
    with ours.trainer.quiet():
        rounds = start([Start(ours)]).rounds()
        while pipe.recv():
            began = time.perf_counter()  # not the record's time: it has begun before we waited for our turn
            next(rounds)
            pipe.send(time.perf_counter() - began)
    ours.trainer.close()


def compare(work: Workload, rounds: int, threads: int, ours: tuple[dict, dict] | None = None) -> float:
    """Two ways, round by round: the plain loop and ours, or two of ours with other settings."""
    context, ends, processes = multiprocessing.get_context("spawn"), [], []
    names = ["plain", "fedstill"] if ours is None else [", ".join(f"{k}={v}" for k, v in c.items()) for c in ours]
    for target, changes in zip(
        (plain_worker if ours is None else our_worker, our_worker), ours or ({}, {}), strict=True
    ):
        here, there = context.Pipe()
        processes.append(context.Process(target=target, args=(there, work, threads, changes), daemon=True))
        processes[-1].start()
        ends.append(here)

    def turn(end: Connection) -> float:
        end.send(True)
        return end.recv()

    times = [[turn(end) for end in ends] for _ in range(rounds + 2)][2:]  # the first two warm up
    for end, process in zip(ends, processes, strict=True):
        end.send(False)
        process.join()
    ratio = statistics.median(a / b for a, b in times)
    a, b = (statistics.median(t) / work.steps() * 1e3 for t in zip(*times, strict=True))
    verdict = "met" if ratio >= work.target else "MISSED"
    print(
        f"{work.name:<44} {names[0]} {a:7.3f} ms/step   {names[1]} {b:7.3f} ms/step   "
        f"ratio {ratio:5.2f}   target {work.target} {verdict}",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each, interleaved (default 11)")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: as torch chooses)")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {options.threads or torch.get_num_threads()} threads, {options.rounds} rounds each"
    )
    for work in WORKLOADS:
        compare(work, options.rounds, options.threads)
    for work, first, second in OURSELVES:
        compare(work, options.rounds, options.threads, (first, second))


if __name__ == "__main__":
    main()
