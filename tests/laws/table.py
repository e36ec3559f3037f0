"""The table of laws. A new method or variant adds one row here and is then under every law in `test_laws.py`.

A row names a method with its hyper-parameters, the neutral values at which it must equal a simpler method, and its fixed
point, known by algebra and not from the code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstill as fs
from fedstill.core.settings import values_of

from ..problems import ADAPTED, COUNTS, A, B, on_quadratics, point

LR, EPOCHS = 0.1, 5  # of `on_quadratics`
OPTIMUM = float(np.dot(A, B) / np.sum(A))  # of the sum of the clients' losses, each client counting alike


@dataclass(frozen=True)
class Neutral:
    """`variant` must give what `parent` gives: `of` says for which models, `within` how closely (0: to the bit).

    `settings` are the conditions that the equality needs, for both; `parent_model` changes the model that the parent trains.
    """

    variant: fs.Method
    parent: fs.Method
    of: str = "both"  # "generic", "personal" or "both"
    within: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    parent_model: Callable[[nn.Module], nn.Module] = lambda model: model


@dataclass(frozen=True)
class Row:
    """One method or variant under the laws."""

    method: fs.Method
    fixed_point: Callable[[fs.Method], None]
    neutral: tuple[Neutral, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # of training, where not the laws' own

    @property
    def name(self) -> str:
        changed = [f"{n}={v}" for n, v in values_of(self.method).items() if v != getattr(type(self.method)(), n)]
        return " ".join([self.method.id, *changed, *(f"{n}={v}" for n, v in self.settings.items())])


# ---- fixed points ------------------------------------------------------------------------------------------------------
def reaches(expected: float, rounds: int = 400, **changes: Any) -> Callable[[fs.Method], None]:
    """The generic model of the quadratic clients ends at a known number."""

    def check(method: fs.Method) -> None:
        run = on_quadratics(method, rounds=rounds, **changes)
        assert abs(point(run.generic()) - expected) < 1e-9

    return check


def local_pull(mu: float = 0.0) -> np.ndarray:
    """How far E full-batch steps carry w towards b_k: w ← w + c_k·(b_k − w), with the proximal term's μ.

    w is the sum of two parameters and both take the step, so its curvature counts twice.
    """
    a = 2 * np.array(A)
    return a / (a + mu) * (1 - (1 - LR * (a + mu)) ** EPOCHS)


def mean_of_pulls(mu: float, weights: tuple[float, ...]) -> float:
    """Where the weighted mean of the pulls is zero: FedAvg's and FedProx's fixed point, not the optimum."""
    c = local_pull(mu) * np.array(weights)
    return float(np.dot(c, B) / c.sum())


def own_optimum(method: fs.Method) -> None:
    """Every client ends at its own b_k."""
    run = on_quadratics(method, rounds=800)
    for k, b in enumerate(B):
        assert abs(point(run.personal(k)) - b) < 1e-9


def stationary_alone(method: fs.Method) -> None:
    """A federation of one client stops where the gradient of its own regularised cross-entropy is zero.

    There teacher and student agree, so the distillation vanishes; the gradient is written out in numpy.
    """
    run, ((x, y),) = softmax_regressions(method, clients=1)
    for state in (run.personal(0), run.generic()):
        assert regularised_slope(state, x, y) < 1e-9


def stationary_in_clusters(method: fs.Method) -> None:
    """Two clients in two clusters each end as if alone, although the generic model, their mean, suits neither."""
    run, data = softmax_regressions(method, clients=2)
    for k, (x, y) in enumerate(data):
        assert regularised_slope(run.personal(k), x, y) < 1e-9
        assert regularised_slope(run.generic(), x, y) > 1e-3


DECAY = 0.05


def softmax_regressions(method: fs.Method, clients: int) -> tuple[fs.Run, list[tuple[np.ndarray, np.ndarray]]]:
    """Train softmax regression with decay on 12 samples a client to its end; return the run and the data."""
    g = np.random.default_rng(1)
    data = [(g.normal(size=(12, 3)), g.integers(0, 2, 12)) for _ in range(clients)]
    fed = fs.Federation.from_arrays([(x, y, x, y) for x, y in data])
    run = fs.simulate(
        method, model=torch.nn.Linear(3, 2, dtype=torch.float64), data=fed, rounds=300, epochs=3, batch_size=12, lr=0.5,
        momentum=0.0, weight_decay=DECAY, dtype="float64", engine="one", eval_every=300,
    )  # fmt: skip
    return run, data


def regularised_slope(state: dict[str, torch.Tensor], x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest entry of the gradient of cross-entropy with decay, written out in numpy."""
    w, b = state["weight"].numpy(), state["bias"].numpy()
    logits = x @ w.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    residual = (p - np.eye(2)[y]) / len(y)
    weight, bias = residual.T @ x + DECAY * w, residual.sum(0) + DECAY * b
    return float(max(np.abs(weight).max(), np.abs(bias).max()))


