"""What makes each method to compare with different, by algebra or written out here: FedBN, FedDyn, FedAvgM, FedPer, LG-FedAvg,
FedBABU, FedRoD, FedGKD, Ditto, pFedMe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.core import tree
from fedstill.core.batch import Batch
from fedstill.core.task import Site, Task
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..laws.table import OPTIMUM, mean_of_pulls
from ..problems import CLASSES, SETTINGS, A, B, make, on_quadratics, point, ragged, run

START = 4.0  # where `Point` begins


def uploads(spied) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """(round, everything that went up), flat."""
    return [(reply.round, tree.flatten(reply.up)) for reply, _ in spied if reply.kind == "train"]


def a_task(method: fs.Method, model: str = "plain") -> Task:
    """The task of a prepared run, as client 0 sees it."""
    prepared = simulation.prepare(method, make(model), ragged(), None, Training(**SETTINGS, engine="one"))
    x, y = prepared.trainer.bench.data.train.of(0)
    last = torch.tensor(1.0, dtype=torch.float64)
    site = Site(x, y, torch.arange(len(y)), x.new_tensor(len(y)), x.new_tensor(1), last)
    return replace(prepared.trainer.bench.task, round=2, site=site)


# ---- FedBN ---------------------------------------------------------------------------------------------------------------
class Misnamed(nn.Module):
    """A BatchNorm that does not say so, and a linear layer that says it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.scale, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.scale(self.bn(x))))


def test_fedbn_never_uploads_batchnorm_and_knows_it_by_its_type(spied) -> None:
    torch.manual_seed(0)
    ended = fs.simulate(fs.FedBN(), model=Misnamed().double(), data=ragged(), **SETTINGS, engine="one")
    expected = {"scale.weight", "scale.bias", "scale.running_mean", "scale.running_var", "scale.num_batches_tracked"}
    assert ended.method.private(ended.task) == expected
    assert {name for _, up in uploads(spied) for name in up} == {
        f"params|{name}" for name in ("bn.weight", "bn.bias", "head.weight", "head.bias")
    }
    own = [ended.personal(k) for k in range(5)]
    assert all(torch.equal(own[0]["bn.weight"], model["bn.weight"]) for model in own)
    took_part = {k for record in ended.history for k in record["participants"]}
    assert len({tuple(own[k]["scale.running_mean"].tolist()) for k in took_part}) == len(took_part)
    assert all(own[k]["scale.running_mean"].abs().max() == 0 for k in range(5) if k not in took_part)


# ---- FedPer and LG-FedAvg ---------------------------------------------------------------------------------------------
def test_fedper_uploads_the_body_alone_and_lg_fedavg_the_head_alone(spied) -> None:
    body, head = {"fc1.weight", "fc1.bias"}, {"fc2.weight", "fc2.bias"}
    for method, shared, own in ((fs.FedPer(), body, head), (fs.LGFedAvg(), head, body)):
        spied.clear()
        ended = run(method, "plain", participation=1.0)
        assert {name.removeprefix("params|") for _, up in uploads(spied) for name in up} == shared
        for name in shared:
            assert all(torch.equal(ended.personal(k)[name], ended.generic()[name]) for k in range(5))
        for name in own:
            assert len({tuple(ended.personal(k)[name].flatten().tolist()) for k in range(5)}) == 5
            assert torch.equal(ended.generic()[name], make("plain").state_dict()[name])


# ---- FedBABU -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_fedbabus_head_keeps_its_initial_bits(engine: str, spied) -> None:
    """With momentum and weight decay, which would move a frozen weight that is only given a zero gradient."""
    ended, start = run(fs.FedBABU(), "normed", engine=engine), make("normed").state_dict()
    for name, value in ended.generic().items():
        assert torch.equal(value, start[name]) == name.startswith("head."), name
    assert not any("head." in name for _, up in uploads(spied) for name in up)
    took_part = {k for record in ended.history for k in record["participants"]}
    for k in range(5):
        moved = not torch.equal(ended.personal(k)["head.0.weight"], start["head.0.weight"])
        assert moved == (k in took_part)
        assert torch.equal(ended.personal(k)["fc1.weight"], ended.generic()["fc1.weight"])


