"""The same experiment on every engine and device of this machine: how far apart the results are, for every method.

    python benchmarks/agree.py
    python benchmarks/agree.py --methods spectral --model resnet18 --clients 10 --rounds 1 --participation 1 --batch-size 100
    python benchmarks/agree.py --methods fedavg pfedsd --set privacy=local noise_multiplier=0.5

Runs each method on the digits (float64, by default 8 clients, a small CNN, three rounds, 60 % a round) one by one on the CPU, and
stacked on the CPU and, where there is one, on the GPU. Prints the largest difference between any two weights of any model.
Exits with 1 if one exceeds 1e-8. (Rounding grows with every step through a deep network with BatchNorm: few steps for those.)
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

import fedstill as fs
from fedstill import methods


def states(run: fs.Run, clients: int) -> list[torch.Tensor]:
    models = [run.generic(), *(run.personal(k) for k in range(clients))]
    return [value.double() for model in models for value in model.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(methods.METHODS))
    parser.add_argument("--model", default="cnn-cifar10")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--participation", type=float, default=0.6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings: privacy=local average=krum"
    )
    parser.add_argument("--compile", action="store_true", help="also with the step compiled (some seconds a method)")
    o = parser.parse_args()
    more = dict(text.split("=", 1) for text in o.set)
    more = {name: json.loads(text) if text[:1].isdigit() else text for name, text in more.items()}
    ways = {"cpu one": ("cpu", "one"), "cpu stacked": ("cpu", "stacked")}
    if torch.cuda.is_available():
        ways |= {"gpu stacked": ("cuda", "stacked"), "gpu one": ("cuda", "one")}
        ways |= {"gpu compiled": ("cuda", "stacked")} if o.compile else {}
    print(f"torch {torch.__version__}; {o.model}, {o.clients} clients; largest difference from 'cpu one', float64")
    print(f"{'method':<12}" + "".join(f"{way:>14}" for way in list(ways)[1:]))
    worst = 0.0
    for name in o.methods:
        found = {}
        for way, (device, engine) in ways.items():
            experiment = fs.Experiment(
                method=methods.get(name)(), rounds=o.rounds, clients=o.clients, participation=o.participation, epochs=1,
                batch_size=o.batch_size, lr=o.lr, momentum=0.5, model=o.model, dtype="float64", device=device, engine=engine,
                eval_every=o.rounds, compile="on" if way == "gpu compiled" else "off", **more,
            )  # fmt: skip
            found[way] = states(fs.run(experiment), o.clients)
        gaps = [
            max(float((a - b).abs().max()) for a, b in zip(found["cpu one"], found[way], strict=True))
            for way in list(ways)[1:]
        ]
        worst = max(worst, *gaps)
        print(f"{name:<12}" + "".join(f"{gap:>14.1e}" for gap in gaps), flush=True)
    sys.exit(0 if worst < 1e-8 else 1)


if __name__ == "__main__":
    main()
