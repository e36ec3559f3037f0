"""The fifth paper's Tables 4 and 9: simulated time until personal models reach a target, waiting or not, and asynchronously.

    python benchmarks/wait_free.py                              # the digits, in a few minutes on two cores
    python benchmarks/wait_free.py --data fmnist --root data    # Fashion-MNIST, 10,000 images of it

Full participation, Dir(0.1), one generic pass and 3 or 5 personal ones a round, batch 10, lr 0.01, momentum 0.5, as in the
paper; its CIFAR-10 and ResNet-18 are too large for a CPU, so data and model are others. Devices: `--profile`. Each number is the
mean over seeds of the first moment at which PM, the mean of the personal models' accuracies by sample, is at the target; its
speed-up is over the same method that computes and waits. "fixed" makes the same personal steps, and counts when the last of them
is made, which may be after the round; "until download" makes as many as fit, and counts those made at the round's end.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import fedstill as fs
from fedstill import data as sources
from fedstill.data import Dataset
from fedstill.run.session import start
from fedstill.run.simulation import begin

WAITING = {"compute and wait": {}, "wait-free, fixed": {"wait_free": "fixed"},
           "wait-free, until download": {"wait_free": "until-download"}}  # fmt: skip
ASYNC = {"FedAsync": {"mode": "fedasync"}, "FedBuff": {"mode": "fedbuff"}}
METHODS = {"spectral": fs.SpectralCoDistillation, "ditto": fs.Ditto, "fedrod": fs.FedRoD}


def reached(experiment: fs.Experiment, federation: fs.Federation, targets: Sequence[float]) -> list[float | None]:
    """The simulated seconds after which PM is at each target; None: not within the rounds."""
    found: list[float | None] = [None] * len(targets)
    session = start([begin(experiment, federation=federation)])
    for (record,) in session.rounds():
        for i, target in enumerate(targets):
            if found[i] is None and record["personal_sample"] >= target:
                found[i] = record.get("ready", record["time"])
        if None not in found:
            break
    session.close()
    return found


def mean(times: Sequence[float | None]) -> float | None:
    """The mean, where every seed got there."""
    known = [t for t in times if t is not None]
    return statistics.mean(known) if len(known) == len(times) else None


def row(name: str, times: Sequence[float | None], base: Sequence[float | None]) -> str:
    """A line of a table: for each target the time and the speed-up."""
    cells = []
    for t, b in zip(times, base, strict=True):
        cells.append("not reached" if t is None else f"{t:.2f} s" + (f" ({b / t:.2f}×)" if b is not None else ""))
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", default=None, help="folder with the data set")
    parser.add_argument("--samples", type=int, default=10_000, help="the first so many of a larger data set")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--profile", default="lognormal:0.5")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.4, 0.8])
    parser.add_argument("--personal", type=int, nargs="+", default=[3, 5], help="personal passes a round")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    o = parser.parse_args()
    dataset: Dataset = sources.load(o.data, o.root)
    if len(dataset.y) > o.samples:
        x, y = dataset.x[: o.samples], dataset.y[: o.samples]
        dataset = dataclasses.replace(dataset, x=x, y=y, test_x=None, test_y=None)
    base = fs.Experiment(
        data=o.data, model=o.model, clients=o.clients, partition="dirichlet:0.1", rounds=o.rounds, epochs=1, batch_size=10,
        lr=0.01, momentum=0.5, profile=o.profile,
    )  # fmt: skip
    dealt = [
        fs.Federation.from_dataset(dataset, partition=base.partition, clients=o.clients, seed=seed)
        for seed in range(o.seeds)
    ]
    print(
        f"{o.data} ({len(dataset.y):,} samples), {o.model}, {o.clients} clients, devices {o.profile}, {o.seeds} seeds"
    )
    heads = " | ".join(f"PM {100 * t:g} %" for t in o.targets)
    began = time.perf_counter()

    def measured(method: fs.Method, changes: dict[str, object]) -> list[float | None]:
        runs = []
        for seed, federation in enumerate(dealt):
            rounds = o.rounds * (o.clients if changes.get("mode") == "fedasync" else 1)
            one = dataclasses.replace(base, method=method, seed=seed, rounds=rounds, **changes)  # type: ignore[arg-type]
            runs.append(reached(one, federation, o.targets))
        return [mean(times) for times in zip(*runs, strict=True)]

    for passes in o.personal:
        print(f"\n{passes} personal passes (Table 4)\n| | {heads} |\n|---|{'---|' * len(o.targets)}", flush=True)
        ditto: dict[str, list[float | None]] = {}
        for name in o.methods:
            waits: list[float | None] = [None] * len(o.targets)
            for how, changes in WAITING.items():
                found = measured(METHODS[name](personal_epochs=passes), changes)
                waits = found if not changes else waits
                ditto |= {how: found} if name == "ditto" else {}
                print(row(f"{name}, {how}", found, waits), flush=True)
        if ditto:
            print(
                f"\nDitto, {passes} personal passes (Table 9)\n| | {heads} |\n|---|{'---|' * len(o.targets)}",
                flush=True,
            )
            ditto |= {how: measured(fs.Ditto(personal_epochs=passes), changes) for how, changes in ASYNC.items()}
            for how, found in ditto.items():
                print(row(how, found, ditto["compute and wait"]), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
