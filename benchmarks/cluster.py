"""The tables of docs/cluster.md: seconds a round on 1 and 2 ranks of this machine, and what communication takes on more.

    python benchmarks/cluster.py [--model cnn-fmnist] [--clients 20] [--rounds 4] [--repeats 3]

Starts itself under torchrun, one thread a rank, 1 and 2 ranks in turn. The data are drawn: what is measured is time and bytes.
The tables for more ranks are computed: a model goes down by a binomial tree, and what comes up passes the link of rank 0. Where
uploads are reduced that is one model from each other rank, else one from each client there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

RANKS = (10, 100, 1000)
CLIENTS = 10  # that take part in a round, a rank
LINKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}


def measure(args: argparse.Namespace) -> None:
    """Run on the ranks of this torchrun; rank 0 prints seconds and bytes of the rounds after the first."""
    import fedstill as fs
    from fedstill.run import cluster

    one = fs.Experiment(
        method=fs.PFedSD(), data=args.data, model=args.model, clients=args.clients, rounds=args.rounds, epochs=1,
        partition="iid", batch_size=64, workers=1, engine="one", device="cpu", eval_every=args.rounds,
    )  # fmt: skip
    with cluster.joined() as ranks:
        if ranks is None:
            return
        history = fs.run(one, transport=ranks).history[1:]
        numbers = ("train_seconds", "communication_seconds", "bytes_down", "bytes_up")
        print(json.dumps({name: statistics.median(r[name] for r in history) for name in numbers}), flush=True)


def start(ranks: int, argv: list[str]) -> dict[str, float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, __file__, "--ranks", *argv], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(done.stderr[:2000])
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn-fmnist")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=300, help="training and test samples of a client together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        rng, count = np.random.default_rng(0), args.clients * args.samples
        file = Path(folder) / "drawn.npz"
        x = rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8)
        np.savez(file, x=x, y=rng.integers(0, 10, count))
        argv = [
            "--model",
            args.model,
            "--clients",
            str(args.clients),
            "--rounds",
            str(args.rounds),
            "--data",
            str(file),
        ]
        rows: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for _ in range(args.repeats):
            for ranks, found in rows.items():
                found.append(start(ranks, argv))
    seconds = {ranks: min(row["train_seconds"] for row in found) for ranks, found in rows.items()}
    carried = {ranks: min(row["communication_seconds"] for row in found) for ranks, found in rows.items()}
    size, one = rows[1][0]["bytes_down"], seconds[1] / args.clients
    rate = moved(2, size) / carried[2]  # packing and unpacking included
    links = {f"as here ({rate / 1e6:.0f} MB/s)": rate, **LINKS}
    about = f"{args.model}, {args.clients} clients of {args.samples} samples, one epoch"
    print(f"{about}; a model of {size / 1e6:.2f} MB, {1e3 * one:.0f} ms of a core a client and round\n")
    print("| ranks | seconds a round | times as fast | of it carrying messages |\n|---|---|---|---|")
    for ranks, value in seconds.items():
        print(f"| {ranks} | {value:.3f} | {seconds[1] / value:.2f} | {1e3 * carried[ranks]:.1f} ms |")
    print(f"\n{CLIENTS} clients a rank: seconds of a round that messages take, by the speed of rank 0's link\n")
    for line in taken(size, links=links):
        print(line)
    print(f"\nand their share of the round, if each client trains {1e3 * one:.0f} ms\n")
    for line in taken(size, CLIENTS * one, links):
        print(line)


def moved(ranks: int, size: float, clients: int = 1) -> float:
    """Return the bytes that one after another pass in a round: the model down a tree, one model up from each of the other ranks
    (where uploads are not reduced, from each of so many `clients` there).

    >>> moved(8, 1.0), moved(8, 1.0, 10)
    (10.0, 73.0)
    """
    return math.ceil(math.log2(ranks)) * size + (ranks - 1) * clients * size


def taken(size: float, work: float = 0.0, links: Mapping[str, float] = LINKS) -> list[str]:
    """Return the lines of a table: seconds by ranks and links or, with seconds of `work`, the share of a round."""
    head = [f"{link}{', each upload by itself' if each else ''}" for each in (False, True) for link in links]
    lines = [f"| ranks | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for ranks in RANKS:
        waits = [moved(ranks, size, CLIENTS if each else 1) / rate for each in (False, True) for rate in links.values()]
        cells = [f"{wait / (wait + work):.1%}" if work else f"{wait:.3g} s" for wait in waits]
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
