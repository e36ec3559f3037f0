"""What couples clients and server stays coupled, whatever happens to replies: the server's books are the mean over all clients.

A reply that was late, dropped, refused by the device, rejected by the gate or part of an abandoned round must not leave its mark
at the client either. The sums are known by algebra: every addition on one side has its counterpart on the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.tree import Tree
from fedstill.edge.edge import Edge
from fedstill.transport.local import LocalTransport
from fedstill.transport.messages import Reply

from ..problems import SETTINGS, make, ragged

SIZES = ((13, 5), (7, 3), (4, 2), (10, 4), (5, 1), (9, 2), (6, 3), (8, 2))
BOOKS: dict[
    str, Callable[[Tree, list[Tree]], tuple[Tree, list[Tree]]]
] = {  # what the server has, what the clients have
    "scaffold": lambda server, memories: (server["c"], [memory["c"] for memory in memories]),
    "feddyn": lambda server, memories: (server["h"], [memory["g"] for memory in memories]),
    "l2gd": lambda server, memories: (server["params"], [memory["params"] for memory in memories]),
}
METHODS = {"scaffold": fs.SCAFFOLD(), "feddyn": fs.FedDyn(alpha=0.5), "l2gd": fs.L2GD(p=0.4, lam=0.5)}


def test_every_method_that_couples_is_here() -> None:
    assert {name for name, kind in fs.METHODS.items() if kind.coupled} == set(BOOKS)


REJECTED: dict[str, Callable[[Reply], Reply]] = {
    "upload": lambda reply: dataclasses.replace(reply, up=tree.map(lambda t: t * torch.nan, reply.up)),
    "report": lambda reply: dataclasses.replace(reply, report={**reply.report, "samples": 10**12}),
    "diverged": lambda reply: dataclasses.replace(reply, report={**reply.report, "finite": 0.0}),
    "unread": lambda reply: Reply("train", reply.round, reply.client, order=reply.order, fault="no message"),
}


@dataclasses.dataclass(frozen=True)
class Corrupting:
    """Spoils the replies of two clients in every other round: what the gate must reject."""

    spoil: Callable[[Reply], Reply]

    def __call__(self, edge: Edge) -> LocalTransport:
        spoil = self.spoil

        class Carrier(LocalTransport):
            def replies(self, timeout: float | None = None) -> Iterator[Reply]:
                for reply in super().replies(timeout):
                    spoilt = reply.kind == "train" and reply.client in (1, 4) and reply.round % 2
                    yield spoil(reply) if spoilt else reply

        return Carrier(edge)


def gap(run: fs.Run) -> float:
    """The distance between the server's books and the mean over all clients, relative to their size."""
    memories = [run.memory(k) for k in range(len(SIZES))]
    server, clients = BOOKS[run.method.id](run.server, memories)
    mean = tree.map(lambda *leaf: torch.stack(leaf).mean(0), *[run.task.trainable(each) for each in clients])
    books = run.task.trainable(server)
    return max(float((books[name] - mean[name]).abs().max()) for name in mean)


def trained(method: fs.Method, seed: int, transport: Callable[[Edge], object] = LocalTransport, **changes) -> fs.Run:
    settings = {
        **SETTINGS,
        "rounds": 6,
        "participation": 0.6,
        "seed": seed,
        "engine": "one",
        "eval_every": 6,
        **changes,
    }
    return fs.simulate(method, model=make("plain"), data=ragged(SIZES), transport=transport, **settings)


def median_deadline(method: fs.Method, seed: int, **timing) -> float:
    """Half of the time that rounds take when nobody is cut off, so that a deadline makes many replies late."""
    history = trained(method, seed, profile="lognormal:1", **timing).history
    return 0.5 * history[-1]["time"] / len(history)


TROUBLE = {
    "nothing": {},
    "drops": {"profile": "lognormal:1", "drop": 0.4},
    "late replies dropped": {"profile": "lognormal:1", "over_select": 1.6},
    "late replies folded": {"profile": "lognormal:1", "over_select": 1.6, "late": "fold"},
    "refusals": {"profile": "lognormal:1", "min_battery": 0.5},
    "abandoned rounds": {"profile": "lognormal:1", "drop": 0.5, "minimum": 4},
    "everything": {
        "profile": "lognormal:1", "drop": 0.2, "over_select": 1.4, "late": "fold", "min_battery": 0.3, "availability": 0.8,
    },
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_the_books_agree(method: str, trouble: str, engine: str) -> None:
    seen = set()
    for seed in (1, 2):
        run = trained(METHODS[method], seed, engine=engine, **TROUBLE[trouble])
        assert gap(run) < 1e-13
        for record in run.history:
            seen |= {name for name in ("dropped", "late", "refused", "folded") if record.get(name)}
            seen |= {"abandoned"} if record.get("abandoned") else set()
    wanted = {"drops": "dropped", "refusals": "refused", "abandoned rounds": "abandoned"}
    expected = {"late replies dropped": {"late"}, "late replies folded": {"late", "folded"}, "nothing": set()}
    assert expected.get(trouble, {wanted.get(trouble, "late")}) <= seen, "the trouble did not happen"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("late", ["drop", "fold"])
def test_the_books_agree_under_a_deadline(method: str, late: str) -> None:
    for seed in (1, 2):
        deadline = median_deadline(METHODS[method], seed)
        run = trained(METHODS[method], seed, profile="lognormal:1", deadline=deadline, late=late)
        assert any(record["late"] for record in run.history)
        assert gap(run) < 1e-13


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "timing", [{}, {"profile": "lognormal:1", "over_select": 1.4, "late": "fold"}], ids=["plain", "timed"]
)
@pytest.mark.parametrize("what", REJECTED)
def test_the_books_agree_when_the_gate_rejects(method: str, timing: dict, what: str) -> None:
    transport = Corrupting(REJECTED[what])
    run = trained(METHODS[method], 3, transport, participation=1.0, on_divergence="refuse", **timing)
    rejected = [record["rejected"] for record in run.history if "rejected" in record]
    assert rejected
    assert set().union(*rejected) <= {"1", "4"}
    assert tree.finite(run.server)
    assert gap(run) < 1e-13


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["fedasync", "fedbuff"])
def test_asynchronous_merging_is_refused_for_them(method: str, mode: str) -> None:
    """Their merge is no plain mean, so a stale reply cannot be rebased: nothing can come apart."""
    with pytest.raises(fs.InputError, match=f"mode = '{mode}'"):
        trained(METHODS[method], 1, profile="lognormal:1", mode=mode)
