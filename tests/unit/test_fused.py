"""A perceptron's own loop equals autograd: every depth, every form of SGD, ragged batches, frozen parts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedstill as fs
from fedstill import models
from fedstill.core.optim import SGD
from fedstill.engine.bench import Bench
from fedstill.engine.fused import Layer, Perceptron
from fedstill.engine.recognise import _follow, recognise
from fedstill.run import simulation
from fedstill.run.experiment import Training

from ..problems import SETTINGS, distance, ragged, states


def layers_of(widths: list[int], bias: bool = True) -> tuple[tuple[Layer, ...], dict[str, torch.Tensor]]:
    """A chain with ReLU between its layers, and weights for it."""
    g = torch.Generator().manual_seed(len(widths))
    params, layers = {}, []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        params[f"{i}.weight"] = torch.randn(b, a, generator=g, dtype=torch.float64) / a**0.5
        if bias:
            params[f"{i}.bias"] = torch.randn(b, generator=g, dtype=torch.float64) * 0.1
        layers.append(Layer(f"{i}.weight", f"{i}.bias" if bias else None, i < len(widths) - 2))
    return tuple(layers), params


def by_autograd(layers, start, names, sgd: SGD, x, y, orders, size):
    """The oracle: torch's own modules, gradients and optimiser."""
    params = {n: v.clone().requires_grad_(n in names) for n, v in start.items()}
    moved = [params[n] for n in params if n in names]
    optimiser = torch.optim.SGD(
        moved, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay
    )
    total = 0.0
    for order in orders:
        for rows in torch.split(order, min(size, len(y))):
            a = x[rows].flatten(1)
            for layer in layers:
                a = F.linear(a, params[layer.weight], params[layer.bias] if layer.bias else None)
                a = a.relu() if layer.relu else a
            loss = F.cross_entropy(a, y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item()
    return {n: v.detach() for n, v in params.items()}, total


@settings(max_examples=60, deadline=None)
@given(
    hidden=st.lists(st.integers(1, 20), max_size=3),
    samples=st.integers(1, 23),
    size=st.integers(1, 30),
    epochs=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.01]),
    bias=st.booleans(),
    frozen=st.integers(0, 15),
)
def test_equals_autograd(hidden, samples, size, epochs, momentum, nesterov, decay, bias, frozen) -> None:
    layers, start = layers_of([6, *hidden, 4], bias)
    moving = [layer for i, layer in enumerate(layers) if not frozen >> i & 1] or [layers[0]]
    names = [n for layer in moving for n in (layer.weight, layer.bias) if n is not None]
    g = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 2, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, 4, (samples,), generator=g)
    orders = [torch.randperm(samples, generator=g) for _ in range(epochs)]
    sgd = SGD(0.1, momentum, nesterov and momentum > 0, decay)
    perceptron = Perceptron(layers)
    for _ in range(2):  # the second time in buffers that were used
        ours, total, _ = perceptron.train(start, names, sgd, x, y, orders, size)
        theirs, expected = by_autograd(layers, start, set(names), sgd, x, y, orders, size)
        assert max((ours[n] - theirs[n]).abs().max() for n in start) < 1e-12
        assert float(total) == pytest.approx(expected, abs=1e-12)
        assert all(ours[n] is start[n] for n in start if n not in names)


def bench_of(model: nn.Module, method: fs.Method | None = None, shape=(4,), **changes) -> Bench:
    how = Training(**{**SETTINGS, "engine": "one", **changes})
    return simulation.prepare(method or fs.FedAvg(), model, ragged(shape=shape), None, how).trainer.bench


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.b(self.a(x.view(x.size(0), -1)).relu())


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (models.build("mlp", (4,), 3), 2),
        (models.build("mlp2", (1, 2, 2), 3), 3),
        (models.build("mlr", (4,), 3), 1),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)), 3),
        (Viewed(), 2),
    ],
    ids=["mlp", "mlp2", "mlr", "sequential", "view"],
)
def test_chains_are_recognised(model: nn.Module, layers: int) -> None:
    found = recognise(bench_of(model, shape=(1, 2, 2) if layers == 3 and hasattr(model, "depth") else (4,)))
    assert found is not None
    assert len(found.layers) == layers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x).relu()) * 2


