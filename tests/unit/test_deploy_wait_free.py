"""Wait-free training on sites: a thread trains the personal model between an upload and the next order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.errors import InputError, TrainingError
from fedstill.data import Federation
from fedstill.deploy import audit
from fedstill.deploy import hub as hubs
from fedstill.deploy.data import SiteData
from fedstill.deploy.hub_server import HubServer
from fedstill.engine.bench import Work
from fedstill.engine.paced import Paced
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment, Training
from fedstill.run.journal import Journal
from fedstill.run.prepare import prepare
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from ..problems import SETTINGS, identical, make, ragged
from .test_deploy import HELD, NAMES, Dying, OneAtATime, Party, federation, local  # noqa: F401

BOTH = [fs.SpectralCoDistillation(personal_epochs=2), fs.Ditto(), fs.FedRoD()]
FIXED: dict[str, Any] = {"wait_free": "fixed", "profile": "real"}
UNTIL: dict[str, Any] = {"wait_free": "until-download", "profile": "real", "personal_cap": 60}


class Together(OneAtATime):
    """Personal training begins when all three sites have opened the run: until then models are followed by torch.fx."""

    opened: set[str]

    def open(self, about: Any) -> None:
        super().open(about)
        self.opened.add(self.folder.name)
        start = self.background.start

        def wait() -> None:
            end = time.monotonic() + 20
            while len(self.opened) < 3 and time.monotonic() < end:
                time.sleep(0.01)
            start()

        self.background.start = wait  # type: ignore[method-assign]


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:  # noqa: F811
    made = Party(federation, tmp_path)
    made.site_client = type("Together", (Together,), {"opened": set()})
    for name in NAMES:
        made.start(name)
    yield made
    made.stop()


# ---- step by step ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["plain", "normed"])
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.id)
def test_so_many_steps_are_an_idle_part_of_so_many_to_the_bit(method: fs.Method, model: str) -> None:
    """Partial batches, dropout and BatchNorm; a result that was had in between is not changed by later steps."""
    sim = prepare(method, make(model), ragged(), None, Training(**{**SETTINGS, "engine": "one", "fast": False}))
    trainer, memory = sim.trainer, method.init_client(sim.task, sim.initial)
    down = method.send(sim.task, method.init_server(sim.task, sim.initial), 1)
    (generic,) = trainer.train(2, [Work(1, down, memory, part="generic")])
    work = Work(1, down, memory, part="idle", local=generic.local)
    paced, between = Paced(trainer.bench, 2, work), {}
    for steps in range(6):
        between[steps] = paced.result()
        paced.step()
    for steps, done in between.items():
        (right,) = trainer.train(2, [Work(1, down, memory, part="idle", local=generic.local, steps=steps)])
        assert done.steps == right.steps == steps
        assert done.loss == pytest.approx(right.loss, rel=1e-12)
        assert identical({"": tree.flatten(done.memory)}, {"": tree.flatten(right.memory)})


# ---- a fixed number of steps -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.id)
def test_fixed_gives_the_bits_of_compute_and_wait(method: fs.Method, federation: Federation, party: Party) -> None:  # noqa: F811
    waits = local(federation, method)
    run = party.run(method, audit=True, **FIXED)
    merged = dict(tree.leaves(run.server))
    for entry, leaf in tree.leaves(waits.server):
        assert torch.equal(merged[entry], leaf), entry
    for k, name in enumerate(NAMES):
        for entry, leaf in waits.served(k).items():
            assert torch.equal(party.personal(name)[entry], leaf), entry
    for a, b in zip(waits.history, run.history, strict=True):
        assert a["personal_clients"] == b["personal_clients"]
        assert a["steps"] == b["steps"] + steps_of(party, method)
    assert sum(record["personal_steps"] for record in run.history) == 3 * steps_of(party, method)
    checked(party)


def steps_of(party: Party, method: fs.Method) -> int:
    """The personal steps of all sites in a round, by the method's phases: batches of 16 of 28, 37 and 46 samples."""
    epochs = {"spectral": 2, "ditto": 5, "fedrod": 5}[method.id]
    if method.id == "fedrod":
        epochs = method.personal_epochs if hasattr(method, "personal_epochs") and method.personal_epochs else 5
    return epochs * (2 + 3 + 3)


