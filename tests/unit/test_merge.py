"""What the server makes of uploads that come rounds late or rebased, by calling the hooks; expected values are algebra."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedstill as fs
from fedstill.core import tree
from fedstill.core.task import Task
from fedstill.core.tree import Params, Tree
from fedstill.methods import METHODS
from fedstill.methods.partial import PartialFedAvg
from fedstill.methods.pfedsd import SelfDistillation
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, identical, make, needed, ragged, run, states


def bench_of(method: fs.Method, model: str = "plain", **changes):
    how = Training(**{**SETTINGS, **needed(method), **changes}, engine="one")
    return simulation.prepare(method, make(model), ragged(), None, how).trainer.bench


def shifted(params: Params, by: float) -> Params:
    """The weights moved by a number; whole numbers stay."""
    return {name: value + by if value.is_floating_point() else value for name, value in params.items()}


def trained(
    bench, method: fs.Method, client: int, round: int, down: Tree, memory: Tree, by: float
) -> tuple[Tree, Tree]:
    """(upload, memory) of a client whose local work moved the uploaded model by a number."""
    task = bench.home(round, client, round - 1)
    local = method.begin(task, down, memory)
    return method.finish(task, down, memory, {**local, "params": shifted(local["params"], by)})


def at(bench, round: int, **changes) -> Task:
    return dataclasses.replace(bench.task, round=round, **changes)


def all_equal(params: Params, value: float) -> bool:
    return all(torch.allclose(leaf, torch.full_like(leaf, value), atol=1e-13) for leaf in params.values())


# ---- FedDyn ------------------------------------------------------------------------------------------------------------
def test_feddyns_h_is_the_mean_of_all_g_also_with_a_late_upload() -> None:
    """Five clients, all weights 0. Round 1: client 0 moves by 1, and client 1 by 3, which is merged in round 2, beside client 2's
    move by −2 from θ_2. g_k = −α·move, so h = −α/5·(1), then −α/5·(1 + 3 − 2)."""
    alpha = 0.5
    method = fs.FedDyn(alpha=alpha)
    bench = bench_of(method)
    zero = tree.zeros(bench.task.net.initial())
    server, memory = method.init_server(bench.task, zero), method.init_client(bench.task, zero)
    g = {k: memory["g"] for k in range(5)}

    first = method.send(at(bench, 1), server, 0)
    ups = {}
    for k, by in ((0, 1.0), (1, 3.0)):
        ups[k], kept = trained(bench, method, k, 1, first, memory, by)
        g[k] = kept["g"]
    server = method.merge(at(bench, 1), server, [fs.Upload(ups[0], 13, 0, first)])
    assert all_equal(server["h"], -alpha / 5)
    assert all_equal(server["params"], 1 + 1 / 5)  # mean − h/α

    second = method.send(at(bench, 2), server, 2)
    ups[2], kept = trained(bench, method, 2, 2, second, memory, -2.0)
    g[2] = kept["g"]
    server = method.merge(at(bench, 2), server, [fs.Upload(ups[1], 7, 1, first), fs.Upload(ups[2], 1, 2, second)])
    assert all_equal(server["h"], -alpha / 5 * 2)
    for name, h in server["h"].items():
        assert torch.allclose(h, torch.stack([g[k][name] for k in range(5)]).mean(0), atol=1e-14)
    assert all_equal(server["params"], (3 + (1.2 - 2)) / 2 + 2 / 5)


# ---- pFedSD and FedGen: rebased uploads ----------------------------------------------------------------------------------
@pytest.mark.parametrize("regulariser", ["kl", "ewc"])
def test_stateless_pfedsd_keeps_what_the_client_trained(regulariser: str) -> None:
    """The mean takes the upload as it stands for the current model; v_k is the upload itself."""
    method = fs.PFedSD(stateless=True, regulariser=regulariser)
    bench = bench_of(method)
    server = method.init_server(bench.task, bench.task.net.initial())
    down = method.send(at(bench, 1), server, 3)
    assert float(down["past"]["known"]) == 0
    up, _ = trained(bench, method, 3, 1, down, {}, 1.0)
    rebased = shifted(bench.task.net.initial(), 0.25)
    server = method.merge(at(bench, 1), server, [fs.Upload(up, 10, 3, down, rebased)])
    down, other = (method.send(at(bench, 2), server, k) for k in (3, 4))
    task = bench.home(2, 3, 1)
    for name, initial in bench.task.net.initial().items():
        assert torch.equal(down["params"][name], initial + 0.25)
        assert torch.equal(method.personal(task, down, {})[name], initial + 1.0)
        assert torch.equal(method.personal(task, other, {})[name], initial + 0.25)  # never trained: the global model
    assert float(method.begin(task, down, {})["lam"]) == method.lam
    assert float(method.begin(task, other, {})["lam"]) == 0


def test_stateless_pfedsd_goes_by_the_servers_books() -> None:
    """A client that has trained, but whose replies the server dropped, has no past model: plain CE, and the global model."""
    method = fs.PFedSD(stateless=True)
    bench = bench_of(method)
    server = method.init_server(bench.task, bench.task.net.initial())
    down, task = method.send(at(bench, 3), server, 0), bench.home(3, 0, last=2)
    assert bool(task.seen)
    assert float(method.begin(task, down, {})["lam"]) == 0
    assert method.personal(task, down, {})["fc1.bias"].equal(server["params"]["fc1.bias"])


def test_fedgen_learns_from_the_heads_that_clients_trained() -> None:
    """A rebased upload changes the mean, and nothing of the generator."""
    method = fs.FedGen(generator_steps=3, generator_hidden=8, generator_noise=3)
    bench = bench_of(method)
    server = method.init_server(bench.task, bench.task.net.initial())
    down = method.send(at(bench, 1), server, 0)
    ups = [trained(bench, method, k, 1, down, {}, 0.1 * k)[0] for k in (0, 1)]
    plain = method.merge(at(bench, 1), server, [fs.Upload(up, 1, k, down) for k, up in enumerate(ups)])
    moved = [fs.Upload(up, 1, k, down, shifted(up["params"], 1.0)) for k, up in enumerate(ups)]
    rebased = method.merge(at(bench, 1), server, moved)
    for name, value in plain["generator"].items():
        assert torch.equal(value, rebased["generator"][name])
    assert torch.allclose(rebased["params"]["fc2.bias"], plain["params"]["fc2.bias"] + 1, atol=1e-14)


# ---- CD²-pFed: channels that have turned private ---------------------------------------------------------------------------
def test_cd2_merges_the_channels_that_are_still_shared() -> None:
    """p_t = t/4 of fc1's six channels: 1 private in round 1, 3 in round 2. An upload of each is merged in round 2."""
    method = fs.CD2PFed(p=1.0)
    bench = bench_of(method, rounds=4)
    zero = tree.zeros(bench.task.net.initial())
    server = method.init_server(bench.task, zero)
    ups = []
    for k, (t, by) in enumerate(((1, 2.0), (2, 4.0))):
        down, memory = method.send(at(bench, t), server, k), method.init_client(bench.task, zero)
        up, _ = trained(bench, method, k, t, down, memory, by)
        assert up["params"]["fc1.weight"].shape == (5 if t == 1 else 3, 4)
        ups.append(fs.Upload(up, 1 if t == 1 else 3, k, down))
    params = method.merge(at(bench, 2), server, ups)["params"]
    mean = (2 + 3 * 4) / 4
    assert params["fc1.weight"].tolist() == [[mean] * 4] * 3 + [[0.0] * 4] * 3
    assert params["fc1.bias"].tolist() == [mean] * 3 + [0.0] * 3
    assert params["fc2.weight"].tolist() == [[mean] * 3 + [0.0] * 3] * 3
    assert params["fc2.bias"].tolist() == [mean] * 3


