"""The transport `cluster`: the processes of torch.distributed, each of which holds a share of the clients. They trust each other.

Rank 0 has the coordinator and its own share; `Ranks` sends the others their orders and receives their replies. What several
ranks are sent is broadcast, the rest goes from process to process; every tensor travels once a rank (see `parcel`).

    header     on a group over Gloo, whatever carries the tensors: the length, then JSON
    tensors    one row of bytes on the device of the backend (Gloo and MPI: CPU, NCCL: GPU)

A rank that dies closes its connections: the next read or write fails at once and names it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import CannotStack, InputError, TrainingError, first_line
from . import parcel
from .messages import Answering, Order, Reply
from .parcel import Header, Parcel

BackendName: TypeAlias = Literal["auto", "gloo", "nccl", "mpi"]
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
WAIT = datetime.timedelta(days=30)  # a rank may train for long; one that dies is noticed by its connection
LEAVE = 10.0  # seconds in which a rank ends
LENGTH, TEXT, ROW = 1, 2, 3  # tags
ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (TrainingError, CannotStack)}


class Group:
    """This process among those of torch.distributed."""

    def __init__(self, backend: BackendName = "auto", device: torch.device | None = None) -> None:
        """Join the processes that torchrun (or `srun` with its variables) has started."""
        if not dist.is_available():
            raise InputError("transport", "cluster", "local: this torch was built without torch.distributed")
        if not dist.is_initialized():
            missing = [name for name in NEEDED if name not in os.environ]
            if backend != "mpi" and missing:
                right = f"used under torchrun ({missing[0]} is not set): torchrun --nproc-per-node 2 -m fedstill run …"
                raise InputError("transport", "cluster", right)
            if backend == "mpi" and not dist.is_mpi_available():
                raise InputError("backend", backend, "gloo or nccl: this torch was built without MPI")
        on_gpu = backend == "nccl" or (backend == "auto" and device is not None and device.type == "cuda")
        if on_gpu and not torch.cuda.is_available():
            raise InputError("backend", backend, "gloo: this process has no GPU")
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if not dist.is_initialized():
            dist.init_process_group(f"{'nccl' if on_gpu else 'gloo' if backend == 'auto' else backend}", timeout=WAIT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        carrier = dist.get_backend()
        self.headers = dist.group.WORLD if carrier != "nccl" else dist.new_group(backend="gloo", timeout=WAIT)
        self.device = torch.device("cuda", torch.cuda.current_device()) if carrier == "nccl" else torch.device("cpu")

    def leave(self) -> None:
        """Close all connections."""
        dist.destroy_process_group()

    def share(self, clients: int) -> frozenset[int]:
        """Return the clients that this rank holds."""
        return frozenset(range(self.rank, clients, self.size))

    # ---- headers -----------------------------------------------------------------------------------------------------
    def write(self, header: Header, to: int) -> None:
        """Send a header."""
        text = parcel.encode(header)
        with _named(to):
            dist.send(torch.tensor([len(text)]), to, self.headers, LENGTH)
            dist.send(text, to, self.headers, TEXT)

    def read(self, source: int) -> Header:
        """Wait for a header."""
        length = torch.zeros(1, dtype=torch.int64)
        with _named(source):
            dist.recv(length, source, self.headers, LENGTH)
            text = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(text, source, self.headers, TEXT)
        return parcel.decode(text)

    # ---- tensors -----------------------------------------------------------------------------------------------------
    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors whose layout the receiver knows."""
        if tensors:
            with _named(to):
                dist.send(parcel.join(tensors, self.device), to, tag=ROW)

    def receive(self, layout: Sequence[Sequence[Any]], source: int, device: torch.device) -> list[Tensor]:
        """Return the tensors that another rank sends."""
        if not layout:
            return []
        row = torch.empty(parcel.size(layout), dtype=torch.uint8, device=self.device)
        with _named(source):
            dist.recv(row, source, tag=ROW)
        return parcel.part(row, layout, device)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors from rank 0 to all others."""
        if tensors:
            with _named(None):
                dist.broadcast(parcel.join(tensors, self.device), 0)

    def broadcasted(self, layout: Sequence[Sequence[Any]], device: torch.device) -> list[Tensor]:
        """Return the tensors that rank 0 sends to all."""
        if not layout:
            return []
        row = torch.empty(parcel.size(layout), dtype=torch.uint8, device=self.device)
        with _named(0):
            dist.broadcast(row, 0)
        return parcel.part(row, layout, device)


class RankLost(ConnectionError):
    """A process of the cluster has died, or its connection has."""


class _named:
    """Within, an error of the connection names the rank."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            who = "a rank of the cluster" if self.rank is None else f"rank {self.rank} of the cluster"
            raise RankLost(f"{who} does not answer any more ({_brief(error)})") from error


