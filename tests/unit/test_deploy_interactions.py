"""What deployments combine: asynchronous and wait-free rounds, privacy, savepoints, restarts of hubs and sites."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fedstill as fs
from fedstill.core import tree
from fedstill.core.errors import TrainingError
from fedstill.core.secret import Secret
from fedstill.data import Federation
from fedstill.deploy import audit
from fedstill.deploy.canary import canary
from fedstill.deploy.data import SiteData
from fedstill.deploy.hub_server import HubServer
from fedstill.deploy.savepoint import SaveEvery
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply
from fedstill.transport.sites import Sites

from .test_deploy import HELD, NAMES, Dying, OneAtATime, Party, federation  # noqa: F401

LOCAL: dict[str, Any] = {
    "privacy": "local", "noise_multiplier": 1.0, "clip_norm": 1.0, "batch_size": 8, "momentum": 0.0,
    "privacy_delta": 1e-3,
}  # fmt: skip
BUFFERED: dict[str, Any] = {"mode": "fedbuff", "buffer": 2, "profile": "real"}
UNTIL: dict[str, Any] = {"wait_free": "until-download", "profile": "real", "personal_cap": 60}
SECRET = Secret(bytes(31) + b"s")


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:  # noqa: F811
    made = Party(federation, tmp_path)
    made.site_client = type("AllOpen", (AllOpen,), {"opened": set()})
    for k, name in enumerate(NAMES):
        made.more[name] = {"secret": Secret(bytes([k]) * 32)}
        made.start(name)
    yield made
    made.stop()


class AllOpen(OneAtATime):
    """Sites that work once all have opened the run: until then models are followed by torch.fx, which takes no threads."""

    opened: set[tuple[str, int]]

    def open(self, about: Any) -> None:
        super().open(about)
        self.opened.add((self.folder.name, about["attempt"]))

    def handle(self, data: bytes) -> bytes:
        end = time.monotonic() + 20
        while (self.key and any((name, self.key[1]) not in self.opened for name in NAMES)) and time.monotonic() < end:
            time.sleep(0.01)
        return super().handle(data)


def checked(party: Party) -> None:
    """Have the audits of the hub and of all sites do everything again."""
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = SiteData(party.federation.clients[k], party.federation.classes)
        (run,) = party.folder.joinpath(name).glob("*")
        assert audit.of_site(run, own, secret=party.more[name]["secret"]) == []


def one_site(folder: Path, federation: Federation, method: fs.Method, about: Any = None, **changed: Any) -> OneAtATime:  # noqa: F811
    """Return a site with a secret, whose hub is the test, with a run that is open."""
    often = SaveEvery(epochs=changed.pop("often", 0))
    site = OneAtATime(folder, SiteData(federation.clients[0], 4), device="cpu", secret=SECRET, often=often)
    described = {"run": "r1", "attempt": 1, "round": 0, "client": 0, "clients": 3, "classes": 4, **(about or {})}
    site.open({**described, "experiment": Experiment(method=method, **{**HELD, **changed}).to_toml()})
    return site


def asked(site: OneAtATime, kind: Any, round: int = 1, **fields: Any) -> Reply:
    down = {} if kind in ("state", "restore") else {"params": site._sim.initial}
    return wire.decode(site.handle(wire.encode(Order(kind, round, 0, down, **fields))), Reply)


# ---- asynchronous rounds with privacy --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["fedbuff", "fedasync"])
def test_noisy_asynchronous_rounds_outlive_a_kill_of_the_hub(mode: str, party: Party) -> None:
    how = {**LOCAL, "mode": mode, "profile": "real", "rounds": 5, **({"buffer": 2} if mode == "fedbuff" else {})}
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 3, "b"  # type: ignore[attr-defined]
    with contextlib.suppress(TrainingError):  # killed, where the run was not over before
        party.run(METHODS["pfedsd"](), audit=True, **how)
    party.hub_server = HubServer(hold=0.2)
    party.run(METHODS["pfedsd"](), audit=True, **how)
    history = Journal(party.folder / "run").history()
    assert [record["round"] for record in history] == [1, 2, 3, 4, 5]
    for k, name in enumerate(NAMES):
        (file,) = (party.folder / name).glob("*/privacy.jsonl")
        entries, wrong = audit.read(file)
        assert not wrong
        counted = history[-1]["epsilon_clients"].get(str(k), 0.0)
        at_site = max([e["epsilon"] for e in entries if e["what"] == "work"], default=0.0)
        assert at_site >= counted * (k not in history[-1]["at_work"])  # a round that a kill undid may cost again
    checked(party)


def test_a_site_with_privacy_gives_no_scores_of_its_training_samples(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    site = one_site(tmp_path, federation, METHODS["pfedsd"](), **LOCAL)
    reply = asked(site, "score", split="train", generic=site._sim.initial)
    assert reply.refusal
    assert not reply.report
    assert asked(site, "score", split="test", generic=site._sim.initial).report["samples"] == 12


def test_an_order_that_a_restarted_hub_gives_out_again_goes_on_where_the_site_was_killed(
    federation: Federation,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Hub and site are both killed in the middle of the site's work."""
    steps = {"mode": "fedbuff", "buffer": 2, "profile": "real", "epochs": 4, "often": 1}
    calm = one_site(tmp_path / "calm", federation, METHODS["pfedsd"](), **steps)
    order = Order("train", 1, 0, {"params": calm._sim.initial})
    right = calm.handle(wire.encode(order))
    site = one_site(tmp_path / "killed", federation, METHODS["pfedsd"](), **steps)
    plain = site._edge.savepoint  # type: ignore[union-attr]

    def killed_after_two(order: Order) -> Any:
        made = plain(order)
        save, left = made.save, [2]  # type: ignore[union-attr]

        def count(halfway: Any) -> None:
            save(halfway)
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        made.save = count  # type: ignore[union-attr, method-assign]
        return made

    site._edge.savepoint = killed_after_two  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        site.handle(wire.encode(order))
    lines: list[str] = []
    again = one_site(
        tmp_path / "killed", federation, METHODS["pfedsd"](), {"attempt": 2, "pending": [order.id, 1]}, **steps
    )
    again.log = lines.append
    assert again.handle(wire.encode(order)) == right
    assert any("goes on after step" in line for line in lines)


