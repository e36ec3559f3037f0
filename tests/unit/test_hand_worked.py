"""The five papers' methods against numpy: gradients derived by hand, two clients, full batches, every parameter to 1e-10.

Nothing here is taken from the library but its interface. The upper part is a small perceptron with its backward pass, SGD and
means; each method's rounds are then written down from its paper's equations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fedstill as fs
from fedstill.core import terms
from fedstill.core.batch import Batch
from fedstill.core.task import Site, Task
from fedstill.nn.channels import Channels
from fedstill.run.experiment import Training
from fedstill.run.simulation import prepare

Weights = dict[str, np.ndarray]
TOLERANCE = 1e-10
INPUTS = 3
both_engines = pytest.mark.parametrize("engine", ["one", "stacked"])


# ---- a perceptron by hand: widths (3, …, classes), layers named as in nn.Sequential: 0, 2, 4, … ---------------------------
def initial(widths: Sequence[int], seed: int = 1) -> Weights:
    g, w = np.random.default_rng(seed), {}
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        w[f"{2 * i}.weight"], w[f"{2 * i}.bias"] = g.normal(size=(b, a)) / np.sqrt(a), 0.3 * g.normal(size=b)
    return w


def layers(w: Weights) -> list[str]:
    return [name.removesuffix(".weight") for name in w if name.endswith(".weight")]


def forward(w: Weights, x, tanh: bool = True, masks=None):
    """The outputs, and every layer's input. `masks[i]` multiplies hidden layer i's activations."""
    inputs, names = [x], layers(w)
    for i, name in enumerate(names):
        z = inputs[-1] @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        if i == len(names) - 1:
            return z, inputs
        h = np.tanh(z) if tanh else z
        inputs.append(h if masks is None else h * masks[i])
    raise AssertionError


def backward(w: Weights, inputs, by_output, tanh: bool = True, masks=None, by_features=None) -> Weights:
    """∂L/∂w from ∂L/∂output (and from ∂L/∂features, the last layer's input)."""
    grads, names, delta = {}, layers(w), by_output
    for i in reversed(range(len(names))):
        name = names[i]
        grads[f"{name}.weight"], grads[f"{name}.bias"] = delta.T @ inputs[i], delta.sum(0)
        if i == 0:
            break
        by_input = delta @ w[f"{name}.weight"]
        if i == len(names) - 1 and by_features is not None:
            by_input = by_input + by_features
        if masks is not None:
            by_input = (
                by_input * masks[i - 1]
            )  # where the mask is 1, inputs[i] is tanh(z); where it is 0, nothing flows
        delta = by_input * (1 - inputs[i] ** 2) if tanh else by_input
    return {name: grads[name] for name in w}


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def by_cross_entropy(z, y):
    """∂/∂z of −mean log softmax(z)[y]."""
    return (softmax(z) - np.eye(z.shape[1])[y]) / len(y)


def by_student(teacher, student, tau: float):
    """∂/∂student of mean KL(q_τ(teacher) ‖ q_τ(student)): the teacher is a constant."""
    return (softmax(student / tau) - softmax(teacher / tau)) / (tau * len(student))


def added(a: Weights, b: Weights, factor: float = 1.0) -> Weights:
    return {name: a[name] + factor * b[name] for name in a}


def averaged(models: Sequence[Weights], counts: Sequence[float]) -> Weights:
    return {n: sum(c * m[n] for c, m in zip(counts, models, strict=True)) / sum(counts) for n in models[0]}


@dataclasses.dataclass(frozen=True)
class Work:
    """The local work's settings; `descend` is SGD from a fresh state, one full batch an epoch."""

    epochs: int = 2
    lr: float = 0.3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def descend(
        self,
        w: Weights,
        gradient: Callable[[Weights], Weights],
        epochs: int | None = None,
        moving: Sequence[str] | None = None,
        after: Callable[[Weights, Weights], Weights] = lambda before, now: now,
    ) -> Weights:
        velocity = {name: np.zeros_like(value) for name, value in w.items()}
        for _ in range(self.epochs if epochs is None else epochs):
            g, now = gradient(w), dict(w)
            for name in w if moving is None else moving:
                slope = g[name] + self.weight_decay * w[name]
                velocity[name] = self.momentum * velocity[name] + slope
                now[name] = w[name] - self.lr * (
                    slope + self.momentum * velocity[name] if self.nesterov else velocity[name]
                )
            w = after(w, now)
        return w


PLAIN, HEAVY, DECAY = Work(), Work(lr=0.2, momentum=0.9), Work(lr=0.2, momentum=0.9, weight_decay=0.05)
NESTEROV = Work(lr=0.2, momentum=0.9, weight_decay=0.05, nesterov=True)
works = pytest.mark.parametrize("work", [PLAIN, HEAVY], ids=["plain", "momentum"])


# ---- the same problem for the library -------------------------------------------------------------------------------------
def clients(classes: int = 2, sizes: Sequence[int] = (7, 4), seed: int = 3):
    g = np.random.default_rng(seed)
    return [(g.normal(size=(n, INPUTS)) + k, g.integers(0, classes, size=n)) for k, n in enumerate(sizes)]


def federation(data, classes: int) -> fs.Federation:
    return fs.Federation.from_arrays([(x, y, x[:2], y[:2]) for x, y in data], classes=classes)


def module(w: Weights, tanh: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = []
    for name in layers(w):
        out, inward = w[f"{name}.weight"].shape
        parts += [nn.Linear(inward, out), nn.Tanh() if tanh else nn.Identity()]
    model = nn.Sequential(*parts[:-1]).double()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in w.items()})
    return model


