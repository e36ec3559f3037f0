"""How fast a stack of clients trains on a GPU, beside the loop that takes them one by one, and beside what the GPU allows.

    python benchmarks/gpu.py                       # the table: CNN with batches of 64 and 10, ResNet-18 with batches of 10
    python benchmarks/gpu.py --precision tf32 --clients 100 --only cnn64
    python benchmarks/gpu.py --experiment DATA     # a whole pFedSD experiment on CIFAR-100, three seeds stacked

Each row: both train the same clients on the same data with the same steps, in one run, rounds alternating; the median of the
rounds. A round is everything: batches, training, merging. The limit is the sum over a step's kernels of the larger of operations
over the measured rate of a large matrix product and bytes over the measured rate of a large copy (see `floor`).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstill as fs
from fedstill import data as sources
from fedstill import models
from fedstill.data import Dataset
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.run.simulation import begin

# model, batch size, samples of a client, local epochs
WORKLOADS = {"cnn64": ("cnn", 64, 512, 5), "cnn10": ("cnn", 10, 100, 5), "resnet18": ("resnet18", 10, 60, 2)}


class CNN(nn.Module):
    """Two 5×5 convolutions, 3-32-64, and 1600-120-84-10."""

    head_modules = "fc3"

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 32, 5), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1600, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))  # type: ignore[no-any-return]


def build(name: str) -> nn.Module:
    """The model of a workload, from a fixed seed."""
    return models.seeded(CNN, 0) if name == "cnn" else models.build(name, (3, 32, 32), 10, 0)


def federation(clients: int, samples: int) -> fs.Federation:
    """Random images in bytes; every client has as many."""
    g = np.random.default_rng(0)
    test = 8
    parts = []
    for _ in range(clients):
        x, y = g.integers(0, 256, (samples + test, 3, 32, 32), dtype=np.uint8), g.integers(0, 10, samples + test)
        parts.append((x[:samples], y[:samples], x[samples:], y[samples:]))
    return fs.Federation.from_arrays(parts, classes=10)


def ours(simulation: Simulation) -> Callable[[], float]:
    """One round of FedAvg each time it is called: seconds."""
    rounds = start([Start(simulation)]).rounds()
    next(rounds)  # the first traces, measures and compiles

    def lap() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        next(rounds)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return lap


def plain(model: nn.Module, data: fs.Federation, batch: int, how: Training) -> Callable[[], float]:
    """The loop that takes clients one by one, data on the GPU, as most people write it."""
    device = torch.device("cuda")
    model = model.to(device)
    shards = [(c.x_train.to(device), c.y_train.to(device)) for c in data.clients]
    server = {name: value.clone() for name, value in model.state_dict().items()}
    g = torch.Generator(device=device).manual_seed(0)

    def lap() -> float:
        nonlocal server
        torch.cuda.synchronize()
        began = time.perf_counter()
        total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in server.items()}
        for x, y in shards:
            model.load_state_dict(server)
            model.train()
            optimiser = torch.optim.SGD(model.parameters(), how.lr, how.momentum)
            orders = [torch.randperm(len(y), generator=g, device=device) for _ in range(how.epochs)]
            for rows in (rows for order in orders for rows in order.split(batch)):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            for name, value in model.state_dict().items():
                total[name] += value / len(shards)
        server = {name: value.to(server[name].dtype) for name, value in total.items()}
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return lap


def rates(dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a large matrix product, bytes a second of a large copy (read and written)."""
    torch.set_float32_matmul_precision("high")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    big = torch.randn(1 << 30, device="cuda")
    other = torch.empty_like(big)
    flops = 2 * 8192**3 / median_seconds(lambda: a @ b)
    moved = 2 * big.nbytes / median_seconds(lambda: other.copy_(big))
    torch.set_float32_matmul_precision("highest")
    return flops, moved


def median_seconds(f: Callable[[], object], times: int = 7) -> float:
    """By events, after a warm-up."""
    f()
    laps = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        end.synchronize()
        laps.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(laps)


def floor(model: nn.Module, clients: int, batch: int, width: int) -> list[tuple[float, float]]:
    """(operations, bytes) of every kernel that a step of all clients cannot do without, `width` bytes a number.

    A layer (convolution, linear, BatchNorm, pool) reads its input and weights and writes its output; backward it reads the
    gradient of its output with its weights for the gradient of its input (but for the first layer), and with its input for
    that of its weights. Activation functions and biases cost nothing. At the end weights and momentum, float32, are read and
    written.
    """
    found: list[tuple[float, float]] = []

    def look(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        x, y, first = given[0].numel(), out.numel(), not found
        if isinstance(layer, nn.Conv2d | nn.Linear):
            w, products = layer.weight.numel(), 2.0 * out.numel() * layer.weight[0].numel()
            found.extend([(products, (x + w + y) * width)] * (2 if first else 3))
        else:
            found.extend([(0.0, (x + y) * width), (0.0, (2 * x + y) * width)])

    model = copy.deepcopy(model).cpu()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.MaxPool2d | nn.AdaptiveAvgPool2d):
            layer.register_forward_hook(look)
    with torch.no_grad():
        model.eval()(torch.zeros(batch, 3, 32, 32))
    found.append((0.0, sum(p.numel() for p in model.parameters()) * (16.0 + width)))
    return [(clients * operations, clients * moved) for operations, moved in found]


