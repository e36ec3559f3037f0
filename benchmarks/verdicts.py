"""Whether the verdict "join, or stay local" is right, and its interval covers the true gain, where the truth is known.

    python benchmarks/verdicts.py                  # 200 repetitions, as stated in docs/report.md
    python benchmarks/verdicts.py --repetitions 10

Half of the clients share a concept w, of which 30 samples in 40 dimensions teach little: federation helps them. Every other
client has a concept of its own, orthogonal to w; they come in pairs v and −v, which cancel in the mean, so that the shared model
is of no use to them and hurts. x is standard normal, the label the sign of the concept at x; the model is linear without bias.
Its true accuracy is 1 − θ/π, θ the angle between the concept and what was learned, so a client's true gain is known without data:

    helped: the shared model has learned w from all samples of half the federation, against its own few
    hurt:   θ is near a right angle under the shared model, so its accuracy is near 1/2, against more alone

Each repetition draws a federation, runs `local` and `fedavg` into folders, and reads the verdicts from there as the report does.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedstill as fs
from fedstill.core import plan
from fedstill.report.html import verdicts
from fedstill.report.html.read import read

FEATURES, SAMPLES, TESTS = 40, 30, (25, 120)  # training samples of a client; test samples from … to …
TRAINING = {"rounds": 8, "participation": 1.0, "epochs": 2, "batch_size": 16, "lr": 0.2, "eval_every": 8, "workers": 1}


@dataclass(frozen=True)
class Outcome:
    """One client's verdict beside the truth."""

    helped: bool
    true_gain: float
    low: float
    high: float
    side: str

    @property
    def right(self) -> bool:
        """Whether the verdict names the side that the truth is on."""
        return self.side == ("join" if self.true_gain > 0 else "stay local")

    @property
    def covered(self) -> bool:
        """Whether the interval holds the true gain."""
        return self.low <= self.true_gain <= self.high


def accuracy(weights: torch.Tensor, concept: np.ndarray) -> float:
    """Return the true accuracy of a linear model on a concept."""
    learned = (weights[1] - weights[0]).double().numpy()
    cosine = learned @ concept / (np.linalg.norm(learned) * np.linalg.norm(concept) or 1.0)
    return 1 - math.acos(max(-1.0, min(1.0, float(cosine)))) / math.pi


def federation(repetition: int, clients: int) -> tuple[fs.Federation, np.ndarray]:
    """Return a federation, and the concept of every client: the first half shares one."""
    rng = np.random.Generator(np.random.PCG64(plan.key(16, repetition)))
    basis = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    half = clients // 2
    opposite = [(-1) ** k * basis[1 + k // 2] for k in range(clients - half)]
    concepts = np.stack([*(basis[0] for _ in range(half)), *opposite])
    members = []
    for concept in concepts:
        sizes = SAMPLES, int(rng.integers(*TESTS))
        arrays = []
        for n in sizes:
            x = rng.normal(size=(n, FEATURES))
            arrays += [x.astype(np.float32), (x @ concept > 0).astype(np.int64)]
        members.append(tuple(arrays))
    return fs.Federation.from_arrays(members, classes=2), concepts


def outcomes(repetition: int, clients: int, folder: Path) -> list[Outcome]:
    """Run one federation and return its verdicts."""
    data, concepts = federation(repetition, clients)
    runs = {}
    for method in (fs.Local(), fs.FedAvg()):
        torch.manual_seed(repetition)
        model = nn.Linear(FEATURES, 2, bias=False)
        runs[method.id] = fs.simulate(
            method, model=model, data=data, out=folder / method.id, seed=repetition, **TRAINING
        )
    true = {
        name: [accuracy(run.personal(k)["weight"], concepts[k]) for k in range(clients)] for name, run in runs.items()
    }
    found = verdicts.verdicts(read([folder]), "fedavg")
    assert len(found) == clients
    assert all(one.paired for one in found)
    return [
        Outcome(k < clients // 2, true["fedavg"][k] - true["local"][k], one.low, one.high, one.side)
        for one in found
        for k in [int(one.client)]
    ]


def repeat(repetitions: int, clients: int = 24) -> list[list[Outcome]]:
    """Return the outcomes of every repetition."""
    found = []
    for repetition in range(repetitions):
        with tempfile.TemporaryDirectory() as temporary:
            found.append(outcomes(repetition, clients, Path(temporary)))
    return found


def main() -> None:
    """Repeat, print, and fail where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=24)
    flags = parser.parse_args()
    repeated = repeat(flags.repetitions, flags.clients)
    every = [one for outcomes in repeated for one in outcomes]
    decided = [one for one in every if one.side != "undecided"]
    right, covered = sum(one.right for one in decided) / len(decided), sum(one.covered for one in every) / len(every)
    for name, helped in (("helped", True), ("hurt", False)):
        of = [one for one in every if one.helped == helped]
        gains, sides = [100 * one.true_gain for one in of], [one.side for one in of]
        counts = ", ".join(f"{sides.count(side)} {side}" for side in ("join", "undecided", "stay local"))
        hold = 100 * sum(one.covered for one in of) / len(of)
        true = f"true gain {min(gains):+.1f} to {max(gains):+.1f} points, mean {np.mean(gains):+.1f}"
        print(f"{name}: {true}; {counts}; covered {hold:.1f} %")
    spread = [sum(one.covered for one in outcomes) / len(outcomes) for outcomes in repeated]
    print(
        f"{flags.repetitions} repetitions of {flags.clients} clients: {100 * len(decided) / len(every):.1f} % decided"
    )
    print(
        f"of the decided verdicts {100 * right:.2f} % are right; the interval covers the true gain in {100 * covered:.2f} %"
    )
    print(f"coverage by repetition: {100 * min(spread):.0f} % to {100 * max(spread):.0f} %")
    assert right >= 0.9, "fewer than 90 % of the decided verdicts are right"
    assert 0.9 <= covered <= 0.99, "the interval covers the true gain in less than 90 or more than 99 %"


if __name__ == "__main__":
    main()
