"""What differential privacy promises, measured: ε, clipped gradients, and what an attacker rebuilds from an upload."""

from __future__ import annotations

import math
import warnings

import torch
from leakage import measure
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedstill.core import tree
from fedstill.core.batch import Batch
from fedstill.engine import private
from fedstill.engine.step import over_clients
from fedstill.server import privacy

Row = tuple[str, str, str]
NAMED = (0.01, 1.0, 1000, 1e-5)  # rate, σ, steps, δ: of which the values are known, 2.10 (RDP) and 1.83 (PLD)
ORDERS = [
    *(1 + k / 10 for k in range(1, 100)),
    *range(11, 64),
    128,
    256,
    512,
    1024,
]  # opacus' own end at 63, which is too few
SETTINGS = [(256 / 60_000, 1.1, 3516, 1e-5), (0.1, 2.0, 300, 1e-5), (0.5, 4.0, 60, 1e-6)]
MORE = [(q, sigma, steps, 1e-5) for q in (0.005, 0.02, 0.1) for sigma in (0.9, 1.5, 4.0) for steps in (100, 1000)]


def epsilon(short: bool) -> list[Row]:
    """Compare ε with known values and with opacus' accountants, to 1 %."""
    rows: list[Row] = []
    for known, kind in ((2.10, "rdp"), (1.83, "pld")):
        rate, noise, steps, delta = NAMED
        ours = privacy.epsilon({rate: steps}, noise, delta, kind)  # type: ignore[arg-type]
        assert abs(ours / known - 1) <= 0.01, (kind, ours)
        rows.append(
            (f"ε by {kind.upper()}: q = 0.01, σ = 1, 1,000 steps, δ = 1e-5", f"{known:.2f}, to 1 %", f"{ours:.3f}")
        )
    worst = {"rdp": 0.0, "pld": 0.0}
    settings = [NAMED, *SETTINGS, *([] if short else MORE)]
    for rate, noise, steps, delta in settings:
        for kind, theirs in (("rdp", RDPAccountant()), ("pld", PRVAccountant())):
            theirs.history = [(noise, rate, steps)]
            ours = privacy.epsilon({rate: steps}, noise, delta, kind)  # type: ignore[arg-type]
            if ours > 20:
                continue  # it would take gigabytes
            options = {"alphas": ORDERS} if kind == "rdp" else {"eps_error": 0.002 * ours}
            other = float(theirs.get_epsilon(delta, **options))
            worst[kind] = max(worst[kind], abs(ours / other - 1))
    for kind, name in (("rdp", "RDP"), ("pld", "PRV")):
        assert worst[kind] <= 0.01, worst
        against = f"opacus' {name} accountant, to 1 %"
        rows.append((f"ε of {len(settings)} settings by {kind.upper()}", against, f"{worst[kind]:.2%} at most"))
    return rows


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(128, 10))


def clipping(short: bool) -> list[Row]:
    """Compare clipped gradients of single samples with opacus', alone and stacked over clients."""
    rows = []
    warnings.filterwarnings("ignore", message="Full backward hook")
    for name, make in (("MLP", _mlp), ("CNN", _cnn)):
        worst = 0.0
        for trial in range(2 if short else 40):
            torch.manual_seed(trial)
            module = make().double()
            x, y = torch.randn(3, 9, 1, 8, 8, dtype=torch.float64) * 2, torch.randint(10, (3, 9))
            worst = max(worst, _difference(module, x, y, clip=math.exp(torch.randn(()).item())))
        assert worst <= 1e-6, (name, worst)
        rows.append(
            (f"clipped gradients of single samples, {name}, float64", "opacus', to 1e-6", f"{worst:.1e} at most")
        )
    return rows


def _difference(module: nn.Module, x: Tensor, y: Tensor, clip: float) -> float:
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(functional_call(module, weights, (batch.x,)), batch.y)

    def of_client(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        batch = Batch(x, y, torch.arange(len(y)), torch.tensor(1))
        return private.clipped(loss, clip, weights, batch)[0]

    stacked, worst = over_clients(of_client, tree.stack([weights] * len(x)), x, y), 0.0
    for k in range(len(x)):
        wrapped = GradSampleModule(module)
        F.cross_entropy(wrapped(x[k]), y[k]).backward()
        grads = {name: p.grad_sample.detach() for name, p in module.named_parameters()}  # type: ignore[union-attr]
        wrapped.zero_grad()
        wrapped.to_standard_module()
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (clip / (norms + 1e-6)).clamp(max=1.0)  # as opacus' DPOptimizer
        alone = of_client(weights, x[k], y[k])
        for name, g in grads.items():
            theirs = torch.einsum("i,i...->i...", factor, g)
            worst = max(worst, *(float((ours - theirs).abs().max()) for ours in (alone[name], stacked[name][k])))
    return worst


def leakage(short: bool) -> list[Row]:
    """Rebuild digits from uploads: nearly exact without privacy, worse than a guess with σ = 1."""
    rows: list[Row] = []
    for model, size in [("mlp", 1)] if short else [("mlp", 1), ("mlp", 4), ("conv", 1)]:
        found = {
            label: decibel for label, _, decibel in measure(model, size, 2 if short else 20, 200 if short else 1500)
        }
        guess = found.pop("guess")
        assert found["none"] > 30, found
        assert found["local, σ = 1"] < guess, found
        assert found["central, σ = 1"] < guess, found
        figure = ", ".join(f"{label}: {decibel:.1f} dB" for label, decibel in found.items())
        fault = f"images rebuilt from the upload of one step ({model}, samples: {size})"
        rows.append((fault, "with σ = 1 worse than a guess", f"{figure}; guess: {guess:.1f} dB"))
    return rows


SECTIONS = {"epsilon": epsilon, "clipping": clipping, "leakage": leakage}
