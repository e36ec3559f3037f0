"""How many rounds a method takes to another's last accuracy, by whose accuracy is looked at (the first paper's Table 4).

    python benchmarks/rounds_to_target.py reproduced/runs --method pfedsd --reference fedper

`all`: the mean over all clients, as our tables count. `participants`: over those that took part in the round, as the
authors' code tests them. `last trained`: over all that ever took part, each as when it last did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

Run = list[dict]


def runs(folder: Path, data: str, method: str) -> list[Run]:
    files = sorted(folder.glob(f"{data}-{method}-seed*/metrics.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def everybody(run: Run) -> list[float]:
    return [mean(list(record["personal_clients"].values())) for record in run]


def participants(run: Run) -> list[float]:
    return [mean([record["personal_clients"][str(k)] for k in record["participants"]]) for record in run]


def last_trained(run: Run) -> list[float]:
    curve, known = [], {}
    for record in run:
        known |= {k: record["personal_clients"][str(k)] for k in record["participants"]}
        curve.append(mean(list(known.values())))
    return curve


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


WAYS: dict[str, Callable[[Run], list[float]]] = {
    "all": everybody, "participants": participants, "last trained": last_trained,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder runs/ of a reproduction")
    parser.add_argument("--method", default="pfedsd")
    parser.add_argument("--reference", default="fedper")
    parser.add_argument("--data", nargs="+", default=["fmnist", "cifar10", "cifar100"])
    options = parser.parse_args()
    print("| data | whose accuracy | target, % | rounds to it, by seed |\n|---|---|---|---|")
    for data in options.data:
        for way, curve in WAYS.items():
            targets = [curve(run)[-1] for run in runs(options.runs, data, options.reference)]
            curves = [curve(run) for run in runs(options.runs, data, options.method)]
            pairs = zip(targets, curves, strict=True)
            rounds = [next((n for n, v in enumerate(c, start=1) if v >= target), None) for target, c in pairs]
            shown = ", ".join("not reached" if n is None else str(n) for n in rounds)
            print(f"| {data} | {way} | {', '.join(f'{100 * t:.1f}' for t in targets)} | {shown} |")


if __name__ == "__main__":
    main()
