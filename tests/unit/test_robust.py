"""Robust rules against oracles that are written differently, in numpy and scipy; breakdown by algebra; what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill as fs
from fedstill.core import plan, tree
from fedstill.core.plan import JointPlan, Plan
from fedstill.core.protection import Robustness
from fedstill.core.tree import Tree
from fedstill.engine.bench import Work
from fedstill.run.experiment import Training
from fedstill.run.prepare import prepare
from fedstill.server import robust
from fedstill.server.average import rule_of
from fedstill.server.trust import root_of
from fedstill.transport.messages import Reply

from ..problems import SETTINGS, Tampered, cut_and_resumed, identical, make, ragged, run, states
from ..robust_oracles import (
    clipped_by_formula,
    counts,
    krum_by_force,
    matrix,
    middle_by_scipy,
    tied,
    trimmed_by_loops,
    trusted_by_formula,
    uploads,
    vector,
)

CLOSE = 1e-6


NUMBERS = [(5, 0), (6, 1), (7, 2), (8, 3), (11, 4)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "seed"), NUMBERS)
def test_the_coordinate_rules_equal_sorting_loops(n: int, seed: int, ties: bool) -> None:
    trees = tied(uploads(n, seed)) if ties else uploads(n, seed)
    x, weights = matrix(trees), [float(k + 1) for k in range(n)]
    middle = robust.median(trees, weights)
    assert np.abs(vector(middle) - np.median(x, axis=0)).max() <= CLOSE
    assert int(middle["n"]) == round(float(np.median(counts(trees))))
    for f in range((n - 1) // 2 + 1):
        trimmed = robust.trimmed_mean(trees, weights, suspected=f)
        assert np.abs(vector(trimmed) - trimmed_by_loops(x, f)).max() <= CLOSE
        assert int(trimmed["n"]) == round(float(trimmed_by_loops(np.array(counts(trees))[:, None].astype(float), f)[0]))
        assert trimmed["n"].dtype == torch.int64
    share = robust.trimmed_mean(trees, weights, suspected=0.2)
    assert np.abs(vector(share) - trimmed_by_loops(x, math.ceil(n / 5))).max() <= CLOSE


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "seed"), NUMBERS)
def test_krum_equals_a_search_of_all_neighbours(n: int, seed: int, ties: bool) -> None:
    trees = tied(uploads(n, seed)) if ties else uploads(n, seed)
    x, weights = matrix(trees), [float(k % 3 + 1) for k in range(n)]
    for f in range((n - 3) // 2 + 1):
        sums = krum_by_force(x, f)
        assert np.abs(robust.krum_sums(trees, f).numpy() - sums).max() <= CLOSE
        best = min(range(n), key=lambda i: (round(sums[i], 9), i))
        chosen = robust.krum(trees, weights, suspected=f)
        assert np.array_equal(vector(chosen), x[best])
        assert int(chosen["n"]) == counts(trees)[best]
        several = sorted(range(n), key=lambda i: (round(sums[i], 9), i))[: n - f]
        assert np.abs(vector(robust.multi_krum(trees, weights, suspected=f)) - x[several].mean(0)).max() <= CLOSE


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("n", "seed"), [(1, 5), (2, 6), (3, 7), *NUMBERS])
def test_the_geometric_median_equals_a_search_by_gradients(n: int, seed: int, uneven: bool, ties: bool) -> None:
    trees = tied(uploads(n, seed)) if ties else uploads(n, seed)
    weights = [float(1 + (k % 4) * uneven) for k in range(n)]
    z, x, p = vector(robust.geometric_median(trees, weights)), matrix(trees), np.array(weights) / sum(weights)
    expected = middle_by_scipy(x, p)
    price = [float((p * np.linalg.norm(x - at, axis=1)).sum()) for at in (z, expected)]
    assert price[0] <= price[1] + 1e-9  # two uploads: every point between them is as good
    if n > 2:
        assert np.abs(z - expected).max() <= CLOSE


def test_an_upload_with_half_the_weight_is_the_geometric_median() -> None:
    trees = uploads(5, 9)
    chosen = robust.geometric_median(trees, [1.0, 1.0, 4.0, 1.0, 1.0])
    assert np.abs(vector(chosen) - matrix(trees)[2]).max() <= CLOSE


def test_a_corner_of_120_degrees_is_the_geometric_median() -> None:
    """Fermat's point of a triangle; the iteration alone comes near it by 1/steps only."""
    corner = [{"a": torch.zeros(2).double()}]
    sides = [{"a": torch.tensor([math.cos(t), math.sin(t)]).double()} for t in (0.0, 2 * math.pi / 3)]
    assert float(robust.geometric_median([*sides, *corner], [1.0] * 3)["a"].norm()) <= CLOSE
    near = [{"a": torch.tensor([math.cos(t), math.sin(t)]).double()} for t in (0.0, 2.0)]  # 114.6°: inside the triangle
    z = robust.geometric_median([*near, *corner], [1.0] * 3)["a"].numpy()
    to = [one["a"].numpy() - z for one in [*near, *corner]]
    assert np.abs(sum(way / np.linalg.norm(way) for way in to)).max() <= CLOSE  # three angles of 120°


