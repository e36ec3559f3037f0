"""A hub's hub_server and sites' stations in one process, without a network: the numbers, and what outlives a stop."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstill as fs
from fedstill import models
from fedstill.core import tree
from fedstill.core.errors import InputError, TrainingError
from fedstill.data import Federation
from fedstill.deploy import audit
from fedstill.deploy import hub as hubs
from fedstill.deploy.canary import canary
from fedstill.deploy.data import SiteData, skeleton
from fedstill.deploy.hub_server import HubServer
from fedstill.deploy.polling import Unreachable, attend
from fedstill.deploy.site import SiteClient
from fedstill.deploy.state_files import read_saved
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.run.journal import Journal
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

NAMES = ("a", "b", "c")
HELD: dict[str, Any] = {"rounds": 3, "dtype": "float64", "lr": 0.05, "momentum": 0.9, "device": "cpu", "engine": "one"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Three clients of different sizes and classes."""
    rng = np.random.default_rng(0)
    centres, clients = rng.normal(size=(4, 6)), []
    for k in range(3):
        y = rng.integers(0, 4, 40 + 9 * k)
        x = (centres[y] * (1 + k) + rng.normal(size=(len(y), 6))).astype(np.float32)
        clients.append((x[:-12], y[:-12], x[-12:], y[-12:]))
    return Federation.from_arrays(clients, classes=4)


TRACING = threading.Lock()


class OneAtATime(SiteClient):
    """A site_client that shares its process: torch.fx, which follows models, is not made for several threads."""

    def open(self, about: Any) -> None:
        with TRACING:
            super().open(about)

    def handle(self, data: bytes) -> bytes:
        with TRACING:
            return super().handle(data)


class Party:
    """Sites as threads of this process."""

    def __init__(self, federation: Federation, folder: Path, hold: float = 0.2) -> None:
        self.federation, self.folder, self.site_client = federation, folder, OneAtATime
        self.hub_server = HubServer(hold=hold)
        self.stops: dict[str, threading.Event] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.cut: set[str] = set()  # sites whose network is cut
        self.wire: list[tuple[str, dict[str, Any], bytes]] = []  # what sites have sent
        self.monitors: dict[str, Any] = {}
        self.more: dict[str, dict[str, Any]] = {}  # by site what else its site_client is given

    def own(self, name: str) -> SiteData:
        return SiteData(self.federation.clients[NAMES.index(name)], self.federation.classes)

    def start(self, name: str) -> None:
        own = self.own(name)
        more = {"monitor": self.monitors.get(name), "audit": True, **self.more.get(name, {})}
        site_client = self.site_client(self.folder / name, own, device="cpu", **more)

        def talk(header: Any, body: bytes) -> Any:
            if name in self.cut:
                raise Unreachable("cut")
            self.wire.append((name, dict(header), body))
            return self.hub_server.answer(name, header, body)

        self.stops[name] = threading.Event()
        self.threads[name] = threading.Thread(target=attend, args=(site_client, talk, self.stops[name]), daemon=True)
        self.threads[name].start()

    def stop(self, *names: str) -> None:
        for name in names or tuple(self.stops):
            self.stops[name].set()
            self.threads[name].join(20)

    def run(self, method: Any, out: str = "run", **changed: Any) -> fs.Run:
        assert not self.hub_server.wait_for(NAMES, 20)
        more = {name: changed.pop(name) for name in ("deadline", "progress", "audit", "secret") if name in changed}
        experiment = Experiment(method=method, **{**HELD, **changed})
        return hubs.run(self.hub_server, experiment, NAMES, self.folder / out, **more)

    def personal(self, name: str) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / name).glob("*/personal.safetensors")
        return load_file(file)


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:
    made = Party(federation, tmp_path)
    for name in NAMES:
        made.start(name)
    yield made
    made.stop()


def local(federation: Federation, method: Any, **changed: Any) -> fs.Run:
    experiment = Experiment(method=method, **{**HELD, **changed})
    return fs.run(experiment, federation=federation)


