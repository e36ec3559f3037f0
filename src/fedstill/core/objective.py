"""What is learned: classes, several labels, numbers, or a class for every token. Each says its loss and what distilling means.

                targets                      output       loss             distillation                score of a sample
classification  whole numbers [n]            [n, C]       cross-entropy    KL of softmax(z/τ)          right or wrong
multilabel      0 or 1 [n, k]                [n, k]       binary CE        KL of Bernoulli(σ(z/τ))     share of labels right
regression      numbers [n, k]               [n, k]       squared error    ((t − s)/τ)²                absolute error
tokens          whole numbers [n, L]         [n, L, C]    cross-entropy    KL of softmax(z/τ)          share of tokens right

Losses and distillation are means over a sample's labels or outputs, of tokens over all tokens of the batch that are not IGNORED.

Distilling outputs divided by τ gives plain squared error at τ = 1, and a method that multiplies by τ² is free of τ.
Class weights multiply a class's cross-entropy, the mean being divided by the weights' sum as in torch; for labels they are the
weight of a 1 against a 0. Label smoothing moves a share of the target to all classes alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from . import terms
from .batch import Batch
from .errors import InputError

ObjectiveName: TypeAlias = Literal["classification", "multilabel", "regression", "tokens"]
IGNORED = -100  # the target of a token that counts nowhere
WEIGHTS = "'none', 'balanced', or a number above 0 for each class with commas"


@dataclass(frozen=True)
class Objective:
    """What is learned. `size` is the number of classes, labels or outputs, `target` the shape of one sample's target."""

    size: int = 0
    target: tuple[int, ...] = ()
    smoothing: float = 0.0
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None

    name: ClassVar[ObjectiveName]
    metric: ClassVar[str] = "accuracy"  # what `score` is, as a mean over samples
    beside: ClassVar[tuple[str, ...]] = ()  # metrics that are computed unless others are named
    lower: ClassVar[bool] = False  # whether a lower score is better
    counted: ClassVar[bool] = False  # whether scores are right answers, which are counted
    whole: ClassVar[bool] = False  # whether targets are whole numbers
    unit: ClassVar[str]  # what `size` counts, in words

    # ---- in training -------------------------------------------------------------------------------------------------
    def loss(self, outputs: Tensor, batch: Batch, balance: Tensor | None = None) -> Tensor:
        """Return the data loss of a batch; `balance` has the weights of the classes."""
        return terms.mean(self.each(outputs, batch.y, balance), batch)

    def each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """Return the data loss, one number a sample."""
        raise NotImplementedError

    def distill(self, teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
        """Return how far a student's outputs are from a teacher's, averaged over a batch."""
        return terms.mean(self.distill_each(teacher, student, tau, batch.y), batch)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, y: Tensor) -> Tensor:
        """Return how far a student's outputs are from a teacher's, one number a sample."""
        raise NotImplementedError

    def squared_error(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return the mean over outputs of (teacher − student)², averaged over a batch."""
        return terms.squared_error(teacher, student, batch)

    def balance(self, y: Tensor) -> Tensor | None:
        """Return the weights of the classes for a client with these training targets; None where all weigh alike.

        "balanced" is n/(m·n_c) for the client's n samples of m classes, 0 for a class that it does not have. Numbers are scaled
        so that the client's samples weigh 1 in the mean, as under "balanced": the mean of `each` over them is then `loss`.
        """
        if self.class_weights is None:
            return None
        counts = torch.bincount(y[y != IGNORED].flatten(), minlength=self.size).double()
        if self.class_weights == "balanced":
            return torch.where(counts > 0, counts.sum() / (counts.count_nonzero() * counts.clamp(min=1)), 0.0)
        weights = self._weights(y)
        return weights * counts.sum() / (weights * counts).sum() if len(y) else weights

    def _weights(self, y: Tensor) -> Tensor:
        """Return the numbers that were given."""
        assert isinstance(self.class_weights, tuple)
        return torch.tensor(self.class_weights, dtype=torch.float64, device=y.device)

    # ---- in evaluation -----------------------------------------------------------------------------------------------
    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return one number a sample, over any leading dimensions: whether it is right, which share is, or how far off."""
        raise NotImplementedError

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return outputs as probabilities, or as values: what the votes of several models are a mean of."""
        return outputs.softmax(-1)

    def score_predictions(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the score of each sample given predictions instead of outputs."""
        return self.score(predictions, y)

    def plain_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the data loss without smoothing and weights, one number a sample, over any leading dimensions."""
        lead = y.shape[: y.ndim - len(self.target)]  # a stack of clients has one more
        flat = outputs.reshape(-1, *outputs.shape[len(lead) :])
        return type(self)(self.size, self.target).each(flat, y.reshape(-1, *self.target)).reshape(lead)

    # ---- form --------------------------------------------------------------------------------------------------------
    @property
    def plain(self) -> bool:
        """Whether the loss is cross-entropy as it is, so that an engine may use a loop of its own for it."""
        return False

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the model's output for a sample."""
        return (self.size,)

    def example(self, count: int, like: Tensor) -> Tensor:
        """Return targets of the right form for so many samples; `like` gives the device and the dtype of numbers."""
        return like.new_zeros((count, *self.target), dtype=torch.int64 if self.whole else like.dtype)

    def check(self) -> None:
        """Refuse smoothing or class weights that this objective does not have."""
        if isinstance(self.class_weights, tuple) and len(self.class_weights) != self.size:
            shown = ",".join(f"{w:g}" for w in self.class_weights)
            raise InputError("class_weights", shown, f"{self.size} numbers, one for each of the {self.unit}")


class Classification(Objective):
    """One of several classes."""

    name = "classification"
    counted = True
    whole = True
    unit = "classes"

    @property
    def plain(self) -> bool:
        """Whether the loss is cross-entropy without smoothing and weights."""
        return not self.smoothing and self.class_weights is None

    def loss(self, outputs: Tensor, batch: Batch, balance: Tensor | None = None) -> Tensor:
        """CE; with weights Σ w_y·CE / Σ w_y."""
        if self.plain:
            return terms.cross_entropy(outputs, batch)
        each = self.each(outputs, batch.y, balance)
        if balance is None:
            return terms.mean(each, batch)
        return each_over(each, balance.to(each.dtype)[batch.y], batch)

    def each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """CE, one number a sample."""
        weight = None if balance is None else balance.to(outputs.dtype)
        return F.cross_entropy(outputs, y, weight, reduction="none", label_smoothing=self.smoothing)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, y: Tensor) -> Tensor:
        """KL(q_τ(teacher) ‖ q_τ(student))."""
        return terms.kl_each(teacher, student, tau)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether the highest output is the target's."""
        return outputs.argmax(-1) == y


