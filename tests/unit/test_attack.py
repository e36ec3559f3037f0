"""Simulated attackers: what they upload against the formulas, who they are, and that nothing else depends on them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.protection import Robustness
from fedstill.core.tree import Tree
from fedstill.data.poison import poisoned, stamped, trigger_value
from fedstill.server.attack import Attack, attacking, z_max
from fedstill.server.trust import root_of
from fedstill.transport.messages import Reply

from ..problems import SETTINGS, WIRED, Tampered, cut_and_resumed, identical, make, ragged, rows, run, states

FORGING = ("sign-flip", "gaussian", "alie", "inner-product")
NAMES = ("w", "b")
SIZES = ((13, 5), (7, 3), (6, 2), (10, 4), (5, 2), (8, 2))


def reply(client: int, seed: int) -> Reply:
    """An upload of a model with BatchNorm's statistics, and a count of labels beside it."""
    g = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(3, 2, generator=g).double(), "b": torch.randn(2, generator=g).double()}
    rest = {"mean": torch.randn(2, generator=g).double(), "n": torch.tensor(seed)}
    return Reply(
        "train", 4, client, {"params": {**params, **rest}, "labels": torch.ones(3)}, {"loss": 1.0, "steps": 2.0}
    )


def start() -> Tree:
    return {
        "params": {
            "w": torch.full((3, 2), 0.5).double(),
            "b": torch.full((2,), -1.0).double(),
            "mean": torch.zeros(2).double(),
            "n": torch.tensor(0),
        },
        "labels": torch.zeros(3),
    }


def forged(
    kind: str, strength: float = 0.0, bad: tuple[int, ...] = (1, 4), n: int = 7
) -> tuple[list[Reply], list[Reply]]:
    replies = [reply(k, k + 10) for k in range(n)]
    attack = Attack.of(Robustness(attack=kind, attack_strength=strength, attackers=2), 3, range(n))
    assert attack is not None
    attack = dataclasses.replace(attack, clients=frozenset(bad))
    return replies, attack.forge(replies, NAMES, lambda _: start())


# ---- formulas ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strength", [0.0, 2.5])
@pytest.mark.parametrize("kind", FORGING)
def test_what_is_forged_is_the_formula(kind: str, strength: float) -> None:
    before, after = forged(kind, strength)
    for old, new in zip(before, after, strict=True):
        if old.client not in (1, 4):
            assert new is old
            continue
        assert identical(
            {"": {k: v for k, v in old.up["params"].items() if k not in NAMES}},
            {"": {k: v for k, v in new.up["params"].items() if k not in NAMES}},
        )
        assert torch.equal(old.up["labels"], new.up["labels"])
        assert (new.report, new.client, new.round) == (old.report, old.client, old.round)
        for name in NAMES:
            u, w, got = (up["params"][name].numpy() for up in (old.up, start(), new.up))
            honest = np.array([r.up["params"][name].numpy() for r in before if r.client not in (1, 4)])
            mu, sigma = honest.mean(0), np.sqrt(((honest - honest.mean(0)) ** 2).mean(0))
            if kind == "sign-flip":
                assert np.abs(got - (w - (strength or 5) * (u - w))).max() <= 1e-12
            elif kind == "inner-product":
                assert np.abs(got - (w - (strength or 5) * (mu - w))).max() <= 1e-12
            elif (
                kind == "alie"
            ):  # seven uploads of which two are forged: ⌊7/2 + 1⌋ − 2 = 2 honest ones are needed, of five
                z = strength or NormalDist().inv_cdf((7 - 2 - 2) / (7 - 2))
                assert np.abs(got - (mu - z * sigma)).max() <= 1e-12
            else:
                assert np.abs(got - w).max() <= 6 * (strength or 10)
                assert np.abs(got - w).min() > 0


def test_gaussian_noise_is_standard_normal_and_drawn_anew_for_each_client_and_round() -> None:
    zeros = {"params": {"w": torch.zeros(100, 200)}}
    attack = Attack("gaussian", frozenset({0, 1}), 3.0, 7)
    replies = [Reply("train", t, k, zeros) for t, k in ((1, 0), (1, 1), (2, 0))]
    ups = [r.up["params"]["w"] for r in attack.forge(replies, ("w",), lambda _: zeros)]
    for noise in ups:
        assert abs(float(noise.mean())) < 0.1
        assert abs(float(noise.std()) - 3) < 0.05
        inside = float((noise.abs() < 3).double().mean())
        assert abs(inside - math.erf(1 / math.sqrt(2))) < 0.01
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([ups[a].flatten(), ups[b].flatten()]))[0, 1])) < 0.05
    again = attack.forge(replies, ("w",), lambda _: zeros)
    assert all(torch.equal(r.up["params"]["w"], noise) for r, noise in zip(again, ups, strict=True))