def test_fedbabu_without_fine_tuning_leaves_it_to_the_score() -> None:
    """The paper's procedure: after the federation, from the last global model. It is what FedAvg with a fixed head gives."""
    plain, fixed = make("plain"), make("plain")
    for name, parameter in fixed.named_parameters():
        parameter.requires_grad_(not name.startswith("fc2"))
    settings = {**SETTINGS, "engine": "one"}
    ours = fs.simulate(fs.FedBABU(personal_epochs=0), model=plain, data=ragged(), **settings)
    theirs = fs.simulate(fs.FedAvg(), model=fixed, data=ragged(), **settings)
    assert all(
        torch.allclose(ours.personal(k)[n], v, atol=1e-15) for k in range(5) for n, v in theirs.generic().items()
    )
    assert 0 <= ours.fine_tuned(5, "all") <= 1


# ---- FedDyn --------------------------------------------------------------------------------------------------------------
def test_feddyn_finds_the_optimum_where_fedavg_does_not() -> None:
    bias = abs(mean_of_pulls(0.0, (1.0, 1.0, 1.0)) - OPTIMUM)
    assert bias > 0.05  # by algebra, FedAvg must miss
    assert abs(point(on_quadratics(fs.FedAvg(mean="uniform")).generic()) - OPTIMUM) == pytest.approx(bias, abs=1e-9)
    assert abs(point(on_quadratics(fs.FedDyn(alpha=1.5)).generic()) - OPTIMUM) < 1e-9
    partly = on_quadratics(fs.FedDyn(alpha=1.5), participation=0.67, rounds=2000, eval_every=2000)
    assert abs(point(partly.generic()) - OPTIMUM) < 1e-9  # two of three clients a round


def test_feddyn_by_hand_with_two_of_three_clients() -> None:
    """One round from θ = 4: five steps of η = 0.1 on a(θ−b)²/2 − gθ + α/2·|θ−4|², each of two parameters taking half."""
    alpha, method = 0.7, fs.FedDyn(alpha=0.7)
    theta, h, g = np.array([START, 0.0]), np.zeros(2), np.zeros((3, 2))
    ended = {}
    for t in (1, 2, 3):
        ended[t] = on_quadratics(method, participation=0.67, rounds=t, eval_every=t)
        present = ended[t].history[-1]["participants"]
        assert len(present) == 2
        trained = {}
        for k in present:
            w = theta.copy()
            for _ in range(5):
                w = w - 0.1 * (A[k] * (w.sum() - B[k]) - g[k] + alpha * (w - theta))
            g[k] -= alpha * (w - theta)
            trained[k] = w
        h -= alpha / 3 * sum(trained[k] - theta for k in present)
        theta = np.mean([trained[k] for k in present], axis=0) - h / alpha
        generic = ended[t].generic()
        assert np.allclose([float(generic["body.w"]), float(generic["head.w"])], theta, atol=1e-12)


@pytest.mark.parametrize("alpha", [0, -0.1])
def test_feddyn_needs_a_positive_alpha(alpha: float) -> None:
    with pytest.raises(fs.InputError, match="alpha"):
        fs.FedDyn(alpha=alpha)


# ---- FedAvgM -------------------------------------------------------------------------------------------------------------
def test_fedavgms_server_by_hand_for_three_rounds(spied) -> None:
    ended = run(fs.FedAvgM(beta=0.8), "normed")
    sizes = [13, 7, 1, 10, 5]
    start = {name: value.double().numpy().copy() for name, value in make("normed").state_dict().items()}
    w, v = dict(start), {name: np.zeros_like(value) for name, value in start.items()}
    parameters = {name for name, _ in make("normed").named_parameters()}
    for t in (1, 2, 3):
        replies = [reply for reply, _ in spied if reply.kind == "train" and reply.round == t]
        total = sum(sizes[reply.client] for reply in replies)
        for name in w:
            mean = sum(sizes[r.client] / total * r.up["params"][name].double().numpy() for r in replies)
            if name in parameters:
                v[name] = 0.8 * v[name] + (w[name] - mean)
                w[name] = w[name] - v[name]
            else:  # BatchNorm's statistics, and its whole-number count
                w[name] = np.round(mean) if name.endswith("num_batches_tracked") else mean
    for name, value in ended.generic().items():
        assert np.allclose(value.numpy(), w[name], atol=1e-12), name