def agree(method, w: Weights, data, work: Work, engine: str, expected, rounds: int = 2, tanh: bool = True) -> None:
    """Run the library and compare with (generic, [personal models]), as worked out by hand."""
    training = dataclasses.asdict(work)
    run = fs.simulate(
        method, model=module(w, tanh), data=federation(data, len(w[f"{layers(w)[-1]}.bias"])), head=layers(w)[-1],
        rounds=rounds, participation=1.0, batch_size=64, dtype="float64", device="cpu", engine=engine, **training,
    )  # fmt: skip
    generic, personal = expected
    for ours, hand in [(run.generic(), generic), *((run.personal(k), v) for k, v in enumerate(personal))]:
        assert ours.keys() == hand.keys()
        for name, value in hand.items():
            np.testing.assert_allclose(ours[name].numpy(), value, rtol=0, atol=TOLERANCE, err_msg=name)


def test_the_hand_gradients_themselves() -> None:
    """Central differences of the plain objective, so that a slip in `backward` could not hide."""
    w, (x, y) = initial((INPUTS, 4, 5, 2)), clients()[0]
    masks = [np.array([0.0, 1, 1, 0]), np.array([1.0, 0, 1, 0, 1])]

    def objective(w: Weights) -> float:
        z, inputs = forward(w, x, masks=masks)
        return float(-np.log(softmax(z)[np.arange(len(y)), y]).mean() + (inputs[-1] ** 3).sum())

    z, inputs = forward(w, x, masks=masks)
    grads = backward(w, inputs, by_cross_entropy(z, y), masks=masks, by_features=3 * inputs[-1] ** 2)
    for name, value in w.items():
        for at in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[at] = 1e-5
            slope = (objective({**w, name: value + step}) - objective({**w, name: value - step})) / 2e-5
            assert grads[name][at] == pytest.approx(slope, abs=1e-8)


# ---- 1. pFedSD ------------------------------------------------------------------------------------------------------------
def self_distilled(w0: Weights, data, work: Work, by_penalty, rounds: int = 2, tanh: bool = True):
    """Eq. 3, 4 and Algorithms 1, 2. `by_held(w, v, x, y, z, t)`: (∂/∂z, ∂/∂w) of λ·R, R against the past model v."""
    w, past = w0, [None] * len(data)
    for t in range(1, rounds + 1):
        for k, (x, y) in enumerate(data):

            def gradient(u: Weights, x=x, y=y, v=past[k], t=t) -> Weights:
                z, inputs = forward(u, x, tanh)
                by_z, by_u = by_cross_entropy(z, y), None
                if v is not None:
                    extra, by_u = by_penalty(u, v, x, y, z, t)
                    by_z = by_z + extra
                grads = backward(u, inputs, by_z, tanh)
                return grads if by_u is None else added(grads, by_u)

            past[k] = work.descend(w, gradient)
        w = averaged(past, [1] * len(data))
    return w, past


@both_engines
@works
@pytest.mark.parametrize("scaled", [True, False], ids=["tau2", "as printed"])
@pytest.mark.parametrize("tanh", [True, False], ids=["tanh", "linear"])
def test_pfedsd(scaled: bool, work: Work, engine: str, tanh: bool) -> None:
    w, data, lam, tau = initial((INPUTS, 4, 2)), clients(), 0.7, 3.0

    def penalty(u, v, x, y, z, t):
        return lam * (tau**2 if scaled else 1) * by_student(forward(v, x, tanh)[0], z, tau), None

    method = fs.PFedSD(lam=lam, tau=tau, scale_by_temperature=scaled)
    agree(method, w, data, work, engine, self_distilled(w, data, work, penalty, tanh=tanh), tanh=tanh)


@both_engines
@pytest.mark.parametrize("change", [{"teacher": "predictions"}, {"stateless": True}], ids=str)
def test_pfedsd_where_the_teacher_is_kept(change, engine: str) -> None:
    w, data, lam, tau, work = initial((INPUTS, 4, 2)), clients(), 0.7, 2.0, DECAY

    def penalty(u, v, x, y, z, t):
        return lam * tau**2 * by_student(forward(v, x)[0], z, tau), None

    expected = self_distilled(w, data, work, penalty, rounds=3)
    agree(fs.PFedSD(lam=lam, tau=tau, **change), w, data, work, engine, expected, rounds=3)


@both_engines
def test_pfedsd_ramp(engine: str) -> None:
    """λ_t = λ·min(1, t/(ramp·T)): the paper proposes a rise, the library a linear one."""
    w, data, lam, rounds, ramp = initial((INPUTS, 4, 2)), clients(), 0.8, 4, 0.75

    def penalty(u, v, x, y, z, t):
        return lam * min(1, t / (ramp * rounds)) * by_student(forward(v, x)[0], z, 1.0), None

    agree(
        fs.PFedSD(lam=lam, ramp=ramp), w, data, HEAVY, engine,
        self_distilled(w, data, HEAVY, penalty, rounds=rounds), rounds=rounds,
    )  # fmt: skip


