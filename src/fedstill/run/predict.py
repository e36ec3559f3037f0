"""Ask a run's model about other samples: a class and its probability for each, and the accuracy where the labels are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InputError
from ..data import own
from ..data.outline import Outline
from .result import Run


@dataclass(frozen=True)
class Predictions:
    """What a model says of samples."""

    where: tuple[str, ...]  # the file of each sample, and its row in it
    probabilities: Tensor  # [samples, classes], float64
    labels: Tensor | None  # where they are known
    outline: Outline

    @property
    def classes(self) -> Tensor:
        """The likeliest class of each sample."""
        return self.probabilities.argmax(-1)

    @property
    def accuracy(self) -> float | None:
        """The share of the samples whose likeliest class is their label; None where labels are not known."""
        return None if self.labels is None else float((self.classes == self.labels).double().mean())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample."""
        for i, (where, c) in enumerate(zip(self.where, self.classes.tolist(), strict=True)):
            row = {"sample": where, "class": self.outline.label(c), "probability": float(self.probabilities[i, c])}
            if self.labels is not None:
                row |= {"label": self.outline.label(int(self.labels[i])), "right": int(int(self.labels[i]) == c)}
            yield row


def predict(run: Run, data: str | Path, client: int | str | None = None) -> Predictions:
    """Have a client's own model, or without `client` the generic one, classify the samples in a file or folder."""
    number = None if client is None else run.client(client)
    if number is None and "generic" not in run.method.scores:
        raise InputError("client", "none", f"a client: {run.method.id} trains no generic model")
    if run.outline is None:
        raise InputError("run", repr(run), "one whose data have a known form")
    samples = own.read(data, run.outline)
    params = run.generic_model() if number is None else run.served(number)
    net = run.task.net
    logits = run.task.predict(params, samples.x.to(net.device, net.example.dtype))[:, : run.outline.classes]
    return Predictions(samples.where, torch.softmax(logits.double(), -1).cpu(), samples.y, run.outline)