@pytest.mark.parametrize("limit", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("n", "seed"), NUMBERS)
def test_norm_clip_equals_the_formula(n: int, seed: int, limit: float) -> None:
    trees, around = uploads(n, seed), {**uploads(1, 99)[0], "more": torch.ones(2)}
    x, w = matrix(trees), vector(around)
    p = np.arange(1.0, n + 1) / np.arange(1.0, n + 1).sum()
    expected = clipped_by_formula(x, p, w, limit)
    clipped = robust.norm_clip(trees, list(p), around, limit=limit)
    assert np.abs(vector(clipped) - expected).max() <= CLOSE
    changes = [tree.sub(one, {name: around[name] for name in one}) for one in trees]
    of_changes = robust.norm_clip([{k: v for k, v in c.items() if k != "n"} for c in changes], list(p), limit=limit)
    assert np.abs(vector(of_changes) + w - expected).max() <= CLOSE


def test_norm_clip_of_short_changes_is_the_mean_to_the_bit() -> None:
    trees, around = uploads(4), tree.clone(uploads(1, 99)[0])
    weights = [1.0, 2.0, 3.0, 4.0]
    clipped = robust.norm_clip(trees, weights, around, limit=1e9)
    assert identical({"": tree.flatten(clipped)}, {"": tree.flatten(tree.mean(trees, weights))})


@pytest.mark.parametrize(("n", "seed"), NUMBERS)
def test_fltrust_equals_the_formula(n: int, seed: int) -> None:
    """Of these uploads one points away from the server's training, and does not count."""
    trees, (around, trained) = uploads(n, seed, 4.0), uploads(2, 99)
    trees[0] = tree.sub(around, tree.sub(trained, around))
    around, trained = ({**one, "deep": {**one["deep"], "more": torch.ones(2)}} for one in (around, trained))
    x, w, g = matrix(trees), vector(around), vector(trained) - vector(around)
    assert 0 < int(((x - w) @ g > 0).sum()) < n
    expected = trusted_by_formula(x, w, g)
    got = robust.fltrust(trees, [1.0] * n, around, trained=trained)
    assert np.abs(vector(got) - expected).max() <= CLOSE
    assert "more" not in got["deep"]


def test_fltrust_keeps_the_model_where_nobody_is_trusted() -> None:
    around, trained = uploads(2, 99)
    away = [tree.sub(around, tree.sub(trained, around)), around]  # the other way, and no change at all
    assert np.array_equal(vector(robust.fltrust(away, [1.0, 1.0], around, trained=trained)), vector(around))


# ---- breakdown, by algebra ---------------------------------------------------------------------------------------------
FAR = 1e12