@both_engines
@works
def test_pfedsd_mse(work: Work, engine: str) -> None:
    """R = mean over samples and classes of (z_v − z_w)²."""
    w, data, lam = initial((INPUTS, 4, 2)), clients(), 0.6

    def penalty(u, v, x, y, z, t):
        return lam * 2 * (z - forward(v, x)[0]) / z.size, None

    agree(fs.PFedSD(lam=lam, regulariser="mse"), w, data, work, engine, self_distilled(w, data, work, penalty))


@both_engines
@works
def test_pfedsd_l2(work: Work, engine: str) -> None:
    """R = ½‖w − v‖²."""
    w, data, lam = initial((INPUTS, 4, 2)), clients(), 0.6

    def penalty(u, v, x, y, z, t):
        return 0 * z, {name: lam * (u[name] - v[name]) for name in u}

    agree(fs.PFedSD(lam=lam, regulariser="l2"), w, data, work, engine, self_distilled(w, data, work, penalty))


@both_engines
@works
def test_pfedsd_ewc(work: Work, engine: str) -> None:
    """R = ½·Σ F·(w − v)², F = mean over samples of (∇ log p_v(y|x))²: squared sample by sample, labels as given."""
    w, data, lam = initial((INPUTS, 4, 2)), clients(sizes=(19, 4)), 3.0

    def penalty(u, v, x, y, z, t):
        fisher = {name: np.zeros_like(value) for name, value in v.items()}
        for i in range(len(y)):
            z_v, inputs = forward(v, x[i : i + 1])
            one = backward(v, inputs, by_cross_entropy(z_v, y[i : i + 1]))
            fisher = {name: fisher[name] + one[name] ** 2 / len(y) for name in fisher}
        return 0 * z, {name: lam * fisher[name] * (u[name] - v[name]) for name in u}

    agree(fs.PFedSD(lam=lam, regulariser="ewc"), w, data, work, engine, self_distilled(w, data, work, penalty))


# ---- 2. FedBSD ------------------------------------------------------------------------------------------------------------
def backbone_distilled(w0: Weights, data, work: Work, method: fs.FedBSD, rounds: int = 2):
    """Algorithm 1 with Eq. 9, KL(P_t ‖ P_s) on features."""
    head = [name for name in w0 if name.startswith(f"{layers(w0)[-1]}.")]
    body = [name for name in w0 if name not in head]
    shared = {name: w0[name] for name in body}
    own = [dict(w0) for _ in data]
    for t in range(1, rounds + 1):
        for k, (x, y) in enumerate(data):

            def head_gradient(u: Weights, x=x, y=y) -> Weights:
                z, inputs = forward(u, x)
                return backward(u, inputs, by_cross_entropy(z, y))

            before = own[k]
            over = work.descend(
                {**before, **shared}, head_gradient, method.head_epochs, head
            )  # order of names as in w0
            teacher = forward(over, x)[1][-1]

            def body_gradient(u: Weights, x=x, y=y, teacher=teacher) -> Weights:
                z, inputs = forward(u, x)
                features = method.lam * by_student(teacher, inputs[-1], method.tau)
                return backward(u, inputs, by_cross_entropy(z, y), by_features=features)

            if method.start == "local" and t > 1:
                over = {**over, **{name: before[name] for name in body}}
            own[k] = work.descend(over, body_gradient, method.backbone_epochs, body)
        shared = {name: averaged(own, [1] * len(own))[name] for name in body}
    return {**w0, **shared}, own


@both_engines
@pytest.mark.parametrize("start", ["global", "local"])
@pytest.mark.parametrize("work", [PLAIN, HEAVY, DECAY], ids=["plain", "momentum", "decay"])
@pytest.mark.parametrize("widths", [(INPUTS, 4, 2), (INPUTS, 5, 4, 3)], ids=str)
def test_fedbsd(start: str, work: Work, engine: str, widths) -> None:
    w, data = initial(widths), clients(widths[-1])
    method = fs.FedBSD(lam=1.5, tau=2.0, head_epochs=3, backbone_epochs=2, start=start)
    agree(method, w, data, work, engine, backbone_distilled(w, data, work, method, rounds=3), rounds=3)


# ---- 3. pFedKD-WCL --------------------------------------------------------------------------------------------------------
def weighted_combination(w0: Weights, data, work: Work, method: fs.PFedKDWCL, rounds: int = 2):
    """Eq. 2 (with its T²) at the clients; Algorithm 1 line 14 with Eq. 4 (no T²) at the server."""
    w, own, alpha, tau = w0, [w0] * len(data), method.alpha, method.tau
    for _ in range(rounds):
        slopes = []
        for k, (x, y) in enumerate(data):
            teacher, inputs_w = forward(w, x)

            def gradient(u: Weights, x=x, y=y, teacher=teacher) -> Weights:
                z, inputs = forward(u, x)
                by_z = (1 - alpha) * by_cross_entropy(z, y) + alpha * tau**2 * by_student(teacher, z, tau)
                return backward(u, inputs, by_z)

            own = [*own[:k], work.descend(own[k], gradient), *own[k + 1 :]]
            personal = forward(own[k], x)[0]
            slopes.append(backward(w, inputs_w, by_student(personal, teacher, tau)))
        counts = [1] * len(data) if method.mean == "uniform" else [len(y) for _, y in data]
        if method.server == "average":
            w = averaged(own, counts)
        else:
            w = added(w, averaged(slopes, counts), -(method.server_lr or work.lr))
    return w, own