def freeze_head(model: nn.Module) -> nn.Module:
    """The model with a head that does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("fc2"))
    return model


def stationary_layers(method: fs.Method, silence: tuple[float, ...] = ()) -> None:
    """As `stationary_alone` for a model with a body and a head: CE + decay has no slope at the personal model.

    With `silence` (1 for a private channel) CD²'s λ·½[KL + KL] belongs to the objective, its two sub-networks written out here.
    """
    g = np.random.default_rng(1)
    x, y = g.normal(size=(12, 3)), g.integers(0, 2, 12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def slope() -> float:
        hidden = torch.tanh(net[0](torch.from_numpy(x)))
        private = torch.tensor(silence or [0.0], dtype=torch.float64)
        full, left, right = (torch.log_softmax(net[2](hidden * mask), 1) for mask in (1.0, private, 1 - private))
        loss = nn.functional.nll_loss(full, torch.from_numpy(y)) + 0.05 * sum(
            p.square().sum() for p in net.parameters()
        )
        if silence:
            both = (left.exp() * (left - right)).sum(1) + (right.exp() * (right - left)).sum(1)
            loss = loss + method.lam * 0.5 * both.mean()
        return max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(net.parameters())))

    before = slope()
    run = fs.simulate(
        method, model=net, data=fs.Federation.from_arrays([(x, y, x, y)]), head="2", rounds=700, epochs=3, batch_size=12,
        lr=0.5, momentum=0.0, weight_decay=0.1, dtype="float64", engine="one", eval_every=700,
    )  # fmt: skip
    net.load_state_dict(run.personal(0))
    assert slope() < 5e-4 < 0.05 < before


def cyclic_stationary(method: fs.Method) -> None:
    """The same with cyclic distillation: of five channels the last ⌊0.7·5⌋ = 3 are private in the end."""
    stationary_layers(method, silence=(0.0, 0.0, 1.0, 1.0, 1.0))


def equal_spectra(method: fs.Method, within: float = 1e-9) -> None:
    """Alone on its quadratic, both models end at b: there the spectra are equal, and the divergence has no slope.

    On the way no frequency passes zero, where |DFT| has a kink that would hold it.
    """
    run = on_quadratics(method, only=2)
    assert abs(point(run.personal(0)) - B[2]) < within
    assert abs(point(run.generic()) - B[2]) < within


def agreement(method: fs.Method) -> None:
    """A federation of one: w learns to predict as θ does, so that θ ends where (1−α)·∇CE + decay·θ = 0."""
    g = np.random.default_rng(1)
    x, y = g.normal(size=(12, 3)), g.integers(0, 2, 12)
    decay, net = 0.05, nn.Linear(3, 2, dtype=torch.float64)
    fed = fs.Federation.from_arrays([(x, y, x, y)])
    run = fs.simulate(
        method, model=net, data=fed, rounds=500, epochs=3, batch_size=12, lr=0.5, momentum=0.0, weight_decay=decay,
        dtype="float64", engine="one", eval_every=500,
    )  # fmt: skip

    def predictions(state: dict[str, torch.Tensor]) -> np.ndarray:
        logits = x @ state["weight"].numpy().T + state["bias"].numpy()
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    theta = run.personal(0)
    assert np.abs(predictions(theta) - predictions(run.generic())).max() < 1e-6
    residual = (1 - method.alpha) * (predictions(theta) - np.eye(2)[y]) / len(y)
    assert np.abs(residual.T @ x + decay * theta["weight"].numpy()).max() < 1e-6


def fine_tuned_from_the_mean(method: fs.Method) -> None:
    """FedBABU on the quadratics: the body alone is pulled (curvature a), under a head that stays 0; then fine-tuning.

    Of the head alone with curvature a, of both with 2a, for τ_f full-batch steps from what was received.
    """
    a, b = np.array(A), np.array(B)
    pull = (1 - (1 - LR * a) ** EPOCHS) * np.array(COUNTS)
    w = float(np.dot(pull, b) / pull.sum())
    run = on_quadratics(method, rounds=1500)
    assert float(run.generic()["head.w"]) == 0.0
    assert abs(point(run.generic()) - w) < 1e-9
    tuned = 1 - (1 - LR * a * (1 if method.personal_part == "head" else 2)) ** method.personal_epochs
    for k in range(len(B)):
        assert abs(point(run.personal(k)) - (w + tuned[k] * (b[k] - w))) < 1e-9


def beside_the_mean(method: fs.Method) -> None:
    """Ditto: w is FedAvg's; v_k stops where 2a·(v − b) + λ·(v − w) = 0 (both parameters take the pull, so 2a)."""
    w = mean_of_pulls(0.0, COUNTS)
    run = on_quadratics(method, rounds=800)
    assert abs(point(run.generic()) - w) < 1e-9
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        assert abs(point(run.personal(k)) - (2 * a * b + method.lam * w) / (2 * a + method.lam)) < 1e-9