def checked(party: Party) -> None:
    """Hub and sites do everything again, from what was kept, to the same bits."""
    assert audit.of_hub(party.folder / "run") == []
    for k, name in enumerate(NAMES):
        own = SiteData(party.federation.clients[k], party.federation.classes)
        assert audit.of_site(next((party.folder / name).glob("*")), own) == []


def test_fixed_after_a_hub_that_was_killed_has_the_same_bits(federation: Federation, party: Party) -> None:  # noqa: F811
    waits = local(federation, fs.Ditto())
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 2, "b"
    with pytest.raises(TrainingError, match="killed"):
        party.run(fs.Ditto(), audit=True, **FIXED)
    party.hub_server = HubServer(hold=0.2)
    run = party.run(fs.Ditto(), audit=True, **FIXED)
    merged = dict(tree.leaves(run.server))
    assert all(torch.equal(merged[entry], leaf) for entry, leaf in tree.leaves(waits.server))
    for k, name in enumerate(NAMES):
        for entry, leaf in waits.served(k).items():
            assert torch.equal(party.personal(name)[entry], leaf), entry
    checked(party)


# ---- until the next download -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.id)
def test_steps_are_made_while_the_hub_waits_and_are_counted(method: fs.Method, party: Party) -> None:
    def wait(record: Any) -> None:
        time.sleep(0.05)

    run = party.run(method, audit=True, progress=wait, **UNTIL)
    steps = [record["personal_steps"] for record in run.history]
    assert steps[0] == 0  # there was nothing before the first upload
    assert min(steps[1:]) > 0
    entries, _ = audit.read(next((party.folder / "a").glob("*")) / "audit" / "log.jsonl")
    scored = [e["personal"] for e in entries if e["what"] == "reply" and e["kind"] == "score"]
    trained = [e["personal"] for e in entries if e["what"] == "reply" and e["kind"] in ("train", "idle")]
    assert trained[0] == 0
    assert all(after >= before for before, after in zip(scored, trained[1:], strict=False))  # the counter rises
    checked(party)


def test_the_cap_is_a_fixed_number_of_steps(federation: Federation, party: Party) -> None:  # noqa: F811
    """With time to spare: five passes of every site are more than the cap, which is then what all make."""
    run = party.run(fs.Ditto(), progress=lambda record: time.sleep(0.5), **{**UNTIL, "personal_cap": 4})
    assert [record["personal_steps"] for record in run.history[1:-1]] == [12]
    assert run.history[-1]["personal_steps"] == 12 + last_of(party)


def last_of(party: Party) -> int:
    """The steps that the last round's idle orders ended, by the sites' logs."""
    total = 0
    for name in NAMES:
        entries, _ = audit.read(next((party.folder / name).glob("*")) / "audit" / "log.jsonl")
        total += sum(e["personal"] for e in entries if e["what"] == "reply" and e["kind"] == "idle")
    return total


def test_clients_that_are_not_asked_go_on_from_the_model_that_all_are_sent(party: Party) -> None:
    how = {"participation": 1 / 3, "unselected": "broadcast", "rounds": 4}
    run = party.run(fs.Ditto(), audit=True, progress=lambda record: time.sleep(0.03), **how, **UNTIL)
    assert all(len(record["participants"]) == 1 for record in run.history)
    assert all(record["personal_steps"] > 0 for record in run.history[1:])
    for name in NAMES:
        entries, _ = audit.read(next((party.folder / name).glob("*")) / "audit" / "log.jsonl")
        assert sum(e["personal"] for e in entries if e["what"] == "reply" and e["kind"] in ("train", "begin")) > 0
    checked(party)


def test_a_kill_leaves_what_was_kept(party: Party) -> None:
    """A hub and a site end while personal training is under way: it begins again, and the books agree."""

    def progress(record: Any) -> None:
        if record["round"] == 2:
            party.stop("a")
            party.start("a")
        time.sleep(0.02)

    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 4, "b"
    with pytest.raises(TrainingError, match="killed"):
        party.run(fs.Ditto(), audit=True, rounds=5, progress=progress, **UNTIL)
    party.hub_server = HubServer(hold=0.2)
    party.run(fs.Ditto(), audit=True, rounds=5, **UNTIL)
    assert [record["participants"] for record in Journal(party.folder / "run").history()] == [[0, 1, 2]] * 5
    checked(party)


