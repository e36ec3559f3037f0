"""What befalls a deployment: a network that is cut, a machine that is slow. For soak_deploy.py and the test suite."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedstill.deploy import demo, keeper
from fedstill.deploy.folders import Site
from fedstill.deploy.process import Settings


class Proxy:
    """Relays TCP connections to a port of this machine. While it is cut nothing passes, and nobody is told."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._passing = threading.Event()
        self._passing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Have nothing pass, in either direction; new connections are not answered."""
        self._passing.clear()

    def heal(self) -> None:
        """Have everything pass again."""
        self._passing.set()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        self._passing.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._passing.wait()
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def joined(party: demo.Party, name: str, port: int, data: str) -> None:
    """Add a site, which has another's data and reaches the hub by a port of its own, and start it."""
    asked = Site.request(party.site(name), name)
    kit = {**party.hub.approve(json.dumps(asked), name), "port": port}
    Site.at(party.site(name)).join(json.dumps(kit), name)
    Settings(str((party.folder / f"{data}.npz").absolute()), device="cpu").write(party.site(name))
    party.start(name)
    party.wait(name)


def process_of(folder: Path) -> int:
    """Return the process of a hub or site, which its keeper starts again when it ends."""
    return int((folder / keeper.PROCESS).read_text())


@contextlib.contextmanager
def slowed(process: int, times: int, slice: float = 0.004) -> Iterator[None]:
    """Within, let a process have one of so many slices of time."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            os.kill(process, signal.SIGSTOP)
            time.sleep(slice * (times - 1))
            os.kill(process, signal.SIGCONT)
            time.sleep(slice)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(process, signal.SIGCONT)
