"""The terms that objectives are made of, against numpy, with and without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import terms
from fedstill.core.batch import Batch

CLASSES = 4
masks = pytest.mark.parametrize(
    "mask", [None, [1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 1, 0]], ids=["no mask", "all real", "padded", "one real"]
)


def logits(seed: int, n: int = 5) -> np.ndarray:
    return 3 * np.random.default_rng(seed).normal(size=(n, CLASSES))


LABELS = np.array([0, 3, 1, 1, 2])


def batch_of(mask, y=LABELS) -> Batch:
    real = None if mask is None else torch.tensor(mask, dtype=torch.float64)
    n = len(y)
    return Batch(torch.zeros(n, 1), torch.tensor(y), torch.arange(n), torch.zeros((), dtype=torch.int64), real)


def real(values: np.ndarray, mask) -> np.ndarray:
    """The rows that count."""
    return values if mask is None else values[np.array(mask) == 1]


def q(z: np.ndarray, tau: float = 1.0) -> np.ndarray:
    e = np.exp(z / tau)
    return e / e.sum(1, keepdims=True)


def t(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


@masks
def test_mean(mask) -> None:
    values = np.array([1.0, -2.0, 4.0, 8.0, 0.5])
    assert terms.mean(torch.tensor(values), batch_of(mask)).item() == pytest.approx(
        real(values, mask).mean(), rel=1e-14
    )


@masks
def test_cross_entropy(mask) -> None:
    z = t(logits(0))
    value = terms.cross_entropy(z, batch_of(mask))
    p, y = q(real(logits(0), mask)), real(LABELS, mask)
    assert value.item() == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=1e-13)
    (slope,) = torch.autograd.grad(value, z)
    np.testing.assert_allclose(real(slope.numpy(), mask), (p - np.eye(CLASSES)[y]) / len(y), atol=1e-14)
    if mask is not None:
        assert (slope.numpy()[np.array(mask) == 0] == 0).all()


@masks
@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_kl(mask, tau: float) -> None:
    teacher, student = t(logits(1)), t(logits(2))
    p, s = q(real(logits(1), mask), tau), q(real(logits(2), mask), tau)
    each = (p * np.log(p / s)).sum(1, keepdims=True)
    value = terms.kl(teacher, student, tau, batch_of(mask))
    assert value.item() == pytest.approx(each.mean(), rel=1e-12)
    by_teacher, by_student = torch.autograd.grad(value, (teacher, student))
    n = len(p)
    np.testing.assert_allclose(real(by_student.numpy(), mask), (s - p) / (tau * n), atol=1e-14)
    np.testing.assert_allclose(real(by_teacher.numpy(), mask), p * (np.log(p / s) - each) / (tau * n), atol=1e-13)
    if mask is not None:
        assert (by_student.numpy()[np.array(mask) == 0] == 0).all()


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_kl_each(tau: float) -> None:
    p, s = q(logits(1), tau), q(logits(2), tau)
    ours = terms.kl_each(torch.tensor(logits(1)), torch.tensor(logits(2)), tau)
    np.testing.assert_allclose(ours.numpy(), (p * np.log(p / s)).sum(1), rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.2, 10.0), st.floats(-50.0, 50.0))
def test_kl_is_a_divergence(seed: int, tau: float, shift: float) -> None:
    """Not negative, zero between equals, blind to a constant added to the logits."""
    a, b = torch.tensor(logits(seed)), torch.tensor(logits(seed + 1))
    assert (terms.kl_each(a, b, tau) >= 0).all()
    assert terms.kl_each(a, a + shift, tau).abs().max() < 1e-12
    torch.testing.assert_close(
        terms.kl_each(a + shift, b - shift, tau), terms.kl_each(a, b, tau), rtol=1e-9, atol=1e-11
    )


def test_kl_of_certain_predictions_stays_finite() -> None:
    """Logits far apart, worked by hand: p ≈ (1, 0), log s₁ = −2000."""
    far = torch.tensor([[1000.0, -1000.0]], dtype=torch.float64)
    assert terms.kl_each(far, -far, 1.0).item() == pytest.approx(2000.0)
    assert terms.kl_each(far, far, 1.0).item() == 0.0


@masks
def test_squared_error(mask) -> None:
    teacher, student = torch.tensor(logits(1)), t(logits(2))
    gap = real(logits(2), mask) - real(logits(1), mask)
    value = terms.squared_error(teacher, student, batch_of(mask))
    assert value.item() == pytest.approx((gap**2).mean(), rel=1e-13)
    (slope,) = torch.autograd.grad(value, student)
    np.testing.assert_allclose(real(slope.numpy(), mask), 2 * gap / gap.size, atol=1e-14)


SHAPES = {"a": (3, 2), "b": (2,), "c": ()}


def tensors(seed: int) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    return {name: np.asarray(g.normal(size=shape)) for name, shape in SHAPES.items()}


def test_proximal() -> None:
    w, anchor = {n: t(v) for n, v in tensors(0).items()}, {n: torch.tensor(v) for n, v in tensors(1).items()}
    value = terms.proximal(w, anchor)
    hand = sum(((tensors(0)[n] - tensors(1)[n]) ** 2).sum() for n in SHAPES) / 2
    assert value.item() == pytest.approx(hand, rel=1e-13)
    for name, slope in zip(w, torch.autograd.grad(value, list(w.values())), strict=True):
        np.testing.assert_allclose(slope.numpy(), tensors(0)[name] - tensors(1)[name], atol=1e-14)


def test_proximal_looks_at_the_names_of_the_first() -> None:
    w, anchor = {"a": torch.tensor([3.0])}, {"a": torch.tensor([1.0]), "b": torch.tensor([9.0])}
    assert terms.proximal(w, anchor).item() == 2.0


def test_ewc() -> None:
    w, anchor = {n: t(v) for n, v in tensors(0).items()}, {n: torch.tensor(v) for n, v in tensors(1).items()}
    f = {n: v**2 for n, v in tensors(2).items()}
    value = terms.ewc(w, anchor, {n: torch.tensor(v) for n, v in f.items()})
    hand = sum((f[n] * (tensors(0)[n] - tensors(1)[n]) ** 2).sum() for n in SHAPES) / 2
    assert value.item() == pytest.approx(hand, rel=1e-13)
    for name, slope in zip(w, torch.autograd.grad(value, list(w.values())), strict=True):
        np.testing.assert_allclose(slope.numpy(), f[name] * (tensors(0)[name] - tensors(1)[name]), atol=1e-14)
