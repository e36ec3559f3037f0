"""The flags --transport and --backend: where a command's clients are. Results do not depend on it, so no experiment holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from ..core.errors import InputError, nearest
from ..run import cluster
from ..run.session import Transports
from ..transport.cluster import BackendName
from . import flags

CHOICES = {"transport": ("local", "cluster"), "backend": get_args(BackendName)}


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
    ):
        choices = CHOICES[name]
        help = f"{help} [one of: {', '.join(choices)}; default {choices[0]}]"
        flags.plain(parser, group, name, help, "NAME", " or ".join(choices))


def take(flag_values: dict[str, Any]) -> tuple[str, BackendName]:
    """Return the flags' values, and take them out: they are no fields of an experiment."""
    given = "backend" in flag_values
    values = {name: flag_values.pop(name, choices[0]) for name, choices in CHOICES.items()}
    for name, value in values.items():
        if value not in CHOICES[name]:
            raise InputError(flags.flag(name), value, nearest(value, CHOICES[name]))
    if given and values["transport"] == "local":
        raise InputError("--backend", values["backend"], "left out without --transport cluster")
    return values["transport"], values["backend"]


@contextmanager
def start(name: str, backend: BackendName, device: str = "auto") -> Iterator[Carrier]:
    """Yield what carries orders. On a rank other than 0 of a cluster that is when all is over, and there is nothing to do."""
    if name == "local":
        yield Carrier()
        return
    with cluster.joined(backend, device) as joined:
        yield Carrier(joined, leads=joined is not None)