SAME = [*(METHODS[m]() for m in ("pfedsd", "scaffold", "fedrep", "spectral")), fs.PFedSD(stateless=True)]


@pytest.mark.parametrize("method", SAME, ids=lambda m: f"{m.id}{'-stateless' * getattr(m, 'stateless', False)}")
def test_sites_give_the_numbers_of_one_process(method: Any, federation: Federation, party: Party) -> None:
    one, sites = local(federation, method), party.run(method)
    merged = dict(tree.leaves(sites.server))
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    for k, name in enumerate(NAMES):
        kept = party.personal(name)
        assert kept.keys() == one.served(k).keys()
        for entry, leaf in one.served(k).items():
            torch.testing.assert_close(kept[entry], leaf, rtol=0, atol=1e-10)
    numbers = ("participants", "personal_clients", "loss", "personal", "generic", "steps")
    for a, b in zip(one.history, sites.history, strict=True):
        for number in numbers:
            assert a.get(number) == pytest.approx(b.get(number), abs=1e-10), number
    checkpoint = Journal(party.folder / "run").load(torch.device("cpu"))
    assert checkpoint is not None
    # what the hub keeps of a client is numbers: its state is at the site
    for _, state in checkpoint.clients():
        assert list(state) == ["report"]
    assert hubs.roster(sites.history, NAMES) == []


def test_stateless_sites_keep_nothing_and_one_that_lost_all_goes_on(federation: Federation, party: Party) -> None:
    """The server keeps v_k and sends it down with w, so a site may be another machine in every round."""
    one = local(federation, fs.PFedSD(stateless=True))

    def progress(record: Any) -> None:
        if record["round"] == 1:
            party.stop("b")
            shutil.rmtree(party.folder / "b")
            party.start("b")

    run = party.run(fs.PFedSD(stateless=True), progress=progress)
    merged = dict(tree.leaves(run.server))
    assert {f"past|{k}|v|fc1.weight" for k in range(3)} <= merged.keys()
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    for name in NAMES:
        (file,) = (party.folder / name).glob("*/state.bin")
        kept = read_saved(file)
        assert kept is not None
        assert not list(tree.leaves(wire.decode(kept[1], Reply).up))  # no model, no v_k
    assert [r["participants"] for r in run.history] == [[0, 1, 2]] * 3


def test_a_site_that_lost_what_it_kept_says_so(party: Party) -> None:
    def progress(record: Any) -> None:
        if record["round"] == 1:
            party.stop("b")
            shutil.rmtree(party.folder / "b")
            party.start("b")

    run = party.run(METHODS["scaffold"](), progress=progress)
    assert [r["participants"] for r in run.history] == [[0, 1, 2], [0, 2], [0, 2]]
    assert any(
        "what it kept of this run is gone, though its round 1 has counted" in r["reason"]
        for r in party.hub_server.refusals
    )


def test_in_single_precision_too(federation: Federation, party: Party) -> None:
    one, sites = (
        run(METHODS["pfedsd"](), dtype="float32") for run in (lambda m, **c: local(federation, m, **c), party.run)
    )
    merged = dict(tree.leaves(sites.server))
    for entry, leaf in tree.leaves(one.server):
        assert leaf.dtype == torch.float32
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-4)
    for k, name in enumerate(NAMES):
        for entry, leaf in one.served(k).items():
            torch.testing.assert_close(party.personal(name)[entry], leaf, rtol=0, atol=1e-4)


# ---- what leaves a site ----------------------------------------------------------------------------------------------
KEEPERS = ("fedbabu", "fedbsd", "fedper", "fedrep", "lg-fedavg")  # whose private part is whole tensors of this model


