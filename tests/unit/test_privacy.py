"""What uploads reveal: ε against independent values, and what is refused."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fedstill.core.errors import InputError
from fedstill.server import privacy

SETTINGS = [  # (rate, noise, steps, δ)
    (0.01, 1.0, 1000, 1e-5),
    (256 / 60_000, 1.1, 3516, 1e-5),  # 15 epochs of MNIST in batches of 256
    (0.1, 2.0, 300, 1e-5),
    (0.5, 4.0, 60, 1e-6),
]


def integrated(rate: float, noise: float, steps: int, delta: float) -> float:
    """ε by RDP with the moment integrated numerically: A(α) = E_{x~N(0,σ²)} ((1−q) + q·exp((2x−1)/2σ²))^α.

    The moment: Mironov, Talwar and Zhang, 2019; from RDP to (ε, δ): Balle et al., AISTATS 2020, Theorem 21.
    """
    x: NDArray[np.float64] = np.linspace(-40 * noise, 40 * noise + 80, 200_001)
    log_density = stats.norm.logpdf(x, scale=noise)
    log_ratio = np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + (2 * x - 1) / (2 * noise**2))
    best = math.inf
    for order in np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11.0, 80.0)]):
        log_values = log_density + order * log_ratio
        top = log_values.max()
        log_moment = top + math.log(np.trapezoid(np.exp(log_values - top), x))
        rdp = steps * log_moment / (order - 1)
        best = min(best, rdp + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return best


def test_the_values_that_the_issue_names() -> None:
    spent = {0.01: 1000}
    assert privacy.epsilon(spent, 1.0, 1e-5, "rdp") == pytest.approx(2.10, rel=0.01)
    assert privacy.epsilon(spent, 1.0, 1e-5, "pld") == pytest.approx(1.83, rel=0.01)


@pytest.mark.parametrize("setting", SETTINGS)
def test_rdp_against_an_integration_and_against_opacus(setting: tuple[float, float, int, float]) -> None:
    from opacus.accountants import RDPAccountant

    rate, noise, steps, delta = setting
    ours = privacy.epsilon({rate: steps}, noise, delta, "rdp")
    theirs = RDPAccountant()
    theirs.history = [(noise, rate, steps)]
    assert ours == pytest.approx(integrated(*setting), rel=0.01)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=0.01)


@pytest.mark.parametrize("setting", SETTINGS)
def test_pld_against_opacus(setting: tuple[float, float, int, float]) -> None:
    from opacus.accountants import PRVAccountant

    rate, noise, steps, delta = setting
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, steps)]
    ours = privacy.epsilon({rate: steps}, noise, delta, "pld")
    assert ours == pytest.approx(theirs.get_epsilon(delta, eps_error=0.005), rel=0.01)


def test_without_sampling_pld_is_the_gaussian_mechanism_itself() -> None:
    noise, steps, delta = 5.0, 20, 1e-5
    reach = math.sqrt(steps) / noise  # T rounds of noise σ are one of noise σ/√T

    def exact(eps: float) -> float:  # Balle and Wang, ICML 2018, Theorem 8
        return float(stats.norm.cdf(reach / 2 - eps / reach) - math.exp(eps) * stats.norm.cdf(-reach / 2 - eps / reach))

    assert exact(privacy.epsilon({1.0: steps}, noise, delta, "pld")) == pytest.approx(delta, rel=0.05)


def test_steps_of_several_rates_add_up() -> None:
    for accountant in ("rdp", "pld"):
        both = privacy.epsilon({0.1: 10, 0.2: 5}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        more = privacy.epsilon({0.2: 15}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        fewer = privacy.epsilon({0.1: 15}, 1.5, 1e-5, accountant)  # type: ignore[arg-type]
        assert fewer < both < more


def test_nothing_sent_costs_nothing_and_no_noise_protects_nothing() -> None:
    assert privacy.epsilon({}, 1.0, 1e-5) == 0.0
    assert privacy.epsilon({0.5: 1}, 0.0, 1e-5) == math.inf
    with pytest.raises(ValueError, match="rates above 0"):
        privacy.epsilon({1.5: 1}, 1.0, 1e-5)


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'fedstill\[privacy\]'"):
        privacy.accounting()
