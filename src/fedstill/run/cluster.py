"""A run on a cluster: rank 0 has the coordinator, every rank trains the clients that it holds.

Rank 0 reads folders, decides and writes; the other ranks are told which experiments begin, read the data for themselves, and
answer orders until rank 0 has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..core import tree
from ..core.errors import InputError, Shown
from ..core.task import Upload
from ..core.tree import Tree
from ..edge.edge import Edge
from ..methods.fedavg import FedAvg
from ..server.gate import REPORTED, Gate, divergence, example_upload, misreported
from ..transport import cluster
from ..transport.cluster import BackendName, Group, RankLost, Ranks
from ..transport.messages import Answering, Order, Reply
from .experiment import Experiment
from .prepare import PYTHON, Simulation, federation_of, from_experiment, pick_device
from .session import edge_of

USAGE = "fs.run or fs.resume with an experiment whose data and model have names: other ranks make them for themselves"


class Reduced:
    """An edge whose uploads are reduced before they travel: each is replaced by the mean of all of this process's.

    Where a merge is one weighted mean, Σ_k p_k·w_k is Σ_k p_k·m with m the mean of the w_k by the same weights, so the server's
    result is the same up to rounding, and m travels once. Uploads that the gate would refuse stay as they are, for rank 0 to
    refuse and name.
    """

    def __init__(self, edge: Edge, simulations: Sequence[Simulation], plain: Sequence[bool]) -> None:
        """Reduce the uploads of those runs whose merge is a `plain` mean."""
        self.edge, self.simulations, self.plain, self.clients = edge, simulations, plain, edge.clients
        self.gates = [
            Gate.of(sim.training, sim.method, sim.data.train.sizes, sim.task.net.buffers) for sim in simulations
        ]

    def handle(self, orders: Sequence[Order]) -> Iterator[Reply]:
        """Yield the replies to the orders."""
        waiting: dict[int, list[Reply]] = {}
        for reply in self.edge.handle(orders):
            if reply.kind == "train" and self.plain[reply.run] and not reply.refusal:
                waiting.setdefault(reply.run, []).append(reply)
            else:
                yield reply
        for run, replies in waiting.items():
            down = {order.client: order.down for order in orders if order.run == run}
            mean, merged = self._mean(run, replies, down)
            for reply in replies:
                yield dataclasses.replace(reply, up=mean) if reply.client in merged else reply

    def _mean(self, run: int, replies: Sequence[Reply], down: Mapping[int, Tree]) -> tuple[Tree, frozenset[int]]:
        """Return the mean of the uploads that pass the gate, and whose they are."""
        sim, gate = self.simulations[run], self.gates[run]
        method = sim.method
        task = dataclasses.replace(sim.task, round=replies[0].round)
        counted = task.objective.counted
        good = [r for r in replies if not misreported(r.report, REPORTED, counted=counted) and not divergence(r)]
        good, _ = gate.inspect(good, lambda reply: example_upload(sim.method, task, down[reply.client]))
        if not isinstance(method, FedAvg) or len(good) < 2 or not all(_weights(reply.up) for reply in good):
            return {}, frozenset()
        uploads = [Upload(reply.up, float(sim.data.train.sizes[reply.client]), reply.client) for reply in good]
        mean = tree.mean([upload.tree for upload in uploads], method.shares(uploads))
        return mean, frozenset(upload.client for upload in uploads)


def _weights(up: Tree) -> bool:
    """Return whether an upload is weights alone, and no counts: these would be rounded twice."""
    return set(up) == {"params"} and all(value.is_floating_point() for value in up["params"].values())


def plain(sim: Simulation) -> bool:
    """Return whether a run's merge is one mean of all uploads of a round, none of which may be late or changed on the way."""
    training = sim.training
    timed = training.mode != "sync" or training.profile or training.deadline or training.over_select > 1
    protected = (
        training.average != "mean" or training.attack != "none" or training.max_norm or training.privacy != "off"
    )
    one_mean = isinstance(sim.method, FedAvg) and sim.method.noisy_mean and not sim.method.upload_varies
    return bool(one_mean and not timed and not protected)


class Cluster:
    """Makes the transport of every run of this process, which is rank 0 of a cluster."""

    live = False

    def __init__(self, group: Group, reduce: bool = True) -> None:
        """Have the other ranks reduce uploads where a merge is a mean; without `reduce` each client's travels by itself."""
        self.group, self.reduce = group, reduce
        self._ranks = Ranks(group)

    def open(self, edge: Edge, simulations: Sequence[Simulation]) -> Ranks:
        """Have all ranks set up their clients of these runs."""
        texts = []
        for sim in simulations:
            if sim.experiment is None or PYTHON in (sim.experiment.data, sim.experiment.model):
                raise InputError("transport", Shown("a cluster"), USAGE)
            texts.append(sim.experiment.to_toml())
        lead = simulations[0]
        about = {"experiments": texts, "engine": lead.trainer.name, "reduce": self.reduce}
        about["constants"] = [sim.net.fixed.digest() for sim in simulations]
        self._ranks.open(edge, about, lead.device)
        return self._ranks

    def hidden(self) -> None:
        """Return nothing: all ranks may know the run's seed."""

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
def joined(backend: BackendName = "auto", device: str = "auto", reduce: bool = True) -> Iterator[Cluster | None]:
    """Join the processes that torchrun has started: yield the cluster on rank 0, and None on the others once all is over.

    with joined() as transport:
        if transport is not None:
            run = fs.run(experiment, transport=transport)
    """
    group = Group(backend, pick_device(device))
    if group.rank:
        with contextlib.suppress(RankLost):  # rank 0 has ended, and says why
            cluster.serve(group, lambda about: _clients(group, about))
        yield None
    else:
        one = Cluster(group, reduce)
        try:
            yield one
        except RankLost:  # there is nobody left to tell: torchrun ends the others
            raise
        except BaseException:
            one.close()
            raise
        one.close()
    group.leave()


def _clients(group: Group, about: Mapping[str, Any]) -> tuple[Answering, torch.device]:
    """Return the edge with this rank's clients of some runs."""
    sims = []
    for text in about["experiments"]:
        experiment = dataclasses.replace(Experiment.from_values(tomllib.loads(text)), engine=about["engine"])
        federation = federation_of(experiment)
        sims.append(from_experiment(experiment, federation.only(group.share(len(federation))))[0])
    for sim, digest in zip(sims, about["constants"], strict=True):
        if sim.net.fixed.digest() != digest:
            right = (
                f"with rank 0's frozen weights ({digest[:12] or 'none'}): every rank makes the model from the same file"
            )
            raise InputError("model", Shown(sim.net.fixed.digest()[:12] or "nothing frozen"), right)
    edge, plains = edge_of(sims).edge, [about["reduce"] and plain(sim) for sim in sims]
    return Reduced(edge, sims, plains) if any(plains) else edge, sims[0].device