@pytest.mark.parametrize("method", KEEPERS)
def test_no_private_part_is_in_any_message_of_a_site(method: str, federation: Federation, party: Party) -> None:
    run = party.run(METHODS[method](), rounds=2)
    private = METHODS[method]().private(run.task)
    sizes = {leaf.numel() for name, leaf in party.personal("a").items() if name in private}
    assert sizes
    kinds = set()
    for _, header, body in party.wire:
        assert set(header) <= {"do", "run", "version", "about"}
        if header["do"] == "hello":
            known = {"shape", "dtype", "classes", "objective", "target", "labels", "sizes", "checksum", "machine"}
            assert set(header["about"]) == known
        if header["do"] != "reply":
            assert body == b""
            continue
        reply = wire.decode(body, Reply)
        kinds.add(reply.kind)
        assert reply.kind == "train" or not reply.up  # scores and states leave as numbers
        # the sizes of private tensors are unique in this model: none of them, no copy and no difference is there
        assert not {leaf.numel() for _, leaf in tree.leaves(reply.up)} & sizes
    assert kinds == {"train", "score", "state"}


def test_a_site_does_not_give_its_model_to_anybody(party: Party) -> None:
    run = party.run(METHODS["pfedsd"](), rounds=1)
    site_client = OneAtATime(party.folder / "a", SiteData(party.federation.clients[0], 4), device="cpu")
    about = json.loads((party.folder / "run" / "deployment.json").read_text())
    site_client.open({**about, "round": 1, "client": 0, "clients": 3, "classes": 4, "experiment": run_toml(party)})
    reply = wire.decode(site_client.handle(wire.encode(Order("model", 1, 0, run.server))), Reply)
    assert reply.refusal == "the personal model stays at the site"
    assert not reply.up


def run_toml(party: Party) -> str:
    return (party.folder / "run" / "experiment.toml").read_text().replace('"(python)"', '"digits"')


# ---- sites that are away, refuse or come back ------------------------------------------------------------------------
def test_a_round_ends_at_its_deadline_and_the_site_is_back_with_its_own_model(party: Party) -> None:
    kept: dict[int, Any] = {}

    def progress(record: Any) -> None:
        if record["round"] == 1:
            kept[1] = party.personal("b")
            party.cut.add("b")
        if record["round"] == 3:
            kept[3] = party.personal("b")
            party.cut.discard("b")

    run = party.run(METHODS["pfedsd"](), rounds=6, deadline=1.0, progress=progress)
    took = [record["participants"] for record in run.history]
    assert took[0] == [0, 1, 2]
    assert took[1:3] == [[0, 2]] * 2
    assert took[-1] == [0, 1, 2]
    assert [record["missing"] for record in run.history[1:3]] == [[1], [1]]
    assert all(
        torch.equal(kept[1][name], kept[3][name]) for name in kept[1]
    )  # nothing happened to it while it was away
    assert hubs.roster(run.history, NAMES) == []
    assert hubs.roster(run.history[1:3], NAMES) == ["b"]


def test_without_a_deadline_a_site_that_is_away_is_waited_for(federation: Federation, party: Party) -> None:
    def progress(record: Any) -> None:
        if record["round"] == 1:
            party.cut.add("c")
            threading.Timer(1.0, party.cut.discard, ["c"]).start()

    run = party.run(METHODS["scaffold"](), progress=progress)
    one = local(federation, METHODS["scaffold"]())
    merged = dict(tree.leaves(run.server))
    for entry, leaf in tree.leaves(one.server):
        torch.testing.assert_close(merged[entry], leaf, rtol=0, atol=1e-10)
    assert [record["participants"] for record in run.history] == [[0, 1, 2]] * 3


class Flat:
    """A machine whose battery is flat in the second round."""

    def refusal(self, round: int, client: int) -> str | None:
        return "battery at 5%, below 20%" if round == 2 else None


def test_a_site_that_refuses_is_named_and_the_others_go_on(federation: Federation, tmp_path: Path) -> None:
    party = Party(federation, tmp_path)
    party.monitors["a"] = Flat()
    for name in NAMES:
        party.start(name)
    run = party.run(METHODS["scaffold"]())
    party.stop()
    assert [record["participants"] for record in run.history] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert run.history[1]["refused"] == [0]
    (told,) = (refused for refused in party.hub_server.refusals if refused["site"] == "a")
    assert "battery at 5%" in told["reason"]


