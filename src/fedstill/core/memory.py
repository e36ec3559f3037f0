"""How much memory this process may still take, and the error for what would take more."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .errors import InputError, Shown

CGROUP = Path("/sys/fs/cgroup")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def available() -> int:
    """Return the bytes that this process may still take: of the machine, of its container, and of its own limit.

    The variable FEDSTILL_MEMORY (such as 500M or 64G) replaces them.
    """
    if text := os.environ.get("FEDSTILL_MEMORY", ""):
        return size_in("FEDSTILL_MEMORY", text)
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        size = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        most = int((CGROUP / "memory.max").read_text())
        size = min(size, max(0, most - _taken_by_container()))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            size = min(size, max(0, limit - mapped))
    return size


def size_in(field: str, text: str) -> int:
    """Return the bytes that a text such as 500M says.

    >>> size_in("FEDSTILL_MEMORY", "64G") == 64 << 30
    True
    """
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", text.strip().upper(), re.ASCII)
    if match is None:
        raise InputError(field, text, "a number of bytes such as 500M or 64G")
    return int(match[1]) * UNITS[match[2]]


def _taken_by_container() -> int:
    """Return the bytes that this process's container has taken, without files that it can drop."""
    try:
        taken = int((CGROUP / "memory.current").read_text())
        stats = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return taken - int(stats.get("inactive_file", 0)) - int(stats.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def require(field: str, where: str, size: int) -> None:
    """Refuse what would take more memory than there is, before anything is allocated.

    >>> require("data file", "x.npz", 1 << 60)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedstill.core.errors.InputError: data file = 'x.npz': should be ...
    """
    free = available()
    if size > free:
        right = f"small enough for the memory: it takes {in_words(size)}, and {in_words(free)} are free"
        raise InputError(field, Shown(repr(where)), f"{right} (FEDSTILL_MEMORY sets another limit)")


def in_words(size: int) -> str:
    """Return a number of bytes with its unit.

    >>> in_words(1_900_000), in_words(12)
    ('1.9 MB', '12 bytes')
    """
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:,.1f} {unit}"
    return f"{size} bytes"
