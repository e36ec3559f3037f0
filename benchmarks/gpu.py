"""How fast a stack of clients trains on a GPU, beside the loop that takes them one by one, and beside what the GPU allows.

    python benchmarks/gpu.py                       # the table: CNN with batches of 64 and 10, ResNet-18 with batches of 10
    python benchmarks/gpu.py --only vit-tiny bert-tiny bert-tiny-lora        # transformers of Hugging Face, batches of 10
    python benchmarks/gpu.py --precision tf32 --clients 100 --only cnn64
    python benchmarks/gpu.py --device cpu --clients 3 --rounds 1 --samples 20 --only bert-tiny     # only to see that it runs
    python benchmarks/gpu.py --experiment DATA     # a whole pFedSD experiment on CIFAR-100, three seeds stacked

Each row: both train the same clients on the same data with the same steps, in one run, rounds alternating; the median of the
rounds. A round is everything: batches, training, merging. The limit is the sum over a step's kernels of the larger of operations
over the measured rate of a large matrix product and bytes over the measured rate of a large copy (see `floor`).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedstill as fs
from fedstill import data as sources
from fedstill import models
from fedstill.data import Dataset
from fedstill.nn.lora import with_lora
from fedstill.nn.split import by_head
from fedstill.run.experiment import Training
from fedstill.run.prepare import Simulation, prepare
from fedstill.run.session import Start, start
from fedstill.run.simulation import begin

LORA = "r=8,alpha=16,targets=query+value"
VIT = "hidden_size=192,num_hidden_layers=12,num_attention_heads=3,intermediate_size=768"  # ViT-tiny, as DeiT-Ti


@dataclass(frozen=True)
class Workload:
    """What is trained: a model on random images, or on random tokens of 64 words."""

    model: str
    batch: int
    samples: int  # of a client
    epochs: int
    arguments: str = ""  # of the model
    lora: str = ""
    side: int = 32  # of an image
    words: int = 0  # in the vocabulary; 0: images


WORKLOADS = {
    "cnn64": Workload("cnn", 64, 512, 5),
    "cnn10": Workload("cnn", 10, 100, 5),
    "resnet18": Workload("resnet18", 10, 60, 2),
    "vit-tiny": Workload("hf:vit", 10, 60, 2, f"{VIT},patch_size=4"),
    "vit-tiny-lora": Workload("hf:vit", 10, 60, 2, f"{VIT},patch_size=4", LORA.replace("query+value", "q_proj+v_proj")),
    "vit-tiny-224": Workload("hf:vit", 10, 20, 2, f"{VIT},patch_size=16", side=224),
    "bert-tiny": Workload("hf:bert-tiny", 10, 60, 2, words=30_522),
    "bert-tiny-lora": Workload("hf:bert-tiny", 10, 60, 2, "", LORA, words=30_522),
}
WORDS = 64  # in a text


LAYERS = (
    nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm, nn.Embedding, nn.MaxPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


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


def build(work: Workload) -> nn.Module:
    """The model of a workload, from a fixed seed."""
    shape = (WORDS,) if work.words else (3, work.side, work.side)
    return models.seeded(CNN, 0) if work.model == "cnn" else models.build(work.model, shape, 10, 0, work.arguments)


def federation(clients: int, work: Workload) -> fs.Federation:
    """Random images in bytes, or random tokens; every client has as many."""
    g = np.random.default_rng(0)
    test, samples = 8, work.samples
    parts = []
    for _ in range(clients):
        if work.words:
            x = g.integers(0, work.words, (samples + test, WORDS))
        else:
            x = g.integers(0, 256, (samples + test, 3, work.side, work.side), dtype=np.uint8)
        y = g.integers(0, 10, samples + test)
        parts.append((x[:samples], y[:samples], x[samples:], y[samples:]))
    return fs.Federation.from_arrays(parts, classes=10)


def ours(simulation: Simulation) -> Callable[[], float]:
    """One round of FedAvg each time it is called: seconds."""
    rounds = start([Start(simulation)]).rounds()
    next(rounds)  # the first traces, measures and compiles

    def lap() -> float:
        wait()
        began = time.perf_counter()
        next(rounds)
        wait()
        return time.perf_counter() - began

    return lap


def plain(model: nn.Module, data: fs.Federation, batch: int, how: Training) -> Callable[[], float]:
    """The loop that takes clients one by one, data on the GPU, as most people write it; what is frozen stays where it is."""
    device = torch.device(how.device)
    model = model.to(device)
    shards = [(c.x_train.to(device), c.y_train.to(device)) for c in data.clients]
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    trained = [value for value in model.parameters() if value.requires_grad]
    server = {name: value.clone() for name, value in model.state_dict().items() if name not in frozen}
    g = torch.Generator(device=device).manual_seed(0)

    def lap() -> float:
        nonlocal server
        wait()
        began = time.perf_counter()
        total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in server.items()}
        for x, y in shards:
            model.load_state_dict(server, strict=not frozen)
            model.train()
            optimiser = torch.optim.SGD(trained, how.lr, how.momentum)
            orders = [torch.randperm(len(y), generator=g, device=device) for _ in range(how.epochs)]
            for rows in (rows for order in orders for rows in order.split(batch)):
                optimiser.zero_grad()
                out = model(x[rows])
                F.cross_entropy(getattr(out, "logits", out), y[rows]).backward()
                optimiser.step()
            for name, value in model.state_dict().items():
                if name not in frozen:
                    total[name] += value / len(shards)
        server = {name: value.to(server[name].dtype) for name, value in total.items()}
        wait()
        return time.perf_counter() - began

    return lap


def wait() -> None:
    """Until the GPU has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rates(dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a large matrix product, bytes a second of a large copy (read and written)."""
    if not torch.cuda.is_available():
        return math.nan, math.nan
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


class Products(TorchDispatchMode):
    """Notes the products of two activations, which are no layers: attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float]] = []  # numbers of operations, and of numbers read and written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.found.append((2.0 * out.numel() * args[0].shape[2], sum(t.numel() for t in (*args, out))))
        return out


