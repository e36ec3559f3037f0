"""Differential privacy in a deployment: noise that nobody else can compute, drawn once, and counted by whoever it protects."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.core import plan, tree
from fedstill.core.batch import Batch
from fedstill.core.errors import InputError, TrainingError
from fedstill.core.secret import Secret, digest_of
from fedstill.core.task import SampleNoise
from fedstill.data import Federation
from fedstill.deploy import audit, jobs, privacy_log
from fedstill.deploy import hub as hubs
from fedstill.deploy.data import SiteData
from fedstill.deploy.hub_server import HubServer
from fedstill.deploy.privacy_log import PRIVACY_LOG, HubPrivacyLog, secret_in, spent_at
from fedstill.engine import private
from fedstill.methods import METHODS
from fedstill.run.experiment import Experiment
from fedstill.server.privacy import NoisyMean
from fedstill.transport import wire
from fedstill.transport.messages import Order, Reply

from .test_deploy import HELD, NAMES, Dying, OneAtATime, Party, local
from .test_deploy import federation as federation  # a fixture

pytest.importorskip("dp_accounting")

LOCAL: dict[str, Any] = {
    "privacy": "local", "noise_multiplier": 1.0, "clip_norm": 1.0, "batch_size": 8, "momentum": 0.0,
    "privacy_delta": 1e-3,
}  # fmt: skip
CENTRAL: dict[str, Any] = {**LOCAL, "privacy": "central", "participation": 0.67, "sampler": "poisson"}
ONE, TWO = Secret(bytes(32)), Secret(bytes(31) + b"x")


# ---- numbers from a secret -------------------------------------------------------------------------------------------
def test_words_and_secrets_that_differ_give_other_numbers() -> None:
    drawn = [ONE.bits(4, *words) for words in ((), (1,), ("1",), (1, 2), (12,), ("1", "2"), (2, 1))] + [TWO.bits(4)]
    assert len({array.tobytes() for array in drawn}) == len(drawn)
    assert ONE.bits(3, "a").tolist() == ONE.bits(9, "a").tolist()[:3]
    names = {
        ONE.digest(),
        TWO.digest(),
        ONE.child("x").digest(),
        ONE.child("x", "y").digest(),
        ONE.child("xy").digest(),
    }
    assert len(names) == 5
    assert ONE.key.hex() not in repr(ONE)


def test_normals_are_normal_and_a_share_of_the_samples_is_drawn() -> None:
    z = ONE.normals(40_000, "z")
    sorted_, ranks = z.sort().values, (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    distance = (0.5 * (1 + torch.erf(sorted_ / math.sqrt(2))) - ranks).abs().max()
    assert distance < 1.63 / math.sqrt(40_000)  # Kolmogorov and Smirnov, 1 %
    rows, keys = ONE.private(1, 200, 400, 20)
    counts = np.array([len(row) for row in rows])
    assert abs(counts.mean() - 20) < 4 * math.sqrt(200 * 0.1 * 0.9 / 400)
    assert np.ptp(counts) > 5
    assert len(set(keys.tolist())) == 400
    assert keys.min() >= 0
    assert [row.tolist() for row in ONE.private(2, 200, 400, 20)[0]] != [row.tolist() for row in rows]


def test_a_steps_noise_has_its_deviation_and_is_the_secrets() -> None:
    """noisy·b − Σ of the clipped gradients is σ·C times what the secret gives."""

    class Here:
        @staticmethod
        def here() -> Any:
            return type("Site", (), {"samples": torch.tensor(8.0)})

    def loss(weights: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        return (batch.x @ weights["w"]).sum()

    x = torch.randn(5, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.zeros(5), torch.arange(5), torch.tensor(77))
    weights = {"w": torch.zeros(300, dtype=torch.float64)}
    noise = SampleNoise(0.5, 3.0, 8, ONE)
    noisy, _ = private.gradient(noise, Here, loss, weights, batch)  # type: ignore[arg-type]
    clipped = (x * (0.5 / x.norm(dim=1, keepdim=True).clamp(min=0.5))).sum(0)
    torch.testing.assert_close(noisy["w"] * 8 - clipped, 1.5 * ONE.normals(300, "noise", 77))
    seed, _ = private.gradient(dataclasses.replace(noise, secret=None), Here, loss, weights, batch)  # type: ignore[arg-type]
    torch.testing.assert_close(seed["w"] * 8 - clipped, 1.5 * plan.normals(batch.key, 300))


def test_a_digest_is_that_of_every_bit_name_and_type() -> None:
    base = {"a": torch.zeros(2, 3), "b": {"c": torch.ones(2)}}
    changed = torch.zeros(2, 3)
    changed[1, 2] = 1e-30
    others = [
        {**base, "a": changed}, {**base, "a": torch.zeros(3, 2)}, {**base, "a": torch.zeros(2, 3, dtype=torch.float64)},
        {"a": base["a"], "d": base["b"]}, {"a": base["a"]}, {},
    ]  # fmt: skip
    assert len({digest_of(state) for state in [base, *others]}) == 7
    assert digest_of(tree.clone(base)) == digest_of(base)


# ---- sites -----------------------------------------------------------------------------------------------------------
class Private(Party):
    """Sites with secrets of their own, and a hub with one."""

    def __init__(self, federation: Federation, folder: Path, seed: int = 0) -> None:
        super().__init__(federation, folder)
        self.secrets = {name: Secret(bytes([seed, k]) * 16) for k, name in enumerate((*NAMES, "hub"))}
        for name in NAMES:
            self.more[name] = {"secret": self.secrets[name]}
            self.start(name)

    def run(self, method: Any, out: str = "run", **changed: Any) -> fs.Run:
        return super().run(method, out, secret=self.secrets["hub"], **changed)

    def books(self, name: str) -> list[dict[str, Any]]:
        (file,) = (self.folder / name).glob(f"*/{PRIVACY_LOG}")
        entries, wrong = audit.read(file)
        assert not wrong
        return entries


@pytest.fixture
def party(federation: Federation, tmp_path: Path) -> Any:
    made = Private(federation, tmp_path)
    yield made
    made.stop()


def uploads(party: Party) -> list[dict[str, torch.Tensor]]:
    replies = [wire.decode(body, Reply) for _, header, body in party.wire if header["do"] == "reply"]
    found = sorted((r.round, r.client, i) for i, r in enumerate(replies) if r.kind == "train")
    return [dict(tree.leaves(replies[i].up)) for _, _, i in found]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("method", ["pfedsd", "scaffold"])
def test_a_site_counts_its_noise_as_the_records_and_simulation_do(
    method: str, federation: Federation, party: Private
) -> None:
    simulated = local(federation, METHODS[method](), **LOCAL)
    run = party.run(METHODS[method](), **LOCAL)
    for a, b in zip(simulated.history, run.history, strict=True):
        assert (a["epsilon"], a["epsilon_clients"], a["spent"]) == (b["epsilon"], b["epsilon_clients"], b["spent"])
        assert b["epsilon"] > 0
    for k, name in enumerate(NAMES):  # what the site has counted itself
        entries = [entry for entry in party.books(name) if entry["what"] == "work"]
        assert [entry["round"] for entry in entries] == [1, 2, 3]
        assert entries[-1]["epsilon"] == run.history[-1]["epsilon_clients"][str(k)]
        assert party.secrets[name].key not in b"".join(body for _, _, body in party.wire)


def test_no_two_runs_and_no_two_secrets_have_the_same_noise(
    federation: Federation, party: Private, tmp_path: Path
) -> None:
    party.run(METHODS["pfedsd"](), rounds=1, **LOCAL)
    first = uploads(party)
    again, other = (Private(federation, tmp_path / f"again-{seed}", seed) for seed in (0, 1))
    for each in (again, other):
        each.run(METHODS["pfedsd"](), rounds=1, **LOCAL)
        each.stop()
    assert not any(same(a, b) for a, b in zip(first, uploads(other), strict=True))
    assert not any(same(a, b) for a, b in zip(first, uploads(again), strict=True))  # another run: other noise


def test_a_round_that_is_done_again_has_the_same_noise_and_costs_nothing(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs.secrets, "token_hex", lambda size: "a" * 16)  # the same run's id, hence the same noise
    calm = Private(federation, tmp_path / "calm")
    undisturbed = calm.run(METHODS["scaffold"](), **LOCAL)
    calm.stop()
    party = Private(federation, tmp_path / "killed")
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "train", 2, "b"
    with pytest.raises(TrainingError, match="killed"):
        party.run(METHODS["scaffold"](), **LOCAL)
    party.hub_server = HubServer(hold=0.2)
    run = party.run(METHODS["scaffold"](), **LOCAL)
    party.stop()
    merged = dict(tree.leaves(run.server))
    assert all(torch.equal(merged[entry], leaf) for entry, leaf in tree.leaves(undisturbed.server))
    for name in NAMES:
        assert [e for e in party.books(name) if e["what"] == "work"] == [
            e for e in calm.books(name) if e["what"] == "work"
        ]


class Alone:
    """One site, whose hub is this test."""

    def __init__(self, folder: Path, federation: Federation, method: Any = None, **changed: Any) -> None:
        self.folder, self.own = folder, SiteData(federation.clients[0], 4)
        self.experiment = Experiment(method=method or METHODS["fedavg"](), **{**HELD, **LOCAL, **changed})
        self.sim = local(federation, METHODS["fedavg"](), rounds=1)

    def site_client(self, secret: Secret | None = ONE, run: str = "r1", attempt: int = 1, **how: Any) -> OneAtATime:
        site_client = OneAtATime(self.folder, self.own, device="cpu", secret=secret, **how)
        about = {"run": run, "attempt": attempt, "round": 0, "client": 0, "clients": 3, "classes": 4}
        site_client.open({**about, "experiment": self.experiment.to_toml()})
        return site_client

    def order(self, scale: float = 1.0, round: int = 1, **how: Any) -> bytes:
        down = {"params": {name: scale * value for name, value in self.sim.task.net.initial().items()}}
        return wire.encode(Order("train", round, 0, down, **how))

    def trained(self, site_client: OneAtATime, order: bytes) -> Reply:
        return wire.decode(site_client.handle(order), Reply)


def test_a_hub_that_asks_again_with_another_model_gets_other_noise_and_it_is_counted(
    federation: Federation, tmp_path: Path
) -> None:
    """With the same noise twice the difference of two uploads would be that of two gradients, without any noise."""
    alone = Alone(tmp_path, federation, noise_multiplier=10.0, epochs=1)
    site_client = alone.site_client()
    orders = [alone.order(), alone.order(1.0001), alone.order()]
    replies = [alone.trained(site_client, order) for order in orders[:2]]
    replies.append(alone.trained(alone.site_client(attempt=2), orders[2]))  # a hub that was stopped begins again
    changes = []
    for order, reply in zip(orders, replies, strict=True):
        down = wire.decode(order, Order).down["params"]
        changes.append(torch.cat([(reply.up["params"][n] - down[n]).flatten() for n in down]))
    steps = int(replies[0].report["steps"])
    gradients = 0.05 * steps * 2 * 40 / 8  # the farthest that clipped gradients alone can move two models apart
    assert (changes[0] - changes[1]).norm() > 3 * gradients
    assert torch.equal(changes[0], changes[2])  # the same work again: the same bytes, which tell nothing new
    entries, _ = audit.read(tmp_path / "r1" / PRIVACY_LOG)
    assert [entry["what"] for entry in entries] == ["secret", "work", "work"]
    assert entries[2]["epsilon"] > entries[1]["epsilon"]
    assert spent_at(tmp_path / "r1") == entries[2]["epsilon"]


def test_a_site_stops_at_its_own_bound_over_all_runs(federation: Federation, tmp_path: Path) -> None:
    alone = Alone(tmp_path, federation, epochs=1)
    free = alone.site_client()
    for scale in (1.0, 2.0, 3.0):
        assert not alone.trained(free, alone.order(scale)).refusal
    costs = [e["epsilon"] for e in audit.read(tmp_path / "r1" / PRIVACY_LOG)[0] if e["what"] == "work"]
    strict = alone.site_client(run="r2", max_epsilon=costs[2] + costs[1] + 0.01)
    assert not alone.trained(strict, alone.order()).refusal
    assert not alone.trained(strict, alone.order(2.0)).refusal
    assert "above this site's" in alone.trained(strict, alone.order(3.0)).refusal
    assert not alone.trained(strict, alone.order(2.0)).refusal  # it has been paid for
    with pytest.raises(InputError, match="this site's other runs have cost"):
        alone.site_client(run="r3", max_epsilon=costs[1])
    unprotected = Alone(tmp_path, federation, privacy="off")
    with pytest.raises(InputError, match="owner has set a bound"):
        unprotected.site_client(run="r4", max_epsilon=100.0)
    budget = Alone(tmp_path / "budget", federation, epochs=1, privacy_budget=costs[1] + 0.01, participation=0.5)
    site_client = budget.site_client()
    assert [bool(budget.trained(site_client, budget.order(scale)).refusal) for scale in (1.0, 2.0, 3.0)] == [
        False,
        False,
        True,
    ]


def test_a_lost_or_other_secret_and_changed_books_are_refused(federation: Federation, tmp_path: Path) -> None:
    alone = Alone(tmp_path, federation)
    with pytest.raises(InputError, match="without a secret"):
        alone.site_client(None)
    alone.trained(alone.site_client(), alone.order())
    alone.site_client()  # goes on
    with pytest.raises(InputError, match="secret = another: should be that with which the run began"):
        alone.site_client(TWO)
    file = tmp_path / "r1" / PRIVACY_LOG
    data = file.read_bytes()
    file.write_bytes(data + data.splitlines()[-1][:20])  # cut short by a kill: it goes on
    alone.site_client()
    assert file.read_bytes() == data
    file.write_bytes(data.replace(b'"steps": ', b'"steps": 1', 1) + data.splitlines()[-1] + b"\n")
    with pytest.raises(InputError, match="as it was written"):
        alone.site_client()
    file.write_bytes(b"{" + data + b'{"what": ')  # damaged in the middle, and cut short besides
    with pytest.raises(InputError, match="as it was written"):
        alone.site_client()
    file.unlink()
    with pytest.raises(InputError, match="without it ε is not known"):
        alone.site_client()


def test_a_hub_cannot_have_a_site_reveal_more(federation: Federation, tmp_path: Path) -> None:
    plain = Alone(tmp_path / "plain", federation)
    expected = plain.trained(plain.site_client(), plain.order())
    crafty = Alone(tmp_path / "crafty", federation, engine="stacked")  # an engine that knows no secrets
    got = crafty.trained(crafty.site_client(), crafty.order())
    assert same(expected.up["params"], got.up["params"])
    site_client = crafty.site_client()
    for order in (Order("tune", 1, 0, epochs=1), Order("model", 1, 0), Order("idle", 1, 0), Order("begin", 1, 0)):
        assert wire.decode(site_client.handle(wire.encode(order)), Reply).refusal, order.kind
    assert "watch" not in crafty.trained(site_client, crafty.order(watch=True)).report
    assert crafty.trained(site_client, crafty.order(watch=True)).refusal
    for method in ("ditto", "fedbabu"):
        with pytest.raises(InputError, match="method"):
            Alone(tmp_path / method, federation, METHODS[method]()).site_client()


def test_a_site_that_is_killed_in_a_round_of_dp_sgd_goes_on(
    federation: Federation, tmp_path: Path, monkeypatch: Any
) -> None:
    from .test_savepoint import Killed, Life, SaveEvery

    life = Life(monkeypatch)
    alone, calm = (Alone(tmp_path / name, federation, METHODS["pfedsd"](), epochs=3) for name in ("a", "b"))
    order = alone.order()
    expected = calm.trained(calm.site_client(), order)
    life.left, lives = 5, 0
    while True:
        site_client = alone.site_client(often=SaveEvery(epochs=1))
        life.left = 5
        try:
            reply = alone.trained(site_client, order)
            break
        except Killed:
            lives += 1
        finally:
            life.left = -1
    assert lives >= 2
    assert same(expected.up["params"], reply.up["params"])
    assert len(audit.read(alone.folder / "r1" / PRIVACY_LOG)[0]) == 2  # it was counted once


def test_a_site_s_audit_trains_its_noisy_rounds_again(party: Private) -> None:
    party.run(METHODS["pfedsd"](), audit=True, **LOCAL)
    own = SiteData(party.federation.clients[0], 4)
    (folder,) = (party.folder / "a").glob("*")
    assert audit.of_site(folder, own, secret=party.secrets["a"]) == []
    assert audit.of_hub(party.folder / "run") == []
    (wrong,) = audit.of_site(folder, own, secret=TWO)
    assert "reply is not what" in wrong


# ---- the hub ---------------------------------------------------------------------------------------------------------
def test_a_hub_draws_cohorts_and_noise_from_its_secret(federation: Federation, party: Private) -> None:
    method = METHODS["fedavg"](mean="uniform")
    run = party.run(method, rounds=8, audit=True, **CENTRAL)
    simulated = local(federation, method, rounds=8, **CENTRAL)
    for a, b in zip(simulated.history, run.history, strict=True):
        assert (a["epsilon"], a["spent"]) == (b["epsilon"], b["spent"])
    assert [r["participants"] for r in run.history] != [r["participants"] for r in simulated.history]
    about = (party.folder / "run" / hubs.DEPLOYMENT).read_text()
    assert '"secret"' in about
    texts = [file.read_bytes() for file in (party.folder / "run").rglob("*") if file.is_file()]
    assert not any(
        party.secrets["hub"].key in text or party.secrets["hub"].key.hex().encode() in text for text in texts
    )
    assert audit.of_hub(party.folder / "run", party.secrets["hub"]) == []
    assert "secret is not that of the run" in audit.of_hub(party.folder / "run", TWO)[0]
    assert "secret is not that of the run" in audit.of_hub(party.folder / "run")[0]
    with pytest.raises(InputError, match="secret = another"):
        hubs.run(party.hub_server, Experiment.from_toml(party.folder / "run" / "experiment.toml"), NAMES, party.folder / "run",
                 rounds=9, secret=TWO)  # fmt: skip
    with pytest.raises(InputError, match="a hub without a secret"):
        hubs.run(party.hub_server, Experiment(method=method, **{**HELD, **CENTRAL}), NAMES, party.folder / "none")


def test_a_hub_that_is_killed_gives_no_second_mean_of_a_round(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs.secrets, "token_hex", lambda size: "b" * 16)
    method, settings = METHODS["fedavg"](mean="uniform"), {**CENTRAL, "participation": 1.0, "sampler": "uniform"}
    calm = Private(federation, tmp_path / "calm")
    undisturbed = calm.run(method, **settings)
    calm.stop()
    party = Private(federation, tmp_path / "killed")
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "score", 2, "b"  # the second round's mean is with the sites
    with pytest.raises(TrainingError, match="killed"):
        party.run(method, **settings)
    party.hub_server = HubServer(hold=0.2)
    run = party.run(method, **settings)
    merged = dict(tree.leaves(run.server))
    assert all(torch.equal(merged[entry], leaf) for entry, leaf in tree.leaves(undisturbed.server))
    # the same, and a site that refuses when the round is done again
    party.hub_server = Dying(hold=0.2)
    party.hub_server.when = "score", 2, "b"
    monkeypatch.setattr(hubs.secrets, "token_hex", lambda size: "c" * 16)
    with pytest.raises(TrainingError, match="killed"):
        party.run(method, "other", **settings)
    party.stop("a")
    monkeypatch.setattr(OneAtATime, "_carry_out", refusing(OneAtATime._carry_out))
    party.hub_server = HubServer(hold=0.2)
    party.start("a")
    with pytest.raises(TrainingError, match="round 2: its noisy mean was given away"):
        party.run(method, "other", **settings)
    party.stop()


def refusing(plain: Any) -> Any:
    """Have client 0 refuse to train."""

    def carry_out(self: Any, order: Order) -> bytes:
        if order.kind == "train" and order.client == 0:
            return wire.encode(Reply("train", order.round, 0, refusal="battery at 5%", order=order.id))
        return bytes(plain(self, order))

    return carry_out


def test_the_noise_of_a_merge_is_that_of_all_it_follows_from(tmp_path: Path) -> None:
    books = HubPrivacyLog(tmp_path, ONE, "r")
    start = {"w": torch.zeros(2000, dtype=torch.float64)}

    def mean(round: int, trees: list[Any]) -> torch.Tensor:
        noisy = NoisyMean(1.0, 2.0, 4, ("w",), 0, lambda inputs: books.release(round, inputs))
        value: torch.Tensor = noisy(trees, [1.0] * len(trees), start)["w"]
        return value

    zeros = [start, start]
    first = mean(1, zeros) * 4 / 2
    assert abs(float(first.std()) - 1) < 4 / math.sqrt(4000)
    assert torch.equal(mean(1, zeros) * 4 / 2, first)  # the same again
    with pytest.raises(TrainingError, match="given away"):
        mean(1, [start])
    assert abs(float((mean(2, zeros) * 4 / 2 * first).mean())) < 4 / math.sqrt(2000)
    books = HubPrivacyLog(tmp_path, ONE, "r", begun=True)  # another process
    assert torch.equal(mean(1, zeros) * 4 / 2, first)
    with pytest.raises(TrainingError, match="given away"):
        mean(2, [start])
    with pytest.raises(InputError, match="ε is not known"):
        HubPrivacyLog(tmp_path / "gone", ONE, "r", begun=True)


# ---- files and refusals ----------------------------------------------------------------------------------------------
def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    made = secret_in(tmp_path / "site")
    file = tmp_path / "site" / privacy_log.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret_in(tmp_path / "site") == made
    assert secret_in(tmp_path / "other") != made
    file.write_bytes(b"short")
    with pytest.raises(InputError, match="32 bytes"):
        secret_in(tmp_path / "site")


def test_what_a_deployment_cannot_protect_is_refused(party: Private) -> None:
    def made(method: str, **changed: Any) -> Experiment:
        return Experiment(method=METHODS[method](), **{**HELD, **changed})

    with pytest.raises(InputError, match="fine_tune"):
        hubs.check(made("pfedsd", **{**LOCAL, "fine_tune": 2}))
    with pytest.raises(InputError, match="round_deadline"):
        hubs.check_deadline(made("fedavg", **CENTRAL), "auto")
    with pytest.raises(InputError, match="round_deadline"):
        hubs.run(party.hub_server, made("fedavg", **CENTRAL), NAMES, party.folder / "x", deadline=3.0)
    assert not party.hub_server.wait_for(NAMES, 20)
    with pytest.raises(InputError, match="personal model is what DP-SGD trains"):
        hubs.run(party.hub_server, made("ditto", **LOCAL), NAMES, party.folder / "y", secret=ONE)
    assert jobs.hubs is hubs
