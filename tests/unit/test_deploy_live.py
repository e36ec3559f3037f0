"""Asynchronous and wait-free runs on sites, hub and stations in one process: whatever has arrived decides."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core import tree
from fedstill.core.errors import InputError, TrainingError
from fedstill.data import Federation
from fedstill.deploy import audit
from fedstill.deploy import hub as hubs
from fedstill.deploy.canary import canary
from fedstill.deploy.data import SiteData
from fedstill.deploy.hub_server import HubServer
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal
from fedstill.timing.live import orders_of
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from .test_deploy import HELD, NAMES, OneAtATime, Party, federation, local  # noqa: F401

BUFFERED: dict[str, Any] = {"mode": "fedbuff", "buffer": 2, "profile": "real", "rounds": 6}


class Slow(OneAtATime):
    """A site_client that takes its time for training."""

    def handle(self, data: bytes) -> bytes:
        if self.folder.name == "c" and wire.decode(data, Order).kind == "train":
            time.sleep(0.3)
        return super().handle(data)


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:  # noqa: F811
    made = Party(federation, tmp_path)
    made.site_client = Slow
    for name in NAMES:
        made.start(name)
    yield made
    made.stop()


def server(party: Party, out: str = "run") -> dict[str, torch.Tensor]:
    checkpoint = Journal(party.folder / out).load(torch.device("cpu"))
    assert checkpoint is not None
    return dict(tree.leaves(checkpoint.state()["server"]))


@pytest.mark.parametrize("mode", ["fedbuff", "fedasync"])
def test_fast_sites_count_more_often_and_nobody_waits_for_the_slow_one(mode: str, party: Party) -> None:
    buffer = {"buffer": 2} if mode == "fedbuff" else {}

    def last(record: Any) -> None:
        time.sleep(0.06)  # so that all rounds take longer than the slow site's one

    run = party.run(METHODS["pfedsd"](), audit=True, mode=mode, profile="real", rounds=12, progress=last, **buffer)
    counted = [k for record in run.history for k in record["participants"]]
    assert min(counted.count(0), counted.count(1)) > counted.count(2) > 0
    assert all(len(record["participants"]) == (2 if mode == "fedbuff" else 1) for record in run.history)
    behind = [record["staleness"]["2"] for record in run.history if "2" in record["staleness"]]
    assert max(behind) > 0
    assert any("2" not in record["personal_clients"] for record in run.history)  # at work, so it is not scored
    assert set(run.history[-1]["personal_clients"]) == {"0", "1", "2"}
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = SiteData(party.federation.clients[k], party.federation.classes)
        assert audit.of_site(next((party.folder / name).glob("*")), own) == []


def test_a_buffer_of_all_sites_is_the_synchronous_run(federation: Federation, party: Party) -> None:  # noqa: F811
    one = local(federation, METHODS["ditto"](mean="uniform"))
    run = party.run(METHODS["ditto"](), **{**BUFFERED, "buffer": 3, "rounds": 3})
    merged = dict(tree.leaves(run.server))
    for entry, leaf in tree.leaves(one.server):
        assert torch.equal(merged[entry], leaf), entry
    for k, name in enumerate(NAMES):
        for entry, leaf in one.served(k).items():
            torch.testing.assert_close(party.personal(name)[entry], leaf, rtol=0, atol=1e-12)


class Dying(HubServer):
    """The hub_server of a hub that is killed when so many replies of a kind have come."""

    kind, left = "train", 0

    def answer(self, site: str, header: Any, body: bytes) -> Any:
        if header.get("do") == "reply" and self.open_run is not None and wire.decode(body, Reply).kind == self.kind:
            self.left -= 1
            if not self.left:
                self.open_run.transport.close("killed")
        return super().answer(site, header, body)


@pytest.mark.parametrize("at", [("train", 1), ("train", 4), ("train", 5), ("score", 3), ("state", 6)])
def test_a_hub_that_is_killed_goes_on_and_nothing_counts_twice(at: tuple[str, int], party: Party) -> None:
    """The audit merges what was kept again: an update that counted twice, or from another state, would give other bits."""
    party.hub_server = Dying(hold=0.2)
    party.hub_server.kind, party.hub_server.left = at
    with pytest.raises(TrainingError, match="killed"):
        party.run(METHODS["pfedsd"](), audit=True, **{**BUFFERED, "rounds": 5})
    party.hub_server = HubServer(hold=0.2)  # another process: it knows nobody
    party.run(METHODS["pfedsd"](), audit=True, **{**BUFFERED, "rounds": 5})
    history = Journal(party.folder / "run").history()
    assert [record["round"] for record in history] == [1, 2, 3, 4, 5]
    assert all(len(record["participants"]) == 2 for record in history)
    used = [(k, r["round"] - r["staleness"][str(k)]) for r in history for k in r["participants"]]
    assert len(set(used)) == len(used)  # (client, round of the order): each counted once
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = SiteData(party.federation.clients[k], party.federation.classes)
        assert audit.of_site(next((party.folder / name).glob("*")), own) == []


def test_a_killed_sites_order_is_given_out_again(party: Party) -> None:
    def progress(record: Any) -> None:
        if record["round"] == 2:
            party.cut.add("a")  # its replies do not come through, and then it is another process
            party.stop("a")
            party.cut.discard("a")
            party.start("a")

    run = party.run(METHODS["pfedsd"](), audit=True, progress=progress, **{**BUFFERED, "rounds": 8})
    assert any(0 in record["participants"] for record in run.history[2:])
    assert audit.of_hub(party.folder / "run") == []


def test_a_site_that_is_away_stops_nobody_where_scores_have_a_deadline(party: Party) -> None:
    def progress(record: Any) -> None:
        if record["round"] == 1:
            party.cut.add("b")

    run = party.run(METHODS["fedavg"](), progress=progress, deadline=0.5, **{**BUFFERED, "buffer": 1, "rounds": 8})
    party.cut.clear()
    assert len(run.history) == 8
    assert sum(1 in record["participants"] for record in run.history) <= 2
    assert run.history[-1]["participants"]


def test_what_is_under_way_is_in_the_checkpoint(party: Party) -> None:
    party.run(METHODS["fedavg"](), **{**BUFFERED, "rounds": 2})
    checkpoint = Journal(party.folder / "run").load(torch.device("cpu"))
    assert checkpoint is not None
    under_way = orders_of(checkpoint.state()["timing"])
    assert sorted(under_way) == Journal(party.folder / "run").history()[-1]["at_work"]
    held = Experiment.from_toml(party.folder / "run" / "experiment.toml")
    hubs.run(party.hub_server, held, NAMES, party.folder / "run", rounds=4)  # continues from there
    history = Journal(party.folder / "run").history()
    assert len(history) == 4
    used = [(k, r["round"] - r["staleness"][str(k)]) for r in history for k in r["participants"]]
    assert len(set(used)) == len(used)


def test_the_canary_asks_every_site_whatever_the_mode(party: Party) -> None:
    assert not party.hub_server.wait_for(NAMES, 20)
    experiment = Experiment(method=METHODS["pfedsd"](), **{**HELD, **BUFFERED, "buffer": 1})
    told = canary(party.hub_server, experiment, NAMES, party.folder / "canary")
    assert told["wrong"] == []
    assert len(told["rows"]) == 3


def test_a_simulated_clock_is_refused() -> None:
    with pytest.raises(InputError, match=r"profile = 'uniform': should be 'real' in a deployment"):
        hubs.check(Experiment(method=METHODS["pfedsd"](), **{**HELD, "profile": "uniform", "mode": "fedbuff"}))
    hubs.check(Experiment(method=METHODS["pfedsd"](), **{**HELD, "profile": "real", "mode": "fedbuff"}))


# ---- one site_client -----------------------------------------------------------------------------------------------------
def opened(folder: Path, federation: Federation, attempt: int = 1, **about: Any) -> OneAtATime:  # noqa: F811
    site_client = OneAtATime(folder, SiteData(federation.clients[0], 4), device="cpu")
    run = {"run": "r1", "attempt": attempt, "round": 0, "client": 0, "clients": 3, "classes": 4, **about}
    site_client.open({**run, "experiment": Experiment(method=METHODS["pfedsd"](), **{**HELD, **BUFFERED}).to_toml()})
    return site_client


def test_an_order_under_way_finds_the_site_as_it_was_when_it_was_given(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    """pFedSD's teacher is the last personal model: training twice from one order, or from another state, gives other bits."""
    one = opened(tmp_path / "a", federation)
    down = {"params": one._sim.initial}
    first, state = Order("train", 1, 0, down), Order("state", 1, 0, {})
    second = Order("train", 2, 0, down)  # under way while the hub keeps the rounds 2 and 3
    one.handle(wire.encode(first))
    one.handle(wire.encode(state))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    right = one.handle(wire.encode(second))
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    pending = [second.id, 2]
    done = opened(tmp_path / "a", federation, attempt=2, round=3, pending=pending)  # it had carried it out
    trained: list[object] = []
    handle, done._edge.handle = done._edge.handle, lambda orders: trained.append(orders) or iter(())  # type: ignore[union-attr, method-assign, assignment, func-returns-value]
    assert done.handle(wire.encode(second)) == right
    assert not trained
    done._edge.handle = handle  # type: ignore[union-attr, method-assign]
    not_begun = opened(tmp_path / "b", federation, attempt=2, round=3, pending=pending)
    assert not_begun.handle(wire.encode(second)) == right
    third = wire.encode(Order("train", 4, 0, down))
    assert done.handle(third) == not_begun.handle(third)  # and both go on alike
    # another order than the last: back to what was kept before the one that is under way
    late = Order("train", 2, 0, down)
    back = opened(tmp_path / "c", federation, attempt=3, round=3, pending=[late.id, 2])
    assert up(back.handle(wire.encode(late))) == up(right)


def up(reply: bytes) -> dict[str, list[float]]:
    return {name: leaf.flatten().tolist() for name, leaf in tree.leaves(wire.decode(reply, Reply).up)}
