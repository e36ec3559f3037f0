"""What sets APFL, L2GD, Per-FedAvg, FedFomo, FedPAC and FedGen apart, each against algebra, autograd or brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstill as fs
from fedstill.core import plan, tree
from fedstill.core.batch import Batch
from fedstill.core.simplex import simplex_minimum
from fedstill.core.task import Task
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, finish, make, on_quadratics, point, ragged, run


def at_home(method: fs.Method, model: str = "plain", client: int = 0, round: int = 1, last: int = 0, **changes) -> Task:
    """The task as a client of the shared problem sees it."""
    training = Training(**{**SETTINGS, **changes}, engine="one")
    return simulation.prepare(method, make(model), ragged(), None, training).trainer.bench.home(round, client, last)


def full_batch(task: Task) -> Batch:
    """All of a client's samples."""
    site = task.here()
    return Batch(site.x[site.index], site.y, site.index, torch.tensor(11))


def other(task: Task, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights somewhere else."""
    g = torch.Generator().manual_seed(4)
    return {n: v + scale * torch.randn(v.shape, generator=g, dtype=v.dtype) for n, v in task.net.initial().items()}


# ---- what they draw ----------------------------------------------------------------------------------------------------
def test_coins_are_common_keyed_and_uniform() -> None:
    task = at_home(fs.FedAvg())
    assert task.uniform(1, 2) == at_home(fs.FedAvg(), client=3).uniform(1, 2)
    assert task.uniform(1, 2) != task.uniform(2, 1)
    assert task.uniform(1) != dataclasses.replace(task, round=2).uniform(1)
    assert task.uniform(1) != dataclasses.replace(task, seed=3).uniform(1)
    many = np.array([task.uniform(i) for i in range(4000)])
    assert 0 <= many.min() < 0.01 < 0.99 < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02
    numbers = task.uniforms(torch.tensor(5), 1, (40, 50))
    assert torch.equal(numbers[:7], task.uniforms(torch.tensor(5), 1, (7, 50))), "rows depend on how many there are"
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert not torch.equal(numbers, task.uniforms(torch.tensor(5), 2, (40, 50)))
    assert sorted(task.permutation(9, 1)) == list(range(9))


def test_a_second_batch_is_the_clients_own_padded_or_not() -> None:
    """Drawn without replacement; a site padded for a stack gives the same samples."""
    task = at_home(fs.FedAvg())
    site = task.here()
    n = len(site.y)
    batch = Batch(site.x[:4], site.y[:4], torch.arange(4), torch.tensor(9))
    drawn = task.redraw(batch, 1)
    assert len(set(drawn.index.tolist())) == 4
    assert torch.equal(drawn.x, site.x[drawn.index])
    assert not torch.equal(drawn.index, task.redraw(batch, 2).index)
    assert sorted(task.redraw(full_batch(task), 1).index.tolist()) == list(range(n)), "a full batch is all samples"
    index = torch.cat([site.index, torch.zeros(5, dtype=torch.int64)])
    padded = dataclasses.replace(task, site=dataclasses.replace(site, index=index))
    again = padded.redraw(batch, 1)
    assert torch.equal(again.index, drawn.index)
    assert torch.equal(again.key, drawn.key)
    used = [
        i
        for key in range(300)
        for i in task.redraw(dataclasses.replace(batch, key=torch.tensor(key)), 1).index.tolist()
    ]
    counts = np.bincount(used, minlength=n)
    assert abs(counts - 1200 / n).max() < 5 * math.sqrt(1200 / n), "some samples are drawn too often"


def test_a_methods_draws_change_no_batch_and_no_cohort() -> None:
    """The streams of the plan are where they were: worked out here from its hash."""
    p = plan.Plan(2, 4)
    ranks = {k: plan.key(2, 1, 3, k) for k in range(9)}
    assert p.cohort(3, range(9), 4) == sorted(sorted(ranks, key=ranks.__getitem__)[:4])
    assert p.order(1, 2, 6, 0).tolist() == np.argsort(plan.bits(plan.key(2, 2, 1, 2, 0), 6)).tolist()
    assert len({plan.COHORT, plan.BATCHES, plan.STEP, plan.METHOD}) == 4


# ---- APFL --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("alpha", [0.3, 0.95])
def test_apfls_step_is_the_papers(alpha: float) -> None:
    """∇_v f(v̄), ∇_α f(v̄) and ∇_w f(w) by autograd through the mixture written out; all at the values before the step."""
    method = fs.APFL(alpha=alpha)
    task = at_home(method, momentum=0.0, weight_decay=0.0, lr=0.4)
    batch, w, v = full_batch(task), task.net.initial(), other(task)
    memory = {**method.init_client(task, w), "v": v}
    local = method.begin(task, {"params": w}, memory)
    after, loss = method.step(task, local, batch)

    leaves = {"w": w, "v": v}
    leaves = {who: {n: p.clone().requires_grad_() for n, p in each.items()} for who, each in leaves.items()}
    share = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)

    def f(p: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.tanh(batch.x @ p["fc1.weight"].T + p["fc1.bias"])
        return F.cross_entropy(hidden @ p["fc2.weight"].T + p["fc2.bias"], batch.y)

    mixture = f({n: share * leaves["v"][n] + (1 - share) * leaves["w"][n] for n in w})
    by_v = torch.autograd.grad(mixture, [*leaves["v"].values(), share])
    by_w = torch.autograd.grad(f(leaves["w"]), list(leaves["w"].values()))
    assert float(loss) == pytest.approx(float(f(w)), abs=1e-12)
    for name, gv, gw in zip(w, by_v[:-1], by_w, strict=True):
        assert torch.allclose(after["v"][name], v[name] - 0.4 * gv, atol=1e-12)
        assert torch.allclose(after["params"][name], w[name] - 0.4 * gw, atol=1e-12)
    assert abs(float(by_v[-1])) > 1e-3
    target = min(1.0, max(0.0, alpha - 0.4 * float(by_v[-1])))
    assert float(after["alpha"]) == pytest.approx(target, abs=1e-12)
    again, _ = method.step(task, after, batch)
    assert float(again["alpha"]) == float(after["alpha"]), "α takes one step a round"
    assert not torch.equal(again["v"]["fc1.bias"], after["v"]["fc1.bias"])


def test_apfl_keeps_v_apart_from_the_mixture() -> None:
    """A known trap: v overwritten by v̄."""
    result = run(fs.APFL(alpha=0.5, adaptive=False), participation=1.0)
    stored = result.memory(0)
    for name, value in result.personal(0).items():
        assert torch.allclose(value, 0.5 * stored["v"][name] + 0.5 * result.generic()[name], atol=1e-14)
        assert not torch.allclose(value, stored["v"][name], atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_of_ones_own_is_torchs_sgd(nesterov: bool) -> None:
    task = at_home(fs.FedAvg(), nesterov=nesterov)
    w = {"a": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    leaf = w["a"].clone().requires_grad_()
    sgd = torch.optim.SGD([leaf], lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=nesterov)
    past = task.at_rest(w)
    for i in range(4):
        g = torch.linspace(0, i + 1, 5, dtype=torch.float64)
        leaf.grad = g.clone()
        sgd.step()
        w, past = task.descend(w, {"a": g}, past)
        assert torch.allclose(w["a"], leaf, atol=1e-15)


# ---- L2GD --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_l2gds_coin_and_expected_communication(p: float) -> None:
    """Runs of a coin: P(J=j) = (1−p)^(j−1)·p, P(A=a) = p^(a−1)·(1−p); a communication is a local run that ends: p(1−p) of all."""
    method, task = fs.L2GD(p=p, lam=0.1), at_home(fs.FedAvg())
    rounds = 6000
    drawn = np.array([method.iterations(dataclasses.replace(task, round=t)) for t in range(1, rounds + 1)])
    for runs, stop in ((drawn[:, 0], p), (drawn[:, 1], 1 - p)):
        for length in (1, 2, 3):
            chance = (1 - stop) ** (length - 1) * stop
            spread = math.sqrt(chance * (1 - chance) / rounds)
            assert abs((runs == length).mean() - chance) < 4 * spread + 1e-9
    assert rounds / drawn.sum() == pytest.approx(p * (1 - p), rel=0.05)
    coins = (
        np.random.default_rng(0).random(200_000) < p
    )  # Lemma 4.2 by tossing: an aggregation after a local step communicates
    assert (coins[1:] & ~coins[:-1]).mean() == pytest.approx(p * (1 - p), abs=0.003)


def test_l2gds_coin_is_common_to_all_clients() -> None:
    """Every participant of a round makes the same number of epochs, and rounds differ."""
    method = fs.L2GD(p=0.3, lam=0.1)
    training = Training(**{**SETTINGS, "rounds": 6, "participation": 1.0}, engine="one")
    prepared = simulation.prepare(method, make("plain"), ragged(), None, training)
    bench = prepared.trainer.bench
    lengths = [method.iterations(dataclasses.replace(bench.task, round=t))[0] for t in range(1, 7)]
    assert len(set(lengths)) > 1
    per_epoch = sum(bench.plan.steps(n, 1) for n in bench.data.train.sizes)
    assert [record["steps"] for record in finish(prepared).history] == [j * per_epoch for j in lengths]


def test_l2gds_mean_is_over_all_clients() -> None:
    """Also over those that sat the last round out; their models are as they left them."""
    result = run(fs.L2GD(p=0.4, lam=0.5), rounds=5, participation=0.4)
    stored = [result.memory(k)["params"] for k in range(5)]
    for name, value in result.generic().items():
        assert torch.allclose(value, torch.stack([model[name] for model in stored]).mean(0), atol=1e-12)


def test_l2gd_draws_models_together_by_theta() -> None:
    """A aggregations leave (1−θ)^A of the distance, θ = ηλ(1−p)/p; the paper's αλ/(np) with α = ηn(1−p)."""
    method, task = fs.L2GD(p=0.25, lam=0.8), at_home(fs.FedAvg())
    n, alpha = task.clients, task.lr * task.clients * 0.75
    theta = alpha * 0.8 / (n * 0.25)
    centre, x = task.net.initial(), other(task)
    begun = method.begin(task, {"params": centre}, {"params": x})["params"]
    for _ in range(method.iterations(task)[1]):
        x = {name: value - theta * (value - centre[name]) for name, value in x.items()}
    assert all(torch.allclose(begun[name], x[name], atol=1e-13) for name in x)


def test_l2gd_refuses_what_would_not_work() -> None:
    with pytest.raises(fs.InputError, match="below 1"):
        fs.L2GD(p=1)
    with pytest.raises(fs.InputError, match=r"lam = 30.* at most 20 with p 0.5 and lr 0.05"):
        run(fs.L2GD(p=0.5, lam=30))


# ---- Per-FedAvg --------------------------------------------------------------------------------------------------------
def test_per_fedavgs_hessian_term_is_autograds() -> None:
    """(∇f(w + δg) − ∇f(w − δg))/2δ against the Hessian-vector product by double backward."""
    method = fs.PerFedAvg(variant="hf", delta=1e-4)
    task = at_home(method)
    batch, w = full_batch(task), task.net.initial()
    g = tree.sub(other(task, 1.0), w)
    leaf = {n: p.clone().requires_grad_() for n, p in w.items()}
    slope = torch.autograd.grad(method.fit(task, leaf, batch), list(leaf.values()), create_graph=True)
    product = sum((s * v).sum() for s, v in zip(slope, g.values(), strict=True))
    expected = torch.autograd.grad(product, list(leaf.values()))
    actual = method.hessian_times(task, w, g, batch)
    for value, target in zip(actual.values(), expected, strict=True):
        assert torch.allclose(value, target, atol=1e-7)
        assert target.abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_per_fedavgs_update_is_mamls(variant: str) -> None:
    """The loss's gradient is ∇f(w̃), or the gradient through the inner step (full batches: D = D′ = D″)."""
    method = fs.PerFedAvg(variant=variant, alpha=0.7, delta=1e-5)
    task = at_home(method)
    batch, w = full_batch(task), task.net.initial()
    leaf = {n: p.clone().requires_grad_() for n, p in w.items()}
    actual = torch.autograd.grad(method.loss(task, leaf, {}, batch), list(leaf.values()))
    inner = torch.autograd.grad(method.fit(task, leaf, batch), list(leaf.values()), create_graph=variant == "hf")
    adapted = {n: p - 0.7 * g for (n, p), g in zip(leaf.items(), inner, strict=True)}
    expected = torch.autograd.grad(method.fit(task, adapted, batch), list(leaf.values()))
    assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(actual, expected, strict=True))
    plain = torch.autograd.grad(method.fit(task, leaf, batch), list(leaf.values()))
    assert max(float((a - b).abs().max()) for a, b in zip(actual, plain, strict=True)) > 1e-3


