"""A run beside other work: `fedstill run pfedsd --rounds 10` on a quiet machine and beside two busy loops, alternating.

    python benchmarks/load.py [--repeats 3] [--loops 2]

Prints the seconds of each and the ratio of the medians; ends with status 1 where it is above 3.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

MOST = 3.0
COMMAND = [sys.executable, "-m", "fedstill", "run", "pfedsd", "--rounds", "10"]


def seconds(loops: int) -> float:
    """Return how long the command takes beside so many busy loops."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        began = time.perf_counter()
        subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2)
    args = parser.parse_args()
    pairs = [(seconds(0), seconds(args.loops)) for _ in range(args.repeats)]
    for quiet, loaded in pairs:
        print(f"quiet {quiet:5.1f} s   beside {args.loops} busy loops {loaded:5.1f} s")
    ratio = statistics.median(loaded for _, loaded in pairs) / statistics.median(quiet for quiet, _ in pairs)
    print(f"{ratio:.1f} times as long (at most {MOST:g})")
    return int(ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