@both_engines
@pytest.mark.parametrize("server", ["distill", "average"])
@pytest.mark.parametrize("tau", [1.0, 2.5])
@pytest.mark.parametrize("work", [PLAIN, HEAVY, DECAY], ids=["plain", "momentum", "decay"])
def test_pfedkd_wcl(server: str, tau: float, work: Work, engine: str) -> None:
    w, data = initial((INPUTS, 4, 2)), clients()
    method = fs.PFedKDWCL(alpha=0.4, tau=tau, server=server)
    agree(method, w, data, work, engine, weighted_combination(w, data, work, method, rounds=3), rounds=3)


@both_engines
@pytest.mark.parametrize("change", [{"server_lr": 0.9}, {"mean": "weighted"}, {"alpha": 0.0}], ids=str)
def test_pfedkd_wcl_settings(change, engine: str) -> None:
    w, data = initial((INPUTS, 4, 2)), clients()
    method = fs.PFedKDWCL(**{"alpha": 0.3, **change})
    agree(method, w, data, PLAIN, engine, weighted_combination(w, data, PLAIN, method))


@both_engines
def test_pfedkd_wcl_without_labels(engine: str) -> None:
    """α = 1: everybody starts at w⁰ and learns from w⁰ alone, so nothing ever moves."""
    w = initial((INPUTS, 4, 2))
    agree(fs.PFedKDWCL(alpha=1.0), w, clients(), HEAVY, engine, (w, [w, w]))


# ---- 4. CD²-pFed ----------------------------------------------------------------------------------------------------------
def private_part(w: Weights, k_of: Callable[[int], int], all_private: bool) -> Weights:
    """1 where a weight is private: the last k rows of hidden layers, the last k columns of the classifier."""
    result, names = {}, layers(w)
    for i, name in enumerate(names):
        weight, bias = np.zeros_like(w[f"{name}.weight"]), np.zeros_like(w[f"{name}.bias"])
        if i < len(names) - 1:
            k = k_of(len(bias))
            weight[len(bias) - k :], bias[len(bias) - k :] = 1, 1
        else:
            width = weight.shape[1]
            weight[:, width - k_of(width) :], bias[:] = 1, 1.0 if all_private else 0.0
        result[f"{name}.weight"], result[f"{name}.bias"] = weight, bias
    return result


def by_cyclic(a, b):
    """∂/∂a and ∂/∂b of ½[KL(p ‖ q) + KL(q ‖ p)], p = softmax(a), q = softmax(b): each KL has a gradient on either side.

    KL(p ‖ q) by its second side's logits: q − p. By its first side's: p∘(log p/q − KL).
    """
    p, q = softmax(a), softmax(b)
    ratio, n = np.log(p) - np.log(q), len(a)
    kl_pq, kl_qp = (p * ratio).sum(1, keepdims=True), -(q * ratio).sum(1, keepdims=True)
    first = {"a": p * (ratio - kl_pq) / n, "b": q * (-ratio - kl_qp) / n}  # through the side that teaches
    second = {"a": (p - q) / n, "b": (q - p) / n}  # through the side that learns
    return first, second


def by_sub_networks(u: Weights, x, hidden: Sequence[int], ks: Sequence[int], teaching: float = 1.0) -> Weights:
    """∂L_CD/∂w; `teaching` = 0 leaves out the gradient through the teaching sides (what a detach would give)."""
    silent = [np.r_[np.zeros(c - k), np.ones(k)] for c, k in zip(hidden, ks, strict=True)]
    private, shared = silent, [1 - m for m in silent]
    (a, inputs_a), (b, inputs_b) = forward(u, x, masks=private), forward(u, x, masks=shared)
    first, second = by_cyclic(a, b)
    by_a, by_b = (0.5 * (teaching * first[side] + second[side]) for side in "ab")
    return added(backward(u, inputs_a, by_a, masks=private), backward(u, inputs_b, by_b, masks=shared))


