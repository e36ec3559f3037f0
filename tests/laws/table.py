"""The table of laws. A new method or variant adds one row here and is then under every law in `test_laws.py`.

A row names a method with its hyper-parameters, the neutral values at which it must equal a simpler method, and its fixed
point, known by algebra and not from the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstill as fs
from fedstill.settings import values_of

from ..problems import COUNTS, A, B, on_quadratics, point

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

    @property
    def name(self) -> str:
        changed = [f"{n}={v}" for n, v in values_of(self.method).items() if v != getattr(type(self.method)(), n)]
        return " ".join([self.method.id, *changed])


# ---- fixed points ------------------------------------------------------------------------------------------------------
def reaches(expected: float) -> Callable[[fs.Method], None]:
    """The generic model of the quadratic clients ends at a known number."""

    def check(method: fs.Method) -> None:
        run = on_quadratics(method)
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
    g = np.random.default_rng(1)
    x, y = g.normal(size=(12, 3)), g.integers(0, 2, 12)
    decay, net = 0.05, torch.nn.Linear(3, 2, dtype=torch.float64)
    fed = fs.Federation.from_arrays([(x, y, x, y)])
    run = fs.simulate(
        method, model=net, data=fed, rounds=300, epochs=3, batch_size=12, lr=0.5, momentum=0.0, weight_decay=decay,
        dtype="float64", engine="one", eval_every=300,
    )  # fmt: skip
    for state in (run.personal(0), run.generic()):
        w, b = state["weight"].numpy(), state["bias"].numpy()
        logits = x @ w.T + b
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        residual = (p - np.eye(2)[y]) / len(y)
        assert np.abs(residual.T @ x + decay * w).max() < 1e-9
        assert np.abs(residual.sum(0) + decay * b).max() < 1e-9


def freeze_head(model: nn.Module) -> nn.Module:
    """The model with a head that does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("fc2"))
    return model


# ---- the rows ----------------------------------------------------------------------------------------------------------
UNIFORM = (1.0, 1.0, 1.0)
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
        fs.PFedSD(lam=0.7, tau=2.0),
        stationary_alone,
        neutral=(
            Neutral(fs.PFedSD(lam=0), fs.FedAvg(mean="uniform"), of="generic"),
            Neutral(fs.PFedSD(lam=0, mean="weighted"), fs.FedAvg(), of="generic"),
        ),
    ),
]
