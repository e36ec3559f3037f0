"""The terms that losses are made of. Each takes a batch's mask into account: padding never counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tree
from .batch import Batch
from .tree import Params


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Mean of one value a sample over the batch's real samples."""
    if batch.mask is None:
        return values.mean()
    return (values * batch.mask).sum() / batch.mask.sum()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """CE: −log softmax(logits)[y], averaged over the batch."""
    if batch.mask is None:
        return F.cross_entropy(logits, batch.y)
    return mean(F.cross_entropy(logits, batch.y, reduction="none"), batch)


def kl(teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
    """KL(q_τ(teacher) ‖ q_τ(student)) with q_τ = softmax(logits / τ), averaged over the batch."""
    log_q = F.log_softmax(teacher / tau, dim=-1)
    log_p = F.log_softmax(student / tau, dim=-1)
    return mean((log_q.exp() * (log_q - log_p)).sum(-1), batch)


def proximal(params: Params, anchor: Params) -> Tensor:
    """½‖w − anchor‖² over the names in `params`."""
    return 0.5 * tree.square_norm({name: params[name] - anchor[name] for name in params})


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is the label, else 0; one a sample."""
    return (logits.argmax(-1) == y).to(torch.int64)