def decoupled(w0: Weights, data, work: Work, method: fs.CD2PFed, counts_of, rounds: int = 2):
    """Eq. 3–7. `counts_of(t, C)` says how many of C channels are private in round t, worked out by the test by hand."""
    hidden = [len(w0[f"{name}.bias"]) for name in layers(w0)[:-1]]
    total, t0 = sum(len(y) for _, y in data), method.ramp_fraction * rounds
    server, own, was_private = w0, [w0] * len(data), {name: np.zeros_like(v) for name, v in w0.items()}
    for t in range(1, rounds + 1):
        ks = [counts_of(t, c) for c in hidden]
        private = private_part(w0, lambda c, t=t: counts_of(t, c), method.p == 1 and not method.progressive)
        beta = method.beta * np.exp(-5 * (1 - t / t0) ** 2) if t <= t0 else method.beta
        teach = method.distill and all(0 < k < c for k, c in zip(ks, hidden, strict=True))

        def smooth(before: Weights, now: Weights, private=private, beta=beta) -> Weights:
            if not method.smoothing:
                return now
            return {n: np.where(private[n] == 1, beta * now[n] + (1 - beta) * before[n], now[n]) for n in now}

        for k, (x, y) in enumerate(data):

            def gradient(u: Weights, x=x, y=y, ks=ks, teach=teach) -> Weights:
                z, inputs = forward(u, x)
                grads = backward(u, inputs, by_cross_entropy(z, y))
                return added(grads, by_sub_networks(u, x, hidden, ks), method.lam) if teach else grads

            start = {n: np.where((was_private[n] == 1) & (private[n] == 1), own[k][n], server[n]) for n in w0}
            own = [*own[:k], work.descend(start, gradient, after=smooth), *own[k + 1 :]]
        mean = {n: sum(len(y) / total * v[n] for v, (_, y) in zip(own, data, strict=True)) for n in w0}
        server = {n: np.where(private[n] == 1, server[n], mean[n]) for n in w0}
        was_private = private
    return server, [{n: np.where(was_private[n] == 1, v[n], server[n]) for n in w0} for v in own]


ONE_OF_FOUR = ({"p": 0.25, "progressive": False}, {(t, 4): 1 for t in (1, 2)})
GROWING = ({"p": 0.5}, {(1, 4): 1, (2, 4): 2})
LATE = ({"p": 0.45}, {(1, 4): 0, (2, 4): 1})  # ⌊0.225·4⌋ = 0: no private channel, no distillation yet


@both_engines
@pytest.mark.parametrize("share", [ONE_OF_FOUR, GROWING, LATE], ids=["fixed", "growing", "late"])
@pytest.mark.parametrize("distill", [True, False], ids=["cd", "no cd"])
@pytest.mark.parametrize("smoothing", [True, False], ids=["ta", "no ta"])
def test_cd2_pfed(share, distill: bool, smoothing: bool, engine: str) -> None:
    w, data, (fields, counts) = initial((INPUTS, 4, 2)), clients(), share
    method = fs.CD2PFed(lam=1.3, beta=0.6, ramp_fraction=1.0, distill=distill, smoothing=smoothing, **fields)
    for work in (PLAIN, NESTEROV):
        expected = decoupled(w, data, work, method, lambda t, c: counts[t, c])
        agree(method, w, data, work, engine, expected)


@both_engines
@pytest.mark.parametrize("ramp_fraction", [0.0, 0.1, 0.5, 1.0])
def test_cd2_pfed_ramp_of_the_smoothing(ramp_fraction: float, engine: str) -> None:
    w, data = initial((INPUTS, 5, 2)), clients()
    method = fs.CD2PFed(p=0.4, ramp_fraction=ramp_fraction)
    counts = {1: 0, 2: 1, 3: 1, 4: 2}  # ⌊5·0.1⌋, ⌊5·0.2⌋, ⌊5·0.3⌋, ⌊5·0.4⌋
    expected = decoupled(w, data, HEAVY, method, lambda t, c: counts[t], rounds=4)
    agree(method, w, data, HEAVY, engine, expected, rounds=4)


@both_engines
def test_cd2_pfed_with_two_hidden_layers(engine: str) -> None:
    """A private channel of the second layer still reads the first layer's shared channels in g_full, not in g_private."""
    w, data = initial((INPUTS, 4, 5, 3)), clients(3)
    method = fs.CD2PFed(p=0.8, lam=0.9, beta=0.7)
    counts = {(1, 4): 1, (1, 5): 2, (2, 4): 3, (2, 5): 4}
    expected = decoupled(w, data, DECAY, method, lambda t, c: counts[t, c])
    agree(method, w, data, DECAY, engine, expected)


@both_engines
def test_cd2_pfed_all_private(engine: str) -> None:
    """p = 1: the classifier's bias too; nothing is shared, and there is nobody to distil with."""
    w, data = initial((INPUTS, 4, 2)), clients()
    method = fs.CD2PFed(p=1.0, progressive=False)
    server, own = expected = decoupled(w, data, HEAVY, method, lambda t, c: c)
    assert all(np.array_equal(server[name], w[name]) for name in w)
    assert all(np.abs(v[name] - w[name]).max() > 1e-3 for v in own for name in w)
    agree(method, w, data, HEAVY, engine, expected)


@given(percent=st.integers(0, 100), channels=st.integers(1, 200), t=st.integers(1, 60), later=st.integers(0, 60))
@example(percent=29, channels=100, t=1, later=0)
@example(percent=58, channels=100, t=1, later=1)
@settings(max_examples=150, deadline=None)
def test_cd2_pfed_counts_channels_exactly(percent: int, channels: int, t: int, later: int) -> None:
    """k = ⌊p·t/T·C⌋ in whole numbers: a binary fraction must not lose a channel (0.29·100 = 28.999…)."""
    rounds, method = t + later, fs.CD2PFed(p=percent / 100)
    share = method.share(dataclasses.replace(any_task(), round=t, rounds=rounds))
    private = percent * t * channels // (100 * rounds)
    layer = Channels(out={"layer": channels}, classifier="last")
    value = torch.zeros(channels, 2)
    assert layer.private(channels, share) == private
    assert len(layer.shared("layer.weight", value, share)) == channels - private
    result = layer.is_private("layer.weight", value, torch.tensor(share, dtype=torch.float64))
    assert result.flatten().tolist() == [c >= channels - private for c in range(channels)]