@pytest.mark.parametrize("n", [5, 8, 11])
def test_forged_uploads_cannot_carry_a_rule_out_of_the_honest_range(n: int) -> None:
    """Each coordinate of the median (f < n/2) and of the trimmed mean (f trimmed) lies between two honest values; Krum's choice
    is honest where the honest are near one another."""
    for f in range(1, (n - 1) // 2 + 1):
        honest = uploads(n - f, n)
        x = matrix(honest)
        forged = [
            tree.map(lambda t: torch.full_like(t, FAR if t.is_floating_point() else 10**6), one) for one in uploads(f)
        ]
        for rule in (robust.median, robust.trimmed_mean, robust.krum, robust.multi_krum):
            options = {} if rule is robust.median else {"suspected": f}
            if rule in (robust.krum, robust.multi_krum) and f > robust.most_krum(n):
                continue
            z = vector(rule([*forged, *honest], [FAR] * f + [1.0] * (n - f), **options))
            assert (z >= x.min(0) - 1e-9).all(), rule
            assert (z <= x.max(0) + 1e-9).all(), rule
        z = vector(robust.geometric_median([*forged, *honest], [1.0] * n))
        # Σ over the honest of ‖z − x‖ is at most 2(n−f)/(n−2f) times the largest distance within them
        reach = max(np.linalg.norm(a - b) for a in x for b in x)
        assert min(np.linalg.norm(z - row) for row in x) <= 2 * (n - f) / (n - 2 * f) * reach
    assert np.abs(vector(tree.mean([*forged, *honest], [1.0] * n))).max() > FAR / n


def test_a_rule_with_too_few_uploads_lowers_f() -> None:
    for n in (1, 2, 3, 4):
        trees = uploads(n)
        for name in robust.RULES.keys() - {"fltrust"}:
            options = {"suspected": 3} if name in ("trimmed-mean", "krum", "multi-krum") else {}
            z = vector(robust.RULES[name](trees, [1.0] * n, trees[0], **options))
            assert (z >= matrix(trees).min(0) - 1e-12).all()
            assert (z <= matrix(trees).max(0) + 1e-12).all()


# ---- settings ----------------------------------------------------------------------------------------------------------
def test_a_setting_names_the_rule() -> None:
    trees, around = uploads(7), uploads(1, 99)[0]
    for name in robust.RULES.keys() - {"fltrust"}:
        rule = rule_of(Robustness(average=name, **({"clip_to": 0.5} if name == "norm-clip" else {})))
        assert tree.finite(rule(trees, [1.0] * 7, around))
    three = rule_of(Robustness(average="trimmed-mean", suspected=3))(trees, [1.0] * 7)
    assert np.abs(vector(three) - np.median(matrix(trees), 0)).max() <= CLOSE


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_run_merges_by_the_rule(engine: str) -> None:
    mean, middle = (
        run(fs.FedAvg(), "normed", participation=1.0, average=rule, engine=engine) for rule in ("mean", "median")
    )
    assert not identical({"": mean.server["params"]}, {"": middle.server["params"]})


ASYNC = {"mode": "fedasync", "profile": "uniform"}


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (fs.Local(), {"average": "median"}, "its server averages nothing"),
        (fs.FedPAC(), {"average": "median"}, "weights that a rule would not keep"),
        (fs.FedAvg(), {"average": "krum"}, "needs 2f \\+ 3 uploads"),
        (fs.FedAvg(), {"average": "trimmed-mean", "suspected": 2}, "below half of the 3 uploads"),
        (fs.FedAvg(), {"average": "median", "participation": 0.3}, "'mean' or 'norm-clip'"),
        (fs.FedAvg(), {"average": "median", "mode": "fedasync", "profile": "uniform"}, "1 upload"),
        (
            fs.FedAvg(),
            {"average": "norm-clip", "participation": 0.1},
            "clip_to = 0.0: should be above 0 with norm-clip",
        ),
        (fs.FedAvg(), {**ASYNC, "average": "norm-clip"}, "clip_to = 0.0: should be above 0 with norm-clip"),
        (
            fs.FedAvg(),
            {**ASYNC, "average": "fltrust", "root_samples": 20, "staleness": "constant"},
            "and mixing 1: it makes",
        ),
        (fs.FedAvg(), {**ASYNC, "average": "fltrust", "root_samples": 20, "mixing": 1.0}, "and mixing 1: it makes"),
        (fs.SCAFFOLD(), {"average": "fltrust", "root_samples": 20}, "gives no change of what it averages"),
        (fs.FedDyn(), {"average": "fltrust", "root_samples": 20}, "gives no change of what it averages"),
        (fs.CD2PFed(), {"average": "fltrust", "root_samples": 20}, "gives no change of what it averages"),
        (fs.FedAvg(), {"average": "fltrust", "root_samples": 37}, "at most 36, which all clients have for training"),
        (fs.FedAvg(), {"suspected": 0.5}, "a share below 0.5"),
        (fs.FedAvg(), {"average": "best"}, "one of: mean, median"),
    ],
)
def test_what_makes_no_sense_is_refused(method: fs.Method, changes: dict, words: str) -> None:
    with pytest.raises(fs.InputError, match=words):
        run(method, rounds=1, **changes)


