"""Copies between a GPU and page-locked memory, on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .tiers import Event


class Gpu:
    """A CUDA device with a stream for copies to it and one for copies from it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._up: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._down: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        """Return the bytes that are free on the device."""
        return torch.cuda.mem_get_info(self.device)[0]

    def allocate_pinned(self, count: int, size: int) -> Tensor:
        """Return page-locked memory of `count` rows of `size` bytes."""
        return torch.empty((count, size), dtype=torch.uint8, pin_memory=True)

    def record(self) -> Event:
        """Return a mark on the caller's stream."""
        event: Event = self._current().record_event()
        return event

    def wait(self, event: Event | None, buffer: Tensor | None = None) -> None:
        """Have the caller's stream wait for an event, after which it uses the buffer."""
        if event is not None:
            stream = self._current()
            stream.wait_event(event)
            if buffer is not None:
                buffer.record_stream(stream)

    def download(self, source: Tensor, buffer: Tensor, after: Iterable[Event]) -> Event:
        """Begin to copy bytes from the device to a page-locked buffer, once the events have happened."""
        for event in after:
            self._down.wait_event(event)
        with torch.cuda.stream(self._down):
            buffer.copy_(source, non_blocking=True)
            done: Event = self._down.record_event()
        source.record_stream(self._down)
        return done

    def upload(self, buffer: Tensor, filled: Event | None, ahead: bool = False) -> tuple[Tensor, Event]:
        """Begin to copy a page-locked buffer to the device: on the caller's stream, or beside it where `ahead`."""
        stream: Any = self._up if ahead else self._current()
        with torch.cuda.stream(stream):  # also allocates there, so that the copy need not wait for what computes now
            if filled is not None:
                stream.wait_event(filled)
            target = torch.empty(len(buffer), dtype=torch.uint8, device=self.device)
            target.copy_(buffer, non_blocking=True)
            return target, stream.record_event()

    def _current(self) -> Any:
        return torch.cuda.current_stream(self.device)
