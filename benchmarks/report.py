"""How long a large report takes to be written and to be opened, and what it weighs: 100 clients × 26 methods × 3 seeds.

The folders hold records that are drawn, not trained: this measures size and time, and says nothing about any method.

    python benchmarks/report.py                       # 100 rounds
    python benchmarks/report.py --rounds 500 --keep DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedstill.core import files
from fedstill.methods import METHODS
from fedstill.report.html import page
from fedstill.run.answers import Answers
from fedstill.run.experiment import Experiment
from fedstill.server.records import Scores, summary


def fabricate(out: Path, clients: int, methods: int, seeds: int, rounds: int) -> None:
    """Write folders as runs leave them, with drawn numbers."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 200, clients)
    for number, method in enumerate([*METHODS.values()][:methods]):
        for seed in range(seeds):
            folder = out / method.id / f"seed-{seed}"
            folder.mkdir(parents=True)
            experiment = Experiment(method=method(), rounds=rounds, clients=clients, seed=seed)
            (folder / "experiment.toml").write_text(experiment.to_toml())
            record = {"kind": "dirichlet", "parameter": 0.1, "hash": f"{seed:064x}", "contents": f"crc32:{seed:08x}"}
            (folder / "partition.json").write_bytes(files.seal(record))
            ease = rng.normal(0.8 + 0.004 * number, 0.08, clients)
            lines = []
            for t in range(1, rounds + 1):
                rate = np.clip(ease - 0.5 / t + rng.normal(0, 0.01, clients), 0.02, 0.99)
                hits = rng.binomial(sizes, rate).tolist()
                scores = summary(Scores([*range(clients)], sizes.tolist(), {"personal": hits, "generic": hits}))
                about = {
                    "participants": [0],
                    "missing": [],
                    "loss": 1.0,
                    "steps": 10,
                    "bytes_down": 4e4,
                    "bytes_up": 4e4,
                }
                lines.append({"round": t, **about, "bytes_total": 8e6, **scores, "seconds": 0.5})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            last = lines[-1]["personal_clients"]
            right = {k: np.arange(n) < round(last[str(k)] * n) for k, n in enumerate(sizes.tolist())}
            counts = {k: rng.integers(0, 40, 10).tolist() for k in right}
            Answers(rounds, right, counts).write(folder)


def opened(file: Path) -> float:
    """Return the milliseconds from the start of loading until the page is drawn, as the browser measures them; best of three."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.chromium import chromium, executable

    path = executable()
    if path is None:
        raise SystemExit("there is no Chromium to open it with")
    drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
    times = []
    with chromium(path) as page:
        for _ in range(3):
            page.open(f"file://{file}", 1440)
            times.append(float(page.run(drawn)))
    return min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 100), ("methods", 26), ("seeds", 3), ("rounds", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="folder for the fabricated results and the page")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = flags.keep or Path(temporary) / "large"
        fabricate(out, flags.clients, flags.methods, flags.seeds, flags.rounds)
        began = time.perf_counter()
        file = page.write([out])
        written = time.perf_counter() - began
        size = file.stat().st_size
        milliseconds = opened(file)
    print(f"{flags.clients} clients × {flags.methods} methods × {flags.seeds} seeds, {flags.rounds} rounds")
    print(f"written in {written:.1f} s, {size / 1e6:.2f} MB, opened and drawn in {milliseconds / 1e3:.2f} s")
    assert size < 5e6, "the report weighs 5 MB or more"
    assert milliseconds < 2000, "the report takes 2 s or more to open"


if __name__ == "__main__":
    main()