def envelope(method: fs.Method) -> None:
    """pFedMe: K inner steps carry θ from w by κ·(b − w), a step carries w by ηλκ·(b − w): pulls, and their mean is zero.

    The inner problem contracts by q = 1 − η_p·(2a + λ) towards (2a·b + λ·w)/(2a + λ), so κ = (1 − q^K)·2a/(2a + λ).
    """
    a, b = 2 * np.array(A), np.array(B)
    q = 1 - method.personal_lr * (a + method.lam)
    kappa = (1 - q**method.k) * a / (a + method.lam)
    left = 1 - LR * method.lam * kappa  # of the distance to b after a step
    pull = 1 - left**EPOCHS
    w = float(np.dot(pull, b) / pull.sum())
    run = on_quadratics(method)
    assert abs(point(run.generic()) - w) < 1e-9
    theta = b + (1 - kappa) * left ** (EPOCHS - 1) * (w - b)
    for k in range(len(B)):
        assert abs(point(run.personal(k)) - theta[k]) < 1e-9


def balanced_stationary(method: fs.Method) -> None:
    """FedRoD alone: the generic model has no slope in the loss of logits + log n, written out here; its classifier with the
    personal head added has none in plain CE."""
    g = np.random.default_rng(1)
    x, y = torch.from_numpy(g.normal(size=(12, 3))), torch.tensor([0] * 8 + [1] * 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    run = fs.simulate(
        method, model=net, data=fs.Federation.from_arrays([(x.numpy(), y.numpy(), x.numpy(), y.numpy())]), head="2",
        rounds=700, epochs=3, batch_size=12, lr=0.5, momentum=0.0, weight_decay=0.1, dtype="float64", engine="one",
        eval_every=700,
    )  # fmt: skip

    def slope(state: dict[str, torch.Tensor], counts: tuple[float, ...], of: tuple[str, ...]) -> float:
        net.load_state_dict(state)
        weighed = torch.tensor(counts) * torch.exp(net(x))
        decay = 0.05 * sum(p.square().sum() for p in net.parameters())
        loss = -torch.log(weighed[torch.arange(12), y] / weighed.sum(1)).mean() + decay
        moving = [p for name, p in net.named_parameters() if name in of]
        return max(float(g.abs().max()) for g in torch.autograd.grad(loss, moving))

    everything = tuple(name for name, _ in net.named_parameters())
    prior = (8.0, 4.0) if method.generic_loss == "balanced" else (1.0, 1.0)
    assert slope(run.generic(), prior, everything) < 1e-6
    if method.personal_head:
        assert slope(run.personal(0), (1.0, 1.0), ("2.weight", "2.bias")) < 1e-6
        assert torch.equal(run.personal(0)["0.weight"], run.generic()["0.weight"])
    if method.generic_loss == "balanced":
        assert slope(run.generic(), (1.0, 1.0), everything) > 0.01


def mixed_with_the_mean(method: fs.Method) -> None:
    """APFL with a fixed α: w is FedAvg's; v_k repeats itself from round to round while w_k goes the way to its client and back.

    A round is an affine map of v, so its fixed point is known from where the round takes 0 and 1. Both parameters of the sum take
    every step, so steps count twice.
    """
    alpha, w = method.alpha, mean_of_pulls(0.0, UNIFORM)
    run = on_quadratics(method, rounds=180)
    assert abs(point(run.generic()) - w) < 1e-9
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        ends = []
        for v in (0.0, 1.0):
            here = w
            for _ in range(EPOCHS):
                v, here = v - 2 * LR * alpha * a * (alpha * v + (1 - alpha) * here - b), here - 2 * LR * a * (here - b)
            ends.append(v)
        v = ends[0] / (1 - (ends[1] - ends[0]))
        assert abs(point(run.personal(k)) - (alpha * v + (1 - alpha) * w)) < 1e-9


def alone_at_its_optimum(method: fs.Method) -> None:
    """A federation of one: shared, personal and mixed model all end at b."""
    run = on_quadratics(method, only=2)
    assert abs(point(run.personal(0)) - B[2]) < 1e-9
    assert abs(point(run.generic()) - B[2]) < 1e-9


def held_together(method: fs.Method) -> None:
    """L2GD stays near the minimum of Σ f_k(x_k) + λ/2·Σ‖x_k − x̄‖², as near as its steps are short.

    x is the sum of two parameters that move alike, and each holds half of x_k − x̄: 2a_k·(x_k − b_k) + λ·(x_k − x̄) = 0.
    """
    a, n = 2 * np.array(A), len(A)
    best = np.linalg.solve(np.diag(a + method.lam) - method.lam / n, a * np.array(B))
    assert np.abs(best - B).max() > 1
    assert np.ptp(best) > 1
    run = on_quadratics(method, rounds=800, lr=0.01)
    reached = np.array([point(run.personal(k)) for k in range(n)])
    assert np.abs(reached - best).max() < 0.1
    assert abs(point(run.generic()) - reached.mean()) < 1e-9


def adapted_pulls(method: fs.Method) -> None:
    """Per-FedAvg: an inner step leaves 1 − 2αa of the distance to b, and so does the Hessian's factor: the curvature is
    a·(1 − 2αa) in first order and a·(1 − 2αa)² with the Hessian."""
    left = 1 - 2 * method.alpha * np.array(A)
    a = 2 * np.array(A) * left ** (1 if method.variant == "fo" else 2)
    pull = 1 - (1 - LR * a) ** EPOCHS
    run = on_quadratics(method, rounds=60)
    assert abs(point(run.generic()) - float(np.dot(pull, B) / pull.sum())) < 1e-8


def stationary_where_loss_counts(method: fs.Method) -> None:
    """FedFomo alone keeps what lowers the loss, so it ends where plain cross-entropy has no slope.

    Of so many copies of every sample the first one measures and the others train: both have the same optimum.
    """
    g = np.random.default_rng(1)
    x, y = g.normal(size=(12, 3)), g.integers(0, 2, 12)
    x, y = (np.repeat(v, round(1 / method.val) if method.val else 1, axis=0) for v in (x, y))
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    run = fs.simulate(
        method, model=net, data=fs.Federation.from_arrays([(x, y, x, y)]), rounds=250, epochs=3, batch_size=len(y), lr=2.0,
        momentum=0.0, weight_decay=0.0, dtype="float64", engine="one", eval_every=250,
    )  # fmt: skip
    state = run.personal(0)
    logits = x @ state["weight"].numpy().T + state["bias"].numpy()
    p = np.exp(logits - logits.max(1, keepdims=True))
    residual = (p / p.sum(1, keepdims=True) - np.eye(2)[y]) / len(y)
    assert np.abs(residual.T @ x).max() < 1e-6


def aligned_stationary(method: fs.Method) -> None:
    """FedPAC alone: no slope in CE + decay + λ·the features' variance within classes.

    Moving the centroids along would not change that slope: around their mean the distances sum to zero.
    """
    g = np.random.default_rng(1)
    x, y = torch.from_numpy(g.normal(size=(12, 3))), torch.from_numpy(g.integers(0, 2, 12))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    data = fs.Federation.from_arrays([(x.numpy(), y.numpy(), x.numpy(), y.numpy())])
    run = fs.simulate(
        method, model=net, data=data, head="2", rounds=900, epochs=3, batch_size=12, lr=0.5, momentum=0.0, weight_decay=0.1,
        dtype="float64", engine="one", eval_every=900,
    )  # fmt: skip
    net.load_state_dict(run.personal(0))

    def slope(lam: float) -> float:
        features = torch.tanh(net[0](x))
        centres = torch.stack([features[y == c].mean(0) for c in (0, 1)])
        decay = 0.05 * sum(p.square().sum() for p in net.parameters())
        loss = nn.functional.cross_entropy(net[2](features), y) + decay
        loss = loss + lam * (features - centres[y]).square().mean()
        return max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(net.parameters())))

    assert slope(method.lam) < 5e-4 < 0.01 < slope(0.0)


