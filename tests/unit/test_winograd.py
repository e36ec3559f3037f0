"""5×5 convolutions by Winograd's algorithm against torch's own: exactly, in float64, in float32, and in whole runs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedstill as fs
from fedstill.nn.kernels import winograd
from fedstill.nn.kernels.winograd import conv2d, matrices, takes

from ..problems import SETTINGS, distance, identical, states

CL = torch.channels_last


def drawn(batch: int, channels: int, outputs: int, h: int, w: int, dtype=torch.float64, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, channels, h, w), (outputs, channels, 5, 5), (outputs,))
    return [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]


def test_the_matrices_are_exact() -> None:
    """Four results of five taps over eight pixels, in whole numbers: nothing is rounded."""
    a, g, b = matrices()
    d, taps = [Fraction(v) for v in (3, -1, 4, 1, -5, 9, 2, -6)], [Fraction(v) for v in (2, 7, -1, 8, -2)]

    def times(rows, vector):
        return [sum(v * u for v, u in zip(row, vector, strict=True)) for row in rows]

    found = times(a, [u * v for u, v in zip(times(g, taps), times(b, d), strict=True)])
    assert found == [sum(taps[j] * d[i + j] for j in range(5)) for i in range(4)]
    assert all(max(map(abs, row)) == 1 for row in g)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), channels=st.integers(1, 5), outputs=st.integers(1, 5), h=st.integers(5, 17), w=st.integers(5, 17),
    padding=st.integers(0, 4), biased=st.booleans(), last=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_value_and_gradients(batch, channels, outputs, h, w, padding, biased, last, seed) -> None:
    x, weight, bias = drawn(batch, channels, outputs, h, w, seed=seed)
    if last:
        x = x.detach().contiguous(memory_format=CL).requires_grad_()
    given = [x, weight, bias] if biased else [x, weight]
    ours, torchs = (f(x, weight, bias if biased else None, padding=padding) for f in (conv2d, F.conv2d))
    assert ours.shape == torchs.shape
    assert torch.allclose(ours, torchs, rtol=0, atol=1e-11)
    slope = torch.randn(torchs.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    for a, b in zip(torch.autograd.grad(ours, given, slope), torch.autograd.grad(torchs, given, slope), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_only_what_is_asked_for() -> None:
    x, w, b = drawn(2, 3, 4, 9, 9)
    x.requires_grad_(False)
    found = torch.autograd.grad(conv2d(x, w, b, 0).square().sum(), [w, b])
    expected = torch.autograd.grad(F.conv2d(x, w, b).square().sum(), [w, b])
    assert all(torch.allclose(a, e, atol=1e-9) for a, e in zip(found, expected, strict=True))
    frozen = w.detach()
    x.requires_grad_()
    ours, torchs = (torch.autograd.grad(f(x, frozen, None, padding=2).pow(3).sum(), [x])[0] for f in (conv2d, F.conv2d))
    assert torch.allclose(ours, torchs, rtol=1e-9)


def test_second_derivatives() -> None:
    x, w, b = drawn(2, 3, 4, 9, 8)

    def penalty(conv):
        slopes = torch.autograd.grad(conv(x, w, b, padding=1).pow(3).sum(), [x, w, b], create_graph=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), [x, w, b])

    for found, expected in zip(penalty(conv2d), penalty(F.conv2d), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9)
    hessian = [torch.func.grad(lambda w, f=f: torch.func.grad(lambda v: f(x, v, b, padding=0).pow(3).sum())(w).square().sum())(w)
               for f in (conv2d, F.conv2d)]  # fmt: skip
    assert torch.allclose(*hessian, rtol=1e-9)


def test_float32_is_off_by_little() -> None:
    x, w, _ = drawn(64, 32, 64, 12, 12, torch.float32)
    exact = F.conv2d(x.double(), w.double())
    slope = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    found = conv2d(x, w, None, 0)
    both = torch.autograd.grad(found, [x, w], slope), torch.autograd.grad(exact, [x, w], slope.double())
    for a, e in ((found, exact), *zip(*both, strict=True)):
        assert (a - e).norm() / e.norm() < 1e-5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0), ({"padding": 2}, 2), ({"padding": "same"}, 2), ({"padding": "valid"}, 0), ({"padding": (1, 2)}, None),
        ({"stride": 2}, None), ({"dilation": (2, 2)}, None), ({"groups": 2, "w": (32, 16, 5, 5)}, None),
        ({"w": (32, 32, 3, 3)}, None), ({"w": (16, 32, 5, 5)}, None), ({"w": (64, 16, 5, 5), "x": (32, 16, 12, 12)}, 0),
        ({"w": (128, 8, 5, 5), "x": (64, 8, 12, 12)}, None), ({"x": (64, 32, 9, 9)}, None), ({"x": (64, 32, 10, 10)}, 0),
        ({"x": (4, 32, 12, 12)}, None), ({"x": (64, 32, 7, 7)}, None), ({"dtype": torch.bfloat16}, None),
        ({"w": (128, 128, 5, 5), "x": (1, 128, 16, 16)}, None), ({"w": (128, 128, 5, 5), "x": (1, 128, 20, 20)}, 0),
        ({"w": (16, 16, 5, 5), "x": (64, 16, 12, 12)}, 0), ({"w": (16, 16, 5, 5), "x": (64, 16, 14, 14)}, None),
    ],
)  # fmt: skip
def test_which_are_taken(changes: dict, expected: int | None) -> None:
    how = {"x": (16, 32, 12, 12), "w": (32, 32, 5, 5), "stride": 1, "padding": 0, "dilation": 1, "groups": 1} | changes
    dtype = how.pop("dtype", torch.float32)
    x, w = (torch.zeros(how.pop(name), dtype=dtype) for name in ("x", "w"))
    assert takes(x, w, **how) == expected


class Five(nn.Module):
    """Two 5×5 convolutions, of which the second is wide enough."""

    head_modules = "out"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (
            nn.Conv2d(1, 32, 5, padding=2),
            nn.Conv2d(32, 64, 5, padding="same"),
            nn.Linear(64, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.one(x)), 2)
        return self.out(F.relu(self.two(x)).mean((2, 3)))


@pytest.mark.parametrize("method", [fs.FedAvg(), fs.PFedSD(), fs.PerFedAvg(variant="hf")], ids=lambda m: m.id)
def test_whole_runs(method: fs.Method, monkeypatch) -> None:
    g = np.random.default_rng(0)
    parts = [(g.normal(size=(n, 1, 16, 16)), np.arange(n) % 3) * 2 for n in (20, 9, 12)]
    data = fs.Federation.from_arrays(parts, classes=3)
    torch.manual_seed(0)
    model, used, plain = Five(), [], winograd._Winograd.apply

    def counted(*given):
        used.append(given[0].shape)
        return plain(*given)

    monkeypatch.setattr(winograd._Winograd, "apply", counted)
    how = {**SETTINGS, "batch_size": 9, "participation": 1.0, "workers": 1}

    def run(**changes) -> fs.Run:
        return fs.simulate(method, model=model, data=data, engine="one", **{**how, **changes})

    fast = run()
    taken = len(used)
    assert {tuple(shape[1:]) for shape in used} == {(32, 8, 8)}
    cost = fast.cost.flops
    slow = run(fast=False)
    assert len(used) == taken > 0
    assert distance(states(fast), states(slow)) < 1e-11
    assert identical(states(run()), states(fast))
    assert identical(states(run(workers=2)), states(fast))
    assert cost == slow.cost.flops