# ---- wait-free -------------------------------------------------------------------------------------------------------
def test_a_site_that_lost_all_says_so_though_a_model_was_sent_before(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    """A client that is not asked is sent the model, from which it would begin anew."""
    how = {**UNTIL, "participation": 1 / 3, "unselected": "broadcast"}
    site = one_site(tmp_path / "a", federation, fs.Ditto(), {"round": 3}, **how)
    assert "is gone" in asked(site, "begin", 4, taken=2).refusal
    assert "is gone" in asked(site, "train", 5, taken=2, work="generic").refusal
    new = one_site(tmp_path / "b", federation, fs.Ditto(), **how)
    assert not asked(new, "begin", 1).refusal
    assert not asked(new, "train", 2, work="generic").refusal
    assert not asked(new, "train", 3, work="generic", taken=2).refusal


def test_a_first_personal_training_that_fails_is_no_loss(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    site = one_site(tmp_path, federation, fs.Ditto(), **UNTIL)
    asked(site, "train", work="generic")

    def fail() -> None:
        raise RuntimeError("out of memory")

    begin, site.background._new = site.background._new, fail  # type: ignore[method-assign, assignment]
    site.background.start()
    assert "out of memory" in asked(site, "train", 2, work="generic", taken=1).refusal
    site.background._new = begin  # type: ignore[method-assign]
    asked(site, "state", 2)
    assert not asked(site, "train", 3, work="generic", taken=1).refusal
    site.background.cancel()
    again = one_site(tmp_path, federation, fs.Ditto(), {"attempt": 2, "round": 2}, **UNTIL)
    assert not asked(again, "train", 3, work="generic", taken=1).refusal


def test_an_audit_agrees_where_a_wait_free_site_refused(party: Party) -> None:
    class Reluctant:
        def refusal(self, round: int, client: int) -> str | None:
            return "battery at 5%" if round == 3 else None

    party.stop("a")
    party.monitors["a"] = Reluctant()
    party.start("a")
    run = party.run(fs.Ditto(), audit=True, rounds=5, progress=lambda record: time.sleep(0.05), **UNTIL)
    assert [r.get("refused") for r in run.history] == [None, None, [0], None, None]
    checked(party)


# ---- sites that are away ---------------------------------------------------------------------------------------------
def test_scores_do_not_wait_for_a_site_that_is_away_with_an_order_to_train() -> None:
    sites = Sites(NAMES, limit=1 << 20, patience=0.3, standing=True)
    sites.dispatch([Order("train", 1, 1), *(Order("score", 1, k) for k in range(3))])
    for name in ("a", "c"):
        data = sites.next(name)
        assert data is not None
        order = wire.decode(data, Order)
        assert sites.take(name, wire.encode(Reply("score", 1, order.client, order=order.id))) == ""
    found: list[Reply] = []
    waiter = threading.Thread(target=lambda: found.extend(sites.replies()), daemon=True)
    waiter.start()
    waiter.join(5)
    over = not waiter.is_alive()
    sites.close("the test is over")
    assert over
    assert sorted(reply.client for reply in found) == [0, 2]
    assert list(sites.boxes["b"].orders)  # its work stands


def test_a_stateless_site_that_lost_all_does_not_keep_a_hub_from_going_on(party: Party) -> None:
    method = fs.PFedSD(stateless=True)
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 3, "b"  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="killed"):
        party.run(method)
    party.stop("b")
    shutil.rmtree(party.folder / "b")
    party.hub_server = HubServer(hold=0.2)
    party.start("b")
    run = party.run(method)
    assert [record["participants"] for record in run.history] == [[0, 1, 2]] * 3


# ---- the canary ------------------------------------------------------------------------------------------------------
CANARIES: dict[str, dict[str, Any]] = {
    "participation": {"participation": 1 / 3},
    "fedasync": {"mode": "fedasync", "profile": "real", "mixing": 0.5, "staleness": "polynomial", "staleness_a": 1.0},
    "fedbuff": {"mode": "fedbuff", "profile": "real", "buffer": 1, "participation": 2 / 3},
    "wait-free": {**UNTIL, "participation": 1 / 3, "unselected": "broadcast"},
    "poisson": {"participation": 0.34, "sampler": "poisson"},
    "choice": {"participation": 0.34, "sampler": "power-of-choice", "candidates": 2},
}


@pytest.mark.parametrize("which", CANARIES)
def test_the_canary_asks_every_site(which: str, party: Party) -> None:
    assert not party.hub_server.wait_for(NAMES, 20)
    method = fs.Ditto() if which == "wait-free" else METHODS["fedavg"](mean="uniform")
    experiment = Experiment(method=method, **{**HELD, **CANARIES[which]})
    told = canary(party.hub_server, experiment, NAMES, party.folder / "canary")
    assert told["wrong"] == []
    assert len(told["rows"]) == 3
    assert dataclasses.replace(experiment, rounds=3) == experiment  # it is not changed


# ---- scores that nobody answers --------------------------------------------------------------------------------------
def test_a_scoring_that_every_site_misses_is_said_in_the_record_and_the_run_goes_on(party: Party) -> None:
    def progress(record: Any) -> None:
        said.append(record.get("unscored"))

    said: list[Any] = []
    party.hub_server = Silent(hold=0.2)
    party.hub_server.rounds = {2}
    party.run(METHODS["fedavg"](), rounds=3, deadline=1.0, audit=True, progress=progress)
    assert said == [None, "nobody answered", None]
    history = Journal(party.folder / "run").history()
    assert "personal" not in history[1]
    assert "generic" not in history[1]
    assert history[1]["participants"] == [0, 1, 2]
    assert history[2]["generic"] > 0
    assert audit.of_hub(party.folder / "run") == []


@pytest.mark.parametrize(("rounds", "ends"), [({3}, 3), ({1, 2, 3}, 3), ({1, 2}, 0)])
def test_the_last_scoring_or_three_in_a_row_end_the_run(rounds: set[int], ends: int, party: Party) -> None:
    party.hub_server = Silent(hold=0.2)
    party.hub_server.rounds = rounds
    how = {"rounds": 3 if rounds == {3} else 4, "deadline": 0.8}
    if ends:
        with pytest.raises(TrainingError, match=f"round {ends}: no client sent scores that can be; nobody answered"):
            party.run(METHODS["fedavg"](), **how)
    else:
        assert len(party.run(METHODS["fedavg"](), **how).history) == 4


class Silent(HubServer):
    """A hub to which no score of some rounds comes through."""

    rounds: set[int]

    def answer(self, site: str, header: Any, body: bytes) -> Any:
        if header.get("do") == "reply":
            reply = wire.decode(body, Reply)
            if reply.kind == "score" and reply.round in self.rounds:
                return {"taken": False, "why": "lost"}, b""
        return super().answer(site, header, body)


def test_a_site_with_a_state_is_not_restored_without_its_file(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    site = one_site(tmp_path, federation, fs.Ditto())
    asked(site, "train")
    asked(site, "state")
    assert not asked(site, "restore").refusal
    (tmp_path / "r1" / "round-000001.bin").unlink()
    assert "is not there any more" in asked(site, "restore").refusal


def test_a_site_forgets_rounds_that_two_restarts_of_the_hub_have_undone(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    """The first attempt's round 2 did not count; in the second the site is not asked, or is away when the round is saved."""
    method = METHODS["pfedsd"]()

    def after(folder: str, asked_again: bool) -> list[Any]:
        first = one_site(tmp_path / folder, federation, method)
        asked(first, "train", 1)
        asked(first, "state", 1)
        if folder == "undone":
            asked(first, "train", 2)
            asked(first, "state", 2)
        second = one_site(tmp_path / folder, federation, method, {"attempt": 2, "round": 1})
        if asked_again:
            down = {"params": {name: 2 * value for name, value in second._sim.initial.items()}}  # from another cohort
            second.handle(wire.encode(Order("train", 2, 0, down)))
        third = one_site(tmp_path / folder, federation, method, {"attempt": 3, "round": 2})
        return [leaf.tolist() for _, leaf in tree.leaves(third._state().up)]

    for asked_again in (False, True):
        shutil.rmtree(tmp_path / "undone", ignore_errors=True)
        shutil.rmtree(tmp_path / "calm", ignore_errors=True)
        assert after("undone", asked_again) == after("calm", asked_again)


def test_a_site_forgets_a_first_round_that_a_restart_of_the_hub_has_undone(
    federation: Federation,  # noqa: F811
    tmp_path: Path,
) -> None:
    first = one_site(tmp_path, federation, METHODS["pfedsd"]())
    asked(first, "train", 1)
    one_site(tmp_path, federation, METHODS["pfedsd"](), {"attempt": 2, "round": 0})
    third = one_site(tmp_path, federation, METHODS["pfedsd"](), {"attempt": 3, "round": 1})
    assert not third._state().up