# ---- 5. spectral co-distillation ------------------------------------------------------------------------------------------
def flat(w: Weights) -> np.ndarray:
    return np.concatenate([value.reshape(-1) for value in w.values()])


def unflat(vector: np.ndarray, like: Weights) -> Weights:
    result, at = {}, 0
    for name, value in like.items():
        result[name] = vector[at : at + value.size].reshape(value.shape)
        at += value.size
    return result


def divergence(w: np.ndarray, other: np.ndarray, first: int, kind: str, transform: str):
    """D and ∂D/∂w over the first entries of the whole spectrum: ∂|F_k|/∂w_n = Re(conj(F_k)/|F_k|·e^{−2πikn/d})."""
    d, scale = len(w), 1 / np.sqrt(len(w)) if transform == "ortho" else 1.0
    f = np.fft.fft(w)[:first]
    p, q = scale * np.abs(f), scale * np.abs(np.fft.fft(other)[:first])
    if kind == "paper":
        value, slope = (p * np.log(p) - p * np.log(q)).sum(), np.log(p) - np.log(q) + 1
    elif kind == "generalised":
        value, slope = (p * np.log(p / q) - p + q).sum(), np.log(p / q)
    else:
        a, b = p / p.sum(), q / q.sum()
        value = (a * np.log(a / b)).sum()
        slope = (np.log(a / b) - value) / p.sum()
    turns = np.exp(-2j * np.pi * np.outer(np.arange(first), np.arange(d)) / d)
    return value, slope @ (scale * (np.conj(f) / np.abs(f))[:, None] * turns).real


def co_distilled(w0: Weights, data, work: Work, method: fs.SpectralCoDistillation, first: int, rounds: int = 2):
    """Algorithm 1 with Eq. 4 and 5; `first` = ⌈τ·d⌉, given by the test."""
    w, own, d = w0, [w0] * len(data), flat(w0).size
    for _ in range(rounds):
        generics = []
        for k, (x, y) in enumerate(data):

            def gradient(u: Weights, other: Weights, lam: float, entries: int, x=x, y=y) -> Weights:
                z, inputs = forward(u, x)
                _, slope = divergence(flat(u), flat(other), entries, method.divergence, method.transform)
                return added(backward(u, inputs, by_cross_entropy(z, y)), unflat(slope, u), lam)

            g = work.descend(w, lambda u, p=own[k]: gradient(u, p, method.lam_g, first), method.generic_epochs)
            p = work.descend(own[k], lambda u, g=g: gradient(u, g, method.lam_p, d), method.personal_epochs)
            own = [*own[:k], p, *own[k + 1 :]]
            generics.append(g)
        w = averaged(generics, [len(y) for _, y in data])
    return w, own


@both_engines
@pytest.mark.parametrize("divergence", ["generalised", "normalised", "paper"])
@pytest.mark.parametrize("transform", ["ortho", "raw"])
@pytest.mark.parametrize(
    ("widths", "tau", "first"),
    [((INPUTS, 4, 2), 0.4, 11), ((INPUTS, 4, 3), 0.4, 13), ((INPUTS, 4, 2), 0.8, 21), ((INPUTS, 4, 3), 1.0, 31)],
    ids=["even 0.4", "odd 0.4", "even 0.8", "odd 1"],
)  # d = 26 and 31
def test_spectral(divergence: str, transform: str, widths, tau: float, first: int, engine: str) -> None:
    w, data = initial(widths), clients(widths[-1])
    work = Work(lr=0.05, momentum=0.5) if transform == "ortho" else Work(lr=0.02)
    method = fs.SpectralCoDistillation(
        lam_g=0.3, lam_p=0.2, tau=tau, generic_epochs=2, personal_epochs=2, divergence=divergence, transform=transform
    )
    agree(method, w, data, work, engine, co_distilled(w, data, work, method, first))


