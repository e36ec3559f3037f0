"""Compile Triton kernels side by side, in processes of their own, into the cache on disk from which others load them.

    python -m fedstill.nn.kernels.warm < jobs.json        # what `compile_all` runs: a list of jobs

Triton compiles one kernel after another in a process, half a second each; measuring a shape tries about ten.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PER_PROCESS = 3  # jobs for which a process is worth the seconds that it needs to start
MOST = 12  # processes at most
PATIENCE = 120  # seconds after which what is left is compiled when it is needed


@dataclass(frozen=True)
class Job:
    """A kernel to compile: its name, the numbers' dtype, the convolution's sizes, and the tile."""

    what: str
    dtype: str
    sizes: dict[str, int]
    tile: tuple[int, ...]
    exact: bool
    biased: bool = False


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile kernels for the present GPU; one that cannot be compiled, or a process that fails, is left to who needs it."""
    count = min(MOST, os.cpu_count() or 1, len(jobs) // PER_PROCESS)
    if count < 2:
        return
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fedstill.nn.kernels.warm"]
    processes = []
    for first in range(count):
        share = json.dumps([asdict(job) for job in jobs[first::count]])
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(share)
        processes.append(process)
    try:
        for process in processes:
            process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Compile the jobs that stdin lists."""
    from . import triton as kernels  # needs Triton, which is not everywhere

    given: list[dict[str, Any]] = json.load(sys.stdin)
    for job in (Job(**values) for values in given):
        try:
            kernels.warm(job.what, getattr(torch, job.dtype), job.sizes, tuple(job.tile), job.exact, job.biased)
        except Exception as error:  # a tile that the compiler refuses is no candidate
            print(f"{job}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