def test_cd2_leaves_out_what_is_not_shared_any_more() -> None:
    """In the last round of p = 1 everything is private: an upload of round 1 changes nothing."""
    method = fs.CD2PFed(p=1.0)
    bench = bench_of(method, rounds=4)
    start = bench.task.net.initial()
    server = method.init_server(bench.task, start)
    down = method.send(at(bench, 1), server, 0)
    late, _ = trained(bench, method, 0, 1, down, method.init_client(bench.task, start), 1.0)
    now, _ = trained(bench, method, 1, 4, down, method.init_client(bench.task, start), 1.0)
    assert now["params"] == {}
    after = method.merge(at(bench, 4), server, [fs.Upload(late, 1, 0, down), fs.Upload(now, 1, 1, down)])
    assert all(torch.equal(after["params"][name], value) for name, value in start.items())


# ---- FedFomo: whom a late upload credits ---------------------------------------------------------------------------------
def test_fedfomo_credits_the_models_that_were_sent() -> None:
    """Client 0 was sent models 2 and 4 and weighed them 0.3 and 0.7; today it would be sent others."""
    method = fs.FedFomo(m=2, epsilon=0.0)
    bench = bench_of(method)
    start = bench.task.net.initial()
    liked = torch.tensor([0.0, 0.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    server = {"params": start, "models": {str(k): start for k in range(1, 5)}, "affinity": {"0": liked}}
    down = method.send(at(bench, 1), server, 0)
    assert down["who"].tolist() == [2, 4]
    today = {**server, "affinity": {"0": torch.tensor([0.0, 5.0, 0.0, 4.0, 0.0], dtype=torch.float64)}}
    assert method.send(at(bench, 3), today, 0)["who"].tolist() == [1, 3]
    up = {"params": shifted(start, 1.0), "weights": torch.tensor([0.3, 0.7], dtype=torch.float64)}
    after = method.merge(at(bench, 3), today, [fs.Upload(up, 1, 0, down, shifted(start, 0.5))])
    assert after["affinity"]["0"].tolist() == pytest.approx([0.0, 5.0, 0.3, 4.0, 0.7])
    assert torch.equal(after["models"]["0"]["fc1.bias"], start["fc1.bias"] + 1.0)  # as it was trained


def test_fedfomo_knows_empty_places() -> None:
    method = fs.FedFomo(m=3)
    bench = bench_of(method)
    start = bench.task.net.initial()
    server = {**method.init_server(bench.task, start), "models": {"4": start}}
    down = method.send(at(bench, 2), server, 0)
    assert down["who"].tolist() == [4, -1, -1]
    assert len(down["models"]) == 3
    up = {"params": start, "weights": torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)}
    after = method.merge(at(bench, 2), server, [fs.Upload(up, 1, 0, down)])
    assert after["affinity"]["0"].tolist() == [0, 0, 0, 0, 0.5]


# ---- of every method -----------------------------------------------------------------------------------------------------
def a_round(method: fs.Method):
    """(bench, server, uploads) of a first round in which clients 0 and 3 moved by 0.1 and 0.3."""
    bench = bench_of(method, "normed")
    start = bench.task.net.initial()
    server, uploads = method.init_server(at(bench, 1), start), []
    for k, by in ((0, 0.1), (3, 0.3)):
        down = method.send(at(bench, 1), server, k)
        up, _ = trained(bench, method, k, 1, down, method.init_client(bench.task, start), by)
        uploads.append(fs.Upload(up, float(k + 1), k, down))
    return bench, server, uploads


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.averages])
def test_a_robust_rule_can_take_the_means_place(name: str) -> None:
    """`merge` averages by nothing but `task.average`: one that takes the last tree makes the last upload the model."""
    method = METHODS[name]()
    bench, server, uploads = a_round(method)
    task = at(bench, 1, average=lambda trees, weights, around=None: trees[-1])
    merged = method.merge(task, server, uploads)["params"]
    assert uploads[-1].params
    for part, value in uploads[-1].params.items():
        assert torch.equal(merged[part], value), part