@given(
    d=st.integers(1, 45),
    percent=st.integers(1, 100),
    kind=st.sampled_from(["generalised", "normalised", "paper"]),
    transform=st.sampled_from(["ortho", "raw"]),
    seed=st.integers(0, 10**6),
)
@example(d=25, percent=28, kind="generalised", transform="ortho", seed=0)  # 0.28·25 = 7.000000000000001
@settings(max_examples=200, deadline=None)
def test_the_real_transform_gives_the_whole_spectrum(
    d: int, percent: int, kind: str, transform: str, seed: int
) -> None:
    g = np.random.default_rng(seed)
    p, q = g.normal(size=d), g.normal(size=d)
    first = -(-percent * d // 100)  # ⌈τ·d⌉ in whole numbers
    value, slope = divergence(p, q, first, kind, transform)
    weights = {"w": torch.tensor(p, requires_grad=True)}
    ours = terms.spectral(weights, terms.spectrum({"w": torch.tensor(q)}, transform), percent / 100, kind, transform)
    (by_w,) = torch.autograd.grad(ours, weights["w"])
    assert ours.item() == pytest.approx(value, rel=1e-9, abs=1e-10)
    np.testing.assert_allclose(by_w.numpy(), slope, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["generalised", "normalised", "paper"])
@pytest.mark.parametrize("transform", ["ortho", "raw"])
@pytest.mark.parametrize("share", [0.4, 0.8, 1.0])
@pytest.mark.parametrize("d", [10, 11])
def test_spectral_gradcheck(kind: str, transform: str, share: float, d: int) -> None:
    g = np.random.default_rng(d)
    a, b, q = (torch.tensor(g.normal(size=n)) for n in (d - 4, 4, d))
    other = terms.spectrum({"a": q[: d - 4], "b": q[d - 4 :].reshape(2, 2)}, transform)

    def value(a, b):
        return terms.spectral({"a": a, "b": b.reshape(2, 2)}, other, share, kind, transform)

    assert torch.autograd.gradcheck(value, (a.requires_grad_(), b.requires_grad_()))


@pytest.mark.parametrize("kind", ["generalised", "normalised", "paper"])
@pytest.mark.parametrize("transform", ["ortho", "raw"])
def test_spectral_where_a_frequency_is_missing(kind: str, transform: str) -> None:
    """0·log 0 = 0, and log 0 is guarded: equal weights have one frequency only, alternating ones another."""
    flat_, waves = torch.full((8,), 0.5, dtype=torch.float64), torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    other = torch.tensor(np.random.default_rng(0).normal(size=8))
    pairs = [(flat_, other), (other, flat_), (flat_, waves), (flat_, flat_)]
    if kind != "normalised":  # which has nothing to divide by where all weights are 0
        pairs += [(0 * flat_, other), (other, 0 * other)]
    for p, q in pairs:
        w = p.clone().requires_grad_()
        value = terms.spectral({"w": w}, terms.spectrum({"w": q}, transform), 1.0, kind, transform)
        (slope,) = torch.autograd.grad(value, w)
        assert torch.isfinite(value), (p, q)
        assert torch.isfinite(slope).all(), (p, q)
    if kind != "normalised":  # p = (4, 0, 0, …), q known: only the first entry counts, and q's sum
        scale = 1 / np.sqrt(8) if transform == "ortho" else 1.0
        q = scale * np.abs(np.fft.fft(other.numpy()))
        expected = 4 * scale * np.log(4 * scale / q[0]) + (q.sum() - 4 * scale if kind == "generalised" else 0)
        assert terms.spectral(
            {"w": flat_}, terms.spectrum({"w": other}, transform), 1.0, kind, transform
        ).item() == pytest.approx(expected)


@pytest.mark.parametrize(("field", "moved"), [("lam_g", "generic"), ("lam_p", "personal")])
def test_the_spectral_term_moves_the_weights(field: str, moved: str) -> None:
    """A known public version loses the gradient on the way: then λ would change nothing."""
    w, data = initial((INPUTS, 4, 2)), clients()
    training = dict(
        rounds=3, epochs=1, batch_size=64, lr=0.1, momentum=0.5, dtype="float64", device="cpu", engine="one"
    )
    ends = []
    for lam in (0.0, 0.5):
        method = fs.SpectralCoDistillation(**{"lam_g": 0.0, "lam_p": 0.0, field: lam})
        ends.append(fs.simulate(method, model=module(w), data=federation(data, 2), **training))
    without, with_ = ((run.generic() if moved == "generic" else run.personal(0)) for run in ends)
    assert max((without[n] - with_[n]).abs().max() for n in without) > 1e-2
    if moved == "personal":  # and λ_p is none of the generic model's business
        assert all(torch.equal(ends[0].generic()[n], ends[1].generic()[n]) for n in without)


# ---- where gradients flow -------------------------------------------------------------------------------------------------
def at_client(method, w: Weights, data, k: int, round: int, rounds: int = 2) -> tuple[Task, Batch]:
    """The task as client k sees it, and its full batch."""
    training = Training(rounds=rounds, epochs=2, batch_size=64, lr=0.2, dtype="float64", device="cpu", engine="one")
    bench = prepare(
        method, module(w), federation(data, len(w[f"{layers(w)[-1]}.bias"])), layers(w)[-1], training
    ).trainer.bench
    x, y = (torch.from_numpy(entry) for entry in data[k])
    rows, n = torch.arange(len(y)), torch.tensor(float(len(y)), dtype=torch.float64)
    site = Site(x, y, rows, n, torch.tensor(2.0, dtype=torch.float64), torch.tensor(round - 1.0, dtype=torch.float64))
    return bench.at(round, site), Batch(x, y, rows, torch.zeros((), dtype=torch.int64))


@functools.cache
def any_task() -> Task:
    return at_client(fs.CD2PFed(), initial((INPUTS, 4, 2)), clients(), 0, round=1)[0]


def leaves(w: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, requires_grad=True) for name, value in w.items()}


