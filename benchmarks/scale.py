"""How time and memory grow with clients, cohort, model and rounds: linear in the work, flat in memory.

    python benchmarks/scale.py                         # on this machine's GPU, else its CPU; plots into scale.png
    python benchmarks/scale.py --only clients rounds --device cpu
    python benchmarks/scale.py --only bank             # ResNet-18, 45 MB a client: 100 clients beside 10,000 (needs a GPU)

Every point is a pFedSD run (each client keeps a model of its own) on random images, timed over rounds after the first. Memory is
the peak of the device during those rounds, less the samples, which of course grow with the clients; on a CPU what the rounds add
to the process, whose samples are loaded, with its workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstill as fs
from fedstill import models
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.run.session import Start, start


@dataclass(frozen=True)
class Point:
    """One measurement."""

    x: float
    seconds: float  # a round
    mebibytes: float
    name: str = ""  # where points are no line


def federation(clients: int, samples: int, shape: tuple[int, ...]) -> fs.Federation:
    """Random images in bytes, ten classes; the samples are views of one pool, so that many clients cost little to make."""
    g = np.random.default_rng(0)
    pool = g.integers(0, 256, (4096, *shape), dtype=np.uint8)
    labels = g.integers(0, 10, 4096)
    parts = []
    for k in range(clients):
        rows = (k * samples + np.arange(samples + 2)) % 4096
        parts.append((pool[rows[:-2]], labels[rows[:-2]], pool[rows[-2:]], labels[rows[-2:]]))
    return fs.Federation.from_arrays(parts, classes=10)


def measure(x: float, *, device: str, **setting: Any) -> Point:
    """One point, in a process of its own, whose peak memory is then the point's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(point, x, device=device, **setting).result()


def point(
    x: float,
    *,
    clients: int,
    cohort: int,
    model: str,
    rounds: int,
    samples: int,
    device: str,
    label: bool = False,
    **more: Any,
) -> Point:
    """Seconds a round (the median after the first) and peak memory."""
    shape = (3, 32, 32) if model.startswith(("cnn", "resnet")) else (1, 16, 16)
    data = federation(clients, samples, shape)
    how = Training(
        rounds=rounds + 2, epochs=1, batch_size=10, lr=0.01, participation=cohort / clients, device=device, compile="off",
        eval_every=rounds + 2, engine="stacked" if device == "cuda" else "auto", **more,
    )  # fmt: skip
    cuda = device == "cuda"
    simulation = prepare(fs.PFedSD(), models.build(model, shape, 10, 0), data, None, how)
    held = sum(part.nbytes for part in (*simulation.trainer.bench.data.train.x.tensors().values(),)) if cuda else 0
    before = 0 if cuda else resident()
    session = start([Start(simulation)])
    going = session.rounds()
    next(going)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    laps, most = [], 0
    for _ in range(rounds):
        began = time.perf_counter()
        next(going)
        if cuda:
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
        most = most if cuda else max(most, resident())
    peak = torch.cuda.max_memory_allocated() - held if cuda else most - before
    print(f"  {x:>9g}  {1e3 * statistics.median(laps):9.1f} ms a round  {peak / 2**20:9.0f} MiB  "
          f"{session.driver.transport.edge.store.stats() if cuda else ''}", flush=True)  # fmt: skip
    session.driver.transport.edge.store.close()
    simulation.trainer.close()
    going.close()  # type: ignore[attr-defined]
    if cuda:
        del session, simulation, going
        torch.cuda.empty_cache()
    return Point(x, statistics.median(laps), peak / 2**20, model if label else "")


def resident() -> int:
    """Bytes of this process and of those it has forked, pages that they share counted once."""
    own = [os.getpid(), *(int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    lines = [line.split() for pid in own for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(1024 * int(line[1]) for line in lines if line[0] == "Pss:")


def sweeps(device: str) -> dict[str, tuple[str, Callable[[], list[Point]]]]:
    """What is varied, with the label of its axis."""
    small: dict[str, Any] = {"model": "mlp", "rounds": 10, "samples": 20, "device": device}

    def clients() -> list[Point]:
        return [measure(n, clients=n, cohort=10, **small) for n in (10, 100, 1_000, 10_000)]

    def cohort() -> list[Point]:
        return [measure(n, clients=256, cohort=n, **small) for n in (4, 16, 64, 256)]

    def size() -> list[Point]:
        found = []
        for model in ("mlr", "mlp", "cnn-cifar10", "cnn-cifar100", "resnet8"):
            shape = (3, 32, 32) if model.startswith(("cnn", "resnet")) else (1, 16, 16)
            weights = sum(p.numel() for p in models.build(model, shape, 10, 0).parameters())
            found.append(measure(weights, clients=20, cohort=10, label=True, **{**small, "model": model, "rounds": 5}))
        return found

    def rounds() -> list[Point]:
        return [measure(n, clients=100, cohort=10, **{**small, "rounds": n}) for n in (10, 100, 1_000)]

    def bank() -> list[Point]:
        big = {"model": "resnet18", "samples": 10, "device": device, "bank": 5.0}
        return [measure(n, clients=n, cohort=100, rounds=6, **big) for n in (100, 10_000)]

    return {
        "clients": ("clients (10 a round)", clients),
        "cohort": ("clients a round", cohort),
        "size": ("weights of the model", size),
        "rounds": ("rounds", rounds),
        "bank": ("clients of ResNet-18 (100 a round)", bank),
    }


def draw(found: dict[str, tuple[str, list[Point]]], file: str) -> None:
    """A plot for each: time and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(found), figsize=(3.4 * len(found), 5.6), squeeze=False)
    for column, (label, points) in enumerate(found.values()):
        for row, (unit, values) in enumerate(
            (("ms a round", [1e3 * p.seconds for p in points]), ("MiB", [p.mebibytes for p in points]))
        ):
            axis = axes[row][column]
            named = any(p.name for p in points)
            axis.plot([p.x for p in points], values, "o" if named else "o-", color="#2563eb")
            for p, value in zip(points, values, strict=True):
                left = p.x > 0.5 * max(other.x for other in points)
                axis.annotate(p.name, (p.x, value), (-6 if left else 6, 5), textcoords="offset points", fontsize=8,
                              ha="right" if left else "left")  # fmt: skip
            if max(p.x for p in points) > 100 * min(p.x for p in points):
                axis.set_xscale("log")  # else a line is what is linear
            axis.set_ylim(0, 1.25 * max(*values, 1))
            axis.set_ylabel(unit if not column else "")
            axis.set_xlabel(label if row else "")
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    print(f"picture: {file}")


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--only", nargs="+", choices=list(sweeps(device)), default=["clients", "cohort", "size", "rounds"]
    )
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--plot", default="scale.png")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if given.device == 'cuda' else 'CPU'}; pFedSD")
    found = {}
    for name in given.only:
        label, sweep = sweeps(given.device)[name]
        print(label, flush=True)
        found[name] = (label, sweep())
    draw(found, given.plot)


if __name__ == "__main__":
    main()
