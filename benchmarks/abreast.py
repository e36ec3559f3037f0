"""What seeds and values of a hyper-parameter cost as one more axis of the stack, beside one run alone.

    python benchmarks/abreast.py [--device cpu|cuda] [--model mlp] [--clients N] [--rounds N] [--times N]

pFedSD on the shipped digits. One run, three seeds together, five values of λ together, in turn; ratios are medians of the ratios
turn by turn. Compiling (on a GPU) happens in the turn that is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import fedstill as fs


def seconds(experiments: list[fs.Experiment]) -> float:
    began = time.perf_counter()
    fs.run_together(experiments)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: auto)")
    parser.add_argument("--model", default="mlp", help="a model by name (default: mlp)")
    parser.add_argument("--clients", type=int, default=20, help="clients, all in each round (default: 20)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a run (default: 10)")
    parser.add_argument("--times", type=int, default=7, help="turns that count (default: 7)")
    options = parser.parse_args()
    base = fs.Experiment(
        method=fs.PFedSD(), engine="stacked", device=options.device, model=options.model, clients=options.clients,
        rounds=options.rounds, eval_every=options.rounds,
    )  # fmt: skip
    many = {
        "three seeds": [dataclasses.replace(base, seed=seed) for seed in range(3)],
        "five values of λ": [dataclasses.replace(base, method=fs.PFedSD(lam=lam)) for lam in (0.1, 0.3, 0.5, 0.7, 1.0)],
    }
    alone: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in many}
    for turn in range(options.times + 1):
        one = seconds([base])
        found = {name: seconds(experiments) / one for name, experiments in many.items()}
        if turn:
            alone.append(one)
            for name, ratio in found.items():
                ratios[name].append(ratio)
    print(f"one run: {statistics.median(alone):.3g} s")
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.2f} times one ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