def printed_divergence_shrinks(method: fs.Method) -> None:
    """The printed D is smallest below q, not at it, so it draws both models off the optimum of the loss, towards 0.

    Two weights u, v with one loss in g = u + v: the spectrum is |u + v|, |u − v|, of which the generic phase sees the first. With
    the personal p alike, a·(g − b) + λ·(log(g/p) + 1) = 0 and a·(p − b) + λ·(log(p/g) + 1) = 0: both end at b − λ/a. The second
    frequency is the personal phase's alone: it draws |u − v| towards the generic model's 4, over e.
    """
    assert (method.lam_g, method.divergence, method.transform) == (method.lam_p, "paper", "raw")
    assert math.ceil(2 * method.tau) == 1
    a, b = A[1], B[1]
    run = on_quadratics(method, only=1)
    for state in (run.generic(), run.personal(0)):
        assert abs(point(state) - (b - method.lam_g / a)) < 1e-9
    generic, personal = (float(state["body.w"] - state["head.w"]) for state in (run.generic(), run.personal(0)))
    assert abs(generic - 4) < 1e-9
    assert 4 / math.e < personal < 3.9


def stationary_adapters(method: fs.Method) -> None:
    """A federation of one stops where CE + decay has no slope by what of the adapters trains, nor by the head.

    The adapted layer is written out: W = W₀ + α/r·B·A, here with α/r = 3/2.
    """
    g = np.random.default_rng(1)
    x, y = g.normal(size=(12, 3)), g.integers(0, 2, 12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    run = fs.simulate(
        method, model=net, data=fs.Federation.from_arrays([(x, y, x, y)]), head="2", rounds=700, epochs=3, batch_size=12,
        lr=0.5, momentum=0.0, weight_decay=0.02, dtype="float64", engine="one", eval_every=700, lora="r=2,alpha=3,targets=0",
    )  # fmt: skip

    def slope(state: dict[str, torch.Tensor]) -> float:
        state = {name: value.clone().requires_grad_() for name, value in state.items()}
        weight = state["0.weight"] + 1.5 * state["0.lora_B"] @ state["0.lora_A"]
        hidden = torch.tanh(torch.from_numpy(x) @ weight.T + state["0.bias"])
        logits = hidden @ state["2.weight"].T + state["2.bias"]
        moving = [state[name] for name in run.task.net.parameters]
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(y)) + 0.01 * sum(p.square().sum() for p in moving)
        return max(float(g.abs().max()) for g in torch.autograd.grad(loss, moving))

    first = run.task.net.export(run.task.net.initial())
    assert slope(run.personal(0)) < 5e-4 < 0.05 < slope(first)
    for name, value in run.personal(0).items():
        assert torch.equal(value, first[name]) == (name not in run.task.net.parameters)