def _brief(error: RuntimeError) -> str:
    """Return what went wrong with a connection, without where in the library."""
    text = first_line(error)
    return "its connection was closed" if "closed by peer" in text or "reset by peer" in text else text[:120]


class Ranks:
    """The cluster as rank 0 sees it: its own edge, and the other ranks by what `open` had them set up."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.seconds = 0.0
        self.out: Counter[int] = Counter()  # answers that each rank owes
        self._headers: queue.SimpleQueue[tuple[int, Header | Exception]] = queue.SimpleQueue()
        self._edge: Answering | None = None
        self._own: list[Order] = []
        self._replies: list[Reply] = []  # that have arrived
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True, name=f"rank {rank}")
            for rank in range(1, group.size)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, edge: Answering, about: Mapping[str, Any], device: torch.device) -> None:
        """Have the other ranks set up the clients of the runs that `about` describes, in place of those before."""
        self._drain()
        self._edge, self._own, self._replies, self._device = edge, [], [], device
        for rank in range(1, self.group.size):
            self._write(rank, {"do": "open", "about": dict(about)})
        self._drain(strict=True)

    def close(self) -> None:
        """Have the other ranks end, and wait for them; those that are lost are left alone."""
        with contextlib.suppress(RankLost):
            self._drain()
        for rank in range(1, self.group.size):
            with contextlib.suppress(RankLost):
                self.group.write({"do": "end"}, rank)
        for thread in self._threads:
            thread.join(LEAVE)

    # ---- as a transport ----------------------------------------------------------------------------------------------
    def dispatch(self, orders: Sequence[Order]) -> None:
        """Send each rank the orders to its clients; those to this rank's wait until somebody asks for replies."""
        while any(self.out[self._rank(order)] for order in orders):  # one that sends an answer cannot receive
            self._replies += self._next(None)
        began = time.perf_counter()
        self._own += [order for order in orders if self._rank(order) == 0]
        box, ranks = Parcel(), []
        for order in orders:
            if self._rank(order):
                box.add(order)
                ranks.append(self._rank(order))
        users: dict[int, set[int]] = {}  # the ranks that a tensor goes to, by its number
        for number, rank in enumerate(ranks):
            for place in box.places(number):
                users.setdefault(place, set()).add(rank)
        common = [place for place, at in users.items() if len(at) > 1]
        asked = range(1, self.group.size) if common else sorted(set(ranks))
        shared = parcel.layout([box.tensors[place] for place in common])
        own: dict[int, list[int]] = {r: [p for p, at in users.items() if at == {r}] for r in asked}
        for rank in asked:
            tensors = [box.tensors[place] for place in own[rank]]
            messages = [message for message, at in zip(box.messages, ranks, strict=True) if at == rank]
            header = {"do": "work", "messages": messages, "common": common, "shared": shared}
            self._write(rank, {**header, "own": own[rank], "layout": parcel.layout(tensors)}, answer=bool(messages))
        try:
            self.group.broadcast([box.tensors[place] for place in common])
        except RankLost:
            raise self._lost() from None
        for rank in asked:
            self.group.send([box.tensors[place] for place in own[rank]], rank)
        self.seconds += time.perf_counter() - began

    def replies(self, timeout: float | None = None) -> Iterator[Reply]:
        """Yield the replies: of this rank's clients, then of the others as they arrive."""
        end = None if timeout is None else time.monotonic() + timeout
        assert self._edge is not None
        orders, self._own = self._own, []
        for reply in self._edge.handle(orders):
            if end is not None and time.monotonic() > end:
                return
            yield reply
        while self._replies or sum(self.out.values()):
            if not self._replies:
                self._replies += self._next(None if end is None else end - time.monotonic())
                if not self._replies and end is not None and time.monotonic() > end:
                    return
            while self._replies:
                yield self._replies.pop(0)

    def alive(self) -> Sequence[int]:
        """Return every client."""
        assert self._edge is not None
        return range(self._edge.clients)

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _rank(self, order: Order) -> int:
        return order.client % self.group.size

    def _write(self, rank: int, header: Header, answer: bool = True) -> None:
        self.group.write({**header, "answer": answer}, rank)
        self.out[rank] += answer

    def _listen(self, rank: int) -> None:
        """Put the headers that a rank sends into the queue, until it sends its last one or dies."""
        while True:
            try:
                header = self.group.read(rank)
            except Exception as error:
                self._headers.put((rank, error))
                return
            self._headers.put((rank, header))
            if header.get("last"):
                return

    def _lost(self, rank: int | None = None, why: str = "") -> RankLost:
        """Return the error that names the ranks whose connections are closed, those besides that are noticed soon."""
        lost = {} if rank is None else {rank: why}
        with contextlib.suppress(queue.Empty):
            while len(lost) < self.group.size - 1:
                other, header = self._headers.get(timeout=0.3 if lost else 2.0)
                if isinstance(header, Exception):
                    lost[other] = str(header)
        if len(lost) == 1:
            return RankLost(next(iter(lost.values())))
        names = " and ".join(map(str, sorted(lost)))
        return RankLost(
            f"ranks {names} of the cluster do not answer any more" if lost else "a rank of the cluster is lost"
        )

    def _next(self, timeout: float | None) -> list[Reply]:
        """Return the replies in the answer that arrives first; none after `timeout` seconds."""
        try:
            rank, header = self._headers.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return []
        if isinstance(header, RankLost):
            raise self._lost(rank, str(header)) from None
        if isinstance(header, Exception):
            raise header
        self.out[rank] -= 1
        began = time.perf_counter()
        tensors = self.group.receive(header["layout"], rank, self._device)
        self.seconds += time.perf_counter() - began
        if header["error"]:
            name, text = header["error"]
            raise ERRORS.get(name, TrainingError)(text if name in ERRORS else f"rank {rank}: {name}: {text}")
        return parcel.unpack(header["messages"], dict(enumerate(tensors)), Reply)

    def _drain(self, strict: bool = False) -> None:
        """Take in every answer that is still out; with `strict` raise what went wrong at a rank, after all have answered."""
        failed: Exception | None = None
        while sum(self.out.values()):
            try:
                self._next(None)
            except RankLost:
                raise
            except Exception as error:
                failed = error
        if strict and failed is not None:
            raise failed