# ---- FedRoD --------------------------------------------------------------------------------------------------------------
def test_fedrods_balanced_softmax_in_numpy() -> None:
    method = fs.FedRoD()
    task = a_task(method)
    site, params = task.here(), task.net.initial()
    local = method.begin(task, {"params": params}, method.init_client(task, params))
    counts = np.array([int((site.y == c).sum()) for c in range(CLASSES)])
    assert np.allclose(local["log_n"].exp().numpy(), counts)
    rows = torch.tensor([0, 3, 5])
    batch = Batch(site.x[rows], site.y[rows], rows, torch.tensor(0))
    z = task.predict(params, batch.x).numpy()
    weighed = counts * np.exp(z)
    expected = -np.mean(np.log(weighed[range(3), batch.y] / weighed.sum(1)))
    assert float(method.loss(task, params, local, batch)) == pytest.approx(expected, abs=1e-12)


def test_fedrod_leaves_out_a_class_that_the_client_does_not_have() -> None:
    method = fs.FedRoD()
    task = a_task(method)
    task = replace(task, site=replace(task.here(), y=task.here().y.clamp(max=1)))  # no sample of class 2
    params = {name: value.requires_grad_() for name, value in task.net.initial().items()}
    local = method.begin(task, {"params": params}, {})
    assert local["log_n"][2] == -torch.inf
    rows = torch.arange(4)
    loss = method.loss(task, params, local, Batch(task.here().x[rows], task.here().y[rows], rows, torch.tensor(0)))
    grads = torch.autograd.grad(loss, list(params.values()))
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[-1][2], grads[-2][2].abs().max()) == (0, 0)  # nothing pulls on the missing class


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("model", ["plain", "normed", "convolved"])
def test_fedrods_personal_head_reaches_neither_the_body_nor_the_server(engine: str, model: str, spied) -> None:
    with_heads = run(fs.FedRoD(), model, engine=engine)
    sent = uploads(spied)
    spied.clear()
    without = run(fs.FedRoD(personal_head=False), model, engine=engine)
    for (t, a), (u, b) in zip(sent, uploads(spied), strict=True):
        assert t == u
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(v, without.generic()[n]) for n, v in with_heads.generic().items())
    classifier = {"plain": "fc2", "normed": "head.3", "convolved": "fc"}[model]
    for k in (k for record in with_heads.history for k in record["participants"]):
        changed = {n for n, v in with_heads.personal(k).items() if not torch.equal(v, with_heads.generic()[n])}
        assert changed == {f"{classifier}.weight", f"{classifier}.bias"}


def test_fedrod_needs_a_linear_classifier() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Unflatten(1, (6, 1)), nn.Conv1d(6, CLASSES, 1), nn.Flatten())
    with pytest.raises(fs.InputError, match="head = 3: should be one that ends in a linear layer"):
        fs.simulate(fs.FedRoD(), model=model, head="3", data=ragged(), rounds=1)
    fs.simulate(fs.FedRoD(personal_head=False), model=model, head="3", data=ragged(), rounds=1, epochs=1)


# ---- FedGKD --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "taken"), [(1, (4,)), (2, (3, 4)), (3, (2, 3, 4)), (9, (1, 2, 3, 4))])
def test_fedgkds_teacher_is_the_mean_of_the_last_m_global_models(m: int, taken: tuple[int, ...]) -> None:
    method = fs.FedGKD(gamma=0.6, m=m)
    ended = {t: run(method, "plain", rounds=t) for t in (1, 2, 3, 4)}
    down = method.send(replace(ended[4].task, round=5), ended[4].server, 0)
    teacher = down.get("teacher", down["params"])
    for name, value in teacher.items():
        mean = np.mean([ended[t].generic()[name].numpy() for t in taken], axis=0)
        assert np.allclose(value.numpy(), mean, atol=1e-14)
    assert len(ended[4].server["past"]) == len(taken) - 1


