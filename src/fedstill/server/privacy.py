"""What uploads have spent of a privacy budget: ε at a given δ, of steps or rounds with Gaussian noise.

A step of DP-SGD, and a round of user-level privacy, is the Gaussian mechanism on a Poisson sample: each sample (or client)
takes part with probability `rate`, by itself; what it adds is clipped to a norm C, and noise of deviation σ·C is added to the
sum. Two data sets are neighbours if one has one sample (or client) more. ε is computed by the package `dp-accounting`, either
by Rényi divergences (RDP; Mironov, Talwar and Zhang, 2019) or by the distribution of the privacy loss (PLD; Koskela et al.,
2020), which is tighter and slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from ..core.errors import InputError

AccountantName: TypeAlias = Literal["rdp", "pld"]
Spent: TypeAlias = Mapping[float, int]  # sampling rate → steps made at this rate


def accounting() -> Any:
    """Return the package that computes ε; refuse where it is not installed, since without ε no upload may leave."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        right = "'off' without the package dp-accounting, which computes ε (pip install 'fedstill[privacy]')"
        raise InputError("privacy", "on", right) from None
    return dp_accounting


def epsilon(spent: Spent, noise: float, delta: float, accountant: AccountantName = "rdp") -> float:
    """Return ε at δ of so many steps at each rate, with noise of `noise` times the clipping norm."""
    steps = tuple(sorted((rate, count) for rate, count in spent.items() if count))
    if any(not 0 < rate <= 1 or count < 0 for rate, count in steps):
        raise ValueError(f"spent = {dict(spent)}: should be rates above 0 and at most 1, with numbers of steps")
    if not steps:
        return 0.0
    if not noise > 0:
        return math.inf
    return (_by_rdp if accountant == "rdp" else _by_pld)(steps, noise, delta)


@functools.lru_cache(maxsize=4096)
def _by_rdp(steps: tuple[tuple[float, int], ...], noise: float, delta: float) -> float:
    rdp = accounting().rdp
    total = sum(count * _one_step(rate, noise).rdp for rate, count in steps)
    return float(rdp.compute_epsilon(_one_step(steps[0][0], noise).orders, total, delta)[0])


@functools.lru_cache(maxsize=4096)
def _one_step(rate: float, noise: float) -> Any:
    """Return an accountant that has seen one step; RDP adds up over steps."""
    package = accounting()
    return package.rdp.RdpAccountant().compose(_event(rate, noise))


@functools.lru_cache(maxsize=4096)
def _by_pld(steps: tuple[tuple[float, int], ...], noise: float, delta: float) -> float:
    package = accounting()
    accountant = package.pld.PLDAccountant()
    for rate, count in steps:
        accountant.compose(_event(rate, noise), count)
    return float(accountant.get_epsilon(delta))


def _event(rate: float, noise: float) -> Any:
    package = accounting()
    return package.PoissonSampledDpEvent(rate, package.GaussianDpEvent(noise))
