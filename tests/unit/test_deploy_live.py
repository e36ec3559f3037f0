"""Asynchronous and wait-free runs on sites, hub and stations in one process: whatever has arrived decides."""

from __future__ import annotations

import contextlib
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
from fedstill.deploy.data import Own
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal
from fedstill.timing.live import orders_of
from fedstill.transport import wire
from fedstill.transport.messages import Order

from .test_deploy import HELD, NAMES, Dying, OneAtATime, Party, federation, local  # noqa: F401

BUFFERED: dict[str, Any] = {"mode": "fedbuff", "buffer": 2, "profile": "real", "rounds": 6}


class Slow(OneAtATime):
    """A station that takes its time for training."""

    def handle(self, data: bytes) -> bytes:
        if self.folder.name == "c" and wire.decode(data, Order).kind == "train":
            time.sleep(0.3)
        return super().handle(data)


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:  # noqa: F811
    made = Party(federation, tmp_path)
    made.station = Slow
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
    run = party.run(METHODS["pfedsd"](), audit=True, mode=mode, profile="real", rounds=12, **buffer)
    counted = [k for record in run.history for k in record["participants"]]
    assert min(counted.count(0), counted.count(1)) > counted.count(2) > 0
    assert all(len(record["participants"]) == (2 if mode == "fedbuff" else 1) for record in run.history)
    behind = [record["staleness"]["2"] for record in run.history if "2" in record["staleness"]]
    assert max(behind) > 0
    assert any("2" not in record["personal_clients"] for record in run.history)  # at work, so it is not scored
    assert set(run.history[-1]["personal_clients"]) == {"0", "1", "2"}
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = Own(party.federation.clients[k], party.federation.classes)
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


@pytest.mark.parametrize("at", [(2, "train", "c"), (2, "score", "a"), (3, "state", "b")])
def test_a_hub_that_is_killed_goes_on_and_nothing_counts_twice(at: tuple[int, str, str], party: Party) -> None:
    """The audit merges what was kept again: an update that counted twice, or from another state, would give other bits."""
    party.desk = Dying(hold=0.2)
    party.desk.when = at[1], at[0], at[2]
    with contextlib.suppress(
        TrainingError
    ):  # the slow site may not have been asked in that round: then nobody is killed
        party.run(METHODS["pfedsd"](), audit=True, **{**BUFFERED, "rounds": 4})
    party.desk = hubs.Desk(hold=0.2)  # another process: it knows nobody
    party.run(METHODS["pfedsd"](), audit=True, **{**BUFFERED, "rounds": 5})
    history = Journal(party.folder / "run").history()
    assert [record["round"] for record in history] == [1, 2, 3, 4, 5]
    assert all(len(record["participants"]) == 2 for record in history)
    used = [(k, r["round"] - r["staleness"][str(k)]) for r in history for k in r["participants"]]
    assert len(set(used)) == len(used)  # (client, round of the order): each counted once
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = Own(party.federation.clients[k], party.federation.classes)
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
    party.run(METHODS["fedavg"](), **{**BUFFERED, "rounds": 4})  # and continues from there
    history = Journal(party.folder / "run").history()
    used = [(k, r["round"] - r["staleness"][str(k)]) for r in history for k in r["participants"]]
    assert len(set(used)) == len(used)


def test_a_simulated_clock_is_refused() -> None:
    with pytest.raises(InputError, match=r"profile = 'uniform': should be 'real' in a deployment"):
        hubs.check(Experiment(method=METHODS["pfedsd"](), **{**HELD, "profile": "uniform", "mode": "fedbuff"}))
    hubs.check(Experiment(method=METHODS["pfedsd"](), **{**HELD, "profile": "real", "mode": "fedbuff"}))
