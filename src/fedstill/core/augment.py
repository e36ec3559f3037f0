"""Augmentation of a batch in the training step: random crop, flip, cutout, colour jitter and mixup.

    crop:p      the image moved by up to p pixels in both directions; what comes in from outside is 0
    flip        mirrored left to right with probability ½
    cutout:s    a square of s pixels around a random pixel set to 0 (DeVries and Taylor, 2017)
    jitter:a    brightness, contrast and, with three channels, saturation multiplied by factors from [1−a, 1+a]
    mixup:α     x ← λ·x + (1−λ)·x′ with another sample of the batch, λ ~ Beta(α, α); the loss is λ·CE(y) + (1−λ)·CE(y′)
                (Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018; one λ for a batch, as in their code)

All draws follow from the step's key and the sample's place in its client's data, that is from seed, round, client, sample and
epoch, since an epoch passes through a sample in one step. So a sample looks the same in both engines, however its batch is
padded, and on every device. The operations take `torch.func.vmap` and are traced with the step. Values are those that the model
is given: 0 is black where images lie in [0, 1], and the mean where they are standardised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import plan
from .batch import Batch
from .errors import InputError

FORMS = "crop:P,flip,cutout:S,jitter:A,mixup:α, or some of these"
TRIES = 32  # draws of λ, of which the first that is accepted counts; at α = 1 all are refused once in 4·10⁹ batches
DX, DY, FLIP, CUT_X, CUT_Y, BRIGHT, CONTRAST, SATURATION, COLUMNS = range(9)  # which draw of a sample
SAMPLES, SHARE, ORDER = (4 * plan.DRAWS + i for i in range(3))  # numbers of these draws, which nothing else has


@dataclass(frozen=True)
class Augment:
    """Which augmentations a batch passes through; 0 and False leave one out."""

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    jitter: float = 0.0
    mixup: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Augment | None:
        """Return what a text such as "crop:4,flip,mixup:0.2" names; None for an empty one.

        >>> Augment.parse("crop:4,flip")
        Augment(crop=4, flip=True, cutout=0, jitter=0.0, mixup=0.0)
        """
        values: dict[str, int | float | bool] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = part.partition(":")
            if name in values or name not in {field.name for field in dataclasses.fields(cls)}:
                raise InputError("augment", text, FORMS)
            values[name] = _value(text, name, number)
        return cls(**values) if values else None  # type: ignore[arg-type]

    @property
    def of_images(self) -> str:
        """Name an augmentation that needs images; '' where mixup is the only one."""
        return next((name for name in ("crop", "flip", "cutout", "jitter") if getattr(self, name)), "")

    def check(self, shape: Sequence[int]) -> None:
        """Refuse samples of a shape that these augmentations do not fit."""
        if self.of_images and len(shape) != 3:
            words = "×".join(map(str, shape))
            right = f"mixup alone, or images of shape channels×height×width: these samples have {words}"
            raise InputError("augment", self.of_images, right)
        for name, size in (("crop", self.crop), ("cutout", self.cutout)):
            if size and size >= min(shape[1:]):
                raise InputError("augment", f"{name}:{size}", f"below {min(shape[1:])}, the size of the images")

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch, augmented."""
        x = batch.x
        if self.of_images:
            u = _uniforms(plan.sample_bits(batch.key, SAMPLES, batch.index, COLUMNS))
            if self.crop:
                x = _moved(x, *((u[:, i] * (2 * self.crop + 1)).long() - self.crop for i in (DY, DX)))
            if self.flip:
                x = torch.where(_wide(u[:, FLIP] < 0.5), x.flip(-1), x)
            if self.jitter:
                x = _jittered(x, (1 + self.jitter * (2 * u[:, BRIGHT : SATURATION + 1] - 1)).to(x.dtype))
            if self.cutout:
                x = self._cut(x, u)
        if not self.mixup:
            return dataclasses.replace(batch, x=x)
        share, partner = self._share(batch.key).to(x.dtype), _partners(batch)
        mixed = share * x + (1 - share) * x[partner]
        return dataclasses.replace(batch, x=mixed, other=batch.y[partner], share=share)

    def _cut(self, x: Tensor, u: Tensor) -> Tensor:
        """Set a square of each image to 0."""

        def hit(column: int, size: int) -> Tensor:
            first = (u[:, column] * size).long().unsqueeze(1) - self.cutout // 2
            places = torch.arange(size, device=x.device)
            return (places >= first) & (places < first + self.cutout)

        inside = hit(CUT_Y, x.shape[2])[:, None, :, None] & hit(CUT_X, x.shape[3])[:, None, None, :]
        return torch.where(inside, torch.zeros_like(x), x)

    def _share(self, key: Tensor) -> Tensor:
        """Draw λ ~ Beta(α, α) from a step's key, by Jöhnk's method in logarithms: U^(1/α) / (U^(1/α) + V^(1/α)) where ≤ 1."""
        u, v = (_uniforms(plan.uniform_bits(key, SHARE, (2, TRIES))).log() / self.mixup).unbind(0)
        accepted = (torch.logaddexp(u, v) <= 0).to(torch.int64)
        chosen = accepted.argmax()
        return torch.sigmoid(u - v).index_select(0, chosen.reshape(1)).squeeze(0)


