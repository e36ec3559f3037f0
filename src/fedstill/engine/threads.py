"""How many threads torch works with.

OpenMP's threads wait for one another in a busy loop. Where other processes hold the cores, a thread that is not running makes all
others wait for it, in every operation (see `is_small`). So small work is done on one thread, and large
work on as many as there are free cores when the trainer is made: never more while it trains, since a stack's results depend on
the number of threads in the last bits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..core.errors import InputError
from .bench import SMALL, Bench

MOST = 4096  # threads that a run may ask for
LOOKS, PAUSE = 5, 0.002  # looks for other load, and seconds between: a process that runs for a moment is no load


def is_small(bench: Bench, clients: int) -> bool:
    """Return whether a step of so many clients is so small that a second thread gains little.

    Measured on two quiet cores, stacked perceptrons: two threads are 1.1, 1.2, 1.3 and 1.5 times as fast as one where parameters
    × batch size × clients are 3, 6, 15 and 44 millions. Beside five other busy processes they were 2 to 60 times slower than one.
    """
    return not bench.net.has_convolution and bench.net.size * bench.plan.batch_size * clients < SMALL


def running() -> int:
    """Return how many threads of the whole machine are running or ready to run, this one included."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def available(
    count: int | None = None,
    chosen: bool | None = None,
    cores: int | None = None,
    machine: int | None = None,
    look: Callable[[], int] = running,
) -> int:
    """Return the number of threads that torch is set to, but at most one for each core that nobody else uses.

    A number that somebody has `chosen`, by an environment variable or `torch.set_num_threads`, is left as it is. `cores` is how
    many this process may use, `machine` how many there are.
    """
    count, machine = count or torch.get_num_threads(), machine or os.cpu_count() or 1
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    if chosen is None:  # torch's own choice is one a core, or one for two of them where a core counts twice
        usual = count in (cores, machine, cores // 2, machine // 2)
        chosen = not usual or "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
    count = min(count, _thread_limit() or count)
    if count == 1 or chosen:
        return count
    others = machine
    try:
        for _ in range(LOOKS):
            others = min(others, look() - 1)
            if others <= 0:
                return count
            time.sleep(PAUSE)
    except (OSError, ValueError, IndexError):  # not Linux
        return count
    return max(1, min(count, machine - others))


def _thread_limit() -> int:
    """Return the limit that OpenMP was given, of which torch knows nothing; 0 for none."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    return int(limit) if limit.isascii() and limit.isdecimal() and len(limit) < 10 else 0


def check_obtainable(count: object) -> None:
    """Refuse a number of threads, that of a run that is to go on, where this process cannot have as many.

    OpenMP itself says nothing where a limit gives it fewer, and ends the process where the system gives it none.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise InputError(
            "threads", count, f"a whole number from 1 to {MOST}, as choices.json had it when the run began"
        )
    why = f"the run began with {count} threads, and the last bits of its results depend on their number"
    if 0 < _thread_limit() < count:
        raise InputError("OMP_THREAD_LIMIT", _thread_limit(), f"at least {count}: {why}")
    if count > 1 and os.environ.get("OMP_DYNAMIC", "").strip().lower() == "true":
        raise InputError("OMP_DYNAMIC", "true", f"false, so that OpenMP does not take fewer threads: {why}")
    if count > torch.get_num_threads():
        started = _started(count - 1)
        if started < count - 1:
            raise InputError(
                "threads", count, f"at most {started + 1}, so many as this system lets a process start; {why}"
            )


def _started(count: int) -> int:
    """Return how many of so many threads this process can start."""
    over = threading.Event()
    waiting = [threading.Thread(target=over.wait, daemon=True) for _ in range(count)]
    started = 0
    try:
        for thread in waiting:
            thread.start()
            started += 1
    except RuntimeError:  # no more
        pass
    finally:
        over.set()
        for thread in waiting[:started]:
            thread.join()
    return started