def test_without_an_honest_upload_the_omniscient_send_what_they_trained() -> None:
    for kind in ("alie", "inner-product"):
        before, after = forged(kind, bad=(0, 1, 2), n=3)
        for a, b in zip(before, after, strict=True):
            assert identical({"": tree.flatten(a.up)}, {"": tree.flatten(b.up)})


def test_an_omniscient_attacker_leaves_broken_uploads_out() -> None:
    """An honest client whose upload is not finite, or of another shape, does not count."""
    replies = [reply(k, k + 10) for k in range(5)]
    broken = tree.map(lambda t: t * math.nan if t.is_floating_point() else t, replies[2].up)
    short = {**replies[3].up, "params": {**replies[3].up["params"], "w": torch.zeros(1, 2).double()}}
    replies[2], replies[3] = dataclasses.replace(replies[2], up=broken), dataclasses.replace(replies[3], up=short)
    (new,) = [
        r
        for r in Attack("inner-product", frozenset({0}), 1.0, 0).forge(replies, NAMES, lambda _: start())
        if r.client == 0
    ]
    mu = (replies[1].up["params"]["w"] + replies[4].up["params"]["w"]) / 2
    assert torch.allclose(new.up["params"]["w"], 2 * start()["params"]["w"] - mu, atol=1e-14)


def test_z_max_is_that_of_the_paper() -> None:
    """Baruch et al., section 3.2: n = 50, m = 24: s = 26 − 24 = 2, z_max with Φ(z) = 24/26."""
    assert NormalDist().cdf(z_max(50, 24)) == pytest.approx(24 / 26)
    assert z_max(3, 1) == 0
    assert NormalDist().cdf(z_max(4, 3)) == pytest.approx(0.99)


# ---- who attacks -----------------------------------------------------------------------------------------------------------
def test_who_attacks_depends_on_the_seed_alone() -> None:
    def drawn(seed: int, attackers: float = 0.25) -> frozenset[int]:
        attack = Attack.of(Robustness(attack="alie", attackers=attackers), seed, range(100, 140))
        assert attack is not None
        return attack.clients

    assert drawn(1) == drawn(1)
    assert len(drawn(1)) == 10
    assert len(drawn(1, 3)) == 3
    assert drawn(1, 3) <= drawn(1)  # more attackers: the same ones and others
    assert drawn(1) <= set(range(100, 140))
    times = np.zeros(40)
    for seed in range(400):
        times[[k - 100 for k in drawn(seed)]] += 1
    assert times.min() > 60  # 100 expected, with a standard deviation of 9
    assert times.max() < 140
    assert Attack.of(Robustness(), 1, range(5)) is None
    assert attacking(0.2, 6) == 1


# ---- poisoned data -----------------------------------------------------------------------------------------------------------
def test_flipped_labels() -> None:
    data = ragged(SIZES)
    bad = poisoned(data, "label-flip", {0, 3}, 1.0, 5)
    for k, (a, b) in enumerate(zip(data.clients, bad.clients, strict=True)):
        assert torch.equal(a.x_train, b.x_train)
        assert torch.equal(a.y_test, b.y_test)
        assert torch.equal(b.y_train, 2 - a.y_train if k in (0, 3) else a.y_train)
    half = poisoned(data, "label-flip", {0}, 0.5, 5)
    kept = half.clients[0].y_train == data.clients[0].y_train
    assert (
        int((~kept).sum()) == int((data.clients[0].y_train[~kept] != 1).sum()) <= 7
    )  # ⌈13/2⌉; class 1 is its own mirror


def test_a_backdoor_sets_trigger_and_label_of_a_share() -> None:
    data = ragged(SIZES)
    bad = poisoned(data, "backdoor", {0}, 0.5, 5, target=2)
    a, b = data.clients[0], bad.clients[0]
    highest = max(float(c.x_train.max()) for c in data.clients)
    hit = (b.x_train[:, -1] == highest) & (b.y_train == 2)
    assert int(hit.sum()) >= 7
    assert torch.equal(b.x_train[:, :-1], a.x_train[:, :-1])
    assert torch.equal(b.x_train[~hit], a.x_train[~hit])
    assert torch.equal(a.x_test, b.x_test)
    assert all(torch.equal(x.x_train, y.x_train) for x, y in zip(data.clients[1:], bad.clients[1:], strict=True))
    with pytest.raises(fs.InputError, match="a class from 0 to 2"):
        poisoned(data, "backdoor", {0}, 0.5, 5, target=3)


