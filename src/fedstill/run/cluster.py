"""A run on a cluster: rank 0 has the coordinator, every rank trains the clients that it holds.

Rank 0 reads folders, decides and writes; the other ranks are told which experiments begin, read the data for themselves, and
answer orders until rank 0 has ended.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..core.errors import InputError, Shown
from ..edge.edge import Edge
from ..transport import cluster
from ..transport.cluster import BackendName, Group, Ranks
from .experiment import Experiment
from .prepare import PYTHON, Simulation, federation_of, from_experiment, pick_device
from .session import edge_of

USAGE = "fs.run or fs.resume with an experiment whose data and model have names: other ranks make them for themselves"


class Cluster:
    """Makes the transport of every run of this process, which is rank 0 of a cluster."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._ranks = Ranks(group)

    def open(self, edge: Edge, simulations: Sequence[Simulation]) -> Ranks:
        """Have all ranks set up their clients of these runs."""
        texts = []
        for sim in simulations:
            if sim.experiment is None or PYTHON in (sim.experiment.data, sim.experiment.model):
                raise InputError("transport", Shown("a cluster"), USAGE)
            texts.append(sim.experiment.to_toml())
        lead = simulations[0]
        self._ranks.open(edge, {"experiments": texts, "engine": lead.trainer.name}, lead.device)
        return self._ranks

    def close(self) -> None:
        """Have the other ranks end."""
        self._ranks.close()

    def share(self, clients: int) -> frozenset[int]:
        """Return the clients that rank 0 holds."""
        if clients < self.group.size:
            right = f"at least {self.group.size}, the number of ranks: each holds at least one"
            raise InputError("clients", clients, right)
        return self.group.share(clients)


@contextmanager
def joined(backend: BackendName = "auto", device: str = "auto") -> Iterator[Cluster | None]:
    """Join the processes that torchrun has started: yield the cluster on rank 0, and None on the others once all is over.

    with joined() as transport:
        if transport is not None:
            run = fs.run(experiment, transport=transport)
    """
    group = Group(backend, pick_device(device))
    if group.rank:
        cluster.serve(group, lambda about: _clients(group, about))
        yield None
    else:
        one = Cluster(group)
        try:
            yield one
        finally:
            one.close()
    group.leave()


def _clients(group: Group, about: Mapping[str, Any]) -> tuple[Edge, torch.device]:
    """Return the edge with this rank's clients of some runs."""
    sims = []
    for text in about["experiments"]:
        experiment = dataclasses.replace(Experiment.from_values(tomllib.loads(text)), engine=about["engine"])
        federation = federation_of(experiment)
        sims.append(from_experiment(experiment, federation.only(group.share(len(federation))))[0])
    return edge_of(sims).edge, sims[0].device