class Skipping(Scaled):
    def forward(self, x):
        return self.b(self.a(x).relu() + self.a(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(self.a(self.a(x).relu()).relu())


class Unused(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Reversed(Scaled):
    def forward(self, x):
        return self.b(self.a(x.flip(1)).relu())


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].register_forward_hook(_double)
    return model


def _double(module, given, out):
    return out * 2


OTHERS = {
    "tanh": nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "relu last": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU()),
    "dropout": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3)),
    "norm": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
    "hook": hooked(),
    "scaled": Scaled(),
    "skip": Skipping(),
    "twice": Twice(),
    "unused": Unused(),
    "reversed": Reversed(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_autograd(name: str) -> None:
    assert recognise(bench_of(OTHERS[name])) is None


def test_a_chain_that_was_followed_wrongly_is_refused() -> None:
    bench = bench_of(models.build("mlp2", (4,), 3))
    right = _follow(bench.task.net)
    wrong = [(replace(right[0], relu=False), *right[1:]), (right[0], replace(right[1], relu=False), right[2])]
    for layers in wrong:
        assert recognise(bench, lambda net, layers=layers: layers) is None


@dataclass(frozen=True, kw_only=True)
class Squared(fs.FedProx):
    """Another objective than its parent's, whose closed form it inherits but for the contract."""

    def loss(self, task, params, local, batch):
        return self.fit(task, params, batch).square()


@dataclass(frozen=True, kw_only=True)
class Wrong(fs.FedProx):
    """A closed form that is not its objective's."""

    def closed_form(self, task, local):
        return replace(super().closed_form(task, local), pull=1.001 * self.mu)


@dataclass(frozen=True, kw_only=True)
class Failing(fs.FedProx):
    def begin(self, task, down, memory):
        return {"params": down["w"]}


OTHER_METHODS = {
    "correct": fs.SCAFFOLD(), "loss": Squared(), "wrong": Wrong(), "failing": Failing(), "hf": fs.PerFedAvg(variant="hf"),
    "ewc": fs.PFedSD(regulariser="ewc"), "mse": fs.PFedSD(regulariser="mse"), "past dropout": fs.PFedSD(teacher_mode="train"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_other_objectives_are_left_to_autograd(name: str) -> None:
    bench = bench_of(models.build("mlp", (4,), 3), fs.FedProx())  # a failing hook would be refused here
    assert recognise(replace(bench, method=OTHER_METHODS[name])) is None


def test_batches_that_are_wide_for_the_inputs_are_left_to_autograd() -> None:
    """Products of all samples with one another would cost more than those with the inputs."""
    bench = bench_of(models.build("mlp", (4,), 3), fs.PFedMe())
    perceptron, (phase,) = recognise(bench), bench.method.phases(bench.task)
    local = {"params": bench.net.initial()}
    found = [perceptron.form(bench.method, bench.task, local, phase, bench.net.parameters, n) for n in (8, 9)]
    assert found[0] is not None
    assert found[1] is None


CLOSED = {
    "fedprox": fs.FedProx(mu=0.3), "fedgkd": fs.FedGKD(gamma=0.7), "pfedsd": fs.PFedSD(lam=0.8, tau=2.0),
    "pfedsd l2": fs.PFedSD(regulariser="l2"), "pfedsd ditto": fs.PFedSD(teacher="ditto"),
    "wcl": fs.PFedKDWCL(alpha=0.4), "wcl softer": fs.PFedKDWCL(alpha=0.4, tau=3.0),
    "pfedme": fs.PFedMe(lam=5.0, k=3, beta=2.0), "per-fedavg": fs.PerFedAvg(alpha=0.2), "per-fedavg b": fs.PerFedAvg(beta=0.02),
}  # fmt: skip
SGDS = [{"momentum": 0.0}, {"weight_decay": 0.02}, {"nesterov": True, "weight_decay": 0.02}]


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("how", SGDS)
def test_a_run_by_its_closed_form_equals_one_by_autograd(name: str, how: dict, monkeypatch) -> None:
    used, train = [], Perceptron.train
    monkeypatch.setattr(Perceptron, "train", lambda self, *given: used.append(True) or train(self, *given))
    model = models.build("mlr" if "weight_decay" in how and "nesterov" not in how else "mlp2", (4,), 3)
    runs = []
    for fast in (True, False):
        settings = {**SETTINGS, "engine": "one", "fast": fast, "batch_size": 7, **how}
        runs.append(fs.simulate(CLOSED[name], model=model, data=ragged(), **settings))
        assert bool(used) is fast
        used.clear()
    assert distance(*(states(r) for r in runs)) < 1e-11
    for a, b in zip(runs[0].history, runs[1].history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-11)


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.Local(), fs.FedRep(head_epochs=2)], ids=lambda m: m.id)
@pytest.mark.parametrize("how", [{"momentum": 0.0}, {"nesterov": True}, {"weight_decay": 0.0}])
def test_a_run_is_the_same_with_and_without(method: fs.Method, how: dict, monkeypatch) -> None:
    used = []
    train = Perceptron.train

    def watched(self, *given):
        used.append(True)
        return train(self, *given)

    monkeypatch.setattr(Perceptron, "train", watched)
    model = models.build("mlp2", (4,), 3)
    runs = []
    for fast in (True, False):
        runs.append(
            fs.simulate(method, model=model, data=ragged(), **{**SETTINGS, "engine": "one", "fast": fast, **how})
        )
        assert bool(used) is fast
        used.clear()
    assert distance(*(states(r) for r in runs)) < 1e-12
    for a, b in zip(runs[0].history, runs[1].history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-12)
        assert a["personal_clients" if "personal_clients" in a else "generic_clients"] is not None


def test_what_comes_out_can_be_differentiated_and_shares_nothing() -> None:
    layers, start = layers_of([4, 5, 3])
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    perceptron, sgd = Perceptron(layers), SGD(0.1)
    first, *_ = perceptron.train(start, list(start), sgd, x, y, [torch.arange(7)], 3)
    kept = {n: v.clone() for n, v in first.items()}
    perceptron.train(start, list(start), sgd, 2 * x, y, [torch.arange(7)], 3)
    assert all(torch.equal(kept[n], first[n]) for n in kept)
    weight = first["0.weight"].requires_grad_()
    (weight.square().sum()).backward()
    assert torch.equal(weight.grad, 2 * weight)
