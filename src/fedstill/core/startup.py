"""Ctrl-C or too little memory while the command `fedstill` is imported, which takes seconds: it ends in one line.

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
from types import FrameType, TracebackType

SHORT = ("Cannot allocate memory", "failed to map segment")  # of the system, of its loader


def is_command() -> bool:
    """Return whether this process is the command: `fedstill`, or `python -m fedstill`."""
    words = sys.orig_argv
    return Path(next(iter(sys.argv), "")).stem == "fedstill" or ("-m", "fedstill") in itertools.pairwise(words)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"fedstill: stopped\n")
    os._exit(128 + number)


def _said(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Say in a line that memory is short; show everything else as Python does."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in SHORT):
        print("fedstill: the memory is too small for PyTorch itself", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def begin() -> None:
    """Handle interrupts and a lack of memory while the command is imported."""
    if is_command() and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _said
    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_command() and free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """Put back what was before."""
    if sys.excepthook is _said:
        sys.excepthook = sys.__excepthook__
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


begin()