def test_a_site_that_restarts_between_training_and_sending_answers_what_it_had_done(
    party: Party, federation: Federation
) -> None:
    party.stop("a")
    site_client = OneAtATime(party.folder / "a", SiteData(federation.clients[0], 4), device="cpu")
    about = {"run": "r1", "attempt": 1, "round": 0, "client": 0, "clients": 3, "classes": 4}
    about["experiment"] = Experiment(method=METHODS["scaffold"](), **HELD).to_toml()
    site_client.open(about)
    task = local(federation, METHODS["scaffold"](), rounds=1).task
    down = METHODS["scaffold"]().send(task, METHODS["scaffold"]().init_server(task, task.net.initial()), 0)
    order = wire.encode(Order("train", 1, 0, down))
    first = site_client.handle(order)
    again = OneAtATime(party.folder / "a", SiteData(federation.clients[0], 4), device="cpu")
    again.open(about)
    trained: list[object] = []
    again._edge.handle = lambda orders: trained.append(orders) or iter(())  # type: ignore[union-attr, method-assign, assignment, return-value]
    assert again.handle(order) == first
    assert not trained


def test_damaged_state_is_not_used(party: Party) -> None:
    party.run(METHODS["pfedsd"](), rounds=2)
    party.stop()
    for name in NAMES:
        (file,) = (party.folder / name).glob("*/round-000002.bin")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        party.start(name)
    toml = party.folder / "run" / "experiment.toml"
    with pytest.raises(TrainingError, match=r"site .: what it kept of round 2 is not there any more, or damaged"):
        hubs.run(party.hub_server, Experiment.from_toml(toml), NAMES, party.folder / "run", rounds=3)


class Dying(HubServer):
    """The hub_server of a hub that is killed when a certain reply comes; the next hub's process knows nobody."""

    when: tuple[str, int, str] = "", 0, ""

    def answer(self, site: str, header: Any, body: bytes) -> Any:
        if header.get("do") == "reply" and self.open_run is not None:
            reply = wire.decode(body, Reply)
            if (reply.kind, reply.round, site) == self.when:
                self.open_run.transport.close("killed")
        return super().answer(site, header, body)


# ---- the canary -----------------------------------------------------------------------------------------------------
def test_the_canary_says_what_is_wrong_where(party: Party) -> None:
    assert not party.hub_server.wait_for(NAMES, 20)
    experiment = Experiment(method=METHODS["pfedsd"](), **HELD)
    told = canary(party.hub_server, experiment, NAMES, party.folder / "canary")
    assert told["wrong"] == []
    assert [row["site"] for row in told["rows"]] == list(NAMES)
    assert all(row["seconds"] >= 0 and row["shape"] == [6] and row["classes"] == 4 for row in told["rows"])
    party.hub_server.sites["b"].about["shape"] = [7]
    party.hub_server.sites["c"].skew = -3600.0
    party.hub_server.sites["a"].about["machine"]["disk"] = 1e6
    told = canary(party.hub_server, experiment, [*NAMES, "d"], party.folder / "canary-2")
    for part in (
        "site 'd' is not here",
        "shape of site 'b'",
        "clock of site 'c' is -3600 s",
        "site 'a' has 1 MB of disk",
    ):
        assert any(part in wrong for wrong in told["wrong"]), part
    assert not (party.folder / "canary-2").exists()