CLASSES = Classification()  # of any number


class Multilabel(Objective):
    """Any of several labels."""

    name = "multilabel"
    beside = ("f1",)
    unit = "labels"

    def each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """BCE, mean over labels."""
        weight = None if balance is None else balance.to(outputs.dtype)
        y = y * (1 - self.smoothing) + self.smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, y, pos_weight=weight, reduction="none").mean(-1)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, y: Tensor) -> Tensor:
        """KL(Bernoulli(σ(teacher/τ)) ‖ Bernoulli(σ(student/τ))), mean over labels."""
        t, s = teacher / tau, student / tau
        p = t.sigmoid()
        one, zero = F.logsigmoid(t) - F.logsigmoid(s), F.logsigmoid(-t) - F.logsigmoid(-s)
        return (p * one + (1 - p) * zero).mean(-1)

    def balance(self, y: Tensor) -> Tensor | None:
        """Return by label the weight of a 1; "balanced" is the client's zeros over its ones, 1 where it has only one of them."""
        if self.class_weights == "balanced":
            ones = y.double().sum(0)
            return torch.where((ones > 0) & (ones < len(y)), (len(y) - ones) / ones.clamp(min=1), 1.0)
        return None if self.class_weights is None else self._weights(y)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the share of the labels that are right: 1 where the output is above 0."""
        return ((outputs > 0) == (y > 0.5)).double().mean(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """σ(z), a probability for each label."""
        return outputs.sigmoid()

    def score_predictions(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the share of the labels that are right: 1 where the probability is above ½."""
        return self.score(predictions - 0.5, y)


