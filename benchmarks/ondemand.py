"""Images in folders, read from disk when they are needed, beside the same images in memory: memory, bits and speed.

    python benchmarks/ondemand.py [--images N] [--size S] [--model M] [--engine E] [--rounds N] [--clients N] [--check]

Makes small JPEG images (the shipped digits, resized, coloured, with noise) in class folders of a temporary folder, and trains
FedAvg on them twice, each in a process of its own, whose rounds alternate: timings of a shared machine wander, so the ratio is
the median of the ratios round by round. Every client takes part in every round, for one epoch. A third process trains the same
model on a few images: what its memory peaks at is what libraries and the model need. With `--check` the status is 1 unless the
bits agree, memory is at most 1 GiB above that, and the ratio of speeds after the first round is at least 0.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MOST, LEAST = 1 << 30, 0.8
FEW = 10  # images a client of the third process


def make_images(folder: Path, images: int, size: int, seed: int = 0) -> None:
    """Write JPEG images of digits into a folder for each class."""
    from fedstill.data.files import digits

    source, rng = digits(), np.random.default_rng(seed)
    for c in range(10):
        (folder / str(c)).mkdir(parents=True)
    grey = [np.asarray(Image.fromarray((x[0] * 15).astype(np.uint8)).resize((size, size)), np.int16) for x in source.x]
    for i in range(images):
        k = int(rng.integers(len(grey)))
        colour, noise = rng.uniform(0.3, 1.0, 3), rng.integers(-40, 40, (size, size, 3), dtype=np.int16)
        pixels = (grey[k][:, :, None] * colour + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / str(source.y[k]) / f"{i:06d}.jpg", quality=90)


def peak() -> int:
    """Return the most bytes that this process has held: its own, and pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class Paced:
    """Waits for a word before each round, and says how long the round took."""

    def on_start(self, coordinator: Any) -> None:
        self._say({"ready": peak()})
        self._wait()

    def on_round(self, coordinator: Any, record: dict[str, Any]) -> None:
        self._say({"seconds": time.perf_counter() - self.began, "loss": record["loss"]})
        self._wait()

    def on_end(self, coordinator: Any) -> None:
        pass

    def _say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    def _wait(self) -> None:
        sys.stdin.readline()
        self.began = time.perf_counter()


def train(settings: dict[str, Any]) -> None:
    """Be one of the processes: train, and print the digest of the final weights and the peak of memory."""
    import fedstill as fs

    began = time.perf_counter()
    run = fs.run(fs.Experiment(method=fs.FedAvg(), **settings), callbacks=[Paced()])
    digest = hashlib.sha256()
    for name, value in sorted(run.generic_model().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    scores = [record.get("generic") for record in run.history]
    print(
        json.dumps({"peak": peak(), "digest": digest.hexdigest(), "scores": scores, "all": time.perf_counter() - began})
    )


class Process:
    """A process that trains with these settings, round by round."""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--train", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self, go: bool = True) -> dict[str, Any]:
        """Let it go on, and return what it says next."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if go:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self.process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]


def compare(images: int, size: int, model: str, engine: str, rounds: int, clients: int, workers: int) -> dict[str, Any]:
    """Run the three processes; return what they took."""
    with tempfile.TemporaryDirectory(prefix="fedstill-ondemand-") as name:
        os.environ["FEDSTILL_CACHE"] = str(Path(name) / "decoded")
        make_images(Path(name) / "few", FEW * clients, size, 1)
        began = time.perf_counter()
        make_images(Path(name) / "all", images, size)
        print(f"{images:,} JPEG images of {size}×{size} made in {time.perf_counter() - began:.0f} s", flush=True)
        common = dict(
            model=model, engine=engine, rounds=rounds, clients=clients, partition="iid", epochs=1, batch_size=50, lr=0.01,
            workers=workers,
        )  # fmt: skip
        few = Process(data=str(Path(name) / "few"), **common)
        for step in range(rounds + 1):
            few.next(go=step > 0)
        base = few.next()
        ways = {way: Process(data=str(Path(name) / "all"), memory_map=way, **common) for way in ("on", "off")}
        started = {way: process.next(go=False) for way, process in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, process in ways.items():
                times[way].append(process.next()["seconds"])
        ended = {way: process.next() for way, process in ways.items()}
    later = [off / on for on, off in zip(times["on"][1:], times["off"][1:], strict=True)]
    return {
        "base": base["peak"],
        "above": {way: ended[way]["peak"] - base["peak"] for way in ways},
        "before": {way: started[way]["ready"] - base["peak"] for way in ways},
        "same": ended["on"]["digest"] == ended["off"]["digest"] and ended["on"]["scores"] == ended["off"]["scores"],
        "digest": ended["on"]["digest"],
        "scores": ended["on"]["scores"],
        "first": {way: times[way][0] for way in ways},
        "later": {way: statistics.median(times[way][1:]) for way in ways},
        "ratio": statistics.median(later),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--engine", default="one")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    check, settings = args.pop("check"), args.pop("train")
    if settings:
        train(json.loads(settings))
        return 0
    found = compare(**args)
    mib = 1 << 20
    print(f"{args['model']}, engine {args['engine']}, {args['clients']} clients, {args['rounds']} rounds of one epoch")
    print(f"a few images        peak {found['base'] / mib:6,.0f} MiB")
    for way, name in (("on", "on disk"), ("off", "in memory")):
        above, before = (found[key][way] / mib for key in ("above", "before"))
        first, later = found["first"][way], found["later"][way]
        print(f"{name:<10} peak above that {above:6,.0f} MiB (before the first round {before:6,.0f})", end="   ")
        print(f"first round {first:6.1f} s, later {later:6.1f} s")
    same = "the same bits" if found["same"] else "OTHER BITS"
    print(f"{same} (weights {found['digest'][:12]}, generic {found['scores'][-1]:.4f})", end="; ")
    print(f"speed on disk / in memory after the first round {found['ratio']:.2f}")
    good = found["same"] and found["above"]["on"] <= MOST and found["ratio"] >= LEAST
    return int(check and not good)


if __name__ == "__main__":
    sys.exit(main())
