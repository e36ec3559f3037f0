"""Sections of soak.py: robust rules against oracles, and 20 % attackers on the digits.

python benchmarks/soak_robust.py [--seeds 3] [--rounds 15]        prints the tables of docs/robust.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import fedstill as fs
from fedstill.core import tree
from fedstill.core.errors import TrainingError
from fedstill.report.robustness import score
from fedstill.run import prepare
from fedstill.server import robust

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the oracles are the tests'

Row = tuple[str, str, str]
CLOSE = 1e-6
KEEPS = 0.9  # of the clean accuracy
ROUNDS = 15
NEAR, FAR = "dirichlet:100", "dirichlet:0.1"
RULES = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-clip", "fltrust")
ATTACKS = (  # with their strengths; 0 is the attack's own
    ("sign-flip", 0.0), ("gaussian", 0.0), ("alie", 0.0), ("alie", 12.0), ("inner-product", 0.0), ("label-flip", 0.0),
    ("backdoor", 0.0),
)  # fmt: skip


# ---- oracles -----------------------------------------------------------------------------------------------------------
def oracles(short: bool) -> list[Row]:
    """Compare every rule with its oracle on random uploads, with and without ties and uneven weights."""
    from tests import robust_oracles as o

    worst: dict[str, float] = {}
    cases = 0

    def check(name: str, got: tree.Tree, expected: np.ndarray) -> None:
        apart = float(np.abs(o.vector(got) - expected).max())
        worst[name] = max(worst.get(name, 0.0), apart)
        assert apart <= CLOSE, f"{name}: {apart:g} from its oracle in case {cases}"

    for seed, n, ties in itertools.product(range(2 if short else 40), (5, 8, 11), (False, True)):
        cases += 1
        trees = o.tied(o.uploads(n, seed)) if ties else o.uploads(n, seed)
        around, trained = o.uploads(2, seed + 1000)
        weights = [1.0 + (k * 7 + seed) % 5 for k in range(n)]
        x, p, w = o.matrix(trees), np.array(weights) / sum(weights), o.vector(around)
        check("median", robust.median(trees, weights), np.median(x, 0))
        for f in range(1, (n - 3) // 2 + 1):
            check("trimmed-mean", robust.trimmed_mean(trees, weights, suspected=f), o.trimmed_by_loops(x, f))
            sums = [round(value, 9) for value in o.krum_by_force(x, f)]
            order = sorted(range(n), key=lambda i, sums=sums: (sums[i], i))  # type: ignore[misc]
            check("krum", robust.krum(trees, weights, suspected=f), x[order[0]])
            check("multi-krum", robust.multi_krum(trees, weights, suspected=f), x[order[: n - f]].mean(0))
        check("geometric-median", robust.geometric_median(trees, weights), o.middle_by_scipy(x, p))
        for limit in (0.0, 1.0):
            check(
                "norm-clip", robust.norm_clip(trees, weights, around, limit=limit), o.clipped_by_formula(x, p, w, limit)
            )
        own = o.vector(trained) - w
        check("fltrust", robust.fltrust(trees, weights, around, trained=trained), o.trusted_by_formula(x, w, own))
    figure = ", ".join(f"{name} {apart:.0e}" for name, apart in worst.items())
    return [
        ("robust rules against an independent oracle", f"within 1e-6 in {cases} cases", f"largest difference: {figure}")
    ]


# ---- attackers ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Mean over seeds; NaN where training could not go on."""

    generic: float
    personal: float
    backdoor: float = math.nan  # success in the generic model
    backdoor_personal: float = math.nan


@functools.cache
def outcome(method: str, partition: str, attack: str, strength: float, rule: str, rounds: int, seeds: int) -> Outcome:
    """Train, and read accuracies on the clients that are honest in attacked runs; "none" is the clean run."""
    results = []
    for seed in range(seeds):
        experiment = fs.Experiment(
            method=fs.METHODS[method](), partition=partition, rounds=rounds, eval_every=rounds, seed=seed, attack=attack,  # type: ignore[arg-type]
            attack_strength=strength, average=rule, device="cpu", engine="one", workers=1,  # type: ignore[arg-type]
        )  # fmt: skip
        federation = _federation(partition, seed)
        marked = dataclasses.replace(experiment, attack="sign-flip")
        attackers = prepare.from_experiment(marked, federation)[0].attack
        assert attackers is not None
        honest = {str(k) for k in range(len(federation)) if k not in attackers.clients}
        try:
            run = fs.run(experiment, federation=federation)
        except TrainingError:
            results.append(Outcome(math.nan, math.nan))
            continue
        models = [
            score(run.history[-1], model, honest) if model in run.method.scores else math.nan
            for model in ("generic", "personal")
        ]
        rates = [run.after.get(name, math.nan) for name in ("backdoor_generic", "backdoor")]
        results.append(Outcome(*models, *rates))
    return Outcome(*(float(np.mean([getattr(one, f.name) for one in results])) for f in dataclasses.fields(Outcome)))