def floor(model: nn.Module, example: Tensor, clients: int, width: int) -> list[tuple[float, float]]:
    """(operations, bytes) of every kernel that a step of all clients cannot do without, `width` bytes a number.

    A layer (convolution, linear, normalisation, pool) reads its input and weights and writes its output; backward it reads the
    gradient of its output with its weights for the gradient of its input (but for the first layer), and with its input for
    that of its weights where these train. A product of attention's is one forward and two backward. Activation functions,
    softmax, dropout and biases cost nothing. At the end weights that train and their momentum, float32, are read and written.
    """
    found: list[tuple[float, float]] = []

    def look(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        x, y, first = given[0].numel(), out.numel(), not found
        if isinstance(layer, nn.Conv2d | nn.Linear):
            own = layer._parameters["weight"]  # an adapter's `weight` is a product
            assert own is not None
            w, products = own.numel(), 2.0 * out.numel() * own[0].numel()
            found.extend([(products, (x + w + y) * width)] * (3 - first - (not own.requires_grad)))
        elif isinstance(layer, nn.Embedding):
            found.extend([(0.0, (x + y) * width)] * (1 + layer.weight.requires_grad))
        else:
            found.extend([(0.0, (x + y) * width), (0.0, (2 * x + y) * width)])

    model = copy.deepcopy(model).cpu()
    for layer in model.modules():
        if isinstance(layer, LAYERS):
            layer.register_forward_hook(look)
    with torch.no_grad(), Products() as products:
        model.eval()(example)
    found += [(operations, moved * width) for operations, moved in products.found for _ in range(3)]
    found.append((0.0, sum(p.numel() for p in model.parameters() if p.requires_grad) * (16.0 + width)))
    return [(clients * operations, clients * moved) for operations, moved in found]


def kernels_of(lap: Callable[[], float], most: int = 25) -> str:
    """The kernels of a round that take longest: share of the device's time, milliseconds, calls, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        lap()
    found = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in found)
    lines = [
        f"{100 * took / total:5.1f} % {took / 1e3:9.2f} {event.count:6} {event.key[:110]}"
        for event in found[:most]
        for took in [event.self_device_time_total]
    ]
    return "\n".join([f"{total / 1e3:.1f} ms of kernels in a round", *lines])


def row(
    name: str, work: Workload, clients: int, precision: str, rounds: int, device: str, profile: bool, alone: bool
) -> str:
    """One line of the table."""
    model, data, steps = build(work), federation(clients, work), work.epochs * work.samples // work.batch
    how = Training(
        rounds=10_000, epochs=work.epochs, batch_size=work.batch, lr=0.01, momentum=0.9, eval_every=10_000, device=device,
        engine="stacked", compile="on", precision=precision, lora=work.lora,
    )  # fmt: skip
    began = time.perf_counter()
    simulation = prepare(fs.FedAvg(), model, data, None, how)
    fast = ours(simulation)
    warm = time.perf_counter() - began
    if profile:
        print(kernels_of(fast), flush=True)
    if work.lora:
        model = with_lora(model, work.lora, by_head(model, None).modules)  # what trains: the adapters and the head
    laps = [fast, plain(model, data, work.batch, how)][: 1 if alone else 2]
    took: list[list[float]] = [[] for _ in laps]
    for number in range(rounds + 1):
        for lap, times in zip(laps, took, strict=True):
            seconds = lap()
            if number:  # the first is a warm-up
                times.append(seconds)
    b, a = (statistics.median(took[0]), math.nan if alone else statistics.median(took[1]))
    rate, bandwidth = rates(torch.bfloat16 if precision == "bf16" else torch.float32)
    kernels = floor(model, data.clients[0].x_train[: work.batch], clients, 2 if precision == "bf16" else 4)
    operations, moved = (sum(part) for part in zip(*kernels, strict=True))
    limit = sum(max(ops / rate, bytes_ / bandwidth) for ops, bytes_ in kernels)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else math.nan
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
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", default=["cnn64", "cnn10", "resnet18"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--alone", action="store_true", help="do not time the loop that takes clients one by one")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a round that take longest, too")
    parser.add_argument("--samples", type=int, help="of a client, in place of the workload's")
    parser.add_argument("--precision", choices=("bf16", "tf32", "full"), nargs="+", default=["bf16", "tf32"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each (the median counts)")
    parser.add_argument("--experiment", metavar="FOLDER", help="the pFedSD experiment instead; FOLDER holds CIFAR-100")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: needs a GPU, and torch sees none")
    if given.experiment:
        dataset = sources.load("cifar100", given.experiment)
        for precision in given.precision:
            print(experiment(dataset, precision, given.seeds), flush=True)
        return
    machine = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("| workload | one by one, ms a step of all | stacked, ms | ratio | operations / bytes / limit, ms | of the limit "
          "| first round (compiling) | memory |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only:
        work = WORKLOADS[name] if given.samples is None else replace(WORKLOADS[name], samples=given.samples)
        for precision in given.precision:
            if given.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            print(
                row(name, work, given.clients, precision, given.rounds, given.device, given.profile, given.alone),
                flush=True,
            )


if __name__ == "__main__":
    main()