def test_a_share_of_a_federation_is_poisoned_as_the_whole() -> None:
    """On a cluster every process has the samples of its own clients only."""
    data = ragged(SIZES)
    whole, share = (poisoned(one, "label-flip", {0, 3}, 0.5, 5) for one in (data, data.only([0, 1])))
    for k in (0, 1):
        assert torch.equal(whole.clients[k].y_train, share.clients[k].y_train)
    assert not torch.equal(whole.clients[0].y_train, data.clients[0].y_train)
    with pytest.raises(fs.InputError, match="its trigger depends on everybody's samples"):
        poisoned(data.only([0, 1]), "backdoor", {0}, 0.5, 5)
    with pytest.raises(fs.InputError, match="the server has no samples of its own"):
        root_of(data.only([0, 1]), 5, 0)


def test_the_trigger_of_images_is_a_square_in_the_last_corner() -> None:
    x = torch.zeros(2, 3, 16, 24)
    x[0, :, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    after = stamped(x, trigger_value([x]))
    for c in range(3):
        assert (after[:, c, -2:, -2:] == c + 1).all()
    after[:, :, -2:, -2:] = 0
    assert torch.equal(after, x)


# ---- runs --------------------------------------------------------------------------------------------------------------------
ATTACKS = (*FORGING, "label-flip", "backdoor")


def attacked(kind: str, method: fs.Method | None = None, **changes) -> fs.Run:
    given = {"participation": 1.0, "rounds": 2, "attack": kind, "attackers": 2, **changes}
    return run(method or fs.PFedSD(), "normed", ragged(SIZES), **given)


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_is_alike_in_both_engines(kind: str) -> None:
    one, stacked = (attacked(kind, engine=engine) for engine in ("one", "stacked"))
    clean = attacked("none")
    for a, b in zip(states(one).values(), states(stacked).values(), strict=True):
        assert max(float((a[name].double() - b[name].double()).abs().max()) for name in a) <= 1e-9
    assert not identical({"": one.generic()}, {"": clean.generic()})


@pytest.mark.parametrize("kind", ATTACKS)
def test_attackers_are_named_and_not_scored(kind: str) -> None:
    end = attacked(kind)
    bad = end.attackers
    assert len(bad) == 2
    honest = [k for k in range(6) if k not in bad]
    assert end.clients == honest
    for record in end.history:
        assert record["attackers"] == sorted(bad)
        assert sorted(map(int, record["personal_clients"])) == honest
        assert sorted(map(int, record["generic_clients"])) == honest
        assert set(record["participants"]) == set(range(6))
    clean = attacked("none")
    assert clean.attackers == ()
    assert all("attackers" not in record for record in clean.history)


def test_an_attack_is_the_same_with_any_number_of_workers() -> None:
    one, three = (attacked("gaussian", trainer={}, workers=workers) for workers in (1, 3))
    assert identical(states(one), states(three))


@pytest.mark.parametrize("kind", ["gaussian", "alie", "backdoor"])
def test_an_attack_is_the_same_with_messages_as_bytes(kind: str) -> None:
    given = {**SETTINGS, "participation": 1.0, "rounds": 2, "engine": "one", "attack": kind, "attackers": 2}
    local, wired = (
        fs.simulate(fs.PFedSD(), model=make("normed"), data=ragged(SIZES), transport=transport, **given)
        for transport in (None, WIRED)
    )
    assert identical(states(local), states(wired))


@pytest.mark.parametrize("rule", ["median", "fltrust"])
def test_two_seeds_side_by_side_have_attackers_of_their_own(rule: str) -> None:
    given = dict(
        clients=6, partition="dirichlet:100", rounds=2, epochs=1, attack="gaussian", attackers=2, average=rule,
        dtype="float64", engine="stacked", device="cpu", attack_strength=0.1, root_samples=20,
    )  # fmt: skip
    both = [fs.Experiment(method=fs.FedAvg(), seed=seed, **given) for seed in (1, 2)]
    together, alone = fs.run_together(both), [fs.run(experiment) for experiment in both]
    assert together[0].attackers != together[1].attackers
    for one, other in zip(together, alone, strict=True):
        assert one.attackers == other.attackers
        for name, value in one.generic().items():
            assert float((value - other.generic()[name]).abs().max()) <= 1e-9


@pytest.mark.parametrize("timing", [{"deadline": 0.5, "late": "fold"}, {"mode": "fedbuff", "buffer": 3}])
def test_attackers_forge_in_simulated_time(timing: dict) -> None:
    """Also uploads that come rounds late, or from an older model."""
    given = {"attack_strength": 1.0, "profile": "lognormal:2", "rounds": 4, **timing}
    end = attacked("sign-flip", fs.FedAvg(), **given)
    seen = {k for record in end.history for k in record["attackers"]}
    assert seen
    assert seen <= set(end.attackers)
    assert tree.finite(end.server)


def test_a_run_forges_what_the_formula_says_and_nothing_else() -> None:
    """As if the attackers' replies had been changed on their way: 2w − u in place of u, with the w that all were sent."""
    start_from = make("normed").state_dict()
    trainable = {name for name, _ in make("normed").named_parameters()}
    bad = attacked("sign-flip", fs.FedAvg(), rounds=1, attack_strength=1.0)

    def flipped(sent: Reply) -> Reply:
        if sent.kind != "train" or sent.client not in bad.attackers:
            return sent
        params = {n: start_from[n] - (u - start_from[n]) if n in trainable else u for n, u in sent.up["params"].items()}
        return dataclasses.replace(sent, up={"params": params})

    given = {**SETTINGS, "participation": 1.0, "rounds": 1, "engine": "one"}
    clean = fs.simulate(fs.FedAvg(), model=make("normed"), data=ragged(SIZES), transport=Tampered(flipped), **given)
    assert identical({"": clean.generic()}, {"": bad.generic()})


@pytest.mark.parametrize("kind", ["gaussian", "alie", "backdoor"])
def test_an_attacked_run_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.PFedSD(), clients=6, partition="dirichlet:100", rounds=4, epochs=1, attack=kind, attackers=2,
        average="trimmed-mean", suspected=2, checkpoint_every=1, device="cpu",
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=3)
    assert identical(states(whole), states(resumed))
    assert rows(whole.history) == rows(resumed.history)
    assert whole.after == resumed.after
    assert whole.attackers == resumed.attackers


