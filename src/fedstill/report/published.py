"""The first paper's costs of a round (pFedSD, Tables 10 and 11: CIFAR-100, 20 clients of which 60 % take part) beside ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import papers
from ..run.experiment import Experiment
from .costs import NONE

MODEL, SHAPE, CLASSES = "cnn-cifar100", (3, 32, 32), 100
SETTING = {"clients": 20, "participation": 0.6, "epochs": 5, "batch_size": 64}
COMMAND = "--data cifar100 --model cnn-cifar100 --clients 20 --participation 0.6 --batch-size 64"


@dataclass(frozen=True)
class PublishedCosts:
    """A method's rows in Tables 10 and 11, in the paper's own units."""

    seconds: float
    shares: tuple[float, float, float]  # per cent: communication, client, server
    megabytes: float
    gigaflops: tuple[float, ...]  # pFedSD: with stored predictions, and with the past model run again


def _rows() -> dict[str, PublishedCosts]:
    """Return the rows of both tables by method, from the paper's file."""
    paper = papers.exhibits("pfedsd")
    times = {(cell.method, cell.column): cell.published or 0.0 for cell in paper["table10"].cells}
    seconds, *shares = paper["table10"].columns
    rows = {}
    for method in dict.fromkeys(method for method, _ in times):
        amounts = [cell for cell in paper["table11"].cells if cell.method == method]
        sent, *flops = sorted(amounts, key=lambda cell: cell.contract.metric != "megabytes")
        communication, client, server = (times[method, share] for share in shares)
        rows[method] = PublishedCosts(
            times[method, seconds],
            (communication, client, server),
            sent.published or 0.0,
            tuple(cell.published or 0.0 for cell in flops),
        )
    return rows


ROWS = _rows()
REASONS = {  # why a method's numbers differ from the paper's
    "lg-fedavg": "the paper's 0.03 is the last layer alone, 2 × 12,900; its text says the last two layers, which would be 0.09",
    "pfedme": "a batch costs K gradients, as its own paper has it (--k); the first paper counts one",
    "fedfomo": "M other models come down, and not the mean, which a client has no use for: 1 + M models travel, the paper's 7.53 "
    "is 2 + M. A client runs M + 2 models on a fifth of its samples; the paper's 45.3 G more are 1,800 samples' forward passes",
    "pfedsd": "966.56 runs the past model once over the client's samples, as ours does; 906.15 takes kept predictions as "
    "free, where ours (--teacher predictions) makes the same pass after training",
}


def applies(experiment: Experiment, shape: tuple[int, ...], classes: int) -> bool:
    """Return whether model and data are those of the paper's tables."""
    return experiment.model == MODEL and shape == SHAPE and classes == CLASSES


def differences(experiment: Experiment, clients: int) -> list[str]:
    """Describe the settings that differ from the paper's."""
    ours = {**{name: getattr(experiment, name) for name in SETTING}, "clients": clients}
    return [f"{name} {ours[name]:g} (the paper's {right:g})" for name, right in SETTING.items() if ours[name] != right]


def cell(label: str, text: str) -> str:
    """Fill `text` with a method's published numbers; return – for a method that the paper does not have."""
    return (
        text.format(row=ROWS[label], flops=" / ".join(f"{g:.2f}" for g in ROWS[label].gigaflops))
        if label in ROWS
        else NONE
    )


def counting_notes(labels: Iterable[str]) -> list[str]:
    """Explain why Table 11's numbers differ from ours."""
    return [
        'the paper\'s "MB" are millions of numbers, down and up: 2 × 1,075,044 = 2.15 M; in float32 that is 8.60 MB',
        "the paper's \"FLOPs\" are multiply-adds (ours are two each) with the convolutions' biases, a training step taken as "
        "three forward passes: 25,170,944 × 3 × 5 epochs × 2,400 samples = 906.15 G; so counted, without the biases (0.25 %), "
        "ours stand under 'ours by its rule'. Autograd computes no gradient for the images, so our backward is less than "
        "twice the forward pass, and pFedSD's one forward pass more a larger share",
        *(f"{label}: {REASONS[label]}" for label in labels if label in REASONS),
    ]