class Regression(Objective):
    """Numbers."""

    name = "regression"
    metric = "mae"
    lower = True
    beside = ("mae", "rmse", "r2")
    unit = "outputs"

    def each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """(f − y)², mean over outputs."""
        return (outputs - y).square().mean(-1)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, y: Tensor) -> Tensor:
        """((teacher − student)/τ)², mean over outputs."""
        return ((teacher - student) / tau).square().mean(-1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """|f − y|, mean over outputs."""
        return (outputs.double() - y.double()).abs().mean(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the values."""
        return outputs

    def check(self) -> None:
        """Refuse class weights and label smoothing."""
        if self.class_weights is not None:
            raise InputError("class_weights", self.class_weights, "'none' with regression, which has no classes")
        if self.smoothing:
            raise InputError("label_smoothing", self.smoothing, "0 with regression, which has no classes")


class Tokens(Objective):
    """A class for every token of a sequence, such as the next one. Tokens whose target is IGNORED count nowhere."""

    name = "tokens"
    beside = ("perplexity",)
    whole = True
    unit = "classes of tokens"

    @property
    def output(self) -> tuple[int, ...]:
        """Logits for every token."""
        return (*self.target, self.size)

    def _each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """CE, one number a token; 0 for those that are ignored."""
        weight = None if balance is None else balance.to(outputs.dtype)
        return F.cross_entropy(
            outputs.transpose(1, -1), y, weight, ignore_index=IGNORED, reduction="none", label_smoothing=self.smoothing
        )

    def loss(self, outputs: Tensor, batch: Batch, balance: Tensor | None = None) -> Tensor:
        """CE, averaged over all tokens of the batch; with weights Σ w_y·CE / Σ w_y."""
        real = (batch.y != IGNORED).to(outputs.dtype)
        if balance is not None:
            real = real * balance.to(outputs.dtype)[batch.y.clamp(min=0)]
        return each_over(self._each(outputs, batch.y, balance).sum(1), real.sum(1), batch)

    def each(self, outputs: Tensor, y: Tensor, balance: Tensor | None = None) -> Tensor:
        """CE, mean over a sample's tokens."""
        return self._each(outputs, y, balance).sum(1) / tokens_of(y).to(outputs.dtype)

    def distill(self, teacher: Tensor, student: Tensor, tau: float, batch: Batch) -> Tensor:
        """KL of every token, averaged over all tokens of the batch."""
        real = (batch.y != IGNORED).to(student.dtype)
        return each_over((terms.kl_each(teacher, student, tau) * real).sum(1), real.sum(1), batch)

    def distill_each(self, teacher: Tensor, student: Tensor, tau: float, y: Tensor) -> Tensor:
        """KL of every token, mean over a sample's tokens."""
        values = torch.where(y != IGNORED, terms.kl_each(teacher, student, tau), 0.0)
        return values.sum(1) / tokens_of(y).to(student.dtype)

    def squared_error(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return the mean over classes of (teacher − student)², averaged over all tokens of the batch."""
        real = (batch.y != IGNORED).to(student.dtype)
        return each_over(((teacher - student).square().mean(-1) * real).sum(1), real.sum(1), batch)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the share of a sample's tokens whose highest output is the target's."""
        return ((outputs.argmax(-1) == y).double()).sum(-1) / tokens_of(y)


def tokens_of(y: Tensor) -> Tensor:
    """Return how many targets each sample has (at least 1, so that it can be divided by)."""
    return (y != IGNORED).double().sum(-1).clamp(min=1)


def each_over(values: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    """Return Σ values / Σ weights over the batch's real samples; 0 where nothing has weight."""
    if batch.mask is not None:
        values, weights = values * batch.mask, weights * batch.mask
    total = weights.sum()
    return values.sum() / torch.where(total > 0, total, torch.ones_like(total))


OBJECTIVES: dict[str, type[Objective]] = {cls.name: cls for cls in (Classification, Multilabel, Regression, Tokens)}


def of(name: str, size: int, target: tuple[int, ...] = (), weights: str = "none", smoothing: float = 0.0) -> Objective:
    """Return an objective; refuse class weights and smoothing that it does not have."""
    made = OBJECTIVES[name](size, target, smoothing, read_weights(weights))
    made.check()
    return made


def read_weights(text: str) -> tuple[float, ...] | Literal["balanced"] | None:
    """Read none, balanced or numbers with commas.

    >>> read_weights("none"), read_weights("balanced"), read_weights("1,2.5")
    (None, 'balanced', (1.0, 2.5))
    """
    if text == "none":
        return None
    if text == "balanced":
        return "balanced"
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise InputError("class_weights", text, WEIGHTS)
    return numbers
