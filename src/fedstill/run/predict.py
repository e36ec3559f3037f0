"""Ask a run's model about other samples: a class and its probability, the labels or the values for each, and the score where
the targets are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.metric import Measure, measure_of
from ..core.objective import Objective
from ..data import own
from ..data.outline import Outline
from ..data.samples import moved
from .result import Run


@dataclass(frozen=True)
class Predictions:
    """What a model says of samples."""

    where: tuple[str, ...]  # the file of each sample, and its row in it
    predictions: Tensor  # [samples, classes, labels or outputs], float64: probabilities, or values
    labels: Tensor | None  # the targets, where they are known
    outline: Outline
    objective: Objective
    notes: tuple[str, ...] = ()  # which categories of the samples' columns the run does not know

    @property
    def probabilities(self) -> Tensor:
        """The probability of each class, or label."""
        return self.predictions

    @property
    def classes(self) -> Tensor:
        """The likeliest class of each sample."""
        return self.predictions.argmax(-1)

    @property
    def accuracy(self) -> float | None:
        """The mean score of the samples, such as the share that is right; None where targets are not known."""
        if self.labels is None:
            return None
        return float(self.objective.score_predictions(self.predictions, self.labels).double().mean())

    @property
    def measure(self) -> Measure:
        """What `accuracy` is: of regression the mean absolute error."""
        return measure_of(self.objective.metric)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample."""
        for i, where in enumerate(self.where):
            target = None if self.labels is None else self.labels[i]
            yield {"sample": where, **self._row(self.predictions[i], target)}

    def _row(self, predicted: Tensor, target: Tensor | None) -> dict[str, Any]:
        label, kind = self.outline.label, self.objective.name
        if kind == "classification":
            c = int(predicted.argmax())
            row: dict[str, Any] = {"class": label(c), "probability": float(predicted[c])}
            if target is not None:
                row |= {"label": label(int(target)), "right": int(int(target) == c)}
        elif kind == "multilabel":
            row = {"labels": _named(label, predicted > 0.5)}
            row |= {f"p({label(c)})": float(p) for c, p in enumerate(predicted)}
            if target is not None:
                row |= {"truth": _named(label, target > 0.5)}
        elif kind == "regression":
            names = [label(c) if self.outline.labels else f"value {c + 1}" for c in range(len(predicted))]
            names = names if len(names) > 1 or self.outline.labels else ["value"]
            row = dict(zip(names, predicted.tolist(), strict=True))
            if target is not None:
                row |= {f"true {name}": float(t) for name, t in zip(names, target, strict=True)}
        else:
            row = {"classes": " ".join(label(int(c)) for c in predicted.argmax(-1))}
        return row


def _named(label: Any, chosen: Tensor) -> str:
    """Return the names of the labels that are set."""
    return ", ".join(label(c) for c in torch.nonzero(chosen).flatten().tolist()) or "none"


def predict(run: Run, data: str | Path, client: int | str | None = None) -> Predictions:
    """Have a client's own model, or without `client` the generic one, predict the samples in a file or folder."""
    number = None if client is None else run.client(client)
    if number is None and "generic" not in run.method.scores:
        raise InputError("client", "none", f"a client: {run.method.id} trains no generic model")
    if run.outline is None:
        raise InputError("run", repr(run), "one whose data have a known form")
    samples = own.read(data, run.outline, number)
    params = run.generic_model() if number is None else run.served(number)
    net, objective = run.task.net, run.task.objective
    outputs = run.task.predict(params, moved(samples.x, net.device, net.example.dtype))[..., : run.outline.classes]
    predictions = objective.predictions(outputs.double()).cpu()
    return Predictions(samples.where, predictions, samples.y, run.outline, objective, samples.notes)