# ---- one site_client -----------------------------------------------------------------------------------------------------
@pytest.fixture
def site_client(federation: Federation, tmp_path: Path) -> Any:  # noqa: F811
    made = OneAtATime(tmp_path / "a", SiteData(federation.clients[0], 4), device="cpu")
    about = {"run": "r1", "attempt": 1, "round": 0, "client": 0, "clients": 3, "classes": 4}
    made.open(
        {**about, "experiment": Experiment(method=fs.Ditto(), **{**HELD, **UNTIL, "personal_cap": 10**6}).to_toml()}
    )
    return made


def asked(site_client: OneAtATime, kind: str, round: int = 1, **fields: Any) -> Reply:
    initial = site_client._sim.initial
    down = {} if kind == "state" else {"params": initial}
    return wire.decode(site_client.handle(wire.encode(Order(kind, round, 0, down, **fields))), Reply)  # type: ignore[arg-type]


def test_scores_have_a_copy_and_what_is_kept_does_not_move_meanwhile(site_client: OneAtATime) -> None:
    asked(site_client, "train", work="generic")
    before = site_client._state()
    site_client.background.start()
    told = []
    for _ in range(3):
        time.sleep(0.05)
        score = asked(site_client, "score", generic=site_client._sim.initial)
        assert 0 <= score.report["personal"] <= score.report["samples"]
        told.append(site_client.background.reported)
    assert 0 < told[0] < told[1] < told[2]  # the step counter rises
    assert identical(flat(before), flat(site_client._state()))  # nothing of it is kept yet
    reply = asked(site_client, "train", 2, work="generic")
    assert reply.report["personal_steps"] >= told[2]
    assert not [thread for thread in threading.enumerate() if thread.name == "personal training"]
    assert not identical(flat(before), flat(site_client._state()))


def flat(reply: Reply) -> dict[str, Any]:
    return {"": dict(tree.leaves(reply.up))}


def test_a_personal_training_that_fails_is_told_once_and_the_site_goes_on(site_client: OneAtATime) -> None:
    asked(site_client, "train", work="generic")

    def fail() -> None:
        raise RuntimeError("out of memory")

    site_client.background._new = fail  # type: ignore[method-assign, assignment]
    site_client.background.start()
    reply = asked(site_client, "train", 2, work="generic")
    assert reply.refusal == "it failed: personal training of round 1: out of memory"
    assert asked(site_client, "train", 2, work="generic").report["personal_steps"] == 0


def test_steps_that_were_kept_are_told_after_a_kill(site_client: OneAtATime, federation: Federation) -> None:  # noqa: F811
    asked(site_client, "train", work="generic")
    site_client.background.start()
    time.sleep(0.1)
    order = Order("train", 2, 0, {"params": site_client._sim.initial}, work="generic")
    handle = site_client._edge.handle

    def killed(orders: Any) -> Any:
        raise KeyboardInterrupt

    site_client._edge.handle = lambda orders: killed(orders) if orders[0].kind == "train" else handle(orders)  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        site_client.handle(wire.encode(order))
    made = site_client.background.unreported
    assert made > 0
    again = OneAtATime(site_client.folder, SiteData(federation.clients[0], 4), device="cpu")
    about = {"run": "r1", "attempt": 1, "round": 0, "client": 0, "clients": 3, "classes": 4}
    again.open({**about, "experiment": site_client._sim.experiment.to_toml()})
    assert wire.decode(again.handle(wire.encode(order)), Reply).report["personal_steps"] == made


def test_apfl_is_refused_in_one_line() -> None:
    """Its two models take their steps together: in simulated time alone they can be told apart."""
    with pytest.raises(InputError, match=r"wait_free = 'fixed': should be 'off' for apfl in a deployment: .*together"):
        hubs.check(Experiment(method=fs.APFL(), **{**HELD, **FIXED}))
    with pytest.raises(InputError, match=r"wait_free = 'fixed': should be 'off' with privacy 'local'"):
        hubs.check(Experiment(method=fs.Ditto(), **{**HELD, **FIXED, "privacy": "local"}))
    for name in ("fedavg", "pfedme"):
        training = Training(**{**SETTINGS, **UNTIL, "participation": 1.0})
        with pytest.raises(InputError, match="wait_free"):
            prepare(METHODS[name](), make("plain"), ragged(), None, training)