def row(name: str, clients: int, precision: str, rounds: int) -> str:
    """One line of the table."""
    kind, batch, samples, epochs = WORKLOADS[name]
    model, data, steps = build(kind), federation(clients, samples), epochs * samples // batch
    how = Training(
        rounds=10_000, epochs=epochs, batch_size=batch, lr=0.01, momentum=0.9, eval_every=10_000, device="cuda",
        engine="stacked", compile="on", precision=precision,
    )  # fmt: skip
    began = time.perf_counter()
    simulation = prepare(fs.FedAvg(), model, data, None, how)
    fast = ours(simulation)
    warm = time.perf_counter() - began
    slow = plain(model, data, batch, how)
    slow()
    fast_laps, slow_laps = [], []
    for _ in range(rounds):
        slow_laps.append(slow())
        fast_laps.append(fast())
    a, b = statistics.median(slow_laps), statistics.median(fast_laps)
    rate, bandwidth = rates(torch.bfloat16 if precision == "bf16" else torch.float32)
    kernels = floor(model, clients, batch, 2 if precision == "bf16" else 4)
    operations, moved = (sum(part) for part in zip(*kernels, strict=True))
    limit = sum(max(ops / rate, bytes_ / bandwidth) for ops, bytes_ in kernels)
    peak = torch.cuda.max_memory_allocated() / 2**30
    compiled = simulation.trainer.choices.seconds
    return (
        f"| {name}, {clients} clients, {precision} | {1e3 * a / steps:.1f} | {1e3 * b / steps:.2f} | **{a / b:.0f}×** "
        f"| {1e3 * operations / rate:.2f} / {1e3 * moved / bandwidth:.2f} / {1e3 * limit:.2f} | {100 * limit * steps / b:.0f} % "
        f"| {warm:.0f} s ({compiled:.0f} s) | {peak:.0f} GiB |"
    )


def experiment(dataset: Dataset, precision: str, seeds: int, rounds: int = 100) -> str:
    """The first paper's pFedSD experiment on CIFAR-100 with all seeds stacked: seconds, and where they went."""
    base = fs.Experiment(
        method=fs.PFedSD(lam=0.5, tau=1.0), data="cifar100", model="cnn-cifar100", clients=100, participation=0.1,
        partition="balanced-dirichlet:0.1", rounds=rounds, epochs=5, batch_size=64, lr=0.01, momentum=0.9,
        weight_decay=1e-5, eval_every=20, device="cuda", engine="stacked", compile="on", precision=precision,
    )  # fmt: skip
    experiments = [dataclasses.replace(base, seed=seed) for seed in range(seeds)]
    dealt = [
        fs.Federation.from_dataset(dataset, partition=base.partition, clients=base.clients, seed=seed)
        for seed in range(seeds)
    ]
    starts = [begin(one, federation=data) for one, data in zip(experiments, dealt, strict=True)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    session = start(starts)
    runs = session.run()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    preparing = session.trainer.choices.seconds
    scores = [100 * run.score() for run in runs]
    return (
        f"pFedSD, CIFAR-100, 100 clients, {rounds} rounds, {seeds} seed(s), {precision}: {wall - preparing:.1f} s "
        f"(+ {preparing:.1f} s tracing and compiling); steps {runs[0].history[-1]['steps'] // 10} a client and round; "
        f"personal {statistics.mean(scores):.2f} % ({', '.join(f'{s:.2f}' for s in scores)})"
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--precision", choices=("bf16", "tf32", "full"), nargs="+", default=["bf16", "tf32"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each (the median counts)")
    parser.add_argument("--experiment", metavar="FOLDER", help="the pFedSD experiment instead; FOLDER holds CIFAR-100")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: needs a GPU, and torch sees none")
    if given.experiment:
        dataset = sources.load("cifar100", given.experiment)
        for precision in given.precision:
            print(experiment(dataset, precision, given.seeds), flush=True)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("| workload | one by one, ms a step of all | stacked, ms | ratio | operations / bytes / limit, ms | of the limit "
          "| first round (compiling) | memory |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only:
        for precision in given.precision:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            print(row(name, given.clients, precision, given.rounds), flush=True)


if __name__ == "__main__":
    main()
