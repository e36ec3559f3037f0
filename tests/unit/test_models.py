"""The models have the sizes that the papers give."""

import pytest
import torch

import fedstill as fs
from fedstill import models
from fedstill.nn.split import by_head


def parameters(name: str, shape: tuple[int, ...], classes: int) -> int:
    return sum(p.numel() for p in models.build(name, shape, classes).parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        # Each layer's weights and biases, from the papers' descriptions.
        ("mlr", (1, 28, 28), 10, 7850),
        ("mlp", (1, 28, 28), 10, 784 * 128 + 128 + 1290),
        ("lenet5", (1, 28, 28), 10, 61706),  # LeNet-5's well-known number for a 32×32 input
        ("lenet5", (3, 32, 32), 10, 62006),
        ("cnn-cifar10", (3, 32, 32), 10, 3 * 6 * 25 + 6 + 6 * 16 * 25 + 16 + 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10),
        ("cnn-fmnist", (1, 28, 28), 10, 64 * 25 + 64 + 64 * 64 * 25 + 64 + 1024 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
        (
            "cnn-cifar100", (3, 32, 32), 100,
            3 * 64 * 25 + 64 + 64 * 128 * 25 + 128 + 3200 * 256 + 256 + 256 * 128 + 128 + 128 * 100 + 100,
        ),
    ],
)  # fmt: skip
def test_sizes(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert parameters(name, shape, classes) == expected


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "mlr"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_every_model_runs_and_names_its_head(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, shape, 7)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    split = by_head(model, None)
    assert split is not None
    assert sum(v.numel() for n, v in model.state_dict().items() if n in split.head) % 7 == 0


def test_same_seed_same_weights_and_no_global_generator() -> None:
    before = torch.get_rng_state()
    a, b, c = (models.build("mlp", (4,), 3, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])


def test_unknown_model_and_wrong_shape_are_refused() -> None:
    with pytest.raises(fs.InputError, match="'lenet5'"):
        models.build("lenet", (1, 28, 28), 10)
    with pytest.raises(fs.InputError, match="no images"):
        models.build("cnn-cifar10", (60,), 10)
