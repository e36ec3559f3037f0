"""The lock on a folder of results, so that two processes never write into one.

The system drops the lock when its process ends, however it ends: no lock outlives a kill.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from ..core import files
from ..core.errors import InputError
from ..engine.stage import say

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # the file's name; it says which process is at work
MARKS = ("experiment.toml", "job.json")  # written last: a folder that holds one holds a run, or several
CHECKPOINTS = "checkpoints"
BEGINNING = ("partition.json", "data.json", "environment.json", CHECKPOINTS)  # what is in it before
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """Holds the lock on a folder, which is made, from construction until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._file = -1
        files.make_folder(folder)
        while self._file < 0:
            self._file = self._acquire()
        _held.add(self)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the note
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _acquire(self) -> int:
        """Return the open and locked file; -1 where another process has just removed it."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.EISDIR):
                raise
            right = f"a folder that can be written ({error.strerror})"
            raise InputError("folder", str(self.folder), right) from None
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(file)
            right = f"a folder in which nobody is at work: {holder} is; wait for its end, or stop it"
            raise InputError("folder", str(self.folder), right) from None
        except OSError as error:
            say(f"{self.folder} cannot be locked ({error.strerror}): see that no other process works in it")
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(file)):
                return file
        os.close(file)
        return -1

    def release(self) -> None:
        """Let go of the folder, and remove the lock's file while nobody else can hold it."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._file)):
                    self.path.unlink()
                if fcntl is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough where a forked process has it open
            self._drop()

    def _drop(self) -> None:
        """Close the file without touching the folder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self._drop()


def _forget() -> None:
    """In a forked process, close the locks of the parent: it must not hold them after the parent's end."""
    for lock in list(_held):
        lock._drop()


def check_free(folder: Path, resume: bool = False) -> None:
    """Refuse a folder that holds something, unless that is what a run leaves that was stopped before it had begun."""
    if not is_free(folder):
        right = "a folder that is new or empty ('fedstill resume FOLDER' continues a run)"
        if resume:
            right = f"one with its {MARKS[0]}, which is gone; delete it to have it run again from round 1"
        raise InputError("folder" if resume else "out", str(folder), right)


def is_free(folder: Path) -> bool:
    """Return whether a folder holds nothing but what such a run leaves."""
    if not folder.exists():
        return True
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {""}
    others = {name.removesuffix(files.PART) for name in names} - {LOCK, *BEGINNING, *MARKS}
    results = not names.isdisjoint(MARKS) or any(folder.glob(f"{CHECKPOINTS}/*"))
    return not names or (LOCK in names and not others and not results)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
