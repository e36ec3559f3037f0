"""What is head and what is body; and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import fedstill as fs
from fedstill.nn.split import by_head, by_type

from ..problems import Convolved, Normed


def test_buffers_go_with_their_module() -> None:
    split = by_head(Normed(), None)
    assert split is not None
    assert {"bn.running_mean", "bn.num_batches_tracked", "fc1.weight"} <= split.body
    assert {"head.1.running_var", "head.0.weight", "head.3.bias"} <= split.head
    assert split.head | split.body == set(Normed().state_dict())


def test_several_modules_make_a_head() -> None:
    split = by_head(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 2)), ["2", "3"])
    assert split is not None
    assert split.head == {"2.weight", "2.bias", "3.weight", "3.bias"}


def test_by_type_matches_the_type_and_not_the_letters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn_like = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)

    kinds = (nn.modules.batchnorm._BatchNorm,)
    assert by_type(Odd(), kinds) == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert not by_type(nn.Linear(2, 2), kinds)
    assert any(name.startswith("bn.") for name in by_type(Convolved(), kinds))


@pytest.mark.parametrize(
    ("model", "head", "says"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), "fc3", "head = 'fc3'"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), None, "named"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)), "1", "parameters"),
        (nn.Sequential(nn.Linear(4, 3)), "0", "whole model"),
    ],
)
def test_bad_heads_are_refused_before_work(model: nn.Module, head: str | None, says: str) -> None:
    g = np.random.default_rng(0)
    fed = fs.Federation.from_arrays([(g.normal(size=(6, 4)), g.integers(0, 3, 6)) * 2], classes=3)
    with pytest.raises(fs.InputError, match=says):
        fs.simulate(fs.FedRep(), model=model, data=fed, head=head, rounds=1)


def test_the_nearest_module_is_offered() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.classifier = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.features(x))

    with pytest.raises(fs.InputError, match="'classifier'"):
        by_head(Named(), "clasifier")