def serve(group: Group, opened: Callable[[Mapping[str, Any]], tuple[Answering, torch.device]]) -> None:
    """Answer rank 0 until it says that all is over. `opened` sets up this rank's clients from what `open` was told.

    Rank 0 decides what an interrupt or a request to end means; this rank ends with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    edge: Answering | None = None
    device = torch.device("cpu")
    while True:
        header = group.read(0)
        if header["do"] == "end":
            group.write({"last": True}, 0)
            return
        box, error = Parcel(), None
        tensors: dict[int, Tensor] = {}
        if header["do"] == "work":
            tensors |= zip(header["common"], group.broadcasted(header["shared"], device), strict=True)
            tensors |= zip(header["own"], group.receive(header["layout"], 0, device), strict=True)
        if not header["answer"]:
            continue
        try:
            if header["do"] == "open":
                edge = None  # frees what the runs before had
                edge, device = opened(header["about"])
            else:
                assert edge is not None
                for reply in edge.handle(parcel.unpack(header["messages"], tensors, Order)):
                    box.add(reply)
        except Exception as failure:
            box, error = Parcel(), [type(failure).__name__, first_line(failure)]
        group.write({"messages": box.messages, "layout": parcel.layout(box.tensors), "error": error}, 0)
        group.send(box.tensors, 0)
