"""How much of a sample the server can rebuild from an upload, with and without differential privacy.

    python benchmarks/leakage.py [--images 20] [--steps 1500]

The victim is one client of the shipped digits, with b samples, and makes one SGD step by `fedstill.simulate`; the attacker
knows the model before and after it, the learning rate and the labels. Counted is the better of two attacks, for each image:

- the first layer by itself: for a linear layer z = Wx + c, ∂ℓ/∂W = Σ ∂ℓ/∂z ⊗ x and ∂ℓ/∂c = Σ ∂ℓ/∂z, so a single sample is a
  row of the one divided by an entry of the other (Phong et al., IEEE TIFS 2018);
- gradients inverted: images whose gradient points in the direction of the observed one, found by Adam on the cosine distance with
  a penalty on their total variation (Geiping et al., NeurIPS 2020; the idea is DLG's, Zhu et al., NeurIPS 2019).

A row is the mean over images of the peak signal-to-noise ratio (PSNR) in dB, after rebuilt images have been matched to the
true ones. `guess` is what somebody scores who has seen no upload: the mean of all images of the same class.
ε is that of the one step, in which all of the client's samples take part.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill as fs
from fedstill import models
from fedstill.data import source
from fedstill.server import privacy

LR = 0.1
SHAPE, CLASSES = (1, 8, 8), 10
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "local, σ = 0.01": {"privacy": "local", "noise_multiplier": 0.01},
    "local, σ = 0.1": {"privacy": "local", "noise_multiplier": 0.1},
    "local, σ = 1": {"privacy": "local", "noise_multiplier": 1.0},
    "central, σ = 1": {"privacy": "central", "noise_multiplier": 1.0, "clip_norm": LR},
}


class Convolved(nn.Module):
    """Two convolutions with a smooth activation, as DLG's own network has, and a linear head."""

    head_modules = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.conv2(torch.tanh(self.conv1(x)))).flatten(1))
        return out


def build(name: str) -> nn.Module:
    """Return a model with fixed weights."""
    if name == "mlp":
        return models.build("mlp", SHAPE, CLASSES, 0)
    return models.seeded(Convolved, 0)


@dataclass(frozen=True)
class Digits:
    """Images scaled as the victim's model sees them: to [0, 1]."""

    x: Tensor
    y: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read the shipped digits."""
        data = source.load("digits", None)
        return cls(torch.as_tensor(data.x).double() / 16, torch.as_tensor(data.y))

    def victim(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a victim, of different classes."""
        rows: list[int] = []
        for i in itertools.islice(itertools.count(37 * number), 500):
            if self.y[i % len(self.y)] not in self.y[rows]:
                rows.append(i % len(self.y))
            if len(rows) == size:
                break
        return self.x[rows], self.y[rows]

    def guess(self, y: Tensor) -> Tensor:
        """Return the mean image of each sample's class."""
        return torch.stack([self.x[self.y == c].mean(0) for c in y])


class _Last:
    def on_start(self, coordinator: Any) -> None:
        self.server = coordinator.state.server

    def on_round(self, coordinator: Any, record: Any) -> None:
        self.server, self.epsilon = coordinator.state.server, record.get("epsilon", float("inf"))

    def on_end(self, coordinator: Any) -> None: ...


def observed(name: str, x: Tensor, y: Tensor, seed: int, protection: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Return the gradient as the attacker infers it from the model before and after one step, and ε."""
    data, last, model = fs.Federation.from_arrays([(x, y, x, y)], classes=CLASSES), _Last(), build(name)
    fs.simulate(
        fs.FedAvg(mean="uniform"), model=model, data=data, callbacks=[last], rounds=1, epochs=1, lr=LR, momentum=0.0,
        batch_size=len(y), dtype="float64", device="cpu", seed=seed, **{"clip_norm": 1.0, **protection},
    )  # fmt: skip
    before = {n: p.detach().double() for n, p in model.named_parameters()}
    return {n: (value - last.server["params"][n]) / LR for n, value in before.items()}, last.epsilon


def first_layer(gradient: dict[str, Tensor], y: Tensor) -> Tensor | None:
    """Return the sample that a linear first layer gives away, where there is one."""
    weight, bias = gradient.get("fc1.weight"), gradient.get("fc1.bias")
    if weight is None or bias is None or len(y) > 1:
        return None
    row = bias.abs().argmax()
    return (weight[row] / bias[row]).reshape(1, *SHAPE).clamp(0, 1)


def inverted(name: str, gradient: dict[str, Tensor], y: Tensor, steps: int, seed: int, tv: float = 1e-3) -> Tensor:
    """Return images whose gradient has the direction of the observed one."""
    model = build(name).double()
    parameters = dict(model.named_parameters())
    target = [gradient[n] for n in parameters]
    length = torch.sqrt(sum(((t**2).sum() for t in target), torch.zeros(())))
    x = torch.rand(len(y), *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-3)
    for _ in range(steps):
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(parameters.values()), create_graph=True)
        dot = sum(((g * t).sum() for g, t in zip(grads, target, strict=True)), torch.zeros(()))
        own = torch.sqrt(sum(((g**2).sum() for g in grads), torch.zeros(())))
        smooth = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
        (x.grad,) = torch.autograd.grad(1 - dot / (own * length) + tv * smooth, x)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach()


def psnr(rebuilt: Tensor, true: Tensor) -> float:
    """Return the mean PSNR of the best matching; images that are equal count as 60 dB."""
    error = ((rebuilt[:, None] - true[None]) ** 2).flatten(2).mean(2).clamp(min=1e-6)
    places = range(len(true))
    best = max(itertools.permutations(places), key=lambda p: -sum(float(error[p[i], i].log()) for i in places))
    return float(sum(-10 * torch.log10(error[best[i], i]) for i in places)) / len(true)


def measure(name: str, size: int, images: int, steps: int) -> list[tuple[str, float, float]]:
    """Return (protection, ε of the step, mean PSNR in dB) for one model and number of samples."""
    digits = Digits.load()
    rows = []
    guesses = [psnr(digits.guess(y), x) for x, y in (digits.victim(i, size) for i in range(images))]
    for label, protection in PROTECTIONS.items():
        scores, epsilon = [], float("inf")
        for i in range(images):
            x, y = digits.victim(i, size)
            gradient, epsilon = observed(name, x, y, i, protection)
            found = [first_layer(gradient, y), inverted(name, gradient, y, steps, i)]
            scores.append(max(psnr(f, x) for f in found if f is not None))
        rows.append((label, epsilon, sum(scores) / images))
    return [*rows, ("guess", 0.0, sum(guesses) / images)]


def table(images: int, steps: int, cases: Sequence[tuple[str, int]]) -> list[str]:
    """Return the results as lines of a table."""
    lines = ["| model | samples | protection | ε of the step | PSNR, dB |", "|---|---|---|---|---|"]
    for name, size in cases:
        for label, epsilon, decibel in measure(name, size, images, steps):
            shown = "–" if label == "guess" else "∞" if epsilon == float("inf") else f"{epsilon:,.4g}"
            lines.append(f"| {name} | {size} | {label} | {shown} | {decibel:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20, help="victims of each row")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the inversion")
    args = parser.parse_args()
    assert privacy.accounting()
    print("\n".join(table(args.images, args.steps, [("mlp", 1), ("mlp", 4), ("conv", 1)])))


if __name__ == "__main__":
    main()