# ---- the rows -------------------------------------------------------------------------------------------------------
UNIFORM = (1.0, 1.0, 1.0)
EVERYBODY = {"participation": 1.0}
SD = {"lam": 0.7, "tau": 2.0}
SPECTRAL = {"generic_epochs": 2, "personal_epochs": 2}
PLAIN_SGD = {"momentum": 0.0, "nesterov": False}
IN_STEPS = {"local_steps": 5}
ROWS = [
    Row(fs.Local(), own_optimum),
    Row(fs.FedAvg(), reaches(mean_of_pulls(0.0, COUNTS))),
    Row(fs.FedAvg(mean="uniform"), reaches(mean_of_pulls(0.0, UNIFORM))),
    Row(
        fs.FedProx(mu=0.3),
        reaches(mean_of_pulls(0.3, COUNTS)),
        neutral=(Neutral(fs.FedProx(mu=0), fs.FedAvg()),),
    ),
    Row(
        fs.SCAFFOLD(),
        reaches(OPTIMUM),
        neutral=(  # before any control variate is known
            Neutral(fs.SCAFFOLD(), fs.FedAvg(mean="uniform"), within=1e-14, settings={"rounds": 1, "momentum": 0.0}),
        ),
    ),
    Row(fs.FedDyn(alpha=1.5), reaches(OPTIMUM)),
    Row(fs.FedDyn(alpha=0.5, mean="weighted"), reaches(float(np.dot(COUNTS, np.multiply(A, B)) / np.dot(COUNTS, A)))),
    Row(
        fs.FedAvgM(beta=0.6),
        reaches(mean_of_pulls(0.0, COUNTS)),  # where the mean stands still, Δ = 0 and v = 0
        neutral=(Neutral(fs.FedAvgM(beta=0), fs.FedAvg()),),
    ),
    Row(
        fs.FedGKD(gamma=1.4, m=2),
        stationary_alone,
        neutral=(
            Neutral(fs.FedGKD(gamma=0), fs.FedAvg()),
            Neutral(fs.FedGKD(gamma=1.4, m=3), fs.FedGKD(gamma=1.4, m=100)),  # three rounds have made two models
        ),
    ),
    Row(fs.FedGKD(gamma=1.4, m=1), stationary_alone),
    Row(
        fs.FedBN(),
        reaches(mean_of_pulls(0.0, UNIFORM)),  # without BatchNorm it is FedAvg
        neutral=(
            Neutral(fs.FedBN(), fs.FedAvg(mean="uniform")),
            Neutral(fs.FedBN(mean="weighted"), fs.FedAvg()),
        ),
    ),
    Row(fs.FedPer(), own_optimum),
    Row(fs.LGFedAvg(), own_optimum, neutral=(Neutral(fs.LGFedAvg(warm_rounds=3), fs.FedAvg()),)),  # of three rounds
    Row(fs.LGFedAvg(warm_rounds=1), own_optimum),
    Row(
        fs.FedBABU(personal_epochs=3),
        fine_tuned_from_the_mean,
        neutral=(
            Neutral(fs.FedBABU(train_head=True), fs.FedAvg(), of="generic"),
            Neutral(fs.FedBABU(train_head=True, personal_epochs=0), fs.FedAvg()),
            Neutral(fs.FedBABU(), fs.FedAvg(), of="generic", parent_model=freeze_head, within=1e-15),
        ),
    ),
    Row(fs.FedBABU(personal_epochs=2, personal_part="all"), fine_tuned_from_the_mean),
    Row(
        fs.FedRoD(),
        balanced_stationary,
        neutral=(
            Neutral(fs.FedRoD(generic_loss="ce", personal_head=False), fs.FedAvg()),
            Neutral(fs.FedRoD(generic_loss="ce"), fs.FedAvg(), of="generic"),
        ),
    ),
    Row(fs.FedRoD(generic_loss="ce", personal_epochs=3), balanced_stationary),
    Row(fs.FedRoD(personal_head=False), balanced_stationary),
    Row(
        fs.Ditto(lam=0.8),
        beside_the_mean,
        neutral=(
            Neutral(fs.Ditto(), fs.FedAvg(), of="generic"),
            Neutral(fs.Ditto(lam=0), fs.Local(), of="personal", settings=EVERYBODY),
            Neutral(fs.Ditto(personal_epochs=2), fs.Ditto(), settings={"epochs": 2}),
        ),
    ),
    Row(
        fs.PFedMe(lam=4.0, k=3, personal_lr=0.06, beta=0.9),
        envelope,
        neutral=(  # one inner step of 1/λ gives λ(w − θ) = ∇f(w), whatever λ
            Neutral(
                fs.PFedMe(lam=4.0, k=1, personal_lr=0.25),
                fs.FedAvg(mean="uniform"),
                of="generic",
                within=1e-13,
                settings=PLAIN_SGD,
            ),
        ),
    ),
    Row(
        fs.APFL(alpha=0.8, adaptive=False),
        mixed_with_the_mean,
        neutral=(
            Neutral(fs.APFL(alpha=1, adaptive=False), fs.Local(), of="personal", within=1e-13, settings=EVERYBODY),
            Neutral(fs.APFL(), fs.FedAvg(mean="uniform"), of="generic", within=1e-13),
        ),
    ),
    Row(fs.APFL(alpha=0.4), alone_at_its_optimum),
    Row(
        fs.L2GD(lam=1.5, p=0.5),
        held_together,
        neutral=(Neutral(fs.L2GD(p=0), fs.Local(), of="personal", settings=EVERYBODY),),
    ),
    *(
        Row(
            fs.PerFedAvg(alpha=0.05, variant=variant),
            adapted_pulls,
            neutral=(
                Neutral(fs.PerFedAvg(alpha=0, variant=variant), fs.FedAvg(mean="uniform")),
                Neutral(fs.PerFedAvg(alpha=0, variant=variant, beta=0.05, mean="weighted"), fs.FedAvg()),
            ),
        )
        for variant in ("fo", "hf")
    ),
    Row(
        fs.FedFomo(m=2),
        stationary_where_loss_counts,
        neutral=(
            Neutral(
                fs.FedFomo(weighing="equal", m=0, val=0), fs.FedAvg(mean="uniform"), within=1e-13, settings=EVERYBODY
            ),
        ),
    ),
    Row(fs.FedFomo(m=0, val=0), stationary_where_loss_counts),
    Row(
        fs.FedPAC(lam=0.8, head_epochs=2, body_epochs=1),
        aligned_stationary,
        neutral=(
            Neutral(
                fs.FedPAC(lam=0, combine=False, head_epochs=2, body_epochs=1), fs.FedRep(head_epochs=2, body_epochs=1)
            ),
        ),
    ),
    Row(fs.FedPAC(lam=0.8, combine=False, head_epochs=1, body_epochs=2, head_lr=0.3), aligned_stationary),
    Row(
        fs.FedGen(alpha=0.7, generator_steps=4, generator_hidden=8, generator_noise=3),
        reaches(
            mean_of_pulls(0.0, COUNTS), rounds=60
        ),  # logits that move together have no slope in the taught cross-entropy
        neutral=(Neutral(fs.FedGen(alpha=0, generator_steps=2), fs.FedAvg()),),
    ),
    Row(
        fs.FedRep(head_epochs=2, body_epochs=1),
        own_optimum,
        neutral=(  # with a head that nobody trains, the body is FedAvg's
            Neutral(
                fs.FedRep(head_epochs=0, body_epochs=2),
                fs.FedAvg(),
                within=1e-15,
                settings={"epochs": 2},
                parent_model=freeze_head,
            ),
        ),
    ),
    Row(
        fs.PFedSD(**SD),
        stationary_alone,
        neutral=(
            Neutral(fs.PFedSD(lam=0), fs.FedAvg(mean="uniform"), of="generic"),
            Neutral(fs.PFedSD(lam=0, mean="weighted"), fs.FedAvg(), of="generic"),
        ),
    ),
    Row(
        fs.PFedSD(**SD, scale_by_temperature=False),
        stationary_alone,
        neutral=(Neutral(fs.PFedSD(**SD, scale_by_temperature=False), fs.PFedSD(lam=0.7 / 4, tau=2.0), within=1e-14),),
    ),
    Row(
        fs.PFedSD(**SD, teacher="predictions"),
        stationary_alone,
        neutral=(Neutral(fs.PFedSD(**SD, teacher="predictions"), fs.PFedSD(**SD), within=1e-10),),
    ),
    Row(
        fs.PFedSD(**SD, stateless=True),
        stationary_alone,
        neutral=(Neutral(fs.PFedSD(**SD, stateless=True), fs.PFedSD(**SD), within=1e-10),),
    ),
    Row(
        fs.PFedSD(**SD, teacher_mode="train"),
        stationary_alone,
        neutral=(Neutral(fs.PFedSD(**SD, teacher_mode="train"), fs.PFedSD(**SD), within=1e-10),),  # nothing is dropped
    ),
    Row(
        fs.PFedSD(**SD, teacher="ditto", teacher_lam=0.8),
        stationary_alone,
        neutral=(
            Neutral(fs.PFedSD(lam=0, teacher="ditto", teacher_lam=0.8), fs.Ditto(lam=0.8, mean="uniform")),
            Neutral(fs.PFedSD(lam=0, teacher="ditto", teacher_lam=0), fs.Local(), of="personal", settings=EVERYBODY),
        ),
    ),
    Row(fs.PFedSD(**SD, clusters=2), stationary_in_clusters),
    *(
        Row(
            fs.PFedSD(lam=0.1, regulariser=kind),
            stationary_alone,
            neutral=(Neutral(fs.PFedSD(lam=0, regulariser=kind), fs.FedAvg(mean="uniform"), of="generic"),),
        )
        for kind in ("mse", "l2", "ewc")
    ),
    Row(
        fs.PFedSD(lam=0.1, regulariser="ewc", stateless=True),
        stationary_alone,
        neutral=(
            Neutral(
                fs.PFedSD(lam=0.1, regulariser="ewc", stateless=True),
                fs.PFedSD(lam=0.1, regulariser="ewc"),
                within=1e-10,
            ),
        ),
    ),
    Row(
        fs.PFedSD(**SD, ramp=0.7),
        stationary_alone,
        neutral=(Neutral(fs.PFedSD(**SD, ramp=1e-9), fs.PFedSD(**SD)),),
    ),
    Row(
        fs.FedBSD(lam=0.8, head_epochs=2, backbone_epochs=2),
        stationary_layers,
        neutral=(
            Neutral(
                fs.FedBSD(lam=0, head_epochs=2, backbone_epochs=1),
                fs.FedRep(head_epochs=2, body_epochs=1, mean="uniform"),
                of="generic",
            ),
        ),
    ),
    Row(fs.FedBSD(lam=0.8, head_epochs=2, backbone_epochs=2, start="local"), stationary_layers),
    Row(
        fs.PFedKDWCL(alpha=0.3, tau=2.0, server_lr=8.0),
        agreement,
        neutral=(Neutral(fs.PFedKDWCL(alpha=0), fs.Local(), of="personal", settings=EVERYBODY),),
    ),
    Row(
        fs.PFedKDWCL(alpha=0.3, server="average"),
        agreement,
        neutral=(Neutral(fs.PFedKDWCL(alpha=0, server="average"), fs.Local(), of="personal", settings=EVERYBODY),),
    ),
    Row(
        fs.SpectralCoDistillation(**SPECTRAL, lam_g=0.2, lam_p=0.1),
        equal_spectra,
        neutral=(
            Neutral(
                fs.SpectralCoDistillation(**SPECTRAL, lam_g=0, lam_p=0),
                fs.FedAvg(),
                of="generic",
                settings={"epochs": 2},
            ),
            Neutral(
                fs.SpectralCoDistillation(**SPECTRAL, lam_g=0, lam_p=0),
                fs.Local(),
                of="personal",
                settings={"epochs": 2, **EVERYBODY},
            ),
        ),
    ),
    Row(
        fs.SpectralCoDistillation(**SPECTRAL, lam_g=0.2, lam_p=0.1, personal_lr=0.02),
        equal_spectra,
        neutral=(
            Neutral(  # the laws' own rate is 0.05
                fs.SpectralCoDistillation(**SPECTRAL, personal_lr=0.05), fs.SpectralCoDistillation(**SPECTRAL)
            ),
        ),
    ),
    Row(  # a weak pull: it closes in slowly
        fs.SpectralCoDistillation(**SPECTRAL, divergence="normalised", tau=0.8, lam_g=2.0, lam_p=2.0),
        functools.partial(equal_spectra, within=1e-4),
    ),
    Row(
        fs.SpectralCoDistillation(**SPECTRAL, divergence="paper", transform="raw", lam_g=1e-3, lam_p=1e-3),
        printed_divergence_shrinks,
    ),
    Row(
        fs.CD2PFed(p=0.6, distill=False),
        stationary_layers,
        neutral=(
            Neutral(fs.CD2PFed(p=0), fs.FedAvg()),
            Neutral(fs.CD2PFed(p=0, progressive=False, smoothing=False), fs.FedAvg()),
            Neutral(fs.CD2PFed(p=1, progressive=False, smoothing=False), fs.Local(), of="personal"),
        ),
    ),
    Row(fs.CD2PFed(p=0.6, progressive=False, smoothing=False, distill=False), stationary_layers),
    Row(fs.CD2PFed(p=0.6, progressive=False, smoothing=True, distill=False, beta=0.3), stationary_layers),
    *(
        Row(
            fs.CD2PFed(p=0.7, distill=True, progressive=li, smoothing=ta, lam=0.5),
            cyclic_stationary,
            neutral=(
                Neutral(
                    fs.CD2PFed(p=0.7, distill=True, progressive=li, smoothing=ta, lam=0),
                    fs.CD2PFed(p=0.7, distill=False, progressive=li, smoothing=ta),
                ),
            ),
        )
        for li in (True, False)
        for ta in (True, False)
    ),
    Row(fs.FedSALoRA(), stationary_adapters, settings={"lora": ADAPTED}),
    Row(fs.FFALoRA(), stationary_adapters, settings={"lora": ADAPTED}),
    # Local training in steps: a client with few samples passes through them several times, one with many not once. Of the
    # quadratics, where a batch is all of a client's data, so many steps are so many epochs.
    Row(fs.FedAvg(), reaches(mean_of_pulls(0.0, COUNTS), epochs=1, local_steps=EPOCHS), settings=IN_STEPS),
    Row(
        fs.Ditto(lam=0.8),
        beside_the_mean,
        neutral=(Neutral(fs.Ditto(), fs.FedAvg(), of="generic", settings=IN_STEPS),),
        settings=IN_STEPS,
    ),
    Row(fs.PFedMe(lam=4.0, k=3, personal_lr=0.06, beta=0.9), envelope, settings=IN_STEPS),
    Row(fs.CD2PFed(p=0.6, distill=False, beta=0.3), stationary_layers, settings=IN_STEPS),
]