def test_data_that_changes_during_a_run_ends_it_by_name(party: Party, federation: Federation) -> None:
    def progress(record: Any) -> None:
        if record["round"] == 1:
            party.stop("b")
            client = federation.clients[1]
            changed = SiteData(dataclasses.replace(client, x_train=client.x_train + 1), 4)
            site_client = OneAtATime(party.folder / "b", changed, device="cpu")
            talk = lambda header, body: party.hub_server.answer("b", header, body)  # noqa: E731
            party.stops["b"] = threading.Event()
            party.threads["b"] = threading.Thread(
                target=attend, args=(site_client, talk, party.stops["b"]), daemon=True
            )
            party.threads["b"].start()

    with pytest.raises(TrainingError, match=r"site b: data = .*the site's data has changed"):
        party.run(METHODS["pfedsd"](), progress=progress)


# ---- hubs that stop ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["pfedsd", "scaffold"])
def test_a_hub_that_goes_on_has_the_bits_of_one_that_did_not_stop(
    method: str, party: Party, federation: Federation, tmp_path: Path
) -> None:
    whole = Party(federation, tmp_path / "whole")
    for name in NAMES:
        whole.start(name)
    undisturbed = whole.run(METHODS[method](), rounds=5)
    whole.stop()

    for at, when in ((1, "train"), (3, "score"), (4, "state")):
        party.hub_server = Dying(hold=0.2)
        party.hub_server.when = when, at + (when == "train"), "b"
        with pytest.raises(TrainingError, match="killed"):
            party.run(METHODS[method](), rounds=5)
    party.hub_server = HubServer(hold=0.2)  # another process: it knows nobody
    run = party.run(METHODS[method](), rounds=5)
    assert [record["participants"] for record in run.history] == [[0, 1, 2]] * 5
    merged = dict(tree.leaves(run.server))
    assert all(torch.equal(merged[entry], leaf) for entry, leaf in tree.leaves(undisturbed.server))
    for name in NAMES:
        assert all(torch.equal(whole.personal(name)[entry], leaf) for entry, leaf in party.personal(name).items())


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_another_version_is_refused_in_one_line(party: Party) -> None:
    party.stop()
    lines: list[str] = []
    site_client = SiteClient(
        party.folder / "d", SiteData(party.federation.clients[0], 4), device="cpu", log=lines.append
    )

    def talk(header: Any, body: bytes) -> Any:
        return party.hub_server.answer("d", {**header, "version": "0.0.1"} if header["do"] == "hello" else header, body)

    with pytest.raises(InputError, match=r"the hub has fedstill .*, this site 0.0.1: install the same"):
        attend(site_client, talk, threading.Event())
    assert party.hub_server.refusals[-1]["site"] == "d"


@pytest.mark.parametrize("about", [None, [], {}, {"shape": [10**9]}, {"shape": "x", "dtype": "float32"}])
def test_nonsense_of_a_site_is_refused(about: object) -> None:
    hub_server = HubServer()
    answer, _ = hub_server.answer("a", {"do": "hello", "version": fs.__version__, "about": about}, b"")
    assert "cannot be read" in answer["refused"]
    assert not hub_server.sites


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("shape", [7], "shape of site 'b'"), ("labels", ["x", "y"], "classes of site 'b'"), ("dtype", "float64", "dtype")],
)
def test_sites_that_do_not_fit_are_named(field: str, value: object, named: str, federation: Federation) -> None:
    abouts = [{**SiteData(client, 4, ("p", "q", "r", "s")).about()} for client in federation.clients]
    abouts[1][field] = value
    with pytest.raises(InputError, match=named):
        skeleton(NAMES, abouts)


SIMULATED = [("new", True), ("external", "digits"), ("profile", "uniform"), ("attack", "sign-flip"), ("newcomers", 1)]


@pytest.mark.parametrize(("name", "value"), SIMULATED)
def test_what_needs_simulation_is_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        hubs.check(Experiment(method=METHODS["pfedsd"](), **{**HELD, name: value}))


# ---- audit -----------------------------------------------------------------------------------------------------------
def tampered(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)


