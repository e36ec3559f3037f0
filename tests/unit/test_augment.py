"""Augmentation against loops over pixels; the same bits in any batch; the losses and teachers of augmented samples."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

import fedstill as fs
from fedstill.core import terms
from fedstill.core.augment import SAMPLES, Augment
from fedstill.core.batch import Batch
from fedstill.core.errors import InputError

from ..problems import distance, ragged, run, states


def images(n: int = 6, channels: int = 3, height: int = 5, width: int = 7, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, channels, height, width, generator=g, dtype=torch.float64)
    index = torch.randperm(40, generator=g)[:n]
    return Batch(x, torch.arange(n) % 3, index, torch.tensor(1234567 + seed))


def mixed(h: int) -> int:
    """The 32-bit hash of `plan`, by Python's whole numbers."""
    h &= 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


def uniforms(key: int, index: int, n: int) -> list[float]:
    """A sample's draws."""
    step = mixed(key + SAMPLES * 0x9E3779B9)
    own = mixed(mixed(index ^ step) + step)
    return [(mixed(mixed(i ^ own) + own) + 0.5) / 2**32 for i in range(n)]


def by_pixels(policy: Augment, batch: Batch) -> np.ndarray:
    """What the images become, pixel by pixel."""
    out = []
    for x, index in zip(batch.x.numpy(), batch.index.tolist(), strict=True):
        u = uniforms(int(batch.key), index, 8)
        channels, height, width = x.shape
        if policy.crop:
            dx, dy = (int(v * (2 * policy.crop + 1)) - policy.crop for v in u[:2])
            moved = np.zeros_like(x)
            for i in range(height):
                for j in range(width):
                    if 0 <= i + dy < height and 0 <= j + dx < width:
                        moved[:, i, j] = x[:, i + dy, j + dx]
            x = moved
        if policy.flip and u[2] < 0.5:
            x = x[:, :, ::-1].copy()
        if policy.jitter:
            bright, contrast, saturation = (1 + policy.jitter * (2 * v - 1) for v in u[5:8])
            x = x * bright
            x = x.mean() + contrast * (x - x.mean())
            if channels == 3:
                grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
                x = np.stack([grey + saturation * (c - grey) for c in x])
        if policy.cutout:
            left, top = (int(v * size) - policy.cutout // 2 for v, size in zip(u[3:5], (width, height), strict=True))
            for i in range(max(0, top), min(height, top + policy.cutout)):
                for j in range(max(0, left), min(width, left + policy.cutout)):
                    x[:, i, j] = 0
        out.append(x)
    return np.stack(out)


@pytest.mark.parametrize("text", ["crop:2", "flip", "cutout:3", "jitter:0.4", "crop:1,flip,cutout:2,jitter:0.2"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_becomes_what_pixels_say(text: str, channels: int) -> None:
    policy = Augment.parse(text)
    assert policy is not None
    for seed in range(3):
        batch = images(channels=channels, seed=seed)
        np.testing.assert_allclose(policy(batch).x.numpy(), by_pixels(policy, batch), atol=1e-14)


ALL = Augment(crop=2, flip=True, cutout=2, jitter=0.3, mixup=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_depend_on_neither_padding_nor_place_nor_stack(dtype: torch.dtype) -> None:
    batch = images()
    batch = dataclasses.replace(batch, x=batch.x.to(dtype))
    whole = ALL(batch)
    padded = Batch(
        torch.cat([batch.x, batch.x[:3]]), torch.cat([batch.y, batch.y[:3]]), torch.cat([batch.index, batch.index[:3]]),
        batch.key, torch.tensor([1.0] * 6 + [0.0] * 3),
    )  # fmt: skip
    longer = ALL(padded)
    assert torch.equal(longer.x[:6], whole.x)
    assert whole.other is not None
    assert longer.other is not None
    assert torch.equal(longer.other[:6], whole.other)
    turned = torch.tensor([3, 1, 0, 5, 4, 2])
    moved = ALL(dataclasses.replace(batch, x=batch.x[turned], y=batch.y[turned], index=batch.index[turned]))
    assert torch.equal(moved.x, whole.x[turned])

    def one(x: Tensor, y: Tensor, index: Tensor, key: Tensor) -> Any:
        after = ALL(Batch(x, y, index, key))
        return after.x, after.other, after.share

    others = [dataclasses.replace(images(seed=s), x=images(seed=s).x.to(dtype)) for s in range(3)]
    stack = [torch.stack([getattr(b, name) for b in others]) for name in ("x", "y", "index", "key")]
    xs, ys, shares = vmap(one)(*stack)
    for k, alone in enumerate(map(ALL, others)):
        assert torch.equal(xs[k], alone.x)
        assert torch.equal(ys[k], alone.other)
        assert torch.equal(shares[k], alone.share)


def test_draws_have_their_distributions() -> None:
    u = torch.tensor([uniforms(77, i, 8) for i in range(2000)])
    assert (u.mean(0) - 0.5).abs().max() < 4 * 0.2887 / 2000**0.5
    for alpha in (0.2, 1.0):  # a Beta(α, α)'s mean is ½, its variance 1/(4·(2α+1))
        policy = Augment(mixup=alpha)
        shares = vmap(policy._share)(torch.arange(4000))
        assert abs(float(shares.mean()) - 0.5) < 4 * 0.5 / 4000**0.5
        assert float(shares.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)
        assert float(shares.min()) >= 0
        assert float(shares.max()) <= 1


def test_mixup_mixes_inputs_and_losses_of_the_same_pairs() -> None:
    batch = images(n=7)
    mixed = Augment(mixup=0.5)(batch)
    assert mixed.other is not None
    assert mixed.share is not None
    share = float(mixed.share)
    partner = [
        next(j for j in range(7) if torch.allclose(share * batch.x[i] + (1 - share) * batch.x[j], mixed.x[i]))
        for i in range(7)
    ]
    assert sorted(partner) == list(range(7))  # each is mixed into one other
    assert all(i != j for i, j in enumerate(partner))
    assert mixed.other.tolist() == batch.y[partner].tolist()
    logits = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    each = [
        share * F.cross_entropy(z, y) + (1 - share) * F.cross_entropy(z, batch.y[j])
        for z, y, j in zip(logits, batch.y, partner, strict=True)
    ]
    assert float(terms.cross_entropy(logits, mixed)) == pytest.approx(float(torch.stack(each).mean()))
    masked = dataclasses.replace(mixed, mask=torch.tensor([1.0, 1, 1, 0, 0, 1, 0], dtype=torch.float64))
    assert float(terms.cross_entropy(logits, masked)) == pytest.approx(float(torch.stack(each)[[0, 1, 2, 5]].mean()))


# ---- within training --------------------------------------------------------------------------------------------------
class Seen(fs.FedAvg):
    """FedAvg that notes what it is given."""

    id = ""
    batches: ClassVar[list[Batch]] = []

    def fit(self, task: Any, params: Any, batch: Batch) -> Tensor:
        self.batches.append(batch)
        return super().fit(task, params, batch)


def test_a_sample_is_drawn_anew_in_each_epoch_round_and_client() -> None:
    """Every client has the same sample in every place: what differs is what was drawn."""
    one = np.arange(25.0).reshape(1, 1, 5, 5)
    clients = [(np.repeat(one, 3, 0), np.array([0, 1, 2]), one, np.array([0])) for _ in range(2)]

    class Begun:
        """Forgets what was seen before the first round, in which the hooks are rehearsed."""

        def on_start(self, coordinator) -> None:
            Seen.batches = []

        def on_round(self, coordinator, record) -> None: ...

        def on_end(self, coordinator) -> None: ...

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3)).double()
    run(
        Seen(), net, fs.Federation.from_arrays(clients), augment="crop:2,jitter:0.5", participation=1.0, epochs=2,
        batch_size=3, rounds=2, workers=1, callbacks=[Begun()],
    )  # fmt: skip
    looks = [row.flatten().tolist() for batch in Seen.batches for row in batch.x]
    assert len(looks) == 3 * 2 * 2 * 2
    assert len({tuple(look) for look in looks}) == len(looks)


TEACHERS = [fs.PFedSD(), fs.PFedSD(teacher_mode="train"), fs.FedGKD(), fs.PFedKDWCL(), fs.FedBSD(head_epochs=1)]


@pytest.mark.parametrize("method", TEACHERS, ids=lambda method: f"{method.id}")
def test_teachers_see_the_augmented_batch(method: fs.Method) -> None:
    """Where the images are symmetric a flip changes nothing: a teacher that runs on each batch equals what is looked up."""
    plain, mirrored = ragged(shape=(1, 2, 2)), []
    for c in plain.clients:
        x, test = (torch.cat([t[..., :1], t[..., :1]], -1) for t in (c.x_train, c.x_test))
        mirrored.append((x.numpy(), c.y_train.numpy(), test.numpy(), c.y_test.numpy()))
    symmetric = fs.Federation.from_arrays(mirrored, classes=3)
    once, each = (run(method, "convolved", symmetric, rounds=2, augment=text) for text in ("", "flip"))
    assert distance(states(once), states(each)) < 1e-12
    changed = run(method, "convolved", plain, rounds=2, augment="flip")
    assert distance(states(changed), states(run(method, "convolved", plain, rounds=2))) > 1e-4


WRONG = [
    ("spin", fs.FedAvg(), "crop:P"),
    ("crop", fs.FedAvg(), "crop:P"),
    ("flip:2", fs.FedAvg(), "crop:P"),
    ("flip,flip", fs.FedAvg(), "crop:P"),
    ("crop:0", fs.FedAvg(), "at least 1"),
    ("mixup:1.5", fs.FedAvg(), "at most 1"),
    ("jitter:nan", fs.FedAvg(), "at most 1"),
    ("cutout:2", fs.FedAvg(), "below 2"),
    ("mixup:0.2", fs.FedFomo(), "mixup"),
    ("mixup:0.2", fs.FedPAC(), "centroid"),
    ("flip", fs.PFedSD(teacher="predictions"), "predictions"),
]


@pytest.mark.parametrize(("text", "method", "says"), WRONG)
def test_what_cannot_be_is_refused_in_a_line(text: str, method: fs.Method, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        run(method, "convolved", ragged(shape=(1, 2, 2)), augment=text)
    assert "\n" not in str(error.value)


def test_images_are_needed_for_all_but_mixup() -> None:
    with pytest.raises(InputError, match="channels"):
        run(fs.FedAvg(), "plain", augment="mixup:0.2,flip")
    run(fs.FedAvg(), "plain", augment="mixup:0.2", rounds=1)
