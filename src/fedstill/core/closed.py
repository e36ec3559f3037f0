"""Objectives whose gradients are known in closed form, told as data, so that an engine may use a loop of its own for them.

    labels·CE + Σ weight·KL( q_τ(teacher) ‖ q_τ(w) ) + pull/2·‖w − anchor‖²          q_τ = softmax(logits / τ)

A method returns one from its hook `closed_form`; its `loss`, or `step`, stays the definition. Before an engine uses a closed
form it tries it against the definition in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Taught:
    """weight·KL(q_τ(teacher) ‖ q_τ(w))."""

    teacher: Tensor  # logits, one row for each of the client's samples
    weight: float
    tau: float = 1.0


@dataclass(frozen=True)
class Ahead:
    """The gradient is taken at w − α·∇f(w; D), on another batch D that the step's key draws (`Task.redraw` with `stream`)."""

    alpha: float
    stream: int


@dataclass(frozen=True)
class Envelope:
    """A step is w ← w − rate·λ·(w − θ), with θ from `steps` steps of SGD on f(θ) + λ/2·‖θ − w‖² from w, all on one batch.

    The inner steps have the experiment's weight decay. θ of the last batch is left in `local[model]`.
    """

    lam: float
    steps: int
    lr: float
    rate: float
    model: str


@dataclass(frozen=True)
class ClosedForm:
    """A sum of terms; with `nested`, how the step uses their gradient if not by one step of SGD."""

    labels: float = 1.0
    taught: tuple[Taught, ...] = ()
    pull: float = 0.0
    anchor: Mapping[str, Tensor] = field(default_factory=dict)
    nested: Ahead | Envelope | None = None


CROSS_ENTROPY = ClosedForm()