@pytest.mark.parametrize("name", [name for name in fs.METHODS if name not in ("local", "fedpac")])
def test_every_method_that_averages_takes_a_rule(name: str) -> None:
    end = run(fs.METHODS[name](), rounds=1, epochs=1, participation=1.0, average="geometric-median")
    assert tree.finite(end.server)


# ---- FLTrust's own training ----------------------------------------------------------------------------------------------
def test_the_servers_samples_come_from_the_common_test_set_which_is_scored_without_them() -> None:
    g = torch.Generator().manual_seed(1)
    common = (torch.randn(40, 4, generator=g).double(), torch.arange(40) % 3)
    data = dataclasses.replace(ragged(), test=common)
    (x, y), left = root_of(data, 10, 4)
    assert left.test is not None
    whole = sorted(map(tuple, torch.cat([x, left.test[0]]).tolist()))
    assert whole == sorted(map(tuple, common[0].tolist()))
    assert (len(y), len(left.test[1])) == (10, 30)
    assert all(int(y[i]) == int(common[1][(common[0] == x[i]).all(1)]) for i in range(10))
    assert not torch.equal(root_of(data, 10, 5)[0][0], x)
    (x, y), same = root_of(ragged(), 10, 4)
    assert same.test is None
    union = torch.cat([client.x_train for client in ragged().clients])
    assert all(bool((union == row).all(1).any()) for row in x)
    with pytest.raises(fs.InputError, match="at most 39, which the common test set leaves"):
        root_of(data, 40, 4)


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_run_trusts_what_points_where_the_servers_training_does(engine: str) -> None:
    """One round, recomputed from the uploads and from a federation whose only client has the server's samples."""
    seen: list[Tree] = []

    def noted(sent: Reply) -> Reply:
        if sent.kind == "train":
            seen.append(tree.clone(sent.up["params"]))
        return sent

    given = {**SETTINGS, "rounds": 1, "participation": 1.0, "engine": engine, "average": "fltrust", "root_samples": 20}
    end = fs.simulate(fs.FedAvg(), model=make("normed"), data=ragged(), transport=Tampered(noted), **given)
    (x, y), _ = root_of(ragged(), 20, SETTINGS["seed"])
    own = fs.Federation.from_arrays([(x, y, x, y)], classes=3)
    seed = plan.key(SETTINGS["seed"], plan.ROOT, 1)
    ready = prepare(fs.FedAvg(), make("normed"), own, None, Training(**{**SETTINGS, "rounds": 1, "participation": 1.0}))
    bench = dataclasses.replace(ready.trainer.bench, plan=JointPlan((Plan(seed, SETTINGS["batch_size"]),), 1))
    (done,) = ready.trainer.over(bench).train(1, [Work(0, {"params": tree.clone(ready.initial)})])
    expected = robust.fltrust(seen, [1.0] * len(seen), ready.initial, trained=done.up["params"])
    assert len(seen) == 5
    for name, value in end.generic().items():
        assert float((value.double() - expected[name].double()).abs().max()) <= 1e-9, name


def test_fltrust_resumes_to_the_bit(tmp_path: Path) -> None:
    experiment = fs.Experiment(
        method=fs.PFedSD(), clients=6, partition="dirichlet:100", rounds=4, epochs=1, attack="sign-flip", attackers=2,
        average="fltrust", checkpoint_every=1, device="cpu",
    )  # fmt: skip
    whole, resumed = cut_and_resumed(experiment, tmp_path, after=3)
    assert identical(states(whole), states(resumed))