@pytest.mark.parametrize(
    "method", ["scaffold", "feddyn", "l2gd", "fedrep", "cd2-pfed", "pfedkd-wcl", "fedgen", "fedfomo", "local"]
)
@pytest.mark.parametrize("kind", ["sign-flip", "alie"])
def test_methods_of_other_uploads_can_be_attacked(method: str, kind: str) -> None:
    end = run(
        fs.METHODS[method](),
        "plain",
        ragged(SIZES),
        rounds=2,
        epochs=1,
        participation=1.0,
        attack=kind,
        attack_strength=0.5,
    )
    assert tree.finite(end.server)
    assert all("rejected" not in record for record in end.history)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(fs.InputError, match="makes 1 to 5 of the 6 clients attackers"):
        attacked("alie", attackers=6)
    with pytest.raises(fs.InputError, match="makes 1 to 5"):
        attacked("alie", attackers=0.01)
    with pytest.raises(fs.InputError, match="a share below 1, or a whole number"):
        attacked("alie", attackers=1.5)
    with pytest.raises(fs.InputError, match="at most 1"):
        attacked("label-flip", attack_strength=2)
    with pytest.raises(fs.InputError, match="no other uploads of its round"):
        attacked("alie", fs.FedAvg(), mode="fedbuff", profile="uniform")


# ---- the backdoor's success -----------------------------------------------------------------------------------------------
def test_the_success_rate_by_hand() -> None:
    """Honest clients' tests of other classes, with the trigger, each model asked by itself."""
    end = attacked("backdoor", fs.PFedSD(), backdoor_target=1, attack_strength=1.0)
    data = poisoned(ragged(SIZES), "backdoor", set(end.attackers), 1.0, SETTINGS["seed"], 1)
    highest = max(float(c.x_train.max()) for c in data.clients)
    expected: dict[str, list[float]] = {"backdoor": [], "backdoor_generic": []}
    for k in end.clients:
        others = [i for i, y in enumerate(data.clients[k].y_test) if y != 1]
        if not others:
            continue
        for name, params in (("backdoor", end.personal(k)), ("backdoor_generic", end.generic())):
            model = make("normed").eval()
            model.load_state_dict(params)
            hits = 0
            for i in others:
                x = data.clients[k].x_test[i].clone()
                x[-1] = highest
                hits += int(model(x.unsqueeze(0)).argmax() == 1)
            expected[name].append(hits / len(others))
    assert end.after == {name: pytest.approx(np.mean(values)) for name, values in expected.items()}
    assert end.backdoor(1) == end.after
    assert attacked("sign-flip").after == {}
