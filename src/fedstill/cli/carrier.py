"""The flags --transport and --backend: where a command's clients are. Results do not depend on it, so no experiment holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..core.errors import InputError, Stopped, nearest
from ..run import cluster
from ..run.session import Transports
from ..transport.cluster import BackendName
from . import flags

CHOICES = {"transport": ("local", "cluster"), "backend": get_args(BackendName), "reduce": ("on", "off")}


@dataclass(frozen=True)
class Carrier:
    """What carries orders to a command's clients, and whether this process runs the command."""

    transport: Transports | None = None  # None: local
    leads: bool = True


def add(parser: flags.Parser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("transport")
    for name, help in (
        ("transport", "where clients are: in this process, or divided among the processes of torchrun"),
        ("backend", "of torch.distributed, for a cluster; auto is nccl on GPUs, else gloo"),
        ("reduce", "on a cluster, add uploads up where they are before they travel; off: the bits of one process"),
    ):
        choices = CHOICES[name]
        help = f"{help} [one of: {', '.join(choices)}; default {choices[0]}]"
        flags.plain(parser, group, name, help, "NAME", " or ".join(choices))


@dataclass(frozen=True)
class Flags:
    """The flags' values."""

    transport: str
    backend: BackendName
    reduce: bool

    @property
    def leads(self) -> bool:
        """Whether this process is the one that runs the command, as far as that is known before others are met."""
        return self.transport == "local" or os.environ.get("RANK", "0") == "0"

    @contextmanager
    def start(self, out: Path | None, device: str = "auto") -> Iterator[Carrier]:
        """Yield what carries orders. On a rank other than 0 of a cluster that is when all is over, and nothing is left to do.

        Where a rank is lost, say how to go on with what is in `out`, and end this process.
        """
        if self.transport == "local":
            yield Carrier()
            return
        try:
            with cluster.joined(self.backend, device, self.reduce) as joined:
                yield Carrier(joined, leads=joined is not None)
        except (ConnectionError, Stopped) as error:
            lost = _lost(error)
            if lost is None:
                raise
            go_on = (
                "" if out is None else f"; 'fedstill resume {out} --transport cluster' goes on, on any number of ranks"
            )
            print(f"fedstill: {lost}{go_on}", file=sys.stderr, flush=True)
            os._exit(1)  # threads that listen to the other ranks would hold this process up


def _lost(error: BaseException | None) -> ConnectionError | None:
    """Return the loss of a rank among an error and those that it followed: torchrun ends this process soon after it."""
    while error is not None and not isinstance(error, ConnectionError):
        error = error.__context__
    return error


def take(flag_values: dict[str, Any]) -> Flags:
    """Return the flags' values, and take them out: they are no fields of an experiment."""
    given = [name for name in CHOICES if name in flag_values]
    values = {name: flag_values.pop(name, choices[0]) for name, choices in CHOICES.items()}
    for name, value in values.items():
        if value not in CHOICES[name]:
            raise InputError(flags.flag(name), value, nearest(value, CHOICES[name]))
    for name in given:
        if name != "transport" and values["transport"] == "local":
            raise InputError(flags.flag(name), values[name], "left out without --transport cluster")
    return Flags(values["transport"], values["backend"], values["reduce"] == "on")
