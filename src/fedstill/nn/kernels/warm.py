"""Compile Triton kernels side by side, in processes of their own, into the cache on disk from which others load them.

    python -m fedstill.nn.kernels.warm < jobs.json        # what `compile_all` runs: a GPU's architecture and a list of jobs

Triton compiles one kernel after another in a process, half a second each; measuring a shape tries about seven. The process that
imports torch and Triton can be begun early; it forks as many as there are cores when it is told what to compile. It uses no GPU.
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


_waiting: list[subprocess.Popen[str]] = []  # a process that has been begun and not yet told what to compile


def begin() -> None:
    """Begin a process that imports what compiling needs, where there is none; it ends with this process."""
    if not _waiting:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "fedstill.nn.kernels.warm"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        _waiting.append(process)


def compile_all(jobs: Sequence[Job], architecture: int) -> None:
    """Compile kernels for a GPU; one that cannot be compiled, or a process that fails, is left to who needs it."""
    if not jobs:
        return
    begin()
    process = _waiting.pop()
    try:
        given = {"architecture": architecture, "jobs": [asdict(job) for job in jobs]}
        process.communicate(json.dumps(given), timeout=PATIENCE)
    except (subprocess.TimeoutExpired, OSError):
        pass
    finally:
        process.kill()
        process.wait()


class Target:
    """Stands for Triton's driver of a GPU that is not used: it says what to compile for."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget  # Triton is not everywhere

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        """Return the architecture to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return a device's number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a stream's number."""
        return 0


def main() -> None:
    """Compile the jobs that stdin lists, divided among forks of this process."""
    import torch
    from triton.runtime.driver import driver

    from . import triton as kernels

    given: dict[str, Any] = json.load(sys.stdin)
    driver.set_active(Target(given["architecture"]))
    jobs = [Job(**values) for values in given["jobs"]]
    count = max(1, min(os.cpu_count() or 1, len(jobs)))
    children = []
    for first in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        for job in jobs[first::count]:
            try:
                kernels.warm(job.what, getattr(torch, job.dtype), job.sizes, tuple(job.tile), job.exact, job.biased)
            except Exception as error:  # a tile that the compiler refuses is no candidate
                print(f"{job}: {error}", file=sys.stderr)
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