def test_per_fedavgs_personal_model_is_a_step_on_local_data() -> None:
    """Also for a client that never took part; what the engine scores is what `run.personal` gives."""
    method = fs.PerFedAvg(alpha=0.5, adapt_steps=2)
    result = run(method, rounds=1, participation=0.2)
    absent = next(k for k in range(5) if k not in result.history[0]["participants"])
    client = ragged().clients[absent]
    net = make("plain")
    net.load_state_dict(result.generic())
    for _ in range(2):
        net.zero_grad()
        F.cross_entropy(net(client.x_train.double()), client.y_train).backward()
        for p in net.parameters():
            p.data -= 0.5 * p.grad
    for name, value in result.personal(absent).items():
        assert torch.allclose(value, net.state_dict()[name], atol=1e-12)
    right = (net(client.x_test.double()).argmax(1) == client.y_test).double().mean()
    assert result.history[0]["personal_clients"][str(absent)] == pytest.approx(float(right))


# ---- FedFomo -----------------------------------------------------------------------------------------------------------
class Constant(nn.Module):
    """Two logits that are parameters: the loss of a sample of class c is −log softmax(b)_c."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + self.b


def test_fedfomos_weights_by_hand() -> None:
    """All samples of class 0. L(0,0) = log 2; models at (log 3, 0), (0, log 3) and (log 7, 0): L = log 4/3, log 4, log 8/7.

    Gains log 3/2, −log 2, log 7/4 over distances log 3, log 3, log 7; the second is cut to 0.
    """
    x, y = np.zeros((4, 1)), np.zeros(4, dtype=int)
    data = fs.Federation.from_arrays([(x, y, x, y)] * 3, classes=2)
    method = fs.FedFomo(m=2, val=0)
    training = Training(rounds=1, dtype="float64", device="cpu", engine="one")
    bench = simulation.prepare(method, Constant(), data, None, training).trainer.bench
    task, never = bench.home(2, 0, last=1), bench.home(1, 0)
    at = lambda a, b: {"b": torch.tensor([a, b], dtype=torch.float64)}  # noqa: E731
    memory = {"before": at(0, 0), "own": at(math.log(3), 0)}
    down = {"models": {"0": at(0, math.log(3)), "1": at(math.log(7), 0)}, "who": torch.tensor([1, 2])}
    worth = np.array([math.log(1.5) / math.log(3), 0.0, math.log(1.75) / math.log(7)])
    worth /= worth.sum()
    actual = method.weigh(task, down, memory)
    assert actual.tolist() == pytest.approx(worth.tolist(), abs=1e-14)
    theta = method.combined(down, memory, actual)["b"]
    assert theta.tolist() == pytest.approx([worth[0] * math.log(3) + worth[2] * math.log(7), 0.0], abs=1e-14)
    nobody = {**down, "who": torch.tensor([-1, -1])}
    assert method.weigh(task, nobody, memory).tolist() == [1, 0, 0]
    fresh = {**memory, "own": at(0, 0)}
    assert method.weigh(never, nobody, fresh).tolist() == [0, 0, 0], "0/0 counts as 0"
    assert method.combined(nobody, fresh, torch.zeros(3, dtype=torch.float64))["b"].tolist() == [0, 0]
    for ulps in range(-3, 4):  # a model that is θ_k to rounding: no gain over no distance
        near = {**memory, "before": at(math.log(7) * (1 + ulps * 2.0**-52), 0), "own": at(math.log(9), 0)}
        assert method.weigh(task, down, near).tolist() == [1, 0, 0]


def test_fedfomo_sends_by_affinity_and_explores() -> None:
    method, task = fs.FedFomo(m=2, epsilon=0.0), at_home(fs.FedAvg())
    models = {str(k): task.net.initial() for k in range(5)}
    liked = torch.tensor([9.0, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    server = {"params": task.net.initial(), "models": models, "affinity": {"0": liked}}
    assert method.chosen(task, server, 0) == [4, 2]
    assert len(set(method.chosen(task, server, 1))) == 2
    assert fs.FedFomo(m=0).chosen(task, server, 3) == [0, 1, 2, 4]
    wild = fs.FedFomo(m=2, epsilon=1.0, decay=0.1)
    sent = [tuple(wild.chosen(dataclasses.replace(task, round=1), server, k)) for k in range(5)]
    assert all(k not in who and len(set(who)) == 2 for k, who in enumerate(sent))
    many = [wild.chosen(dataclasses.replace(task, round=1, seed=s), server, 0)[0] for s in range(400)]
    assert all(abs(many.count(k) - 100) < 45 for k in (1, 2, 3, 4)), "ε = 1 sends anybody"
    assert wild.chosen(dataclasses.replace(task, round=11), server, 0) == [4, 2], "ε has fallen to 0"


def test_fedfomos_affinity_sums_the_weights(spied) -> None:
    result = run(fs.FedFomo(m=0), rounds=3, participation=1.0)
    uploads = [reply for reply, _ in spied if reply.kind == "train" and reply.client == 0]
    total = torch.stack([reply.up["weights"] for reply in uploads]).sum(0)
    assert float(uploads[0].up["weights"].sum()) == 0, "in the first round there is nobody's model yet"
    assert total.sum() > 0
    assert torch.allclose(result.server["affinity"]["0"][1:], total)


def test_fedfomo_does_not_train_on_what_measures() -> None:
    """Every fifth sample: changing their labels changes no gradient."""
    method = fs.FedFomo()
    task = at_home(method)
    batch, w = full_batch(task), task.net.initial()
    measures = batch.index % 5 == 0
    changed = dataclasses.replace(batch, y=torch.where(measures, (batch.y + 1) % 3, batch.y))
    slopes = [task.gradient(lambda p, b: method.loss(task, p, {}, b), w, each)[0] for each in (batch, changed)]
    assert all(torch.equal(slopes[0][n], slopes[1][n]) for n in w)
    x, y = batch.x[measures], batch.y[measures]
    assert float(method.measured(task, w)) == pytest.approx(float(F.cross_entropy(task.predict(w, x), y)), abs=1e-14)


# ---- FedPAC ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
def test_the_simplex_programme_against_a_grid(seed: int) -> None:
    """No point of a grid on the simplex is better; entries at 0, singular matrices and ties included."""
    g = np.random.default_rng(seed)
    rank, steps = 1 + seed % 4, 40
    vectors = g.normal(size=(4, rank)) + (2 * g.normal(size=rank) if seed % 2 else 0)
    matrix = vectors @ vectors.T + np.diag(g.random(4) * (seed % 3) * 0.2)
    actual = simplex_minimum(torch.from_numpy(matrix))
    assert float(actual.min()) >= 0
    assert float(actual.sum()) == pytest.approx(1, abs=1e-12)
    grid = np.array([c for c in itertools.product(range(steps + 1), repeat=3) if sum(c) <= steps]) / steps
    grid = np.column_stack([grid, 1 - grid.sum(1)])
    best = np.einsum("ni,ij,nj->n", grid, matrix, grid)
    value = float(actual.numpy() @ matrix @ actual.numpy())
    assert value <= best.min() + 1e-8
    slack = 2 * np.abs(matrix).max() * 4 / steps
    assert value >= best.min() - slack


def test_the_simplex_programmes_plain_cases() -> None:
    by_variance = simplex_minimum(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)))
    assert by_variance.tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-9)  # α_j ∝ 1/V_j
    assert simplex_minimum(torch.tensor([[3.0]], dtype=torch.float64)).tolist() == [1]
    assert simplex_minimum(torch.zeros(3, 3, dtype=torch.float64)).sum() == pytest.approx(1)
    far = torch.tensor([[0.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    assert simplex_minimum(far).tolist() == pytest.approx([1, 0], abs=1e-8)
    big = torch.randn(60, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = big @ big.T + 0.01 * torch.eye(60, dtype=torch.float64)
    alpha = simplex_minimum(matrix)
    slope, value = matrix @ alpha, alpha @ matrix @ alpha
    assert (slope >= value - 1e-9).all(), "the conditions of Karush, Kuhn and Tucker"
    assert (slope[alpha > 0] - value).abs().max() < 1e-9


def test_fedpacs_statistics_and_combination(spied) -> None:
    """μ, V, the objective and the combined heads, written out sample by sample."""
    method = fs.FedPAC(head_epochs=1, body_epochs=1)
    result = run(method, rounds=1, participation=1.0)
    ups = [reply.up for reply, _ in spied if reply.kind == "train"]
    net = make("plain")
    mus, vs = [], []
    for client, up in zip(ragged().clients, ups, strict=True):
        features, y = torch.tanh(net.fc1(client.x_train.double())).detach(), client.y_train
        n, mu = len(y), torch.zeros(3, 6, dtype=torch.float64)
        for c in y.unique():
            mu[c] = (y == c).double().mean() * features[y == c].mean(0)
        v = (sum(f @ f for f in features) / n - (mu * mu).sum()) / n
        assert torch.allclose(up["mu"], mu, atol=1e-12)
        assert float(up["v"]) == pytest.approx(float(v), abs=1e-12)
        mus.append(mu)
        vs.append(float(v))
    for k in range(5):

        def cost(alpha: np.ndarray, k: int = k) -> float:
            gap = sum(a * (mus[k] - mu) for a, mu in zip(alpha, mus, strict=True))
            return float((gap * gap).sum()) + sum(a * a * v for a, v in zip(alpha, vs, strict=True))

        heads = [up["head"]["fc2.weight"] for up in ups]
        combined = result.server["heads"][str(k)]["fc2.weight"]
        flat = torch.stack([h.flatten() for h in heads], 1).numpy()
        alpha = np.linalg.lstsq(flat, combined.flatten().numpy(), rcond=None)[0]
        assert alpha.min() > -1e-9
        assert alpha.sum() == pytest.approx(1, abs=1e-9)
        corners = np.eye(5)
        for t in (0.02, 0.2):
            assert all(cost(alpha) <= cost((1 - t) * alpha + t * corner) + 1e-12 for corner in corners)


def test_fedpacs_centroids_are_means_over_all_participants(spied) -> None:
    method = fs.FedPAC(head_epochs=1, body_epochs=1)
    result = run(method, rounds=1, participation=1.0)
    net, features, labels = make("plain"), [], []
    for client, (reply, _) in zip(ragged().clients, [s for s in spied if s[0].kind == "train"], strict=True):
        net.fc1.load_state_dict({n[4:]: v for n, v in reply.up["params"].items()})
        features.append(torch.tanh(net.fc1(client.x_train.double())).detach())
        labels.append(client.y_train)
    x, y = torch.cat(features), torch.cat(labels)
    for c in range(3):
        assert torch.allclose(result.server["centroids"][c], x[y == c].mean(0), atol=1e-12)


def test_fedpac_without_combining_keeps_heads_at_home(spied) -> None:
    run(fs.FedPAC(combine=False), rounds=2)
    for reply in (r for r, _ in spied if r.kind == "train"):
        assert set(reply.up) == {"params", "counts", "centroids"}
        assert set(reply.up["params"]) == {"fc1.weight", "fc1.bias"}


# ---- FedGen ------------------------------------------------------------------------------------------------------------
SMALL = {"generator_hidden": 16, "generator_noise": 4, "generator_batch": 64}


def test_fedgens_generator_learns_and_no_data_reaches_the_server(spied) -> None:
    """Its loss on labels and noise that it was not trained with falls; uploads are models and label counts, nothing else."""
    method = fs.FedGen(generator_steps=60, generator_lr=0.01, **SMALL)
    training = Training(**{**SETTINGS, "rounds": 4, "participation": 1.0}, engine="one")
    prepared = simulation.prepare(method, make("normed"), ragged(), None, training)
    task = prepared.trainer.bench.task
    with pytest.raises(RuntimeError, match="server"):
        task.here()
    start = method.init_server(task, prepared.initial)["generator"]
    result = finish(prepared)
    ups = [reply.up for reply, _ in spied if reply.kind == "train" and reply.round == 4]
    heads = tree.stack([task.head(up["params"]) for up in ups])
    counts = torch.stack([up["labels"] for up in ups])
    loss = partial(method.generator_loss, task, heads=heads, counts=counts, key=torch.tensor(12345))
    before, after = float(loss(start)), float(loss(result.server["generator"]))
    assert after < 0.8 * before
    names = {name for name, _ in tree.leaves({"params": dict.fromkeys(task.net.names, torch.zeros(1))})}
    for reply, client in ((r, ragged().clients[r.client]) for r, _ in spied if r.kind == "train"):
        assert {name for name, _ in tree.leaves(reply.up)} == {*names, "labels"}
        assert reply.up["labels"].tolist() == np.bincount(client.y_train, minlength=3).tolist()
        for name, leaf in reply.up["params"].items():
            assert leaf.shape == prepared.initial[name].shape


def test_fedgens_generator_loss_by_hand() -> None:
    """Σ_k n_ky/n_y·CE(head_k(z), y), averaged over drawn labels, and exp(−mean ‖ε_i−ε_j‖²·|z_i−z_j|) (means over entries)."""
    method = fs.FedGen(eta=0.5, **{**SMALL, "generator_batch": 6})
    task = at_home(method)
    generator = method.init_server(task, task.net.initial())["generator"]
    heads = [task.head(task.net.initial()), task.head(other(task))]
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 2.0, 1.0]], dtype=torch.float64)
    key = torch.tensor(77)
    z, y, eps = method.generate(task, generator, counts.sum(0) / 8, key, 6)
    taught = 0.0
    for i in range(6):
        for k, head in enumerate(heads):
            logits = head["fc2.weight"] @ z[i] + head["fc2.bias"]
            taught -= float(counts[k, y[i]] / counts[:, y[i]].sum() * torch.log_softmax(logits, 0)[y[i]]) / 6
    pairs = [(i, j) for i in range(6) for j in range(6)]
    spread = np.mean([float((eps[i] - eps[j]).square().mean() * (z[i] - z[j]).abs().mean()) for i, j in pairs])
    actual = method.generator_loss(task, generator, tree.stack(heads), counts, key)
    assert float(actual) == pytest.approx(taught + 0.5 * math.exp(-spread), abs=1e-12)


def test_fedgen_draws_labels_and_noise_as_it_says() -> None:
    method = fs.FedGen(**SMALL)
    task = at_home(method)
    generator = method.init_server(task, task.net.initial())["generator"]
    labels = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    _, y, eps = method.generate(task, generator, labels, torch.tensor(3), 4000)
    shares = np.bincount(y.numpy(), minlength=3) / 4000
    assert shares[1] == 0
    assert abs(shares[0] - 0.5) < 0.04
    assert abs(float(eps.mean())) < 0.03
    assert abs(float(eps.std()) - 1) < 0.03
    assert method.generate(task, generator, labels * 0, torch.tensor(3), 5)[0].isfinite().all()


def test_fedgen_teaches_nothing_before_the_first_merge() -> None:
    one = run(fs.FedGen(**SMALL), rounds=1).generic()
    two = run(fs.FedAvg(), rounds=1).generic()
    assert all(torch.equal(one[n], two[n]) for n in one)
    later = run(fs.FedGen(**SMALL), rounds=3).generic()
    assert not torch.equal(later["fc2.weight"], run(fs.FedAvg(), rounds=3).generic()["fc2.weight"])


def test_generated_features_leave_batchnorms_statistics_alone() -> None:
    """The head's BatchNorm sees generated features in training; its running statistics are those of the real samples."""
    method = fs.FedGen(**SMALL)
    task = at_home(method, "normed")
    server = method.init_server(task, task.net.initial())
    local = {**server, "labels": torch.full((3,), 1 / 3, dtype=torch.float64)}
    moved = []
    for kind in (method, fs.FedAvg()):
        _, _, buffers = task.gradient(
            lambda p, b, kind=kind: kind.loss(task, p, local, b), server["params"], full_batch(task)
        )
        moved.append(buffers)
    assert all(torch.equal(moved[0][n], moved[1][n]) for n in moved[0])
    assert not torch.equal(moved[0]["head.1.running_mean"], server["params"]["head.1.running_mean"])