def _value(text: str, name: str, number: str) -> int | float | bool:
    """Return the number of one augmentation."""
    if name == "flip" and not number:
        return True
    kinds = {"crop": (int, 1, 1 << 16), "cutout": (int, 1, 1 << 16), "jitter": (float, 0, 1), "mixup": (float, 0, 1)}
    try:
        kind, least, most = kinds[name]
        value: int | float = kind(number)
    except (KeyError, ValueError):
        raise InputError("augment", text, FORMS) from None
    if not (least <= value <= most and value):
        bounds = "a number of pixels, at least 1" if kind is int else "above 0 and at most 1"
        raise InputError("augment", text, f"one whose {name} is {bounds}")
    return value


def _uniforms(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1) from words of 32 random bits."""
    return (bits.to(torch.float64) + 0.5) / 2**32


def _wide(values: Tensor) -> Tensor:
    """Return one value for each sample so that it broadcasts over images."""
    return values[:, None, None, None]


def _moved(x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """Return each image moved by its own number of pixels; what comes in is 0."""
    height, width = x.shape[2:]
    rows = torch.arange(height, device=x.device) + dy.unsqueeze(1)
    columns = torch.arange(width, device=x.device) + dx.unsqueeze(1)
    x = x.gather(2, rows.clamp(0, height - 1)[:, None, :, None].expand(x.shape))
    x = x.gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand(x.shape))
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    return torch.where(inside, x, torch.zeros_like(x))


def _jittered(x: Tensor, factors: Tensor) -> Tensor:
    """Return images with brightness, contrast and saturation multiplied, in this order."""
    x = x * _wide(factors[:, 0])
    mean = x.double().mean((1, 2, 3), keepdim=True).to(x.dtype)
    x = mean + _wide(factors[:, 1]) * (x - mean)
    if x.shape[1] != 3:
        return x
    grey = (0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]).unsqueeze(1)
    return grey + _wide(factors[:, 2]) * (x - grey)


def _partners(batch: Batch) -> Tensor:
    """Return for each sample the one that is mixed into it: the next in a random order of the batch's real samples."""
    ranks = (plan.sample_bits(batch.key, ORDER, batch.index, 1).squeeze(-1) << 30) + batch.index
    if batch.mask is not None:
        ranks = torch.where(batch.mask > 0, ranks, (1 << 62))
    order = ranks.argsort(stable=True)
    count = len(ranks) if batch.mask is None else (batch.mask > 0).sum().clamp(min=1)
    return order[(order.argsort(stable=True) + 1) % count]