def requiring(values):
    """A copy of a tree in which every model's tensors ask for a gradient, and these tensors (flags and predictions do not)."""
    asked: list[torch.Tensor] = []

    def copy(value, inside: bool):
        if isinstance(value, dict):
            return {name: copy(entry, inside=True) for name, entry in value.items()}
        value = value.detach().clone()
        if inside and value.is_floating_point():
            asked.append(value.requires_grad_())
        return value

    return {name: copy(value, inside=False) for name, value in values.items()}, asked


def second_round(method, phase: int):
    """A phase's loss in round 2 as a function of the student's weights, and all other models, which ask for gradients."""
    w, data = initial((INPUTS, 4, 2)), clients()
    task, batch = at_client(method, w, data, 0, round=1)
    start = {name: torch.from_numpy(value) for name, value in w.items()}
    trained = {name: torch.from_numpy(value) for name, value in initial((INPUTS, 4, 2), seed=8).items()}
    down, memory = method.send(task, method.init_server(task, start), 0), method.init_client(task, start)
    local = method.begin(task, down, memory)
    models = {p.model for p in method.phases(task)}
    _, memory = method.finish(task, down, memory, {**local, **dict.fromkeys(models, trained)})
    task = at_client(method, w, data, 0, round=2)[0]
    (down, asked), (memory, others) = requiring(down), requiring(memory)
    local = method.begin(task, down, memory)
    stage = method.phases(task)[phase]
    if stage.enter is not None:
        local = stage.enter(task, local)

    def loss(*student: torch.Tensor) -> torch.Tensor:
        return (stage.loss or method.loss)(task, dict(zip(w, student, strict=True)), local, batch)

    return loss, tuple(leaves(initial((INPUTS, 4, 2), seed=9)).values()), asked + others


BY_PREDICTIONS = [
    (fs.PFedSD(tau=2.0), 0),
    (fs.PFedSD(regulariser="mse"), 0),
    (fs.PFedSD(teacher="predictions"), 0),
    (fs.FedBSD(), 1),
    (fs.FedBSD(start="local"), 1),
    (fs.PFedKDWCL(alpha=0.5), 0),
]
BY_WEIGHTS = [  # an anchor stands in the loss itself; that it is a constant is a matter of what is differentiated
    (fs.PFedSD(regulariser="l2"), 0),
    (fs.PFedSD(regulariser="ewc"), 0),
    (fs.SpectralCoDistillation(lam_g=1.0), 0),
    (fs.SpectralCoDistillation(lam_p=1.0), 1),
]


@pytest.mark.parametrize(("method", "phase"), BY_PREDICTIONS, ids=lambda v: getattr(v, "id", v))
def test_teachers_carry_no_gradient(method, phase: int) -> None:
    loss, student, teachers = second_round(method, phase)
    value = loss(*student)
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(value, student, retain_graph=True))
    assert teachers
    assert all(g is None for g in torch.autograd.grad(value, teachers, allow_unused=True))


@pytest.mark.parametrize(("method", "phase"), BY_PREDICTIONS + BY_WEIGHTS, ids=lambda v: getattr(v, "id", v))
def test_the_gradient_is_that_of_the_student_alone(method, phase: int) -> None:
    """Central differences in the student, everything else held where it is."""
    loss, student, _ = second_round(method, phase)
    assert torch.autograd.gradcheck(loss, student)


@pytest.mark.parametrize("widths", [(INPUTS, 4, 2), (INPUTS, 4, 5, 3)], ids=str)
def test_cd2_gradient_flows_through_both_sides(widths) -> None:
    w, data, counts = initial(widths), clients(widths[-1]), {4: 2, 5: 2}
    hidden, x = widths[1:-1], data[0][0]
    slopes = []
    for lam in (1.0, 0.0):
        method = fs.CD2PFed(p=0.5, lam=lam)
        task, batch = at_client(method, w, data, 0, round=2)
        start = leaves(w)
        local = method.begin(
            task, method.send(task, method.init_server(task, start), 0), method.init_client(task, start)
        )
        loss = method.loss(task, start, local, batch)
        slopes.append(dict(zip(w, torch.autograd.grad(loss, list(start.values())), strict=True)))
    ks = [counts[c] for c in hidden]
    hand, detached = by_sub_networks(w, x, hidden, ks), by_sub_networks(w, x, hidden, ks, teaching=0.0)
    private = private_part(w, lambda c: counts[c], False)
    for name in w:
        ours = (slopes[0][name] - slopes[1][name]).numpy()
        np.testing.assert_allclose(ours, hand[name], rtol=0, atol=TOLERANCE)
        for side in (0, 1):  # shared, private
            here = private[name] == side
            if here.any():
                assert np.abs(hand[name][here]).max() > 1e-4, name
                assert np.abs((hand[name] - detached[name])[here]).max() > 1e-5, name


def test_cd2_gradcheck() -> None:
    w, data, method = initial((INPUTS, 4, 2)), clients(), fs.CD2PFed(p=0.5)
    task, batch = at_client(method, w, data, 0, round=2)
    start = {name: torch.from_numpy(value) for name, value in w.items()}
    local = method.begin(task, method.send(task, method.init_server(task, start), 0), method.init_client(task, start))

    def value(*parts):
        return method.loss(task, dict(zip(w, parts, strict=True)), local, batch)

    assert torch.autograd.gradcheck(value, tuple(leaves(w).values()))