@functools.cache
def _federation(partition: str, seed: int) -> fs.Federation:
    return prepare.federation_of(fs.Experiment(partition=partition, seed=seed))


def attackers(short: bool) -> list[Row]:
    """Let 4 of 20 clients attack; assert on the near-IID split, report on the other."""
    rounds = 6 if short else ROUNDS
    return [row for partition in ((NEAR,) if short else (NEAR, FAR)) for row in compared(partition, rounds, short)]


def compared(partition: str, rounds: int = ROUNDS, short: bool = False) -> list[Row]:
    """Return a row for each method, model and attack on a partition."""
    rows = []
    rules = ("median", "multi-krum") if short else RULES
    for method in ("fedavg", "pfedsd"):
        for attack, strength in (("sign-flip", 0.0), ("gaussian", 0.0)) if short else ATTACKS:
            clean = outcome(method, partition, "none", 0.0, "mean", rounds, 1)
            plain = outcome(method, partition, attack, strength, "mean", rounds, 1)
            ruled = {rule: outcome(method, partition, attack, strength, rule, rounds, 1) for rule in rules}
            for model in ("generic", "personal") if method == "pfedsd" else ("generic",):
                best = max(ruled, key=lambda rule: np.nan_to_num(getattr(ruled[rule], model)))
                a, b, c = (getattr(one, model) for one in (clean, plain, ruled[best]))
                if partition == NEAR:
                    assert c >= KEEPS * a, f"{attack} on {method}, {model}: {best} keeps {c:.3f} of {a:.3f}"
                name = f"{attack}{f' ({strength:g})' if strength else ''}"
                said = f"best rule {best}: {100 * c / a:.0f} % of clean" + ("" if partition == NEAR else " (reported)")
                figure = f"clean {100 * a:.1f} %, mean {100 * b:.1f} %, {best} {100 * c:.1f} %"
                rows.append((f"20 % attackers, {name}, {method} {model}, {partition}", said, figure))
    return rows


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {"oracles": oracles, "attackers": attackers}


# ---- the tables of docs/robust.md ---------------------------------------------------------------------------------------
def table(method: str, model: str, partition: str, rounds: int, seeds: int) -> list[str]:
    """Return accuracies by attack and rule, as Markdown."""
    rules = ("mean", *RULES)
    lines = [f"| {' | '.join(['attack', *rules])} |", "|---" * (len(rules) + 1) + "|"]
    for attack, strength in (("none", 0.0), *ATTACKS):
        ends = [outcome(method, partition, attack, strength, rule, rounds, seeds) for rule in rules]
        name = f"{attack}{f', strength {strength:g}' if strength else ''}"
        lines.append(_line(name, [getattr(end, model) for end in ends]))
        if attack == "backdoor":
            rates = [end.backdoor_personal if model == "personal" else end.backdoor for end in ends]
            lines.append(_line("its success", rates))
    return lines


def _line(name: str, values: Sequence[float]) -> str:
    return f"| {' | '.join([name, *(f'{100 * value:.1f}' if value == value else 'stopped' for value in values)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", nargs="+", default=[NEAR, FAR])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    models = (("fedavg", "generic"), ("pfedsd", "generic"), ("pfedsd", "personal"))
    for partition, (method, model) in itertools.product(args.partitions, models):
        print(f"\n{method}, {model}, {partition}, {ROUNDS} rounds, mean of {args.seeds} seeds\n")
        print("\n".join(table(method, model, partition, ROUNDS, args.seeds)), flush=True)
    for row in (row for partition in args.partitions for row in compared(partition)):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