def test_fedgkds_loss_in_numpy_and_no_teacher_in_the_first_round() -> None:
    method = fs.FedGKD(gamma=0.6)
    task = a_task(method)
    student, teacher = task.net.initial(), {n: v * 0.5 for n, v in task.net.initial().items()}
    local = method.begin(task, {"params": student, "teacher": teacher}, {})
    rows = torch.tensor([4, 1])
    batch = Batch(task.here().x[rows], task.here().y[rows], rows, torch.tensor(0))

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z)
        return e / e.sum(1, keepdims=True)

    p, q = (softmax(task.predict(w, batch.x).numpy()) for w in (student, teacher))
    ce = -np.mean(np.log(p[range(2), batch.y]))
    kl = np.mean((q * np.log(q / p)).sum(1))
    assert float(method.loss(task, student, local, batch)) == pytest.approx(ce + 0.3 * kl, abs=1e-12)
    assert "teacher" not in method.begin(replace(task, round=1), {"params": student}, {})


# ---- Ditto ---------------------------------------------------------------------------------------------------------------
def test_dittos_proximal_gradient_is_lam_times_the_distance_to_what_was_received() -> None:
    method = fs.Ditto(lam=0.7)
    task = a_task(method, "normed")
    w = task.net.initial()
    v = {n: (p + 0.3).requires_grad_() if n in task.net.parameters else p for n, p in task.net.initial().items()}
    local = method.begin(task, {"params": w}, {"v": v})
    rows = torch.arange(4)
    batch = Batch(task.here().x[rows], task.here().y[rows], rows, torch.tensor(3))
    weights = [v[name] for name in task.net.parameters]
    ours = torch.autograd.grad(method.personal_loss(task, v, local, batch), weights)
    plain = torch.autograd.grad(method.fit(task, v, batch), weights)
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a - b, torch.full_like(a, 0.7 * 0.3), atol=1e-12)


def test_ditto_trains_its_personal_model_for_its_own_epochs() -> None:
    """Alone on a quadratic: n steps towards (2ab + λw)/(2a + λ), by the factor 1 − η(2a + λ) each; w is what was received."""
    a, b, lam = A[2], B[2], 0.8
    ended = on_quadratics(fs.Ditto(lam=lam, personal_epochs=3), only=2, rounds=1, eval_every=1)
    stop = (2 * a * b + lam * START) / (2 * a + lam)
    assert point(ended.personal(0)) == pytest.approx(stop + (1 - 0.1 * (2 * a + lam)) ** 3 * (START - stop), abs=1e-12)
    assert point(ended.generic()) == pytest.approx(b + (1 - 0.1 * 2 * a) ** 5 * (START - b), abs=1e-12)


# ---- pFedMe --------------------------------------------------------------------------------------------------------------
def test_pfedmes_inner_problem_is_the_exact_prox_on_a_quadratic() -> None:
    """θ = argmin a/2·(θ−b)² + λ/2·|θ − w|² over both parameters is (2ab + λw)/(2a + λ); then w moves by ηλ(w − θ)."""
    lam = 3.0
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        method = fs.PFedMe(lam=lam, k=100, personal_lr=0.1, beta=1.5)
        ended = on_quadratics(method, only=k, rounds=1, epochs=1, eval_every=1)
        theta = (2 * a * b + lam * START) / (2 * a + lam)
        assert point(ended.personal(0)) == pytest.approx(theta, abs=1e-10)
        w = START - 0.1 * lam * (START - theta)
        assert point(ended.generic()) == pytest.approx(-0.5 * START + 1.5 * w, abs=1e-10)


def test_pfedmes_personal_model_is_w_as_lam_grows() -> None:
    """The exact prox is off w by 2a·(b − w)/(2a + λ), which goes to zero as λ → ∞."""
    a, b = A[2], B[2]
    for lam in (1e2, 1e5, 1e9):
        method = fs.PFedMe(lam=lam, k=60, personal_lr=0.5 / lam)
        theta = point(on_quadratics(method, only=2, rounds=1, epochs=1, lr=0.1 / lam).personal(0))
        assert theta - START == pytest.approx(2 * a * (b - START) / (2 * a + lam), rel=1e-6, abs=1e-12)
    assert abs(theta - START) < 1e-7


def test_pfedmes_personal_model_is_not_the_global_one() -> None:
    ended = run(fs.PFedMe(), "normed")
    for k in {k for record in ended.history for k in record["participants"]}:
        assert not torch.allclose(ended.personal(k)["fc1.weight"], ended.generic()["fc1.weight"])
