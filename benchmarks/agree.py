"""The same experiment on every engine and device of this machine: how far apart the results are, for every method.

    python benchmarks/agree.py

Runs each method on the digits (8 clients, a small CNN, float64, three rounds, 60 % a round) one by one on the CPU, and
stacked on the CPU and, where there is one, on the GPU. Prints the largest difference between any two weights of any model.
Exits with 1 if one exceeds 1e-8.
"""

from __future__ import annotations

import sys

import torch

import fedstill as fs
from fedstill import methods


def states(run: fs.Run) -> list[torch.Tensor]:
    models = [run.generic(), *(run.personal(k) for k in range(8))]
    return [value.double() for model in models for value in model.values()]


def main() -> None:
    ways = {"cpu one": ("cpu", "one"), "cpu stacked": ("cpu", "stacked")}
    if torch.cuda.is_available():
        ways |= {"gpu stacked": ("cuda", "stacked"), "gpu one": ("cuda", "one")}
    print(f"torch {torch.__version__}; largest difference from 'cpu one', float64")
    print(f"{'method':<12}" + "".join(f"{way:>14}" for way in list(ways)[1:]))
    worst = 0.0
    for name, method in methods.METHODS.items():
        found = {}
        for way, (device, engine) in ways.items():
            experiment = fs.Experiment(
                method=method(), rounds=3, clients=8, participation=0.6, epochs=1, batch_size=32, model="cnn-cifar10",
                dtype="float64", device=device, engine=engine, eval_every=3,
            )  # fmt: skip
            found[way] = states(fs.run(experiment))
        gaps = [
            max(float((a - b).abs().max()) for a, b in zip(found["cpu one"], found[way], strict=True))
            for way in list(ways)[1:]
        ]
        worst = max(worst, *gaps)
        print(f"{name:<12}" + "".join(f"{gap:>14.1e}" for gap in gaps), flush=True)
    sys.exit(0 if worst < 1e-8 else 1)


if __name__ == "__main__":
    main()
