"""Ctrl-C while the command `fedstill` is imported, which takes seconds: it ends in one line.

Importing this module does that for the command, and nothing for other programs; `done` puts Python's own handler back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def is_command() -> bool:
    """Return whether this process is the command: `fedstill`, or `python -m fedstill`."""
    words = sys.orig_argv
    return Path(next(iter(sys.argv), "")).stem == "fedstill" or ("-m", "fedstill") in itertools.pairwise(words)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"fedstill: stopped\n")
    os._exit(128 + number)


def begin() -> None:
    """Handle interrupts while the command is imported."""
    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_command() and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """Put back what was before."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


begin()
