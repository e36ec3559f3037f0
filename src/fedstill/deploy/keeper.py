"""Keep a process at work: start it, start it again when it ends, end it when told to. Run as a script, so that it stays small.

    python keeper.py FOLDER COMMAND…

FOLDER/.lock is held as long as a keeper runs, and names its process. The process ends with its keeper, however that ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOCK, LOG, PROCESS = ".lock", "log.txt", "process"
REFUSED = 3  # the exit status of a process that would fail again
LOG_BYTES = 20 << 20  # of the log, at which it begins anew; the one before is kept
LONGEST = 10.0  # seconds between two starts at most


def holder(folder: Path) -> int:
    """Return the keeper that holds a folder; 0: none does."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 0
    except BlockingIOError:
        return int(os.pread(file, 20, 0).decode().strip() or 0)
    finally:
        os.close(file)


def hold(folder: Path) -> int:
    """Take the folder's lock; return the open file, -1 where another keeper has it."""
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return -1
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def with_parent() -> None:
    """Have the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def rotate(folder: Path) -> None:
    """Begin the log anew where it is long."""
    log = folder / LOG
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(folder / f"{LOG}.1")


def main(folder: Path, command: list[str]) -> int:
    """Keep the command at work until SIGTERM; return an exit status."""
    if hold(folder) < 0:
        print(f"fedstill: {folder} has a keeper already", flush=True)
        return 2
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: object) -> None:
        if child is not None and child.returncode is None:
            os.kill(child.pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    pause = 0.5
    while True:
        rotate(folder)
        began = time.monotonic()
        with open(folder / LOG, "ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=with_parent)
        (folder / PROCESS).write_text(f"{child.pid}\n")
        status = child.wait()
        if status == REFUSED:
            return status
        print(f"fedstill: the process has ended ({status}); it is started again", flush=True)
        pause = 0.5 if time.monotonic() - began > 30 else min(LONGEST, 2 * pause)
        time.sleep(pause)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
