"""A first look: a hub and some sites as processes on this machine, with certificates, then everything is removed."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import TrainingError
from ..data import Federation
from ..data.samples import read
from . import process
from .folders import Hub, Site, remove
from .process import Settings

START = 90.0  # seconds in which all processes must be up, on a busy machine
Say = Callable[[str], None]


@dataclass
class Party:
    """A hub and its sites on this machine."""

    folder: Path
    hub: Hub
    names: Sequence[str]
    keepers: dict[str, Any] = field(default_factory=dict)

    def site(self, name: str) -> Path:
        """Return a site's folder."""
        return self.folder / name

    def start(self, name: str = "hub") -> None:
        """Start the hub, or a site, in the background."""
        kind = "hub" if name == "hub" else "site"
        self.keepers[name] = process.launch(kind, self.folder / name, threads=1)

    def wait(self, *names: str) -> None:
        """Wait until these are up."""
        for name in names:
            kind = "hub" if name == "hub" else "site"
            if not process.wait_until_up(kind, self.folder / name, self.keepers[name], START):
                raise TrainingError(
                    f"{name} is not up after {START:.0f} s; its log ends: {process.tail(self.folder / name)}"
                )

    def stop(self, *names: str) -> None:
        """End processes; without names all of them."""
        for name in names or ("hub", *self.names):
            process.stop(self.folder / name)
            if name in self.keepers:
                self.keepers.pop(name).wait()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def found(folder: Path, federation: Federation, names: Sequence[str]) -> Party:
    """Make a hub and sites that it has approved, each with its client's data in a file of its own."""
    hub = Hub.init(folder / "hub", "demo-hub", "127.0.0.1", free_port())
    for name, client in zip(names, federation.clients, strict=True):
        asked = Site.request(folder / name, name)
        kit = hub.approve(json.dumps(asked), name)
        Site.at(folder / name).join(json.dumps(kit), name)
        arrays = {"train": (client.x_train, client.y_train), "test": (client.x_test, client.y_test)}
        data = {f"{s}_{k}": read(v).numpy() for s, pair in arrays.items() for k, v in zip("xy", pair, strict=True)}
        np.savez(folder / f"{name}.npz", **data)  # type: ignore[arg-type]
        Settings(str((folder / f"{name}.npz").absolute()), device="cpu").write(folder / name)
    return Party(folder, hub, names)


@contextmanager
def party(federation: Federation, names: Sequence[str], say: Say = lambda line: None) -> Iterator[Party]:
    """Yield a hub and sites that are at work; end and remove everything afterwards."""
    process.check_installed()
    folder = Path(tempfile.mkdtemp(prefix="fedstill-deploy-"))
    made: Party | None = None
    try:
        say(f"certificates for a hub and {len(names)} sites, each with its own key")
        made = found(folder, federation, names)
        say("starting their processes (mutual TLS on this machine)")
        made.start()
        made.wait("hub")
        for name in names:
            made.start(name)
        made.wait(*names)
        yield made
    finally:
        if made is not None:
            made.stop()
        remove(folder)
