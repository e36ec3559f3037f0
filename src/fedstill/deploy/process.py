"""The processes of a deployment: FLARE's, which does the work, and a keeper beside it that starts it again when it ends.

    python -m fedstill.deploy.process hub FOLDER         FLARE's server with the hub's part, in this process
    python -m fedstill.deploy.process site FOLDER        FLARE's client with the site's part

Everything that matters is on the disk, so a process is stopped by killing it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..core import files, reading
from ..core.errors import InputError
from ..edge.monitor import Policy
from .keeper import LOG, holder

UP = "up"  # the file that a process writes once it is up
FIELDS = {"battery": 1, "memory": 1, "network": 1, "load": -1}  # of a policy; 1: more is better


def check_installed() -> None:
    """Refuse to go on without FLARE."""
    if importlib.util.find_spec("nvflare") is None:
        raise InputError("extra", "deploy", "installed for hubs and sites: pip install 'fedstill[deploy]'")


@dataclass(frozen=True)
class Settings:
    """What a site's owner has decided: its data, and when it works."""

    data: str
    split: str = "80/20"
    device: str = "auto"
    monitor: str = ""
    audit: bool = False
    save_every_epochs: int = 0  # how often training under way is saved (`savepoint.SaveEvery`)
    save_every_steps: int = 0
    objective: str = "auto"  # what its targets are for
    label: str = ""  # columns of tables: the labels', those to leave out, and those that are texts whatever they hold
    ignore: str = ""
    encode: str = "onehot"
    max_epsilon: float = 0.0  # what all runs together may cost under differential privacy; 0: what each run says

    def policy(self) -> Policy | None:
        """Return the policy that `monitor` describes: conditions such as battery>20 and load<0.8; None without any."""
        values: dict[str, float] = {}
        for condition in filter(None, (part.strip() for part in self.monitor.split(","))):
            sign = "<" if "<" in condition else ">"
            name, _, number = (part.strip() for part in condition.partition(sign))
            right = "battery>PERCENT, load<SHARE, memory>SHARE or network>BYTES, joined by commas"
            try:
                value = float(number)
            except ValueError:
                raise InputError("monitor", self.monitor, right) from None
            if name not in FIELDS or (sign == ">") != (FIELDS[name] > 0) or not 0 <= value < float("inf"):
                raise InputError("monitor", self.monitor, right)
            values[name] = value / 100 if name == "battery" else value
        return Policy(**values) if values else None

    def reading(self) -> dict[str, Any]:
        """Return how the data are read, as the arguments of `SiteData.read`."""
        names = ("split", "objective", "label", "ignore", "encode")
        return {"path": self.data, **{name: getattr(self, name) for name in names}}

    def write(self, folder: Path) -> None:
        """Write the settings into a site's folder."""
        files.write(folder / "settings.json", (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Return the settings that `write` wrote."""
        return cls(**reading.read_json(folder / "settings.json"))


def running(folder: Path) -> int:
    """Return the process id of the keeper that is at work in a folder; 0: none is."""
    return holder(folder)


def launch(kind: str, folder: Path, threads: int = 0) -> subprocess.Popen[bytes]:
    """Start a hub's or site's keeper in the background; `threads` is how many OpenMP may use, 0: as the system says."""
    check_installed()
    check_stopped(kind, folder)
    (folder / UP).unlink(missing_ok=True)
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(
            _keeper(kind, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(threads),
        )


def wait_until_up(kind: str, folder: Path, keeper: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a hub listens, or a site has introduced itself to its hub; return whether that is so.

    Refuse one whose keeper has given up.
    """
    end = time.monotonic() + seconds
    while not (folder / UP).exists():
        if keeper.poll() is not None:
            raise InputError("folder", str(folder), f"that of a {kind} that can run: {tail(folder)}")
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def check_stopped(kind: str, folder: Path) -> None:
    """Refuse a folder whose hub or site is at work."""
    at_work = running(folder)
    if at_work:
        raise InputError("folder", str(folder), f"that of a {kind} that is not at work yet: process {at_work} is")


def foreground(kind: str, folder: Path) -> NoReturn:
    """Become a hub's or site's keeper, as a service manager wants it."""
    check_installed()
    check_stopped(kind, folder)
    os.execve(sys.executable, _keeper(kind, folder), _environment(0))


def stop(folder: Path, seconds: float = 10.0) -> bool:
    """End a hub or site, if it runs; return whether it did."""
    keeper = running(folder)
    if not keeper:
        return False
    end = time.monotonic() + seconds
    os.kill(keeper, signal.SIGTERM)
    while running(folder) == keeper:
        if time.monotonic() > end:
            os.kill(keeper, signal.SIGKILL)  # what it has started ends with it
            end = time.monotonic() + seconds
        time.sleep(0.05)
    return True


def tail(folder: Path) -> str:
    """Return the last line of a log that says something."""
    try:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    ours = [line for line in lines if line.startswith("fedstill: ")]
    return (ours or [line for line in lines if line.strip()] or ["(empty)"])[-1][-300:]


def _command(kind: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "fedstill.deploy.process", kind, str(folder.absolute())]


def _keeper(kind: str, folder: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("keeper.py")), str(folder.absolute()), *_command(kind, folder)]


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of processes that are started: the same package as this one's."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    limited = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1", **limited}


def main(argv: list[str]) -> int:
    """Be FLARE's process of a hub or site, until it is killed."""
    kind, folder = argv[0], Path(argv[1])
    from nvflare.fuel.f3.mpm import MainProcessMonitor

    from .folders import Hub, Site

    args = argparse.Namespace(local_rank=0)
    if kind == "hub":
        from nvflare.private.fed.app.server import server_train as program

        place: Any = Hub.at(folder)
        args.fed_server, names = "fed_server.json", []
    else:
        from nvflare.private.fed.app.client import client_train as program

        place = Site.at(folder)
        args.fed_client, names = "fed_client.json", [f"uid={place.name}", "heart_beat_interval=5.0"]
    place.write_flare()  # a folder that was moved, or an older version's
    args.workspace = str(place.flare.absolute())
    args.set = ["secure_train=true", "org=", "config_folder=", *names]
    return int(MainProcessMonitor.run(main_func=program.main, run_dir=args.workspace, args=args) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
