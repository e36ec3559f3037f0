"""Seconds a round on 1 and on 2 ranks of this machine, and what communication takes on more, computed from measured bytes.

    python benchmarks/cluster.py [--model cnn-fmnist] [--clients 20] [--rounds 4] [--repeats 3]

Starts itself under torchrun, one thread a rank, 1 and 2 ranks in turn. The data are drawn: what is measured is time. The table
for more ranks takes a rank's training seconds as measured and divides the clients among the ranks; the model goes down by a
binomial tree, one mean a rank comes up over the link of rank 0.
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
from pathlib import Path

import numpy as np

RANKS = (10, 100, 1000)
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
    carried = min(row["communication_seconds"] for row in rows[2])
    size, one = rows[1][0]["bytes_down"], seconds[1] / args.clients
    print(
        f"{args.model}, {args.clients} clients, {args.samples} samples each, one epoch; a model of {size / 1e6:.2f} MB"
    )
    for ranks, value in seconds.items():
        print(f"{ranks} rank{'s' * (ranks > 1)}: {value:.3f} s a round, {seconds[1] / value:.2f}×")
    print(f"of it carrying messages on 2 ranks: {carried * 1e3:.1f} ms ({carried / seconds[2]:.1%})")
    print(f"\ncommunication's share of a round, computed: 10 clients a rank of {one * 1e3:.0f} ms each")
    print("| ranks | " + " | ".join(LINKS) + " |")
    for ranks in RANKS:
        shares = []
        for rate in LINKS.values():
            moving = math.ceil(math.log2(ranks)) * size / rate + (ranks - 1) * size / rate
            shares.append(f"{moving / (moving + 10 * one):.1%}")
        print(f"| {ranks} | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    main()