@pytest.mark.parametrize("name", METHODS)
def test_what_is_coupled_is_in_the_memory(name: str) -> None:
    """Where the sums of what clients keep and what the server keeps must agree: SCAFFOLD's c, FedDyn's h, L2GD's mean."""
    method = METHODS[name]()
    bench = bench_of(method)
    expected = {"scaffold": {"c"}, "feddyn": {"g"}, "l2gd": {"params"}}.get(name, set())
    assert method.coupled == expected
    assert method.coupled <= method.init_client(bench.task, bench.task.net.initial()).keys()


def test_no_memory_carries_a_flag_of_its_own() -> None:
    """Whether a client has taken part comes from `task.seen`."""
    for name, kind in METHODS.items():
        bench = bench_of(kind())
        memory = kind().init_client(bench.task, bench.task.net.initial())
        assert not {"seen", "last"} & memory.keys(), name


# ---- pFedMe ------------------------------------------------------------------------------------------------------------
def test_pfedme_refuses_inner_steps_that_diverge() -> None:
    """An inner step multiplies the distance to the prox by 1 − η_p·(λ + curvature): below −1 from η_p·λ = 2 on."""
    with pytest.raises(fs.InputError, match=r"personal_lr = 0\.09: should be at most 0\.0666667 \(2/λ\) with lam 30"):
        bench_of(fs.PFedMe(lam=30))
    bench_of(fs.PFedMe(lam=30, personal_lr=0.06))


# ---- the registry ------------------------------------------------------------------------------------------------------
def test_a_base_of_methods_is_no_method() -> None:
    """`PartialFedAvg` and `SelfDistillation` say so by an empty id; every class that is listed has one of its own."""
    assert "" not in METHODS
    assert issubclass(METHODS["fedrep"], PartialFedAvg)
    assert issubclass(METHODS["pfedsd"], SelfDistillation)
    assert not {PartialFedAvg, SelfDistillation} & set(METHODS.values())
    assert all(vars(kind)["id"] == name for name, kind in METHODS.items())


def test_pfedsds_defaults_are_algorithm_1() -> None:
    """The method without its variants trains to the same bits as the class that is Algorithm 1 alone."""
    ends = [run(kind(lam=0.7, tau=2.0), "normed") for kind in (fs.PFedSD, SelfDistillation)]
    assert identical(*map(states, ends))
