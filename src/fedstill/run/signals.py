"""Ctrl-C and SIGTERM: the round is finished, a checkpoint is saved, and the run stops; a second signal stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.errors import Paused, Stopped

if TYPE_CHECKING:  # the command handles signals before it imports what takes seconds
    from ..server.coordinator import Coordinator, Record

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

KINDS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
NOTE = b"fedstill: stops after this round, with a checkpoint; a second signal stops at once\n"


@dataclass
class Stop:
    """Whether runs should stop, and after which round: those that go side by side stop after the same one."""

    signal: int = 0  # the signal that asked for it; 0: none did
    after: int = 0  # the round; 0: not decided
    newest: int = 0  # the newest round that is over in any of the runs

    def due(self, round: int) -> bool:
        """Return whether a run stops after this round, which is over."""
        if self.signal and not self.after and round > self.newest:
            self.after = round
        self.newest = max(self.newest, round)
        return 0 < self.after <= round

    def check(self) -> None:
        """Raise `Stopped` where a run was asked to stop."""
        if self.signal:
            raise Stopped(f"stopped after round {self.after or self.newest}", self.signal)


class StopCallback:
    """Ends a run after the round in which it is asked to stop. It comes after all others, so that they see the round."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_start(self, coordinator: Coordinator) -> None:
        """Do nothing."""

    def on_round(self, coordinator: Coordinator, record: Record) -> None:
        """Stop where that is due."""
        if 0 < self.stop.after <= record["round"]:  # decided before the checkpoint, not since
            raise Paused

    def on_end(self, coordinator: Coordinator) -> None:
        """Do nothing."""


@contextlib.contextmanager
def listening(active: bool) -> Iterator[Stop]:
    """Within, let the first signal ask for a stop, and the second raise `Stopped`; at the end raise it for the first.

    Nothing changes where nothing could be saved (not `active`), beside the main thread, and for signals that are ignored
    or that the program handles itself.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.signal:
            raise Stopped("stopped in the middle of a round", number)
        stop.signal = number
        with contextlib.suppress(OSError):  # printing is not safe here
            os.write(2, NOTE)

    with _handled(handle, KINDS if active else ()):
        yield stop
    stop.check()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within, let SIGTERM and a closed terminal raise `Stopped`, as Ctrl-C raises KeyboardInterrupt."""
    with _handled(_end, [kind for kind in KINDS if kind != signal.SIGINT]):
        yield


def _end(number: int, frame: FrameType | None) -> None:
    raise Stopped("stopped", number)


@contextlib.contextmanager
def _handled(handler: Handler, kinds: tuple[signal.Signals, ...] | list[signal.Signals]) -> Iterator[None]:
    """Within, handle signals that nobody else does."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        free = (signal.SIG_DFL, signal.default_int_handler, _end)
        before = {kind: signal.getsignal(kind) for kind in kinds if signal.getsignal(kind) in free}
    try:
        for kind in before:
            signal.signal(kind, handler)
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, old)