def copies(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize("method", ["pfedsd", "scaffold"])
def test_an_audit_merges_and_trains_again_to_the_same_bits_and_names_what_was_changed(
    method: str, party: Party
) -> None:
    hub_server = party.hub_server
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 2, "b"
    with pytest.raises(TrainingError, match="killed"):
        party.run(METHODS[method](), audit=True)
    party.hub_server = hub_server  # the next hub: the second round is made twice
    party.run(METHODS[method](), audit=True)
    run = party.folder / "run"
    assert audit.of_hub(run) == []
    sites = {name: next((party.folder / name).glob("*")) for name in NAMES}
    own = {name: SiteData(party.federation.clients[k], 4) for k, name in enumerate(NAMES)}
    for name, folder in sites.items():
        assert audit.of_site(folder, own[name]) == []
    kept = {e["id"] for e in audit.read(run / "audit" / "log.jsonl")[0] if e["what"] == "reply" and e["site"] == "a"}
    assert kept <= {e["order"] for e in audit.read(sites["a"] / "audit" / "log.jsonl")[0] if e["what"] == "reply"}
    cases = {
        "audit/log.jsonl": "log.jsonl",
        "audit/replies/000002-0002-train-b.bin": "train reply of site 'b' in round 2 was changed",
        "metrics.jsonl": "record of round 2 was changed",
        "checkpoints/round-000003.safetensors": "merged model of round 3 is damaged",
    }
    for number, (file, words) in enumerate(cases.items()):
        other = copies(run, party.folder / f"case-{number}")
        if file == "metrics.jsonl":
            (other / file).write_text((other / file).read_text().replace('"round": 2', '"round": 2, "x": 1'))
        else:
            tampered(other / file)
        (wrong, *_) = audit.of_hub(other)
        assert words in wrong, (file, wrong)
    # a model that is whole, its checksums too, and not what the uploads give: another run's
    party.run(METHODS[method](), out="other", seed=7)
    other = copies(run, party.folder / "swapped")
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(party.folder / "other" / "checkpoints", other / "checkpoints")
    assert audit.of_hub(other)
    other = copies(sites["a"], party.folder / "case-site")
    assert "is not what the site's data and the order give" in audit.of_site(other, own["b"])[0]
    tampered(next((other / "audit" / "orders").glob("*")))
    assert "order of round" in audit.of_site(other, own["a"])[0]
    lines = (sites["a"] / "audit" / "log.jsonl").read_text().splitlines()
    (other / "audit" / "log.jsonl").write_text("\n".join(lines[:2] + lines[3:]) + "\n")
    assert "line 2 of log.jsonl was changed, or a line beside it left out" in audit.of_site(other, own["a"])[0]


def test_sites_with_adapters_give_the_numbers_of_one_process_and_send_nothing_else(
    federation: Federation, party: Party
) -> None:
    """Hub and sites make the base model for themselves; a site's own file is a whole state dict."""
    one, sites = local(federation, fs.FedSALoRA(), lora="r=2"), party.run(fs.FedSALoRA(), lora="r=2")
    for k, name in enumerate(NAMES):
        kept, whole = party.personal(name), one.personal(k)
        assert kept.keys() == whole.keys()
        assert all((kept[entry] - whole[entry]).abs().max() < 1e-10 for entry in whole)
    assert all(record["bytes_up"] == 8 * 2 * 6 for record in sites.history)  # of A, in float64


def test_a_site_whose_frozen_weights_are_others_is_refused_in_one_line(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    party, made = Party(federation, tmp_path), models.build
    party.start("a")
    party.start("b")

    class Another(OneAtATime):
        def open(self, about: Any) -> None:
            with TRACING, monkeypatch.context() as patch:
                other = lambda name, shape, classes, seed, *more: made(name, shape, classes, seed + 1, *more)  # noqa: E731
                patch.setattr(models, "build", other)
                SiteClient.open(self, about)

    party.site_client = Another
    party.start("c")
    try:
        with pytest.raises(
            TrainingError, match=r"site c: model = [0-9a-f]{12}: should be with the hub's frozen weights"
        ):
            party.run(fs.FedAvg(), lora="r=2")
    finally:
        party.stop()
