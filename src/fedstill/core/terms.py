"""The terms that losses are made of. Terms of a batch leave its padding out."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tree
from .batch import Batch
from .errors import InputError, Shown
from .tree import Params


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of one value a sample over the batch's real samples."""
    if batch.mask is None:
        return values.mean()
    return (values * batch.mask).sum() / batch.mask.sum()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """CE: −log softmax(logits)[y], averaged over the batch; `Task.fit` is the data loss of any objective.

    Where samples are mixed it is λ·CE(y) + (1−λ)·CE(y′).
    """
    if batch.y.ndim != logits.ndim - 1 or logits.ndim != 2 or batch.y.is_floating_point():
        shown = f"targets of shape {tuple(batch.y.shape)} and type {batch.y.dtype}"
        right = "one whole number a sample: task.fit(outputs, batch) is the loss of every objective"
        raise InputError("terms.cross_entropy", Shown(shown), right)
    if batch.other is not None and batch.share is not None:
        own, mixed = (F.cross_entropy(logits, y, reduction="none") for y in (batch.y, batch.other))
        return mean(batch.share * own + (1 - batch.share) * mixed, batch)
    if batch.mask is None:
        return F.cross_entropy(logits, batch.y)
    return mean(F.cross_entropy(logits, batch.y, reduction="none"), batch)


def kl(teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
    """KL(q_τ(teacher) ‖ q_τ(student)) with q_τ = softmax(logits / τ), averaged over the batch."""
    return mean(kl_each(teacher, student, tau), batch)


def kl_each(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """KL(q_τ(teacher) ‖ q_τ(student)), one number a sample."""
    log_q = F.log_softmax(teacher / tau, dim=-1)
    log_p = F.log_softmax(student / tau, dim=-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def squared_error(teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
    """Mean over classes of (teacher − student)², averaged over the batch."""
    return mean((teacher - student).square().mean(-1), batch)


def proximal(params: Params, anchor: Params) -> Tensor:
    """½‖w − anchor‖² over the names in `params`."""
    return 0.5 * tree.square_norm({name: params[name] - anchor[name] for name in params})


def ewc(params: Params, anchor: Params, fisher: Params) -> Tensor:
    """½·Σ F·(w − anchor)²: elastic weight consolidation."""
    value: Tensor = 0.5 * tree.total({n: fisher[n] * (params[n] - anchor[n]).square() for n in params})
    return value


def spectrum(params: Params, transform: Literal["ortho", "raw"]) -> Tensor:
    """|DFT(vec(w))| at frequencies 0 … ⌊d/2⌋; the rest of the spectrum of real numbers mirrors these.

    An even number of weights is transformed as half as many complex numbers x_2j + i·x_2j+1, whose transform Z has in it those of
    the even and of the odd ones: X_k = (Z_k + Z̄_n−k)/2 + e^(−πik/n)·(Z_k − Z̄_n−k)/2i, n = d/2. That is what a library does for
    lengths of small factors only, and a model's has large ones: up to twice as fast, forwards and backwards.
    """
    vector = torch.cat([value.reshape(-1) for value in params.values()])
    scale = len(vector) ** -0.5 if transform == "ortho" else 1.0
    if len(vector) % 2:
        return torch.fft.rfft(vector).abs() * scale  # type: ignore[no-any-return]
    n = len(vector) // 2
    z = torch.fft.fft(torch.view_as_complex(vector.reshape(n, 2)))
    z = torch.cat([z, z[:1]])
    mirrored = z.flip(0).conj()
    angle = torch.arange(n + 1, dtype=torch.float64, device=vector.device) * (torch.pi / n)
    turn = torch.complex(-angle.sin(), -angle.cos()).to(z.dtype)  # −i·e^(−πik/n)
    return ((z + mirrored) + turn * (z - mirrored)).abs() * (scale / 2)


def spectral(
    p: Params,
    other: Tensor,
    share: float,
    divergence: Literal["generalised", "normalised", "paper"],
    transform: Literal["ortho", "raw"],
) -> Tensor:
    """D(ŝ(p) ‖ ŝ(q)) over the first ⌈share·d⌉ of the d entries of s(w) = |DFT(vec(w))|; `other` is the `spectrum` of q.

    paper: Σ p log p − p log q.  generalised: Σ p log(p/q) − p + q, zero exactly at p = q.  normalised: KL of the spectra
    divided by their sums. Mirrored entries are equal, so each frequency is computed once and counted as often as it occurs.
    """
    d = sum(value.numel() for value in p.values())
    first = math.ceil(share * d - 1e-9)  # entries that count
    a, b = spectrum(p, transform), other
    i = torch.arange(len(a), device=a.device)
    mirrored = (i > 0) & (d - i != i) & (d - i < first)
    times = (i < first).to(a.dtype) + mirrored.to(a.dtype)
    tiny = torch.finfo(a.dtype).tiny
    if divergence == "normalised":
        a, b = a / (times * a).sum().clamp_min(tiny), b / (times * b).sum().clamp_min(tiny)
    value = a * (a.clamp_min(tiny).log() - b.clamp_min(tiny).log())
    if divergence == "generalised":
        value = value - a + b
    return (times * value).sum()