# ---- what personal may use ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_personal_is_at_home(engine: str) -> None:
    """`personal` has the client's own training data, wherever it is called from."""
    seen: set[int] = set()
    data = ragged()

    class Looks(fs.FedAvg):
        scores = ("personal",)

        def personal(self, task, down, memory):
            site = task.here()
            n, x, y = int(site.samples), site.x[site.index], site.y[site.index]
            assert len(site.index) == n
            own = [c for c in data.clients if torch.equal(y, c.y_train[:n]) and torch.equal(x, c.x_train[:n].double())]
            assert own  # before the run, in the rehearsal, some of a client's samples; then all of them
            seen.update(len(client.y_train) for client in own if len(client.y_train) == n)
            return down["params"]

    result = run(Looks(), engine=engine, rounds=1)
    assert seen == {13, 7, 1, 10, 5}
    seen.clear()
    result.personal(2)
    assert seen == {1}


def test_per_fedavg_on_quadratics_uses_beta() -> None:
    """β is the step: with one epoch from w, client by client, w moves by the mean of β·2a(1 − 2αa)·(b − w)."""
    method = fs.PerFedAvg(alpha=0.05, beta=0.02)
    a, b = np.array([0.2, 1.0, 4.0]), np.array([-3.0, 4.0, 0.5])
    result = on_quadratics(method, rounds=1, epochs=1, eval_every=1)
    assert point(result.generic()) == pytest.approx(4.0 + 0.02 * np.mean(2 * a * (1 - 0.1 * a) * (b - 4.0)), abs=1e-12)
